"""The configuration that both kinds of node share."""

from typing import Literal

from pydantic import Field, field_validator

from lockstep.rpc.credentials import LinkConfig

_UNROUTABLE = frozenset({"0.0.0.0", "::", "*", ""})


class NodeConfig(LinkConfig):
    """Flags of `lockstep prefill` and `lockstep decode`; vLLM's engine flags come on top of them."""

    host: str = Field("0.0.0.0", description="address the gRPC and HTTP ports listen on")
    port: int = Field(50051, ge=1, le=65535, description="gRPC port that proxies connect to")
    http_port: int = Field(50080, ge=1, le=65535, description="HTTP port of /healthz, /readyz and /metrics")
    side_channel_host: str | None = Field(
        None, description="address peers reach this node's NIXL side channel at; found by itself if not given"
    )
    side_channel_port: int = Field(
        5600,
        ge=1,
        le=65535,
        description="first NIXL side-channel port; each data-parallel rank adds its index",
    )
    group_id: str | None = Field(
        None, description="name of the data-parallel group; the same on each host of a multi-host group"
    )
    nixl_progress_delay_us: int = Field(
        2000,
        ge=0,
        le=1_000_000,
        description="longest sleep of NIXL's progress thread, in whole ms; 0 polls and burns one core",
    )
    kv_lease_s: int = Field(
        30,
        ge=6,
        le=86400,
        description="how long prefill keeps finished blocks for a decode rank that says nothing; decode "
        "renews it each sixth of this, also while the request queues there",
    )
    registration_deadline_s: float = Field(
        60.0,
        gt=0,
        description="time from decode's registration of its blocks to the end of the push; then the transfer "
        "has failed",
    )
    quarantine_limit_ratio: float = Field(
        0.5,
        gt=0,
        le=1,
        description="share of a rank's KV blocks that may be in quarantine; with more for 15 s the node "
        "drains and ends with an error, so that its supervisor starts it anew",
    )
    park: Literal["on", "off"] = Field(
        "on",
        description="off: engines that only wait for KV go on stepping, as vLLM's do; for comparison",
    )
    warmup_timeout_s: float = Field(300.0, gt=0, description="deadline of the warm-up requests before ready")
    drain_timeout_s: float = Field(30.0, ge=0, description="time running requests get after SIGTERM")
    log_format: Literal["console", "json"] = Field("console", description="console or json")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="of our own loggers")

    @field_validator("side_channel_host")
    @classmethod
    def _routable(cls, value: str | None) -> str | None:
        if value in _UNROUTABLE:
            raise ValueError("peers connect to this address, so it must be one that they can reach")
        return value
