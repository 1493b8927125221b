"""Warm-up: short requests through every rank before the node says that it is ready.

The first steps under async scheduling compile small functions, on CPU for 5 to 20 s; no client shall wait
for that.
"""

import asyncio
import logging
import time

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from lockstep.errors import InternalError
from lockstep.node.engine_cores import EngineCores

logger = logging.getLogger(__name__)

_OUTPUT_TOKENS = 16


async def warm_up(engine: EngineCores, prompt_tokens: int, timeout_s: float) -> None:
    """Run a greedy and a sampled request on each rank to their ends; raises InternalError at the deadline.

    Nothing else reads the engine's outputs meanwhile.
    """
    started = time.monotonic()
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        waiting = set()
        for rank in range(engine.num_ranks):
            prompt = range(10 + rank, 10 + rank + prompt_tokens)
            request = _request(f"warmup-{name}-{rank}", temperature, prompt)
            await engine.add(request, rank)
            waiting.add(request.request_id)
        try:
            async with asyncio.timeout(timeout_s - (time.monotonic() - started)):
                while waiting:
                    outputs = await engine.next_outputs()
                    waiting -= {output.request_id for output in outputs.outputs if output.finished}
        except TimeoutError as error:
            raise InternalError(
                f"the warm-up did not finish within --warmup-timeout-s {timeout_s:g}"
            ) from error
    logger.info("warm after %.1f s", time.monotonic() - started)


def _request(request_id: str, temperature: float, prompt: range) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=SamplingParams(
            temperature=temperature, max_tokens=_OUTPUT_TOKENS, ignore_eos=True, seed=None
        ),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt="lockstep-warmup",
        data_parallel_rank=None,
    )
