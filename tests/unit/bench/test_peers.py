"""The comparison with other systems: what is sent, what the figures are held against, what a report says."""

import importlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def load_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """bench is a folder of scripts, not an installed package."""
    monkeypatch.syspath_prepend(REPOSITORY)
    return lambda name: importlib.import_module(f"bench.peers.{name}")


def point(ttft_ms: float, tokens_per_s: float, cpu_s: float = 4.0) -> dict[str, Any]:
    return {
        **{f"{name}_p{share}_ms": 1.0 for name in ("itl", "tpot") for share in (50, 99)},
        **{"ttft_p50_ms": ttft_ms, "ttft_p99_ms": 2 * ttft_ms, "output_tokens_per_s": tokens_per_s},
        **{"errors": 0, "cpu_s_per_1000_tokens": cpu_s, "client_cpu_s_per_1000_tokens": 1.0},
    }


def answer(*token_ids: int, text: str = "", error: str = "") -> dict[str, Any]:
    return {"text": text, "token_ids": list(token_ids) or None, "error": error}


def sample(system: str, *answers: dict[str, Any], c1: dict[str, Any], **figures: Any) -> dict[str, Any]:
    defaults = {
        "start_s": 60.0,
        "memory_mib": 3000.0,
        "idle_cores": 0.1,
        "prefill_ms": None,
        "unfinished": [],
    }
    return defaults | figures | {"system": system, "points": {"c1": c1}, "answers": list(answers)}


def comparison(*samples: dict[str, Any]) -> dict[str, Any]:
    return {"machine": {"cores": 2}, "samples": list(samples), "failures": []}


def test_lockstep_is_held_against_the_best_peer_of_each_figure(load_module: Any) -> None:
    """The best TTFT and the best throughput may be two peers'; plain vLLM is none of them."""
    figures = load_module("figures")
    data = comparison(
        sample("lockstep", answer(1), c1=point(50, 150)),
        sample("plain", answer(1), c1=point(10, 900)),
        sample("router-pull", answer(1), c1=point(100, 90)),
        sample("smg", answer(1), c1=point(125, 100)),
    )
    found = {ratio.bound.figure: ratio for ratio in figures.ratios(data)}
    assert (found["ttft_p50_ms"].best_peer, found["ttft_p50_ms"].value) == ("router-pull", 0.5)
    assert found["ttft_p50_ms"].holds
    assert (found["output_tokens_per_s"].best_peer, found["output_tokens_per_s"].value) == ("smg", 1.5)
    assert found["output_tokens_per_s"].holds


def test_a_bound_is_missed_on_its_own_side(load_module: Any) -> None:
    """TTFT may not be above its limit, throughput not below."""
    figures = load_module("figures")
    data = comparison(
        sample("lockstep", answer(1), c1=point(61, 149)), sample("smg", answer(1), c1=point(100, 100))
    )
    held = {ratio.bound.figure: ratio.holds for ratio in figures.ratios(data)}
    assert not held["ttft_p50_ms"]
    assert not held["output_tokens_per_s"]
    assert held["memory_mib"]


def test_peers_as_they_come_are_held_against_apart(load_module: Any) -> None:
    """A patched peer is better than what its users have."""
    figures = load_module("figures")
    data = comparison(
        sample("lockstep", answer(1), c1=point(50, 150)),
        sample("smg", answer(1), c1=point(500, 20)),
        sample("smg-patched", answer(1), c1=point(100, 100)),
    )
    best = {ratio.bound.figure: ratio.value for ratio in figures.ratios(data)}
    as_they_come = {ratio.bound.figure: ratio.value for ratio in figures.ratios(data, figures.AS_THEY_COME)}
    assert (best["ttft_p50_ms"], as_they_come["ttft_p50_ms"]) == (0.5, 0.1)
    assert (best["output_tokens_per_s"], as_they_come["output_tokens_per_s"]) == (1.5, 7.5)


def test_figures_are_medians_over_the_rounds(load_module: Any) -> None:
    """One slow round does not move them."""
    figures = load_module("figures")
    data = comparison(*(sample("plain", answer(1), c1=point(ms, 100)) for ms in (10, 500, 12)))
    assert figures.median(data, "plain", "ttft_p50_ms", "c1") == 12
    assert figures.median(data, "plain", "ttft_p50_ms", "c8") is None
    assert figures.median(data, "lockstep", "start_s") is None


def test_a_peer_that_answers_nothing_is_not_the_best(load_module: Any) -> None:
    """Errors come fast."""
    figures = load_module("figures")
    data = comparison(
        sample("lockstep", answer(1), c1=point(50, 150)),
        sample("router-pull", answer(error="500"), c1=point(1, 9000)),
        sample("smg", answer(1), c1=point(100, 100)),
    )
    assert {ratio.best_peer for ratio in figures.ratios(data)} == {"smg"}


def test_a_load_with_errors_makes_no_peer_the_best(load_module: Any) -> None:
    """What is left of a load is lighter than the load."""
    figures = load_module("figures")
    data = comparison(
        sample("lockstep", answer(1), c1=point(50, 150)),
        sample("router-pull", answer(1), c1=point(1, 9000) | {"errors": 3}),
        sample("smg", answer(1), c1=point(100, 100)),
    )
    at_c1 = {ratio.best_peer for ratio in figures.ratios(data) if ratio.bound.point == "c1"}
    assert at_c1 == {"smg"}


def test_answers_are_compared_by_token_ids_where_both_have_them(load_module: Any) -> None:
    """Otherwise by text; an answer that did not come is not equal to an empty one."""
    figures = load_module("figures")
    reference = [answer(1, 2, text="ab"), answer(3, text="c"), answer(text="")]
    mine = [answer(1, 9, text="ab"), answer(text="c"), answer(text="", error="timeout")]
    data = comparison(sample("plain", *reference, c1=point(1, 1)), sample("smg", *mine, c1=point(1, 1)))
    assert figures.equal_answers(data, "plain") == (3, 3)
    assert figures.equal_answers(data, "smg") == (1, 3)


def test_bounds_beside_plain_vllm(load_module: Any) -> None:
    """TTFT: a prefill time + 10 % + 2 ms. Tokens/s: two cores over 4 + 1 s a 1,000, by the first round."""
    figures = load_module("figures")
    data = comparison(
        sample("plain", answer(1), c1=point(1, 1), prefill_ms=30.0),
        sample("lockstep", answer(1), c1=point(1, 1, cpu_s=4.0), prefill_ms=40.0),
        sample("lockstep", answer(1), c1=point(1, 1, cpu_s=1.0), prefill_ms=40.0),
    )
    assert figures.ttft_bound_ms(data, "plain") == pytest.approx(35.0)
    assert figures.ttft_bound_ms(data, "lockstep") == pytest.approx(46.0)
    assert figures.throughput_bound(data, "c1") == pytest.approx(400.0)
    assert figures.throughput_bound(data, "c8") is None


def test_every_point_has_its_own_flags(load_module: Any) -> None:
    """Concurrency, rate and data set are what tells them apart; the output length is the same in all."""
    load = load_module("load")
    points = load.points(aiperf_concurrency=[])
    assert [point.name for point in points] == ["c1", "c4", "c8", "c16", "1/s", "2/s", "prefixes c4"]
    flags = [load.flags("http://host:1", point, seed=7) for point in points]
    assert all(one != other for one, other in itertools.combinations(flags, 2))
    for argv in flags:
        values = dict(itertools.pairwise(argv))
        output = values.get("--random-output-len") or values["--prefix-repetition-output-len"]
        assert output == str(load.OUTPUT_TOKENS)
        assert values["--seed"] == "7"


def test_aiperf_sends_what_vllms_client_sends(load_module: Any) -> None:
    """The same lengths, sampling and number of requests at a concurrency."""
    load, aiperf = load_module("load"), load_module("aiperf")
    points = {point.name: point for point in load.points()}
    assert points["aiperf c8"].by_aiperf
    assert points["aiperf c8"].requests == points["c8"].requests
    argv = aiperf.flags("http://host:1", 8, 24, load.INPUT_TOKENS, load.OUTPUT_TOKENS, seed=7)
    pairs = list(itertools.pairwise(argv))
    assert ("--concurrency", "8") in pairs
    assert ("--request-count", "24") in pairs
    assert ("--synthetic-input-tokens-mean", "256") in pairs
    assert ("--output-tokens-mean", "64") in pairs
    assert ("--extra-inputs", "ignore_eos:true") in pairs
    assert ("--extra-inputs", "temperature:0") in pairs


def test_aiperfs_figures_have_vllms_names(load_module: Any) -> None:
    """Its inter-token latency is a request's mean, vLLM's TPOT; ITL is between two chunks."""
    load, aiperf = load_module("load"), load_module("aiperf")
    result = {
        "time_to_first_token": {"p50": 80.0, "p99": 90.0},
        "inter_chunk_latency": {"p50": 20.0, "p99": 30.0},
        "inter_token_latency": {"p50": 9.0, "p99": 11.0},
        "output_token_throughput": {"avg": 101.5},
        "error_summary": [{"count": 2}, {"count": 1}],
    }
    figures = load.Figures(**aiperf.figures(result))
    assert (figures.ttft_p50_ms, figures.itl_p99_ms, figures.tpot_p50_ms) == (80.0, 30.0, 9.0)
    assert (figures.output_tokens_per_s, figures.errors) == (101.5, 3)
    assert figures.cpu_s_per_1000_tokens is None


def test_quick_points_are_those_at_a_concurrency(load_module: Any) -> None:
    """And half of the requests, but at least as many as run at once."""
    load = load_module("load")
    points = load.points([1, 8], [5.0], [1], quick=True)
    assert [point.name for point in points] == ["c1", "c8"]
    assert [point.requests for point in points] == [8, 12]


def test_a_report_shows_what_did_not_start(load_module: Any) -> None:
    """A system without figures is a row with its error, not left out."""
    report = load_module("report")
    data = comparison(sample("plain", answer(1), c1=point(1, 1)))
    data["failures"].append({"system": "dynamo", "round": 0, "error": "No module named 'x'"})
    text = report.markdown(data)
    assert "Dynamo 1.6.1" in text
    assert "No module named 'x'" in text


def test_peers_run_without_anything_of_ours(load_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither our settings nor our vLLM plugins reach a plain server, and it has our engines' flags."""
    monkeypatch.setenv("LOCKSTEP_CPU_PLATFORM", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    engines = load_module("engines")
    program = engines.server("vllm", 1234)
    assert not [name for name in program.environment if name.startswith("LOCKSTEP_")]
    assert program.environment["VLLM_PLUGINS"] == ""
    assert "VLLM_CPU_KVCACHE_SPACE" not in program.environment  # it would win over --kv-cache-memory-bytes
    values = dict(itertools.pairwise(program.argv))
    assert json.loads(values["--speculative-config"])["num_speculative_tokens"] == 2
    assert values["--max-num-seqs"] == "16"


def test_engines_are_patched_only_where_asked(load_module: Any, tmp_path: Path) -> None:
    """The patches are vLLM plugins beside the peer's packages; without them vLLM loads no plugin at all."""
    patch = load_module("patch")
    assert patch.environment(tmp_path, False) == {}
    assert patch.environment(tmp_path, False, Path("/peer")) == {"PYTHONPATH": "/peer"}
    patched = patch.environment(tmp_path, True, Path("/peer"))
    assert patched["PYTHONPATH"] == f"/peer:{tmp_path / 'site'}"
    names = patched["VLLM_PLUGINS"].split(",")
    assert names == ["sleeping_progress", "kept_cores"]
    assert all((tmp_path / "site" / f"{name}.py").is_file() for name in names)


def test_patched_connector_leaves_its_thread_on_all_cores(
    load_module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM's puts it on one while it is made; what it starts by then stays there."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

    cores = os.sched_getaffinity(0)
    one = {max(cores)}
    made: list[set[int]] = []

    def make(worker: Any) -> None:
        os.sched_setaffinity(0, one)
        made.append(os.sched_getaffinity(0))

    monkeypatch.setattr(NixlBaseConnectorWorker, "__init__", make)
    load_module("patch").environment(tmp_path, True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.import_module("kept_cores").register()
    try:
        NixlBaseConnectorWorker()
        assert (made, os.sched_getaffinity(0)) == ([one], cores)
    finally:
        os.sched_setaffinity(0, cores)


def test_every_candidate_has_a_key_of_its_own(load_module: Any) -> None:
    """And the peers that bounds are taken from are in the catalog, as such."""
    catalog, figures = load_module("catalog"), load_module("figures")
    keys = [candidate.key for candidate in catalog.CANDIDATES]
    assert len(set(keys)) == len(keys)
    assert {c.key for c in catalog.CANDIDATES if c.disaggregated_peer} == set(figures.PEERS)
