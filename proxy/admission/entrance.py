"""Puts together what stands before vLLM's app: who a client is, what it sent, and how much it may."""

from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp
from vllm.entrypoints.launchers.utils.constants import (
    H11_MAX_INCOMPLETE_EVENT_SIZE_DEFAULT as VLLM_HEAD_BYTES,
)

from proxy.admission.accounts import Accounts
from proxy.admission.config import AdmissionConfig
from proxy.admission.door import Bodies, Door
from proxy.admission.http_protocol import BoundedHttp, ClientLimits
from proxy.flow import Flow
from proxy.security.guard import KeyGuard
from proxy.security.headers import HeaderCheck
from proxy.security.key_source import KeySource

HEAD_BYTES = 64 * 1024
"""Unless --h11-max-incomplete-event-size says otherwise; vLLM's own default would be 4 MiB a connection."""

_HELD_BODIES = 16
_DISCARDED_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Entrance:
    """One for all of a process's front ends: limits hold over them all."""

    keys: KeySource
    accounts: Accounts
    bodies: Bodies
    clients: ClientLimits
    flow: Flow

    def middleware(self) -> list[Middleware]:
        """Outermost first."""
        refused = self.flow.metrics.refused
        guard = [Middleware(KeyGuard, keys=self.keys, refused=refused)] if self.keys.configured else []
        return [
            *guard,
            Middleware(HeaderCheck, refused=refused),
            Middleware(
                Door,
                accounts=self.accounts,
                bodies=self.bodies,
                refused=refused,
                retry_after_s=self.flow.retry_after_s,
            ),
        ]

    def guarded(self, app: ASGIApp) -> ASGIApp:
        """Another app, behind the keys alone."""
        return KeyGuard(app, self.keys, self.flow.metrics.refused) if self.keys.configured else app

    def not_ready_because(self) -> str:
        """For everybody who asks. Whoever has to show keys is told no addresses without one."""
        reason = self.flow.not_ready_because()
        if reason and self.keys.configured and not self.flow.draining:
            return "no prefill and decode node that fit together are ready"
        return reason

    def http_protocol(self) -> Any:
        """What uvicorn makes for each connection."""
        return partial(BoundedHttp, self.clients)


def build(config: AdmissionConfig, args: Namespace, keys: KeySource, flow: Flow) -> Entrance:
    """`args` are vLLM's."""
    head_bytes = args.h11_max_incomplete_event_size or VLLM_HEAD_BYTES
    return Entrance(
        keys,
        Accounts(config.key_max_requests, config.key_tokens_per_minute),
        Bodies(config.max_body_bytes, _HELD_BODIES * config.max_body_bytes),
        ClientLimits(
            stall_s=config.slow_client_timeout_s,
            head_bytes=HEAD_BYTES if head_bytes == VLLM_HEAD_BYTES else head_bytes,
            discarded_bytes=config.max_body_bytes + _DISCARDED_BYTES,
            stalled=flow.metrics.refused,
        ),
        flow,
    )
