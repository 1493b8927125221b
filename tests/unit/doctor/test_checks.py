"""Each check of `lockstep doctor`: a healthy cluster passes all, one wrong value gives that finding alone."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
from unit.cli.status_documents import usual
from unit.doctor.healthy import DECODE_ADDRESS, PREFILL_ADDRESS, decode, prefill, rank

from lockstep.doctor.cluster_checks import FLAGS
from lockstep.doctor.described import Described
from lockstep.doctor.findings import Finding, Level
from lockstep.doctor.report import examine, is_healthy
from lockstep.rpc.generated import lockstep_pb2 as pb
from proxy.nodes import CompatibilityKey

DECODE, PREFILL = f"decode {DECODE_ADDRESS}", f"prefill {PREFILL_ADDRESS}"
PAIR = f"{DECODE_ADDRESS} and {PREFILL_ADDRESS}"
URL = "http://h:8000"


def wrong(nodes: Sequence[Described], **proxy: Any) -> list[Finding]:
    """What is not well."""
    whole = usual()
    document = replace(whole, proxy=replace(whole.proxy, **proxy)) if proxy else None
    return [finding for finding in examine(nodes, document, URL) if finding.level is not Level.OK]


def test_healthy_cluster() -> None:
    """Every check says what is the case; the proxy's too."""
    findings = examine([prefill(), decode()], replace(usual()), URL)
    assert [finding for finding in findings if finding.level is not Level.OK] == []
    assert all(finding.text for finding in findings)
    assert len({(finding.where, finding.check) for finding in findings}) == len(findings)
    assert {finding.where for finding in findings} == {PREFILL, DECODE, PAIR, "cluster", f"proxy {URL}"}


OF_DECODE: list[tuple[dict[str, Any], str, Level, str]] = [
    ({"ready": False}, "ready", Level.WARNING, "/readyz"),
    ({"runner": "V2"}, "runner", Level.ERROR, "VLLM_USE_V2_MODEL_RUNNER=0"),
    (
        {"engine": {"scheduler_cls": "kv_transfer.carried.vllm_schedulers.CarriedAsyncScheduler"}},
        *("scheduler", Level.WARNING, "no --scheduler stock"),
    ),
    ({"engine": {"scheduler_cls": "mine.S"}}, "scheduler", Level.ERROR, "no scheduler of your own"),
    (
        {"engine": {"async_scheduling": False}},
        *("async scheduling", Level.WARNING, "no --no-async-scheduling"),
    ),
    (
        {"engine": {"arrival_padding": False}},
        *("arrival padding", Level.WARNING, "no --arrival-padding off"),
    ),
    ({"engine": {"strict": True}}, "strict", Level.WARNING, "no --strict"),
    ({"engine": {"full_graph_tokens": [3, 6]}}, "capture sizes", Level.ERROR, "a size of 12"),
    (
        {"engine": {"max_num_scheduled_tokens": 11}},
        *("token budget", Level.ERROR, "no --max-num-scheduled-tokens"),
    ),
    (
        {"ranks": [rank(0, "10.0.0.2"), rank(1, "10.0.0.2", max_num_batched_tokens=8)]},
        *("token budget", Level.ERROR, "--max-num-batched-tokens 12"),
    ),
    (
        {"engine": {"long_prefill_token_threshold": 2}},
        *("long prefills", Level.ERROR, "--long-prefill-token-threshold 0"),
    ),
    ({"served_context_limit": 508}, "context limit", Level.ERROR, "the same Lockstep everywhere"),
    (
        {"ranks": [rank(0, "10.0.0.2"), rank(1, "10.0.0.2", num_kv_blocks=32)]},
        *("KV pool", Level.ERROR, "--max-model-len 496"),
    ),
    ({"engine": {"kv_load_failure_policy": "recompute"}}, "failed loads", Level.ERROR, "no --kv-transfer"),
    ({"engine": {"pipeline_parallel_size": 2}}, "pipeline", Level.ERROR, "--pipeline-parallel-size 1"),
    ({"engine": {"records_steps": False}}, "step records", Level.WARNING, "no --worker-cls"),
]


@pytest.mark.parametrize(("changes", "check", "level", "instead"), OF_DECODE)
def test_one_wrong_value_of_a_decode_node(
    changes: dict[str, Any], check: str, level: Level, instead: str
) -> None:
    """That finding and no other; it names a flag with a value that works."""
    (found,) = wrong([prefill(), decode(**changes)])
    assert (found.where, found.check, found.level) == (DECODE, check, level)
    assert found.instead.startswith(instead)


def test_prefill_under_a_scheduler_that_does_not_know_carried_tokens() -> None:
    """A second attempt would begin anew there."""
    (found,) = wrong([prefill(engine={"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}), decode()])
    assert (found.where, found.check, found.level) == (PREFILL, "scheduler", Level.ERROR)


def test_decode_without_full_graphs() -> None:
    """The mode is named; that no batch is covered follows from it."""
    found = wrong([prefill(), decode(engine={"cudagraph_mode": "NONE", "full_graph_tokens": []})])
    assert [finding.check for finding in found] == ["graph mode", "capture sizes"]
    assert found[0].text == "NONE: no step runs in a full graph"
    assert "FULL_DECODE_ONLY" in found[0].instead


def test_without_speculation_a_row_has_one_token() -> None:
    """Smaller graphs and a margin of one token are enough then."""
    plain = {"num_speculative_tokens": 0, "speculative_method": ""}
    node = decode(engine={"full_graph_tokens": [1, 2, 4]}, served_context_limit=511, **plain)
    assert wrong([prefill(**plain), node]) == []


def test_synchronous_scheduling_has_one_batch_in_flight() -> None:
    """So its margin is K less."""
    (found,) = wrong([prefill(), decode(engine={"async_scheduling": False}, served_context_limit=509)])
    assert found.check == "async scheduling"


@pytest.mark.parametrize(
    "changes", [{"protocol_version": 99}, {"lockstep_version": "9", "protocol_version": 2}]
)
def test_node_of_another_version_is_judged_no_further(changes: dict[str, Any]) -> None:
    """What it leaves out would look like wrong values."""
    found = [finding for finding in wrong([prefill(), decode(**changes)]) if finding.where == DECODE]
    assert (found[0].check, found[0].level) == ("version", Level.ERROR)
    assert {finding.check for finding in found} <= {"version", "fits"}


@pytest.mark.parametrize("field", list(FLAGS))
def test_nodes_that_differ_do_not_fit(field: str) -> None:
    """Each field of the compatibility key, on both nodes, with both values and what sets it."""
    other: Any = 9 if isinstance(getattr(decode().description, field), int) else "other"
    found = wrong([prefill(**{field: other}), decode()])
    by_check = {(finding.where, finding.check): finding for finding in found}
    assert by_check["cluster", "pairs"].level is Level.ERROR
    mine = by_check[PREFILL, "fits"]
    assert mine.text == f"{field} is {other!r}, but {getattr(decode().description, field)!r} on {DECODE}"
    assert mine.instead == f"the same {FLAGS[field]} on both"
    assert (DECODE, "fits") in by_check


def test_fields_that_must_be_equal_are_the_proxys() -> None:
    """The doctor would otherwise call a pair healthy that the proxy refuses."""
    assert set(FLAGS) == {field.name for field in fields(CompatibilityKey)}


def test_node_beside_a_pair_that_fits_nobody() -> None:
    """The others are well; it is named."""
    (found,) = wrong([prefill(), decode(), decode("10.0.0.3:50051", block_size=32)])
    assert (found.where, found.check, found.level) == ("decode 10.0.0.3:50051", "fits", Level.ERROR)


@pytest.mark.parametrize(
    ("nodes", "role"), [([decode()], "prefill"), ([prefill()], "decode"), ([], "prefill")]
)
def test_half_a_cluster(nodes: list[Described], role: str) -> None:
    """Says which half is missing and how to start it."""
    (found,) = wrong(nodes)
    assert (found.where, found.check, found.level) == ("cluster", "pairs", Level.ERROR)
    assert found.text == f"no {role} node answered"
    assert found.instead.startswith(f"lockstep {role} MODEL")


@pytest.mark.parametrize("listed", [[0], [0, 0], [1, 2]])
def test_group_without_all_its_ranks(listed: list[int]) -> None:
    """A host of a group that is not up, or two that start at the same rank."""
    ranks = [rank(number, "10.0.0.2", side_channel_port=7000 + i) for i, number in enumerate(listed)]
    (found,) = wrong([prefill(), decode(ranks=ranks)])
    assert (found.where, found.check, found.level) == ("cluster", "ranks", Level.ERROR)
    assert found.text == f"the group of {DECODE} has ranks {listed} of 2"


def test_group_over_two_hosts() -> None:
    """One node for each host, the same group id."""
    hosts = [("10.0.0.2", 0), ("10.0.0.3", 1)]
    nodes = [decode(f"{host}:50051", ranks=[rank(i, host)], group_id="g") for host, i in hosts]
    assert wrong([prefill(), *nodes]) == []


def test_two_nodes_with_one_side_channel() -> None:
    """A push would go to the wrong process."""
    twin = decode("10.0.0.2:50052", ranks=[rank(0, "10.0.0.2", engine_id="a"), rank(1, "10.0.0.2")])
    (found,) = wrong([prefill(), decode(), twin])
    assert (found.where, found.check, found.level) == ("cluster", "side channels", Level.ERROR)
    assert found.text == f"10.0.0.2:5600 is of {DECODE} and of decode 10.0.0.2:50052"
    assert found.instead.startswith("--side-channel-port")


def test_loopback_side_channel_beside_other_machines() -> None:
    """Right on one machine only."""
    (found,) = wrong([prefill(ranks=[rank(0, "127.0.0.1")]), decode()])
    assert (found.where, found.check, found.level) == (PREFILL, "side channel", Level.ERROR)
    assert found.instead.startswith("--side-channel-host")
    own = [rank(0, "127.0.0.1"), rank(1, "127.0.0.1")]
    assert wrong([prefill(ranks=[rank(9, "localhost", global_rank=0)]), decode(ranks=own)]) == []


@pytest.mark.parametrize(
    ("prefill_changes", "decode_changes", "check", "level", "instead"),
    [
        (
            {},
            {"engine": {"kv_lease_renewal_s": 10}},
            *("lease", Level.ERROR, "the same --kv-lease-s on both"),
        ),
        ({"engine": {"kv_lease_s": 20}}, {}, "lease", Level.ERROR, "the same --kv-lease-s on both"),
        ({"served_context_limit": 500}, {}, "context", Level.WARNING, "--max-model-len 512 on prefill"),
        (
            {"ranks": [rank(0, "10.0.0.1", tensor_parallel_size=2)]},
            {},
            *("tensor parallel", Level.WARNING, "the same --tensor-parallel-size"),
        ),
    ],
)
def test_what_a_pair_must_agree_on(
    prefill_changes: dict[str, Any], decode_changes: dict[str, Any], check: str, level: Level, instead: str
) -> None:
    """Beside the compatibility key: that one finding, about the pair."""
    (found,) = wrong([prefill(**prefill_changes), decode(**decode_changes)])
    assert (found.where, found.check, found.level, found.instead) == (PAIR, check, level, instead)


@pytest.mark.parametrize(
    ("proxy", "check", "level", "instead"),
    [
        ({"ready": False, "not_ready_because": "no pair"}, "ready", Level.ERROR, "what is said of its nodes"),
        ({"version": "0.2.0"}, "version", Level.ERROR, "the same Lockstep version everywhere"),
        ({"request_timeout_s": 90.0}, "timeout", Level.WARNING, "--request-timeout-s 120"),
    ],
)
def test_one_wrong_value_of_the_proxy(proxy: dict[str, Any], check: str, level: Level, instead: str) -> None:
    """A request must outlive the deadline of a lost push, or it is not tried again."""
    (found,) = wrong([prefill(), decode()], **proxy)
    assert (found.where, found.check, found.level) == (f"proxy {URL}", check, level)
    assert found.instead.startswith(instead)


def test_only_errors_are_unhealthy() -> None:
    """A warning is to be known, and the cluster serves in lockstep all the same."""
    assert is_healthy(examine([prefill(), decode(engine={"strict": True})], None, ""))
    assert not is_healthy(examine([prefill(), decode(runner="V2")], None, ""))


def test_role_that_is_neither() -> None:
    """It is no part of a pair."""
    found = wrong([prefill(), decode(), decode("10.0.0.9:1", role=pb.ROLE_UNSPECIFIED)])
    assert all("10.0.0.9" not in finding.where or finding.where.startswith("node ") for finding in found)
