"""How many attempts may follow failures, how soon, and which nodes get none."""

import pytest
from unit.proxy.attempts_for_tests import flight, loads
from unit.proxy.nodes_for_tests import node

from lockstep.errors import ConfigError
from proxy import attempt_end
from proxy.attempt_end import AttemptEnd
from proxy.config import ProxyConfig
from proxy.flight import Flight
from proxy.metrics import AttemptReason, ProxyMetrics, RetryDecision
from proxy.nodes import Node, Role
from proxy.retries.breaker import Breakers, unit_of
from proxy.retries.budget import RetryBudget
from proxy.retries.limits import RetryLimits
from proxy.retries.rules import RetryRules

FAILED = AttemptEnd(AttemptReason.KV_LOAD_FAILED, "no KV", ("prefill", "decode"))
PREEMPTED = AttemptEnd(AttemptReason.PREEMPTED, "no room")
NOTHING = frozenset[tuple[Role, str]]()


class Clock:
    """Stands until it is set."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def ended(*ends: AttemptEnd, tokens: bool = False) -> Flight:
    """A choice whose attempts ended so; with `tokens`, the last one had given some."""
    made = flight()
    for number, end in enumerate(ends):
        if number:
            made.begin(*loads(), hand_off=False)
        attempt = made.attempt
        assert attempt is not None
        attempt.end = end
        if tokens and number == len(ends) - 1:
            attempt.first_output_s = 1.0
        made.attempt_over()
    return made


def rules(clock: Clock, metrics: ProxyMetrics | None = None, **limits: float) -> RetryRules:
    """Waits are as long as they can be."""
    return RetryRules(RetryLimits(**limits), metrics or ProxyMetrics(), clock, lambda least, most: most)


def test_budget_is_a_share_of_the_requests() -> None:
    budget = RetryBudget(0.2, 0.0, 0.0)
    assert not budget.spend(0.0)
    for _ in range(5):
        budget.earn()
    assert budget.spend(0.0)
    assert not budget.spend(1e6)


def test_budget_has_a_rate_however_few_requests_come() -> None:
    """Ten seconds of it are saved up at most, and there from the start."""
    budget = RetryBudget(0.0, 2.0, 50.0)
    assert [budget.spend(50.0) for _ in range(21)] == [True] * 20 + [False]
    assert [budget.spend(51.0) for _ in range(3)] == [True, True, False]
    assert [budget.spend(1e6) for _ in range(21)] == [True] * 20 + [False]


def test_failures_draw_on_the_budget_and_what_a_node_asked_for_does_not() -> None:
    """Nor does the first loss of a node: with it go all of its streams, each once."""
    metrics = ProxyMetrics()
    broke = rules(Clock(), metrics, budget_ratio=1.0, budget_min_per_s=0.0)
    lost, drained = attempt_end.lost("decode"), attempt_end.drained("decode")
    for free in (ended(PREEMPTED), ended(lost), ended(drained), ended(FAILED, lost)):
        assert broke.wait_s(free) is not None
    for failed in (ended(FAILED), ended(PREEMPTED, FAILED), ended(lost, lost)):
        assert broke.wait_s(failed) is None
    broke.came()
    assert broke.wait_s(ended(FAILED)) == 0.0
    counted = {
        s.labels["decision"]: s.value for s in metrics.retries.collect()[0].samples if "_total" in s.name
    }
    assert counted == {RetryDecision.FREE: 4.0, RetryDecision.REFUSED: 3.0, RetryDecision.GRANTED: 1.0}


def test_wait_doubles_with_each_attempt_without_a_token() -> None:
    """The first one is followed at once, elsewhere."""
    patient = rules(Clock(), backoff_s=0.1, backoff_max_s=0.5)
    waits = [patient.wait_s(ended(*[FAILED] * count)) for count in range(1, 6)]
    assert waits == [0.0, 0.1, 0.2, 0.4, 0.5]
    assert patient.wait_s(ended(FAILED, FAILED, FAILED, tokens=True)) == 0.0


def test_wait_is_drawn_between_nothing_and_the_longest() -> None:
    """So that those that failed together do not come back together."""
    drawn: list[tuple[float, float]] = []

    def draw(least: float, most: float) -> float:
        drawn.append((least, most))
        return 0.03

    jittered = RetryRules(RetryLimits(backoff_s=0.1), ProxyMetrics(), Clock(), draw)
    assert jittered.wait_s(ended(FAILED, FAILED)) == 0.03
    assert drawn == [(0.0, 0.1)]


class Switch:
    """Breakers over one prefill node and two decode groups, one of which has two nodes."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.open: dict[Role, int] = {}
        self.breakers = Breakers(RetryLimits(breaker_failures=3, breaker_open_s=10.0), self._told, self.clock)
        self.a1, self.a2 = node("decode", "a1", group_id="a"), node("decode", "a2", group_id="a")
        self.b = node("decode", "b")
        self.all = [self.a1, self.a2, self.b]

    def _told(self, role: Role, count: int) -> None:
        self.open[role] = count

    def usable(self, failed: frozenset[tuple[Role, str]] = NOTHING) -> list[Node]:
        return self.breakers.usable(self.all, failed)

    def fail(self, *nodes: Node, times: int = 3) -> None:
        for _ in range(times):
            for each in nodes:
                self.breakers.failed(each)


def test_group_that_keeps_failing_gets_nothing_while_another_is_there() -> None:
    """All its nodes: its ranks step together. Failures with successes between do not add up."""
    switch = Switch()
    switch.fail(switch.a1, times=2)
    switch.breakers.worked([switch.a2])
    switch.fail(switch.a1, times=2)
    assert switch.usable() == switch.all
    switch.fail(switch.a2, times=1)
    assert switch.usable() == [switch.b]
    assert switch.open == {"decode": 1}


def test_open_breaker_lets_one_request_try_after_a_while() -> None:
    """If it works, all go there again; if it fails, the next try is as far off."""
    switch = Switch()
    switch.fail(switch.a1)
    switch.clock.now_s += 10.0
    assert switch.usable() == switch.all
    switch.breakers.sent([switch.a1], "leg1")
    assert switch.usable() == [switch.b]
    switch.breakers.failed(switch.a1)
    switch.breakers.over([switch.a1], "leg1")
    assert switch.usable() == [switch.b]
    switch.clock.now_s += 10.0
    switch.breakers.sent([switch.a1], "leg2")
    switch.breakers.worked([switch.a1])
    assert switch.usable() == switch.all
    assert switch.open == {"decode": 0}


def test_trial_without_a_verdict_is_followed_by_another() -> None:
    """Its client left."""
    switch = Switch()
    switch.fail(switch.a1)
    switch.clock.now_s += 10.0
    switch.breakers.sent([switch.a1], "leg1")
    switch.breakers.over([switch.a1], "another leg")
    assert switch.usable() == [switch.b]
    switch.breakers.over([switch.a1], "leg1")
    assert switch.usable() == switch.all


def test_with_nothing_else_a_broken_group_is_used_but_not_twice_by_one_request() -> None:
    switch = Switch()
    switch.fail(switch.a1, switch.b)
    assert switch.usable() == switch.all
    assert switch.usable(frozenset({unit_of(switch.b)})) == [switch.a1, switch.a2]
    assert switch.usable(frozenset({unit_of(switch.a1), unit_of(switch.b)})) == []


def test_broken_prefill_node_does_not_take_the_only_decode_group_with_it() -> None:
    """KV that fails to arrive may be either's fault; what fails with one prefill node only is that node's."""
    switch = Switch()
    broken, other = node("prefill", "p"), node("prefill", "q")
    for each in (broken, other, switch.b):
        switch.breakers.restarted(each)
    for _ in range(5):
        switch.breakers.failed(broken, switch.b)
        switch.breakers.failed(switch.b, broken)
    assert switch.open == {"prefill": 1}
    assert switch.breakers.usable([broken, other], NOTHING) == [other]
    assert switch.breakers.usable([switch.b], frozenset({unit_of(switch.b)})) == [switch.b]
    switch.breakers.failed(switch.b, other)
    assert switch.open == {"prefill": 1, "decode": 1}


def test_group_on_which_a_request_failed_is_still_there_for_it_while_it_works() -> None:
    switch = Switch()
    assert switch.usable(frozenset({unit_of(n) for n in switch.all})) == switch.all


def test_restarted_node_is_tried_at_once() -> None:
    switch = Switch()
    switch.fail(switch.a1)
    assert switch.usable() == [switch.b]
    switch.breakers.restarted(switch.a1)
    assert switch.usable() == switch.all
    switch.breakers.sent([switch.a1], "leg")
    assert switch.usable() == [switch.b]


def test_what_is_gone_is_not_counted() -> None:
    """The last node of a group that left, and a node that came back as another group."""
    switch = Switch()
    for each in switch.all:
        switch.breakers.restarted(each)
    switch.fail(switch.a1, switch.b)
    assert switch.open == {"decode": 2}
    switch.breakers.forget("a1")
    assert switch.open == {"decode": 2}
    switch.breakers.forget("a2")
    assert switch.open == {"decode": 1}
    switch.breakers.restarted(node("decode", "b", group_id="b of another start"))
    assert switch.open == {"decode": 0}


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--retry-budget-ratio", "-1", "greater than or equal to 0"),
        ("--retry-budget-min-per-s", "-1", "greater than or equal to 0"),
        ("--retry-backoff-s", "-1", "greater than or equal to 0"),
        ("--retry-backoff-max-s", "-1", "greater than or equal to 0"),
        ("--breaker-failures", "0", "greater than or equal to 1"),
        ("--breaker-open-s", "0", "greater than 0"),
        ("--hedge-after-s", "0", "greater than 0"),
        ("--drain-move-s", "-1", "greater than or equal to 0"),
    ],
)
def test_wrong_value_is_refused_by_name(flag: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}: Input should be {message}"):
        ProxyConfig.load(["--prefill", "a:1", "--decode", "b:1", flag, value], "lockstep proxy", "")
