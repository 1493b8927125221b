"""Bounds what the proxy does about attempts that end without an answer: how many, how soon, and where not."""
