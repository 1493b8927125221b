"""A long prompt's KV on the shared stack: part of it is written while prefill still computes."""

from system.harness import Stack
from system.streamed_push import blocks_of, push_long_prompts


async def test_long_prompt_is_streamed(stack: Stack) -> None:
    """4000 tokens take two steps of prefill's default budget of 2048: the first step's blocks go out before
    the second has ended, each block goes once, and the answer is pico's."""
    counted = await push_long_prompts(stack, [4000], seed=53)
    assert counted == {
        "streamed_chunks": 1,
        "pushed_chunks": 2,
        "pushed_blocks": blocks_of([4000]),
        "received_blocks": blocks_of([4000]),
    }
