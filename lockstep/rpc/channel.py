"""The gRPC settings that both ends must agree on: message sizes and keepalive, and how each opens its end."""

import grpc.aio

from lockstep.rpc.credentials import NO_CREDENTIALS, Credentials, Pem
from lockstep.rpc.token_check import TokenCheck

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


def connect(address: str, credentials: Credentials = NO_CREDENTIALS) -> grpc.aio.Channel:
    """Open a channel to `host:port`; it connects lazily and reconnects by itself.

    The caller sends `credentials.metadata` with each call.
    """
    pem = credentials.pem
    if pem is None:
        return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
    tls = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
    names = [("grpc.ssl_target_name_override", credentials.server_name)] if credentials.server_name else []
    return grpc.aio.secure_channel(address, tls, options=[*CLIENT_OPTIONS, *names])


def make_server(credentials: Credentials = NO_CREDENTIALS) -> grpc.aio.Server:
    """A server that asks its callers for the token, if there is one."""
    checks = [TokenCheck(credentials)] if credentials.tokens else []
    return grpc.aio.server(options=SERVER_OPTIONS, interceptors=checks)


def listen(server: grpc.aio.Server, address: str, credentials: Credentials = NO_CREDENTIALS) -> int:
    """Take a port and return it, or 0; raises RuntimeError as gRPC does where it cannot."""
    pem = credentials.pem
    if pem is None:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, _server_tls(pem)))


def _server_tls(pem: Pem) -> grpc.ServerCredentials:
    """With a CA, a caller has to have a certificate that it signed."""
    return grpc.ssl_server_credentials(
        [(pem.key, pem.cert)], root_certificates=pem.ca, require_client_auth=pem.ca is not None
    )
