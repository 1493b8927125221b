"""The proxy service: the OpenAI-compatible endpoint and the routing between prefill and decode."""
