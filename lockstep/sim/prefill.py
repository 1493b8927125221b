"""The simulated engines of a prefill node: prompts computed in steps, then pushed to who registered."""

import asyncio
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats

from lockstep.sim import pushes
from lockstep.sim.answers import Voice
from lockstep.sim.config import SimFigures
from lockstep.sim.engine import SimulatedEngine
from lockstep.sim.pool import KVPool
from lockstep.sim.prefill_rank import PrefillRank
from lockstep.sim.pushes import Pushes
from lockstep.sim.rows import ReadLeg, Row


class SimulatedPrefill(SimulatedEngine):
    """One scheduler and one side of the transfer for each rank."""

    def __init__(
        self,
        figures: SimFigures,
        vllm_config: VllmConfig,
        voice: Voice,
        read_leg: ReadLeg,
        *,
        engine_ids: list[str],
        lease_s: float,
    ) -> None:
        super().__init__(figures, vllm_config, voice, read_leg)
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        self.ranks: list[PrefillRank] = [
            PrefillRank(
                KVPool(
                    cache.num_gpu_blocks,
                    cache.block_size,
                    prefix_caching=cache.enable_prefix_caching is not False,
                ),
                scheduler.max_num_seqs,
                scheduler.max_num_batched_tokens,
            )
            for _ in self.global_ranks
        ]
        self._pushes = [
            Pushes(engine_id, lease_s, figures.push_s, self._releaser(rank))
            for rank, engine_id in zip(self.ranks, engine_ids, strict=True)
        ]
        self._servers: list[asyncio.Server] = []

    async def listen(self, host: str, first_port: int) -> None:
        """Take registrations, each rank on its own port. Raises OSError for a port that is taken."""
        for local_rank, rank in enumerate(self.global_ranks):
            self._servers.append(await pushes.serve(host, first_port + rank, self._pushes[local_rank]))

    async def shutdown(self) -> None:
        for server in self._servers:
            server.close()
        for of_rank in self._pushes:
            of_rank.close()
        await super().shutdown()

    def schedule(self) -> float | None:
        tokens = max(rank.schedule() for rank in self.ranks)
        return self.figures.prefill_step_s(tokens) if tokens else None

    def end_step(self) -> None:
        for local_rank, rank in enumerate(self.ranks):
            done = rank.step()
            for row in done:
                self._pushes[local_rank].computed(row)
            if early := [_early(row) for row in done if row.leg.hand_off]:
                self.emit(local_rank, early)
            if done:
                self.emit(local_rank, [_output(row) for row in done])

    def take(self, row: Row, local_rank: int) -> None:
        self.ranks[local_rank].add(row)

    def give_up(self, request_id: str) -> None:
        for rank, of_rank in zip(self.ranks, self._pushes, strict=True):
            rank.drop(request_id)
            of_rank.give_up(request_id)

    def kv_counters(self, local_rank: int) -> dict[str, Any]:
        of_rank = self._pushes[local_rank]
        return {
            "pushed_requests": of_rank.pushed_requests,
            "pushed_blocks": of_rank.pushed_blocks,
            "leases_expired": of_rank.leases_expired,
            "leases_held": of_rank.held,
        }

    def _releaser(self, rank: PrefillRank) -> "_Releaser":
        return _Releaser(self, rank)


class _Releaser:
    """Gives a row's blocks back to its rank, where another row may wait for them."""

    def __init__(self, engine: SimulatedPrefill, rank: PrefillRank) -> None:
        self._engine = engine
        self._rank = rank

    def __call__(self, row: Row) -> None:
        self._rank.pool.release(row.holding)
        self._engine.wake()


def _early(row: Row) -> EngineCoreOutput:
    """A promised token is told before the end of its leg (lockstep/node/first_tokens.py)."""
    output = _output(row)
    output.finish_reason, output.events = None, list(row.events)
    return output


def _output(row: Row) -> EngineCoreOutput:
    """A prefill leg ends by its length, whatever its token is."""
    cached = row.holding.cached_tokens
    stats = PrefillStats()
    stats.set(len(row.tokens), cached, 0)
    return EngineCoreOutput(
        row.request_id,
        [row.script.token(row.next_index)],
        finish_reason=FinishReason.LENGTH,
        events=row.take_events(),
        prefill_stats=None if row.leg.carried else stats,
    )
