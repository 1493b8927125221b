"""The live page on the proxy's admin port: what the ranks, the KV pushes and the requests do right now."""
