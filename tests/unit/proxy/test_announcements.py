"""Prefill nodes are told of the decode engines, whoever connects last."""

from collections.abc import Sequence
from typing import Any

from unit.proxy.nodes_for_tests import node

from proxy.announcements import Announcements


class Session:
    """Notes what its node is told."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []

    def announce(self, engine_ids: Sequence[str]) -> None:
        self.told.append(list(engine_ids))


def test_each_prefill_node_is_told_of_each_decode_engine() -> None:
    """Those that are there when it connects, and those that come later; decode is told nothing."""
    announcements = Announcements()
    sessions: dict[str, Any] = {name: Session() for name in ("p1", "d1", "p2", "d2", "p1 again")}
    announcements.opened(sessions["p1"], node("prefill", "p:1"))
    announcements.opened(sessions["d1"], node("decode", "d:1", num_ranks=2))
    announcements.opened(sessions["p2"], node("prefill", "p:2"))
    announcements.closed("p:1")
    announcements.opened(sessions["d2"], node("decode", "d:2", num_ranks=2))
    announcements.closed("d:1")
    announcements.opened(sessions["p1 again"], node("prefill", "p:1"))
    assert {name: session.told for name, session in sessions.items()} == {
        "p1": [["d:1_dp0", "d:1_dp1"]],
        "d1": [],
        "p2": [["d:1_dp0", "d:1_dp1"], ["d:2_dp0", "d:2_dp1"]],
        "d2": [],
        "p1 again": [["d:2_dp0", "d:2_dp1"]],
    }
