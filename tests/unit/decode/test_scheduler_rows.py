"""Rows as plain data: width, drafts, placeholders, causes."""

from types import SimpleNamespace
from typing import Any

import pytest

from decode_node.scheduler.rows import (
    Violation,
    count_placeholders,
    fill_drafts,
    unpad_arrivals,
    violation_of,
)


def output(num_scheduled_tokens: dict[str, int], drafts: dict[str, list[int]], **more: Any) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=num_scheduled_tokens,
        total_num_scheduled_tokens=sum(num_scheduled_tokens.values()),
        scheduled_spec_decode_tokens=drafts,
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in more.get("new", ())],
        scheduled_cached_reqs=SimpleNamespace(all_token_ids={name: [] for name in more.get("back", ())}),
    )


@pytest.mark.parametrize(
    ("known", "computed", "num_tokens", "arrived", "cause"),
    [
        (10, 9, 3, True, None),
        (10, 9, 3, False, None),
        (10, 12, 3, False, None),  # asynchronous: three tokens that are not known yet
        (10, 9, 1, True, Violation.UNPADDED_ARRIVAL),
        (1, 0, 1, True, Violation.UNPADDED_ARRIVAL),
        (10, 9, 2, False, Violation.SHORT_DRAFTS),
        (10, 0, 10, True, Violation.LOCAL_PREFILL),
        (10, 7, 3, True, Violation.LOCAL_PREFILL),  # of the right width by chance
        (18, 17, 2, False, Violation.CONTEXT_LIMIT),
        (17, 16, 3, False, None),
    ],
)
def test_cause_of_a_row(
    known: int, computed: int, num_tokens: int, arrived: bool, cause: Violation | None
) -> None:
    """Of K = 2 and max_model_len = 20, whose last token is sampled and never computed."""
    request = SimpleNamespace(num_tokens=known, num_computed_tokens=computed + num_tokens)
    assert violation_of(request, num_tokens, width=3, max_model_len=20, arrived=arrived) == cause


def test_full_rows_get_all_their_drafts() -> None:
    """Known drafts stay in front; a row of 1 token stays as it is."""
    drafts = {"some": [5], "all": [6, 7]}
    fill_drafts(output({"some": 3, "all": 3, "none": 3, "short": 1}, drafts), 2)
    assert drafts == {"some": [5, -1], "all": [6, 7], "none": [-1, -1]}


def test_unpadded_arrivals_have_one_token() -> None:
    """And only they."""
    scheduled = output({"new": 3, "old": 3}, {"new": [-1, -1], "old": [-1, -1]}, new=["new"])
    unpad_arrivals(scheduled)
    assert scheduled.num_scheduled_tokens == {"new": 1, "old": 3}
    assert scheduled.total_num_scheduled_tokens == 4
    assert scheduled.scheduled_spec_decode_tokens == {"old": [-1, -1]}


@pytest.mark.parametrize(
    ("drafts_on_worker", "counts"),
    [(True, {"new": 2, "back": 2}), (False, {"new": 2, "back": 2, "some": 1, "old": 2})],
)
def test_placeholders_are_drafts_that_nobody_has(drafts_on_worker: bool, counts: dict[str, int]) -> None:
    """Asynchronous: -1 stands for the worker's drafts, unless the row was not in the step before."""
    drafts = {"new": [-1, -1], "back": [-1, -1], "some": [5, -1], "old": [-1, -1], "real": [5, 6]}
    scheduled = output(dict.fromkeys(drafts, 3), drafts, new=["new"], back=["back"])
    assert count_placeholders(scheduled, drafts_on_worker=drafts_on_worker) == counts


def test_drafts_that_came_with_an_arrival_are_no_placeholders() -> None:
    scheduled = output({"new": 3}, {"new": [5, 6]}, new=["new"])
    assert count_placeholders(scheduled, drafts_on_worker=True) == {}
