"""The gRPC settings that both ends must agree on: message sizes and keepalive."""

import grpc.aio

PROTOCOL_VERSION = 1

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""A prompt of a million token ids with prompt logprobs fits."""

KEEPALIVE_S = 10.0
"""A peer that vanishes without closing its socket is noticed within two of these."""

_COMMON = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

SERVER_OPTIONS = [
    *_COMMON,
    ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_S * 500)),
    # A second server on the same port must fail to start instead of sharing it.
    ("grpc.so_reuseport", 0),
]

CLIENT_OPTIONS = [
    *_COMMON,
    ("grpc.enable_retries", 0),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.initial_reconnect_backoff_ms", 200),
]


def connect(address: str) -> grpc.aio.Channel:
    """Open a channel to `host:port`; it connects lazily and reconnects by itself."""
    return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
