"""What the proxy counts, and under which labels."""

from prometheus_client import REGISTRY

from lockstep import metrics
from proxy.metrics import OUTCOMES, AttemptReason, ProxyMetrics


def test_outcomes_have_bounded_labels() -> None:
    """Each way to end has its label from the start; what is not on the list is counted as "other"."""
    proxy = ProxyMetrics()
    for outcome in ("stop", "stop string", "NodeLostError", "something new", "another"):
        proxy.ended(outcome, 1)
    counted = metrics.values(proxy.requests)
    assert {labels for (labels,) in counted} == set(OUTCOMES)
    assert {labels: n for (labels,), n in counted.items() if n} == {
        "stop": 1,
        "stop_string": 1,
        "NodeLostError": 1,
        "other": 2,
    }


def test_attempts_and_first_tokens() -> None:
    """By reason, and with the sum of the seconds."""
    proxy = ProxyMetrics()
    for ttft_s in (0.1, 0.3):
        proxy.attempted(AttemptReason.FIRST)
        proxy.first_token(ttft_s)
    proxy.attempted(AttemptReason.PREEMPTED)
    proxy.resumed(0.5)
    counted = metrics.values(proxy.attempts)
    assert {reason for (reason,) in counted} == set(AttemptReason)
    assert {reason: n for (reason,), n in counted.items() if n} == {"first": 2, "preempted": 1}
    assert metrics.count_and_sum(proxy.attempt_gap) == (1, 0.5)
    count, total_s = metrics.count_and_sum(proxy.ttft)
    assert (count, round(total_s, 9)) == (2, 0.4)


def test_attempts_per_request_are_of_those_that_were_sent() -> None:
    """A choice that left the queue or was refused there had none."""
    proxy = ProxyMetrics()
    for num_attempts in (0, 1, 3):
        proxy.ended("disconnected", num_attempts)
    assert metrics.count_and_sum(proxy.attempts_per_request) == (2, 4)


def test_published_beside_vllms_metrics_and_taken_back() -> None:
    """In the registry that vLLM serves, the queue as it is when asked; another proxy may follow."""
    for length in (3, 5):
        proxy = ProxyMetrics()
        with proxy.published(
            lambda length=length: length,
            lambda length=length: "draining" * (length > 3),
            lambda role, state, length=length: length if (role, state) == ("decode", "away") else 0,
        ):
            away = {"role": "decode", "state": "away"}
            assert REGISTRY.get_sample_value("lockstep_proxy_nodes", away) == length
            proxy.ended("stop", 1)
            assert REGISTRY.get_sample_value("lockstep_proxy_requests_queued") == length
            assert REGISTRY.get_sample_value("lockstep_proxy_requests_total", {"outcome": "stop"}) == 1
            assert REGISTRY.get_sample_value("lockstep_proxy_ready") == (length == 3)
        assert REGISTRY.get_sample_value("lockstep_proxy_requests_queued") is None
