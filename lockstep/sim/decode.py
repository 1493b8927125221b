"""The simulated engines of a decode node: steps of 1 + K tokens a row, that all ranks make together."""

import random
from collections import Counter, deque
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from lockstep.bounce import Bounce
from lockstep.sim.answers import GOES_ON, Voice
from lockstep.sim.config import SimFigures
from lockstep.sim.decode_rank import DecodeRank, Said
from lockstep.sim.engine import SimulatedEngine
from lockstep.sim.pool import KVPool
from lockstep.sim.receives import Receives
from lockstep.sim.rows import ReadLeg, Row

_KEPT_RECORDS = 4096
"""Between two readings of the node, a second apart."""


class SimulatedDecode(SimulatedEngine):
    """One scheduler for each rank, and one side of the transfer for all of them."""

    def __init__(
        self,
        figures: SimFigures,
        vllm_config: VllmConfig,
        voice: Voice,
        read_leg: ReadLeg,
        *,
        registration_deadline_s: float,
    ) -> None:
        super().__init__(figures, vllm_config, voice, read_leg)
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        draws = random.Random(figures.sim_seed)
        self.num_speculative_tokens: int = vllm_config.num_speculative_tokens
        self.ranks: list[DecodeRank] = [
            DecodeRank(
                KVPool(cache.num_gpu_blocks, cache.block_size, prefix_caching=False),
                scheduler.max_num_seqs,
                self.num_speculative_tokens,
                figures.sim_acceptance,
                draws,
            )
            for _ in self.global_ranks
        ]
        self._receives = Receives(registration_deadline_s, self._kv_ended)
        self._rank_of: dict[str, int] = {}
        self._counts = [Counter[str]() for _ in self.ranks]
        self._bounced = [Counter[str]() for _ in self.ranks]
        self._records: list[deque[list[Any]]] = [deque(maxlen=_KEPT_RECORDS) for _ in self.ranks]
        self._steps = 0
        self._graphs = sorted(vllm_config.compilation_config.cudagraph_capture_sizes or ())

    async def shutdown(self) -> None:
        await self._receives.close()
        await super().shutdown()

    def schedule(self) -> float | None:
        for rank in self.ranks:
            for row in rank.take_blocks():
                self._receives.register(row)
        widest = max(rank.schedule() for rank in self.ranks)
        return self.figures.decode_step_s(widest) if widest else None

    def end_step(self) -> None:
        self._steps += 1
        for local_rank, rank in enumerate(self.ranks):
            said = rank.step()
            self._record(local_rank, len(said))
            if said:
                self.emit(local_rank, [self._output(one) for one in said], self._drafts(rank, len(said)))
                for one in said:
                    if one.end is not GOES_ON:
                        self._ended(one.row, local_rank, one.end[1])

    def take(self, row: Row, local_rank: int) -> None:
        self._rank_of[row.request_id] = local_rank
        self.ranks[local_rank].add(row)

    def give_up(self, request_id: str) -> None:
        local_rank = self._rank_of.pop(request_id, None)
        if local_rank is not None:
            self._receives.cancel(request_id)
            self.ranks[local_rank].drop(request_id)

    def kv_counters(self, local_rank: int) -> dict[str, Any]:
        counts = self._counts[local_rank]
        failed = {name.removeprefix("failed "): n for name, n in counts.items() if name.startswith("failed ")}
        received = {name: counts[name] for name in ("received_requests", "received_blocks")}
        return {**received, "failed": failed}

    def scheduler_counters(self, local_rank: int) -> dict[str, Any]:
        names = ("hand_offs", "handed_over_drafts", "padded_arrivals", "placeholder_drafts", "reentries")
        counts = {name: self._counts[local_rank][name] for name in names}
        return {**counts, "bounced": dict(self._bounced[local_rank]), "violations": {}}

    def step_records(self, local_rank: int) -> list[list[Any]]:
        records = self._records[local_rank]
        taken = list(records)
        records.clear()
        return taken

    def _kv_ended(self, request_id: str, failure: str) -> None:
        local_rank = self._rank_of.get(request_id)
        if local_rank is None:
            return
        rank = self.ranks[local_rank]
        if not failure:
            row = rank.arriving[request_id]
            self._counts[local_rank]["received_requests"] += 1
            self._counts[local_rank]["received_blocks"] += row.holding.blocks
            self._counts[local_rank]["padded_arrivals"] += 1
            self._counts[local_rank]["hand_offs"] += row.leg.hand_off
            rank.kv_arrived(request_id)
        else:
            self._counts[local_rank][f"failed {failure}"] += 1
            dropped = rank.drop(request_id)
            if dropped is not None:
                end = (FinishReason.ABORT, str(Bounce.KV_LOAD_FAILED))
                self.emit(local_rank, [self._output(Said(dropped, [], end))])
                self._ended(dropped, local_rank, end[1])
        self.wake()

    def _ended(self, row: Row, local_rank: int, stop_reason: int | str | None) -> None:
        del self._rank_of[row.request_id]
        if isinstance(stop_reason, str):
            self._bounced[local_rank][stop_reason] += 1

    def _record(self, local_rank: int, rows: int) -> None:
        """Every step here is one that a full graph serves, those of an idle rank too."""
        width = 1 + self.num_speculative_tokens
        tokens = width * max(rows, 1)
        padded = next((size for size in self._graphs if size >= tokens), tokens)
        self._records[local_rank].append([self._steps, "FULL", width, rows, tokens, padded, rows == 0, ""])

    def _drafts(self, rank: DecodeRank, rows: int) -> SpecDecodingStats | None:
        if not self.num_speculative_tokens:
            return None
        return SpecDecodingStats(
            self.num_speculative_tokens,
            rows,
            num_draft_tokens=rank.drafted,
            num_accepted_tokens=rank.accepted,
        )

    def _output(self, said: Said) -> EngineCoreOutput:
        row, (finish_reason, stop_reason) = said.row, said.end
        is_first = bool(row.events)
        return EngineCoreOutput(
            row.request_id,
            said.tokens,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            events=row.take_events(),
            prefill_stats=PrefillStats(len(row.tokens)) if is_first else None,
        )
