"""The live page over the real stack, in a real browser; screenshots of it are left in the test's folder."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from component.proxy.browser import browser, page
from system.harness import Stack, complete_all, completion_body, run_stack
from system.prompts import prompts

WIDE = {"viewport": {"width": 1200, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"}
LENGTHS = [64, 300, 130, 20, 400, 40] * 2


def bodies(seed: int) -> list[dict[str, Any]]:
    return [
        completion_body(prompt, max_tokens=100, ignore_eos=True) for prompt in prompts(LENGTHS, seed=seed)
    ]


async def test_page_shows_the_ranks_in_lockstep(stack: Stack, tmp_path: Path) -> None:
    """Two lanes of full-graph steps, pushes from prefill to both ranks, KV rates as measured, the requests as
    they end; no console error at either width."""
    async with (
        browser() as running,
        page(running, stack.live_url, **WIDE) as wide,
        page(running, stack.live_url, **PHONE) as phone,
    ):
        asking = asyncio.create_task(complete_all(stack.url, bodies(91), concurrency=4))
        for rank in (0, 1):
            lane = wide.locator(".lane", has_text=f"rank {rank} · {stack.decode.grpc_address}")
            await lane.get_by_text("100 % of the last 120 steps in the full graph").wait_for()
            assert await lane.locator(".cells .full").count() == 120
            assert await lane.locator(".cells .full:not(.idle)").count() > 0
            await wide.locator("#pushes li", has_text=f"{stack.decode.grpc_address} rank {rank}").wait_for()
        await wide.locator("#prefill .rank", has_text="KV pushed").wait_for()
        await wide.locator("#decode .rank", has_text="drafts accepted").first.wait_for()
        await wide.locator("#rows tr", has_text="length").nth(3).wait_for()
        for name, shown in (("wide", wide), ("phone", phone)):
            await shown.screenshot(path=tmp_path / f"live-page-{name}.png", full_page=name == "wide")
        await asking
        assert await wide.locator(".cells .none, .cells .piecewise").count() == 0


@pytest.mark.full
async def test_colours_change_without_padding(tmp_path: Path) -> None:
    """A decode node that leaves arrivals unpadded: their steps leave the full graph on both ranks."""
    flags = [f"--decode-arg={flag}" for flag in ("--arrival-padding=off", "--i-know")]
    with run_stack(tmp_path, *flags, "--proxy-arg=--hand-off=off") as unpadded:
        async with browser() as running, page(running, unpadded.live_url, **WIDE) as wide:
            asking = asyncio.create_task(complete_all(unpadded.url, bodies(92), concurrency=4))
            for rank in (0, 1):
                await wide.locator(".lane", has_text=f"rank {rank}").locator(".cells .none").first.wait_for()
            none = wide.locator(".cells .none").first
            full = wide.locator(".cells .full:not(.idle)").first
            colours = [
                await cell.evaluate("c => getComputedStyle(c).backgroundColor") for cell in (none, full)
            ]
            assert colours[0] != colours[1]
            await wide.screenshot(path=tmp_path / "live-page-unpadded.png", full_page=True)
            await asking
