"""Nodes without a model: the real node process over engine cores that only keep time, blocks and tokens."""
