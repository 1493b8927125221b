"""The live page in a real browser, over fake nodes: lanes, pushes, keyboard, small screens, lost streams."""

import asyncio
from typing import Any

from component.proxy.browser import browser, page
from component.proxy.conftest import Start
from component.proxy.live_stack import live_stack, step, tell_steps
from component.proxy.stack import until

ASK: dict[str, Any] = {"model": "pico", "prompt": "Some words to say.", "max_tokens": 30}


async def colour(shown: Any, rank: int, at: int) -> str:
    """Of a lane's cell, counted from the last one."""
    cell = shown.locator(".lane").nth(rank).locator(".cell").nth(-1 - at)
    return str(await cell.evaluate("cell => getComputedStyle(cell).backgroundColor"))


async def text_has(shown: Any, selector: str, text: str) -> None:
    await shown.locator(selector, has_text=text).first.wait_for()


async def test_page_shows_what_the_cluster_does(start: Start) -> None:
    """One lane for each rank; a step that left the full graph has another colour and height, and its cause in
    words; a request's KV push is told from its start to its arrival; no console error."""
    live = await live_stack(start)
    live.stack.prefill[0].set.pause_after_tokens = 0
    async with browser() as running, page(running, f"{live.url}/lockstep/") as shown:
        await text_has(shown, "#ready", "ready")
        await text_has(shown, "#model", "pico")
        for rank in (0, 1):
            tell_steps(live.decode, rank, *(step(number, idle=rank == 1) for number in range(30)))
        for rank in (0, 1):
            await shown.locator(".lane", has_text=f"rank {rank} · {live.decode.address}").wait_for()
        assert await shown.get_by_text("100 % of the last 30 steps in the full graph").count() == 2
        full, idle = await colour(shown, 0, 0), await colour(shown, 1, 0)
        assert full != idle
        tell_steps(live.decode, 0, step(30, "NONE", "short_row"))
        tell_steps(live.decode, 1, step(30, "NONE", "peer"))
        await text_has(shown, ".detail", "step 30: NONE (a row of this rank was too short)")
        await text_has(shown, ".detail", "step 30: NONE (another rank of the group broke it)")
        assert await colour(shown, 0, 0) not in (full, idle)
        assert await colour(shown, 0, 1) == full
        assert await shown.locator(".cells .none").count() == 2

        lane = shown.get_by_role("slider", name="Steps of decode rank 0")
        await lane.focus()
        await shown.keyboard.press("ArrowLeft")
        assert (await lane.get_attribute("aria-valuetext")).startswith("step 29: FULL")

        asking = asyncio.create_task(live.stack.http.post("/v1/completions", json=ASK))
        await text_has(shown, "#pushes", "1 being computed, 0 with KV on its way, 0 arrived")
        await text_has(shown, "#rows tr", "prompt")
        await shown.locator("#links path.computing").wait_for(state="attached")
        live.stack.prefill[0].set.go.set()
        await text_has(shown, "#pushes", "0 being computed, 0 with KV on its way, 1 arrived")
        await text_has(shown, "#rows tr", "stop")
        assert (await asking).status_code == 200


async def test_page_fits_a_phone_and_says_what_is_wrong(start: Start) -> None:
    """Nothing is wider than the screen; a node that goes away, and why nothing is served, are in words."""
    live = await live_stack(start)
    phone = {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark", "reduced_motion": "reduce"}
    async with browser() as running, page(running, f"{live.url}/lockstep/", **phone) as shown:
        tell_steps(live.decode, 0, *(step(number) for number in range(200)))
        await text_has(shown, "#ready", "ready")
        await shown.locator(".cell.full").last.wait_for()
        assert await shown.evaluate("document.documentElement.scrollWidth") <= 360
        await live.decode.stop()
        await until(lambda: not live.stack.cluster.pair(), "the proxy notices")
        await text_has(shown, "#ready", "not ready")
        await text_has(shown, "#why", live.decode.address)
        await text_has(shown, ".node .bad", "away")
