"""The proxy's own flags; vLLM's front-end flags come on top of them."""

import re
from typing import Literal

from pydantic import Field, field_validator

from lockstep.rpc.credentials import CallerConfig

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]\s,]+):(\d{1,5})")


class ProxyConfig(CallerConfig):
    """Flags of `lockstep proxy`; --host and --port are vLLM's."""

    prefill: str = Field(description="prefill nodes, HOST:PORT[,HOST:PORT...]")
    decode: str = Field(description="decode nodes, HOST:PORT[,HOST:PORT...]")
    prefill_window_tokens: int | None = Field(
        None,
        ge=1,
        description="prompt tokens that one prefill rank may have outstanding before requests queue here; "
        "two steps' token budget of the rank if not given",
    )
    connect_timeout_s: float = Field(5.0, gt=0, description="deadline of each call that opens a session")
    startup_timeout_s: float = Field(
        600.0, gt=0, description="how long to wait for the first prefill and decode node that fit together"
    )
    request_timeout_s: float = Field(
        600.0, gt=0, description="longest time a request may take, queueing included"
    )
    max_attempts: int = Field(
        8,
        ge=1,
        description="how often a request may be sent to a prefill and a decode rank before it ends with an "
        "error; 1 never tries again",
    )
    hand_off: Literal["on", "off"] = Field(
        "on",
        description="on: a request's first token comes from prefill, and decode goes on from it; off: every "
        "token comes from decode",
    )
    admin_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="port of the live page /lockstep/; it asks for no key, so keep it from the outside; no "
        "page if not given",
    )
    admin_host: str = Field("127.0.0.1", description="address that --admin-port listens on")
    drain_timeout_s: float = Field(30.0, ge=0, description="time running requests get after SIGTERM")
    log_format: Literal["console", "json"] = Field("console", description="console or json")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="of our own loggers")

    @field_validator("prefill", "decode")
    @classmethod
    def _addresses(cls, value: str) -> str:
        addresses = _split(value)
        for address in addresses:
            match = _ADDRESS.fullmatch(address)
            if match is None or not 1 <= int(match[2]) <= 65535:
                raise ValueError(f"{address!r} is not HOST:PORT")
        if len(set(addresses)) != len(addresses):
            raise ValueError("an address is listed twice")
        return value

    @property
    def prefill_addresses(self) -> tuple[str, ...]:
        """In the order given."""
        return _split(self.prefill)

    @property
    def decode_addresses(self) -> tuple[str, ...]:
        """In the order given."""
        return _split(self.decode)


def _split(value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(","))
