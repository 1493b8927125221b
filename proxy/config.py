"""The proxy's own flags; vLLM's front-end flags come on top of them."""

from typing import Literal, Self

from pydantic import Field, model_validator

from lockstep.rpc.credentials import CallerConfig
from proxy.admission.config import AdmissionConfig
from proxy.discovery.config import DiscoveryConfig
from proxy.retries.config import RetryConfig

PolicyName = Literal["lockstep", "prefix", "least_loaded", "round_robin"]
"""Here and not with the policies: flags are read without vLLM, whose import takes seconds."""


class ProxyConfig(DiscoveryConfig, AdmissionConfig, RetryConfig, CallerConfig):
    """Flags of `lockstep proxy`; --host and --port are vLLM's."""

    prefill_window_tokens: int | None = Field(
        None,
        ge=1,
        description="prompt tokens that one prefill rank may have outstanding before requests queue here; "
        "two steps' token budget of the rank if not given",
    )
    routing_policy: PolicyName = Field(
        "lockstep",
        description="how ranks are chosen. lockstep: prefill by the tokens that wait there and those of the "
        "prompt that it has not cached, decode by free rows and KV and by the graph that its group runs in; "
        "prefix: prefill by the longest cached part of the prompt; least_loaded; round_robin",
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
    frozen_after_s: float = Field(
        5.0, gt=0, description="time without a step after which a rank with work makes its group suspect"
    )
    drain_move_s: float = Field(
        5.0,
        ge=0,
        description="time before the deadline of a draining node at which its streams are moved to another",
    )
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="proxy processes on the one port; limits of keys, of the queue and of prefill windows "
        "hold for each of them",
    )
    admin_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="port of the live page /lockstep/; where others than this machine reach it, it takes an "
        "admin's API key; with several workers, each has the next port; no page if not given",
    )
    admin_host: str = Field("127.0.0.1", description="address that --admin-port listens on")
    drain_timeout_s: float = Field(30.0, ge=0, description="time running requests get after SIGTERM")
    log_format: Literal["console", "json"] = Field("console", description="console or json")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="of our own loggers")

    @model_validator(mode="after")
    def _admin_ports_exist(self) -> Self:
        if self.admin_port is not None and self.admin_port + self.workers - 1 > 65535:
            raise ValueError(
                f"--admin-port: with {self.workers} workers the last one has no port; give one up to "
                f"{65536 - self.workers}"
            )
        return self
