"""Leg ids: unique, and safe from vLLM's suffix stripping."""

import re

from hypothesis import given
from hypothesis import strategies as st

from proxy.ids import ChoiceIds, choice_id, leg_id

HEX = st.text("0123456789abcdef", min_size=1, max_size=16)


@given(HEX, st.integers(1, 10**12), st.integers(1, 10**9))
def test_never_ends_as_vllm_strips(proxy_id: str, choice: int, attempt: int) -> None:
    """vLLM cuts '-' and 8 hex digits off the end of an id, whatever its length before."""
    assert not re.search(r"-[0-9a-fA-F]{8}$", leg_id(choice_id(proxy_id, choice), attempt))


@given(
    st.lists(st.tuples(HEX, st.integers(1, 999), st.integers(1, 99)), min_size=2, max_size=20, unique=True)
)
def test_no_two_are_equal(parts: list[tuple[str, int, int]]) -> None:
    """Another proxy, choice or attempt is another id."""
    assert len({leg_id(choice_id(proxy, choice), attempt) for proxy, choice, attempt in parts}) == len(parts)


def test_proxies_differ_from_start_to_start() -> None:
    """A restarted proxy never reuses an id that a node may still know."""
    assert ChoiceIds().new() != ChoiceIds().new()
