"""What the full-graph benchmark's observer notes, and how it is read: a miscount would prove anything."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
FULL, NONE = 2, 0


@pytest.fixture(autouse=True)
def _bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """bench is a folder of scripts, not an installed package."""
    monkeypatch.syspath_prepend(REPOSITORY)


def _records() -> Any:
    return importlib.import_module("bench.observer.records")


def _events(scheduler_output: Any, query_len: int) -> list[list[Any]]:
    events: list[list[Any]] = importlib.import_module("bench.observer.plugin")._events(
        scheduler_output, query_len
    )
    return events


def _agreement(
    who: str = "target", when: str = "work", mode: int = FULL, padded: tuple[int, ...] = (6, 6)
) -> Any:
    return ["a", who, when, 3, 3, FULL, mode, padded]


def _written(directory: Path, **ranks: list[Any]) -> Any:
    for name, events in ranks.items():
        lines = "".join(json.dumps(event) + "\n" for event in events)
        (directory / f"{name}-4711.jsonl").write_text(lines)
    records = _records()
    return records.read(directory, records.Position({}))


def _step(widths: dict[str, int], drafts: dict[str, list[int]], **changes: Any) -> Any:
    nothing = SimpleNamespace(req_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    step = SimpleNamespace(
        num_scheduled_tokens=widths,
        scheduled_spec_decode_tokens=drafts,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=nothing,
        preempted_req_ids=None,
    )
    return SimpleNamespace(**vars(step) | changes)


def test_steps_are_the_targets_without_startup(tmp_path: Path) -> None:
    """Work and idle steps of the target count; draft agreements and warm-up runs do not."""
    events = [
        _agreement(when="startup"),
        _agreement(),
        _agreement(who="draft", mode=NONE),
        _agreement(when="idle"),
        _agreement(mode=NONE),
    ]
    rank = _written(tmp_path, rank0=events)[0]
    assert rank.steps() == {"FULL": 2, "NONE": 1}


def test_what_was_before_the_position_is_left_out(tmp_path: Path) -> None:
    """A run starts where the file ended then."""
    records = _records()
    _written(tmp_path, rank0=[_agreement(), _agreement()])
    start = records.position(tmp_path)
    _written(tmp_path, rank0=[_agreement(), _agreement(), _agreement(mode=NONE)])
    assert records.read(tmp_path, start)[0].steps() == {"NONE": 1}


@pytest.mark.parametrize(
    "other",
    [
        pytest.param([_agreement(), _agreement(mode=NONE)], id="another mode"),
        pytest.param([_agreement(), _agreement(padded=(6, 12))], id="another padded size"),
        pytest.param([_agreement(), _agreement(who="draft")], id="another model"),
        pytest.param([_agreement()], id="one agreement less"),
    ],
)
def test_ranks_that_differ_are_found(tmp_path: Path, other: list[Any]) -> None:
    """The n-th agreement must be the same on both ranks, and there must be as many."""
    ranks = _written(tmp_path, rank0=[_agreement(), _agreement()], rank1=other)
    assert len(_records().mismatches(list(ranks.values()))) == 1


def test_unequal_sizes_are_a_fault_only_under_a_graph(tmp_path: Path) -> None:
    """vLLM pads ranks to one size for a graph, and leaves them alone without."""
    uneven = (3, 9)
    eager = _written(tmp_path, rank0=[_agreement(mode=NONE, padded=uneven)] * 2)[0]
    graph = _written(tmp_path, rank0=[_agreement(padded=uneven)] * 2)[0]
    assert _records().mismatches([eager, eager]) == []
    assert len(_records().mismatches([graph, graph])) == 2


def test_two_processes_of_one_rank_are_refused(tmp_path: Path) -> None:
    """A rank that was started again has lost a part of its count."""
    (tmp_path / "rank0-1.jsonl").touch()
    (tmp_path / "rank0-2.jsonl").touch()
    with pytest.raises(RuntimeError, match="more than once"):
        _records().position(tmp_path)


def test_a_padded_arrival_is_noted(tmp_path: Path) -> None:
    """Its placeholders are counted, and one of its three tokens is computed that was there before."""
    new = SimpleNamespace(req_id="r", num_computed_tokens=99)
    events = _events(_step({"r": 3}, {"r": [-1, -1]}, scheduled_new_reqs=[new]), query_len=3)
    assert events == [["new", "r", 99, 3, 2, 2]]
    first = _written(tmp_path, rank0=events)[0].first_steps[0]
    assert (first.padded, first.local_tokens, first.resumed) == (True, 1, False)


def test_a_request_resumed_after_preemption_is_noted(tmp_path: Path) -> None:
    """Its whole prefix is computed here, and its row is not 1 + K wide."""
    cached = SimpleNamespace(req_ids=["r", "s"], num_computed_tokens=[0, 50], resumed_req_ids={"r"})
    step = _step({"r": 120, "s": 3}, {"s": [7, 8]}, scheduled_cached_reqs=cached, preempted_req_ids={"t"})
    events = _events(step, query_len=3)
    assert events == [["preempted", 1], ["resumed", "r", 0, 120, 0, 0], ["odd", {"r": 120, "s": 3}]]
    rank = _written(tmp_path, rank0=events)[0]
    assert (rank.preempted, rank.first_steps[0].local_tokens, rank.odd_steps) == (
        1,
        120,
        [{"r": 120, "s": 3}],
    )


def test_a_step_of_full_rows_notes_nothing() -> None:
    """Only what is noteworthy is written: the file stays small over hours."""
    cached = SimpleNamespace(req_ids=["r"], num_computed_tokens=[50], resumed_req_ids=set())
    assert _events(_step({"r": 3}, {"r": [7, 8]}, scheduled_cached_reqs=cached), query_len=3) == []


def test_busy_steps_are_those_with_work_on_a_rank(tmp_path: Path) -> None:
    """A step that both ranks only make for a peer that waits is left out."""
    ranks = _written(
        tmp_path,
        rank0=[_agreement(when="idle"), _agreement(mode=NONE), _agreement(when="idle")],
        rank1=[_agreement(when="work"), _agreement(mode=NONE), _agreement(when="idle")],
    )
    assert _records().busy_steps(list(ranks.values())) == {"FULL": 1, "NONE": 1}
