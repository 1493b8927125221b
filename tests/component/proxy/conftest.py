"""Fixtures: a proxy over fake nodes that a test chooses, or the usual ones."""

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"

import pytest
from component.proxy.fake_node import FakeNode, Wire
from component.proxy.stack import PICO, Stack, running

Start = Callable[..., Awaitable[Stack]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Start fake nodes and a proxy over them; everything is gone after the test."""
    async with contextlib.AsyncExitStack() as opened:

        async def begin(
            *flags: str,
            prefill: list[FakeNode] | None = None,
            decode: list[FakeNode] | None = None,
            send_buffer_bytes: int | None = None,
        ) -> Stack:
            wire = Wire()
            prefill = prefill or [FakeNode("prefill", wire, PICO)]
            decode = decode or [FakeNode("decode", wire, PICO, num_ranks=2)]
            for node in (*prefill, *decode):
                await node.start()
                opened.push_async_callback(node.stop)
            return await opened.enter_async_context(running(prefill, decode, list(flags), send_buffer_bytes))

        yield begin


@pytest.fixture
async def stack(start: Start) -> Stack:
    """One prefill node and one decode node with two ranks."""
    return await start()
