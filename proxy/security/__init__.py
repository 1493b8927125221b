"""Who may ask the proxy for what: API keys, header checks, and what an exposed port needs."""
