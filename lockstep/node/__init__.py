"""The runtime that both kinds of node share: vLLM engine cores behind a gRPC session server."""
