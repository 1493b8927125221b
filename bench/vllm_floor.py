"""vLLM's own API server over a simulated engine in its process: the floor for a proxy with its front end.

    python -m bench.vllm_floor --sim-... figures, and vLLM's server flags

The simulation's share of the process is in the figures, the way to engine core processes is not.
"""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import uvloop
from vllm.entrypoints.launchers.api_server import entry
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    async_llm,
)
from vllm.v1.engine.core_client import EngineCoreClient

from bench.sim_engine import Row, SimEngine
from lockstep.sim.config import SimFigures

_FIRST_TOKEN_ID = 300


class _Resources:
    engine_dead = False


class SimClient(EngineCoreClient):
    """What AsyncLLM asks of its engine core, over the simulation."""

    def __init__(self, figures: SimFigures, num_speculative_tokens: int) -> None:
        self.resources = _Resources()
        self.engine_ranks_managed = [0]
        self._figures, self._num_speculative_tokens = figures, num_speculative_tokens
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._engine: SimEngine | None = None
        self._new: set[str] = set()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        """There is none."""

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        if self._engine is None:
            self._engine = SimEngine(self._figures, self._num_speculative_tokens, 2048, self._step)
        self._new.add(request.request_id)
        params = request.sampling_params
        self._engine.add(Row(request.request_id, len(request.prompt_token_ids), params.max_tokens))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if self._engine is not None:
                self._engine.abort(request_id)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    def shutdown(self, timeout: float | None = None) -> None:
        if self._engine is not None:
            self._engine.close()

    def _step(self, rows: Sequence[Row]) -> None:
        outputs = [
            EngineCoreOutput(
                row.name,
                [_FIRST_TOKEN_ID + index for index in range(row.new_tokens)],
                finish_reason=None if row.tokens_left else FinishReason.LENGTH,
                events=self._events(row.name),
            )
            for row in rows
        ]
        self._outputs.put_nowait(EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic()))

    def _events(self, name: str) -> list[EngineCoreEvent] | None:
        if name not in self._new:
            return None
        self._new.discard(name)
        return [
            EngineCoreEvent.new_event(kind)
            for kind in (EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED)
        ]


def main() -> None:
    figures, rest = SimFigures.load(sys.argv[1:], "vllm_floor", "")

    class Factory:
        @staticmethod
        def make_async_mp_client(*_: Any, **__: Any) -> SimClient:
            return SimClient(figures, 2)

    async_llm.EngineCoreClient = Factory
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(rest)
    validate_parsed_serve_args(args)
    uvloop.run(entry.run_server(args))


if __name__ == "__main__":
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    main()
