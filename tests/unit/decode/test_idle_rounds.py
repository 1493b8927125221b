"""A rank learns from the agreement whether its peers had work, and nobody else sees that it asked."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.v1.worker import dp_utils

from decode_node.idle_rounds import IDLE, IdleRounds, IdleRoundsWorkerMixin

FULL = 2


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the graph mode that the other rank brings to the agreement, its idle bit included."""
    brings = [FULL]

    def agree(
        should_ubatch: bool,
        orig_num_tokens_per_ubatch: int,
        padded_num_tokens_per_ubatch: int,
        cudagraph_mode: int,
        parallel_config: Any,
    ) -> torch.Tensor:
        return torch.tensor([[3, 3], [3, 3], [0, 0], [cudagraph_mode, brings[0]]], dtype=torch.int32)

    monkeypatch.setattr(dp_utils, "_run_ar", agree)

    def bring(mode: int) -> None:
        brings[0] = mode

    return bring


def agreed_modes() -> list[int]:
    table = dp_utils._run_ar(
        should_ubatch=False,
        orig_num_tokens_per_ubatch=3,
        padded_num_tokens_per_ubatch=3,
        cudagraph_mode=FULL,
        parallel_config=None,
    )
    modes: list[int] = table[3].tolist()
    return modes


@pytest.mark.parametrize(("of_peer", "all_idle"), [(FULL, False), (FULL + IDLE, True), (IDLE, True)])
def test_round_is_idle_if_it_is_so_for_every_rank(
    peer: Callable[[int], None], of_peer: int, all_idle: bool
) -> None:
    """The modes come out as they were brought, without the bit."""
    rounds = IdleRounds()
    rounds.watch()
    peer(of_peer)
    with rounds.idle():
        assert agreed_modes() == [FULL, of_peer % IDLE]
    assert rounds.all_idle is all_idle


def test_rank_with_work_says_so(peer: Callable[[int], None]) -> None:
    """Its peers must see no bit, whatever they bring themselves."""
    rounds = IdleRounds()
    rounds.watch()
    peer(FULL + IDLE)
    assert agreed_modes() == [FULL, FULL]
    assert rounds.all_idle is False


class Dummies:
    """A worker as far as the mixin calls it."""

    def execute_dummy_batch(self) -> None:
        agreed_modes()


class Worker(IdleRoundsWorkerMixin, Dummies):
    pass


class ParallelConfig:
    data_parallel_size = 2

    def __init__(self, on_host: bool) -> None:
        self.disable_nccl_for_dp_synchronization = on_host


@pytest.mark.parametrize("on_host", [True, False])
def test_worker_answers_for_the_round_where_the_table_is_on_the_host(
    peer: Callable[[int], None], on_host: bool
) -> None:
    worker = Worker()
    worker.watch_idle_rounds(ParallelConfig(on_host))
    peer(FULL + IDLE)
    assert worker.execute_dummy_batch() is on_host
