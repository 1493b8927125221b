"""The KV transfer from prefill to decode: the connector, its parameters and its NIXL agent."""
