"""Judges a cluster by what its nodes and its proxy say of themselves: pure checks, without vLLM."""
