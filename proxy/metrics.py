"""The Prometheus metrics of the proxy; their one definition."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import get_args

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from lockstep.errors import ERROR_CLASSES, ConfigError, LockstepError
from lockstep.status import NodeState
from proxy.nodes import Role

OTHER = "other"
"""Outcomes that this list does not have; the label set stays bounded."""

OUTCOMES = (
    *("stop", "length", "repetition"),  # vLLM's finish reasons (vllm/v1/engine/__init__.py, FinishReason)
    *("stop_string", "disconnected"),  # ended by the front end: `Flow.abort`
    *sorted(set(ERROR_CLASSES) - {LockstepError.__name__, ConfigError.__name__}),
    OTHER,
)
"""How a choice can end."""

# As vLLM's vllm:time_to_first_token_seconds has them, with more steps where an interactive answer lies.
_TTFT_BUCKETS_S = (
    *(0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)


_ATTEMPTS_BUCKETS = tuple(range(1, 11))
_GAP_BUCKETS_S = (*(0.01, 0.025, 0.05, 0.1, 0.25, 0.5), *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0))


class AttemptReason(StrEnum):
    """Why both legs of a choice were sent: for the first time, or because of how the attempt before ended."""

    FIRST = "first"
    HEDGE = "hedge"
    """The one before had computed no prompt for a while, and was not given up for that."""
    PREEMPTED = "preempted"
    """Decode needed its KV blocks for another request."""
    REVOKED = "revoked"
    """Decode needed its blocks for requests that prefill had finished; this one had not been begun."""
    KV_LOAD_FAILED = "kv_load_failed"
    """The KV cache did not reach decode."""
    LOCAL_PREFILL = "local_prefill"
    """Decode would have had to compute more than one of its tokens."""
    PREFILL_LOST = "prefill_lost"
    """The prefill node went away before the KV had arrived."""
    DECODE_LOST = "decode_lost"
    """The decode node went away."""
    DRAINED = "drained"
    """A node that shuts down was left before its deadline."""
    REFUSED = "refused"
    """A node answered with an error that says to try again."""
    PREFILL_FAILED = "prefill_failed"
    """Prefill ended without having computed the prompt."""


class RetryDecision(StrEnum):
    """What became of the wish for another attempt."""

    FREE = "free"
    """A node asked for it, or the choice lost its node for the first time: the budget is not touched."""
    GRANTED = "granted"
    """Out of the budget."""
    REFUSED = "refused"
    """The budget was used up: the choice ended with an error."""


class HandOffOutcome(StrEnum):
    """What became of the first token that an attempt's prefill sampled."""

    PASSED_ON = "passed_on"
    """The client got it as soon as it was there, and decode went on from it."""
    SEED = "seed"
    """Held back: decode's generator of random numbers would start anew after it."""
    DECODE_SCHEDULER = "decode_scheduler"
    """Held back: the decode node runs vLLM's own scheduler (--scheduler stock)."""
    OFF = "off"
    """Held back: --hand-off off."""


class Refusal(StrEnum):
    """Why a request was turned away by the proxy itself, or a client was cut off."""

    UNAUTHENTICATED = "unauthenticated"
    """No API key, or none of ours."""
    FORBIDDEN = "forbidden"
    """A key that does not open this path."""
    HEADER = "header"
    """A header that is there twice, or is not what it should be."""
    LARGE_HEAD = "large_head"
    """More bytes of headers than a request may have."""
    BODY_SIZE = "body_size"
    """A body over --max-body-bytes."""
    BODIES = "bodies"
    """As many bytes of bodies as may be held were held."""
    KEY_REQUESTS = "key_requests"
    """As many requests of this API key were in progress as may be."""
    KEY_TOKENS = "key_tokens"
    """The API key had used up its tokens."""
    QUEUE_FULL = "queue_full"
    """As many choices waited as may."""
    DISPLACED = "displaced"
    """It waited, and one of a better priority came to a full queue."""
    QUEUE_TIMEOUT = "queue_timeout"
    """It waited for longer than --queue-timeout-s."""
    SLOW_HEAD = "slow_head"
    """The client did not send a request's head in time."""
    SLOW_BODY = "slow_body"
    """The client did not go on sending a body."""
    SLOW_READER = "slow_reader"
    """The client did not read its answer."""


NODE_STATES = (*get_args(NodeState), "suspect")
"""In the status document a suspect stands aside; `Cluster.count` tells the two apart."""


class ProxyMetrics:
    """Counters of one proxy process. Nothing is counted per token: at most once per choice and event."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._asked: list[tuple[Gauge, Callable[[], float]]] = []
        self.requests = Counter(
            "lockstep_proxy_requests",
            "Choices that ended, by how; a request with n > 1 or several prompts is as many choices.",
            ["outcome"],
            registry=self.registry,
        )
        self.ttft = Histogram(
            "lockstep_proxy_ttft_seconds",
            "From a choice's arrival, before it is tokenized, to its first token passed on to the front end.",
            buckets=_TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.attempts = Counter(
            "lockstep_proxy_attempts",
            "Pairs of legs sent to a prefill and a decode rank, by why.",
            ["reason"],
            registry=self.registry,
        )
        self.attempts_per_request = Histogram(
            "lockstep_proxy_attempts_per_request",
            "Attempts that a choice took, counted when it ends; one that was never sent is not counted.",
            buckets=_ATTEMPTS_BUCKETS,
            registry=self.registry,
        )
        self.attempt_gap = Histogram(
            "lockstep_proxy_attempt_gap_seconds",
            "From the end of an attempt without an answer to the next token passed on to the front end.",
            buckets=_GAP_BUCKETS_S,
            registry=self.registry,
        )
        self.requests_queued = Gauge(
            "lockstep_proxy_requests_queued",
            "Choices that wait in the proxy for a prefill rank below its window.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self.ready = Gauge(
            "lockstep_proxy_ready",
            "1 while requests are taken, as /readyz says.",
            registry=self.registry,
            multiprocess_mode="livemin",
        )
        self.nodes = Gauge(
            "lockstep_proxy_nodes",
            "Listed nodes by what they are to this proxy.",
            ["role", "state"],
            registry=self.registry,
            multiprocess_mode="livemax",
        )
        self.hand_offs = Counter(
            "lockstep_proxy_hand_offs",
            "First tokens that prefill sampled, one an attempt, by what became of them; those held back are "
            "sampled again on decode.",
            ["outcome"],
            registry=self.registry,
        )
        self.early_first_tokens = Counter(
            "lockstep_proxy_early_first_tokens",
            "First tokens of those passed on that prefill told before it made their drafts.",
            registry=self.registry,
        )
        self.retries = Counter(
            "lockstep_proxy_retries",
            "Attempts without an answer that another one was to follow, by what the retry budget said.",
            ["decision"],
            registry=self.registry,
        )
        self.hedges = Counter(
            "lockstep_proxy_hedges",
            "Hedges, by whether they had computed the prompt before the attempt that they were beside.",
            ["won"],
            registry=self.registry,
        )
        self.breakers_open = Gauge(
            "lockstep_proxy_breakers_open",
            "Prefill nodes and decode groups that failed so often in a row that they get a trial at most.",
            ["role"],
            registry=self.registry,
            multiprocess_mode="livemax",
        )
        self.routed_tokens = Counter(
            "lockstep_proxy_routed_tokens",
            "Prompt tokens of attempts that were sent, by whether the prefill rank had them cached as far as "
            "the proxy knew.",
            ["cached"],
            registry=self.registry,
        )
        self.refusals = Counter(
            "lockstep_proxy_refused",
            "Requests that the proxy itself turned away, and clients that it cut off, by why.",
            ["reason"],
            registry=self.registry,
        )
        for role in get_args(Role):
            self.breakers_open.labels(role)
        for won in ("yes", "no"):
            self.hedges.labels(won)
        for decision in RetryDecision:
            self.retries.labels(decision)
        for cached in ("yes", "no"):
            self.routed_tokens.labels(cached)
        for refusal in Refusal:
            self.refusals.labels(refusal)
        for hand_off in HandOffOutcome:
            self.hand_offs.labels(hand_off)
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        for reason in AttemptReason:
            self.attempts.labels(reason)

    def ended(self, outcome: str, num_attempts: int) -> None:
        """A choice ended as `InFlight.end` names it."""
        label = outcome.replace(" ", "_")
        self.requests.labels(label if label in OUTCOMES else OTHER).inc()
        if num_attempts:
            self.attempts_per_request.observe(num_attempts)

    def attempted(self, reason: AttemptReason) -> None:
        """Both legs of a choice were sent."""
        self.attempts.labels(reason).inc()

    def refused(self, reason: Refusal) -> None:
        """A request was turned away, or a client cut off."""
        self.refusals.labels(reason).inc()

    def retry(self, decision: RetryDecision) -> None:
        """Another attempt was wished for."""
        self.retries.labels(decision).inc()

    def hedged(self, *, won: bool) -> None:
        """Of two attempts one is left."""
        self.hedges.labels("yes" if won else "no").inc()

    def breakers_open_now(self, role: Role, count: int) -> None:
        """So many circuit breakers of the role are not closed."""
        self.breakers_open.labels(role).set(count)

    def routed(self, uncached_tokens: int, cached_tokens: int) -> None:
        """An attempt's prefill leg was sent."""
        self.routed_tokens.labels("no").inc(uncached_tokens)
        if cached_tokens:
            self.routed_tokens.labels("yes").inc(cached_tokens)

    def first_token_of(self, outcome: HandOffOutcome, *, early: bool = False) -> None:
        """An attempt's first token was passed on, or will be held back; `early`: before its leg ended."""
        self.hand_offs.labels(outcome).inc()
        if early:
            self.early_first_tokens.inc()

    def first_token(self, ttft_s: float) -> None:
        """A choice's first token was passed on."""
        self.ttft.observe(ttft_s)

    def resumed(self, gap_s: float) -> None:
        """A choice whose attempt had ended got its next token."""
        self.attempt_gap.observe(gap_s)

    def write_gauges(self) -> None:
        """Write down what a scrape would ask for: with several workers, it asks another process."""
        for gauge, now in self._asked:
            gauge.set(now())

    @contextlib.contextmanager
    def published(
        self,
        num_queued: Callable[[], int],
        not_ready_because: Callable[[], str],
        num_nodes: Callable[[str, str], int],
    ) -> Iterator[None]:
        """Show these metrics beside vLLM's, which are in prometheus_client's default registry.

        vLLM's /metrics serves that registry (v1/metrics/prometheus.py::get_prometheus_registry), or, where
        PROMETHEUS_MULTIPROC_DIR is set, the files that every metric then writes its values to.
        """
        self._asked = [
            (self.requests_queued, num_queued),
            (self.ready, lambda: not not_ready_because()),
            *(
                (self.nodes.labels(role, state), functools.partial(num_nodes, role, state))
                for role, state in itertools.product(get_args(Role), NODE_STATES)
            ),
        ]
        for gauge, now in self._asked:
            gauge.set_function(now)
        REGISTRY.register(self.registry)
        try:
            yield
        finally:
            REGISTRY.unregister(self.registry)
