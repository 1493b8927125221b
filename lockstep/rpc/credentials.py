"""What proxies and nodes prove themselves to each other with: a shared token, TLS, or both.

Secrets come from files or the environment, never from a command line, which every user of a machine can read.
"""

import hashlib
import hmac
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import Field, SecretStr

from lockstep.config import ServiceConfig
from lockstep.errors import ConfigError

TOKEN_METADATA = "authorization"
MIN_TOKEN_CHARACTERS = 16
# What fits into a gRPC metadata value as it is.
_TOKEN = re.compile(r"[\x21-\x7e]+")


class LinkConfig(ServiceConfig):
    """The flags of every service that takes part in a session."""

    insecure_bind: bool = Field(
        False, description="listen on addresses that other machines reach without asking who they are"
    )
    grpc_token_file: str | None = Field(
        None,
        description="file with the token that proxies show to nodes; of several, one a line, nodes accept "
        "each and a proxy shows the first; LOCKSTEP_GRPC_TOKEN instead holds a token itself",
    )
    grpc_token: SecretStr | None = Field(None)
    grpc_tls_cert_file: str | None = Field(None, description="PEM certificate of this service for gRPC")
    grpc_tls_key_file: str | None = Field(None, description="PEM key of --grpc-tls-cert-file")
    grpc_tls_ca_file: str | None = Field(
        None, description="PEM certificates of who signs the other side's; with it a node asks for one"
    )


class CallerConfig(LinkConfig):
    """The flags of a service that calls nodes."""

    grpc_tls_server_name: str | None = Field(
        None, description="name that the certificates of all nodes are made out to, if not to their addresses"
    )


@dataclass(frozen=True, slots=True)
class Pem:
    """PEM files as read: of a service's own certificate both parts or none."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None


@dataclass(frozen=True, slots=True)
class Credentials:
    """All that one service has; without anything, links are neither secret nor checked.

    `server_name` is what the certificates of nodes are made out to, if not to the addresses.
    """

    tokens: tuple[str, ...] = field(default=(), repr=False)
    pem: Pem | None = field(default=None, repr=False)
    server_name: str | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with each call of a proxy."""
        return ((TOKEN_METADATA, f"Bearer {self.tokens[0]}"),) if self.tokens else ()

    @property
    def checks_callers(self) -> bool:
        """Whether a node that has these knows who calls it."""
        return bool(self.tokens) or (self.pem is not None and self.pem.ca is not None)

    def accepts(self, authorization: str | None) -> bool:
        """Whether metadata shows one of the tokens; takes equally long whichever is wrong, and where."""
        if not self.tokens:
            return True
        shown = hashlib.sha256((authorization or "").encode(errors="surrogateescape")).digest()
        accepted = False
        for token in self.tokens:
            accepted |= hmac.compare_digest(shown, hashlib.sha256(f"Bearer {token}".encode()).digest())
        return accepted


NO_CREDENTIALS = Credentials()


def of_node(config: LinkConfig) -> Credentials:
    """What a node serves with; raises ConfigError that names the flag."""
    credentials = _read(config)
    pem = credentials.pem
    if pem is not None and pem.cert is None:
        raise ConfigError("--grpc-tls-ca-file: a node needs --grpc-tls-cert-file and --grpc-tls-key-file too")
    return credentials


def of_caller(config: CallerConfig) -> Credentials:
    """What a proxy connects with; raises ConfigError that names the flag."""
    credentials = _read(config)
    pem = credentials.pem
    if pem is not None and pem.ca is None:
        raise ConfigError("--grpc-tls-cert-file: a proxy needs --grpc-tls-ca-file too, to know the nodes by")
    return replace(credentials, server_name=config.grpc_tls_server_name)


def _read(config: LinkConfig) -> Credentials:
    return Credentials(_tokens(config), _pem(config))


def _tokens(config: LinkConfig) -> tuple[str, ...]:
    if config.grpc_token is not None and config.grpc_token_file is not None:
        raise ConfigError("--grpc-token-file: LOCKSTEP_GRPC_TOKEN is set as well; keep one of them")
    if config.grpc_token is not None:
        return _checked([config.grpc_token.get_secret_value()], "LOCKSTEP_GRPC_TOKEN")
    if config.grpc_token_file is not None:
        content = read(config.grpc_token_file, "--grpc-token-file").decode(errors="replace")
        return _checked([line.strip() for line in content.splitlines() if line.strip()], "--grpc-token-file")
    return ()


def _checked(tokens: Sequence[str], source: str) -> tuple[str, ...]:
    if not tokens:
        raise ConfigError(f"{source}: there is no token in it; give a line of random characters")
    for token in tokens:
        if len(token) < MIN_TOKEN_CHARACTERS or not _TOKEN.fullmatch(token):
            raise ConfigError(
                f"{source}: a token is {MIN_TOKEN_CHARACTERS} or more printable ASCII characters, no spaces"
            )
    return tuple(tokens)


def _pem(config: LinkConfig) -> Pem | None:
    cert_file, key_file, ca_file = (
        config.grpc_tls_cert_file,
        config.grpc_tls_key_file,
        config.grpc_tls_ca_file,
    )
    if (cert_file is None) != (key_file is None):
        raise ConfigError("--grpc-tls-cert-file: it goes with --grpc-tls-key-file; give both or none")
    if cert_file is None and ca_file is None:
        return None
    pem = Pem(
        read(cert_file, "--grpc-tls-cert-file") if cert_file else None,
        read(key_file, "--grpc-tls-key-file") if key_file else None,
        read(ca_file, "--grpc-tls-ca-file") if ca_file else None,
    )
    _check_pem(cert_file, key_file, ca_file)
    return pem


def _check_pem(cert_file: str | None, key_file: str | None, ca_file: str | None) -> None:
    """gRPC takes whatever it is given and then refuses every peer; OpenSSL says at once what is wrong."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if cert_file is not None:
        try:
            # Without a password there is no prompt for one: a service has no terminal.
            context.load_cert_chain(cert_file, key_file, password="")
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"--grpc-tls-cert-file: not a certificate and its key without a password, in PEM: {error}"
            ) from error
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"--grpc-tls-ca-file: not certificates in PEM: {error}") from error


def read(path: str, flag: str) -> bytes:
    """The content of a file that a flag names; raises ConfigError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}") from error
