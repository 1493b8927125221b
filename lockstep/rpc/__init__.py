"""The gRPC protocol between a proxy and a node: messages, codec, channel and server settings."""
