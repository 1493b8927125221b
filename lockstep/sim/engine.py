"""What both simulated engines have in common: steps that all ranks make together, in their time."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from lockstep.errors import InvalidRequestError, UnavailableError
from lockstep.node.engine import RankStatus
from lockstep.node.facts import EngineFacts
from lockstep.sim.answers import Voice
from lockstep.sim.config import SimFigures
from lockstep.sim.pool import KVPool
from lockstep.sim.rows import ReadLeg, Row

_CATCH_UP_S = 0.02
"""How much of a step that began late is taken off its time: timers of an event loop ring late."""


class Rank(Protocol):
    """What the engine reads of a rank's scheduler."""

    @property
    def pool(self) -> KVPool: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...


class SimulatedEngine:
    """Implements lockstep.node.engine_cores.EngineCores; a subclass has the ranks and their steps."""

    has_peers_elsewhere = False
    ranks: Sequence[Rank]
    """By local rank; a subclass makes them."""

    def __init__(self, figures: SimFigures, vllm_config: VllmConfig, voice: Voice, read_leg: ReadLeg) -> None:
        self.figures = figures
        self.vllm_config = vllm_config
        parallel = vllm_config.parallel_config
        self.global_ranks = list(range(parallel.data_parallel_size))
        self._voice = voice
        self._read_leg = read_leg
        self._outputs: asyncio.Queue[EngineCoreOutputs | None] = asyncio.Queue()
        self._work = asyncio.Event()
        self._stepping: asyncio.Task[None] | None = None
        self.dead = False

    # What a subclass does.

    def schedule(self) -> float | None:
        """Begin a step on all ranks: its time in seconds, None where no rank has anything to do."""
        raise NotImplementedError

    def end_step(self) -> None:
        """The step's time is over: emit what it gives."""
        raise NotImplementedError

    def take(self, row: Row, local_rank: int) -> None:
        """A request for one rank."""
        raise NotImplementedError

    def give_up(self, request_id: str) -> None:
        """The request is not wanted any more; it may be unknown."""
        raise NotImplementedError

    def kv_counters(self, local_rank: int) -> dict[str, Any]:
        """As kv_transfer.counters.KVCounters.snapshot names them."""
        raise NotImplementedError

    def scheduler_counters(self, local_rank: int) -> dict[str, Any]:
        """As the decode scheduler names them; empty on prefill."""
        return {}

    def step_records(self, local_rank: int) -> list[list[Any]]:
        """Those since the last call, fields as in decode_node.step_recorder.StepRecord; empty on prefill."""
        return []

    # What the node calls.

    @property
    def num_ranks(self) -> int:
        return len(self.global_ranks)

    def start(self) -> None:
        self._stepping = asyncio.create_task(self._step_on(), name="simulated steps")
        self._stepping.add_done_callback(self._died)

    async def add(self, request: EngineCoreRequest, local_rank: int) -> None:
        """Raises InvalidRequestError for what a simulated model cannot give."""
        if self.dead:
            raise UnavailableError("the engines of this node are gone")
        if request.request_id.startswith("warmup-"):
            self._end_warm_up(request, local_rank)
            return
        self.take(self._row(request, local_rank), local_rank)
        self.wake()

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.give_up(request_id)
        self.wake()  # their blocks may be what others wait for

    async def announce(self, engine_ids: list[str]) -> None:
        """A simulation shakes hands with nobody."""

    async def abandon(self, request_ids: list[str]) -> None:
        await self.abort(request_ids)

    async def next_outputs(self) -> EngineCoreOutputs:
        outputs = await self._outputs.get()
        if outputs is None:
            raise EngineDeadError()
        return outputs

    async def status(self) -> list[RankStatus]:
        return [
            RankStatus(
                num_running=rank.num_running,
                num_waiting=rank.num_waiting,
                kv_cache_usage=rank.pool.usage,
                steps=self.step_records(local_rank),
                steps_dropped=0,
                kv=self.kv_counters(local_rank),
                scheduler=self.scheduler_counters(local_rank),
            )
            for local_rank, rank in enumerate(self.ranks)
        ]

    async def facts(self) -> list[EngineFacts]:
        """What real engines on a device with full graphs would make of the configuration."""
        compilation = self.vllm_config.compilation_config
        facts = EngineFacts(
            scheduler_cls=str(self.vllm_config.scheduler_config.scheduler_cls or ""),
            async_scheduling=bool(self.vllm_config.scheduler_config.async_scheduling),
            cudagraph_mode=compilation.cudagraph_mode.name,
            full_graph_tokens=sorted(compilation.cudagraph_capture_sizes or ()),
            num_kv_blocks=self.ranks[0].pool.num_blocks,
            records_steps=bool(self.scheduler_counters(0)),
        )
        return [facts] * self.num_ranks

    async def shutdown(self) -> None:
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.gather(self._stepping, return_exceptions=True)

    # What the subclasses call.

    def wake(self) -> None:
        """Something may be there to run."""
        self._work.set()

    def emit(
        self, local_rank: int, outputs: list[EngineCoreOutput], drafts: SpecDecodingStats | None = None
    ) -> None:
        """What one rank's step gives."""
        rank = self.ranks[local_rank]
        stats = SchedulerStats(
            num_running_reqs=rank.num_running,
            num_waiting_reqs=rank.num_waiting,
            kv_cache_usage=rank.pool.usage,
            spec_decoding_stats=drafts,
        )
        self._outputs.put_nowait(
            EngineCoreOutputs(
                engine_index=self.global_ranks[local_rank],
                outputs=outputs,
                scheduler_stats=stats,
                timestamp=time.monotonic(),
            )
        )

    def _row(self, request: EngineCoreRequest, local_rank: int) -> Row:
        leg, prompt = self._read_leg(request), list(request.prompt_token_ids)
        params = request.sampling_params
        if params.logprobs is not None or params.prompt_logprobs is not None:
            raise InvalidRequestError("a simulated model has no logprobs", param="logprobs")
        pool = self.ranks[local_rank].pool
        tokens = [*prompt, *leg.carried]
        if len(tokens) + 1 + self.vllm_config.num_speculative_tokens > pool.num_blocks * pool.block_size:
            raise InvalidRequestError(f"{len(tokens)} tokens do not fit {pool.num_blocks} KV blocks")
        first = len(leg.carried) + (leg.hand_off and leg.peer is not None)
        return Row(request, leg, self._voice.script(prompt, params), tokens, first)

    def _end_warm_up(self, request: EngineCoreRequest, local_rank: int) -> None:
        """There is nothing to warm."""
        self.emit(local_rank, [EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.LENGTH)])

    async def _step_on(self) -> None:
        free_s = time.monotonic()
        while True:
            self._work.clear()
            duration_s = self.schedule()
            if duration_s is None:
                await self._work.wait()
                free_s = time.monotonic()
                continue
            free_s = max(free_s, time.monotonic() - _CATCH_UP_S) + duration_s
            await asyncio.sleep(free_s - time.monotonic())
            self.end_step()

    def _died(self, task: "asyncio.Task[None]") -> None:
        """Ends by cancellation only; anything else is the end of the node, as that of an engine core is."""
        self.dead = True
        self._outputs.put_nowait(None)
        if not task.cancelled():
            task.result()
