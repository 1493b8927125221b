"""Runs an OpenAI batch file against an endpoint: one request a line, one answer a line, resumable."""
