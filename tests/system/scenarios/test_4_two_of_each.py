"""Scenario 4, its second part: small pools on both sides, two prefill nodes and two proxies."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from system.harness import Node, Stack, complete_all, run_stack
from system.kv_checks import kv_moves_and_returns
from system.scenarios.bodies import K
from system.scenarios.tight_pools.bodies import FILLING, GROWING, POOL_BLOCKS
from system.servers import run_node, run_proxy
from system.step_records import step_records
from system.waiting import until

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
DEADLINE_S = 240.0


@dataclass(frozen=True)
class TwoOfEach:
    """A stack with a second prefill node, and two proxies that use both."""

    stack: Stack
    second_prefill: Node
    urls: tuple[str, str]


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, scenario_reference: dict[str, dict[str, Any]]
) -> Iterator[TwoOfEach]:
    """Every pool, on both sides, has `POOL_BLOCKS` blocks; a step that is not uniform ends its engine."""
    pool = ("--max-model-len=1024", f"--num-gpu-blocks-override={POOL_BLOCKS + 1}")
    flags = [f"--{role}-arg={flag}" for role in ("prefill", "decode") for flag in pool]
    directories = [tmp_path_factory.mktemp(name) for name in ("stack", "prefill", "proxy", "proxy")]
    with (
        run_stack(directories[0], *flags, "--decode-arg=--strict") as stack,
        run_node("prefill", directories[1], *pool) as second,
        run_proxy([stack.prefill, second], [stack.decode], directories[2]) as one,
        run_proxy([second, stack.prefill], [stack.decode], directories[3]) as other,
    ):
        yield TwoOfEach(stack, second, (one, other))


@pytest.fixture(autouse=True)
def nothing_left_over(cluster: TwoOfEach) -> Iterator[None]:
    """As for the scenarios on the shared stack, and the second prefill node's pool is empty too."""
    with kv_moves_and_returns(cluster.stack):
        yield
    assert not any(cluster.second_prefill.metric("lockstep_kv_cache_usage_ratio").values())


@pytest.mark.parametrize("asked", [FILLING * 3, GROWING * 2], ids=["long prompts", "growing answers"])
async def test_all_finish(
    cluster: TwoOfEach, scenario_reference: dict[str, dict[str, Any]], asked: list[dict[str, Any]]
) -> None:
    """All requests of both proxies at once: answered within the deadline, with the reference's tokens."""
    answers_by_prompt = {
        str(body["prompt"]): scenario_reference[f"{name}-{number}"]["choices"][0]["token_ids"]
        for name, bodies in (("filling", FILLING), ("growing", GROWING))
        for number, body in enumerate(bodies)
    }
    async with step_records(cluster.stack.decode.grpc_address) as log:
        async with asyncio.timeout(DEADLINE_S):
            answers = await asyncio.gather(*(complete_all(url, asked, len(asked)) for url in cluster.urls))
        await asyncio.to_thread(cluster.stack.wait_idle)
        await until(lambda: len(log.by_rank) == 2, "steps of both ranks", timeout_s=5)
    for of_proxy in answers:
        for body, answer in zip(asked, of_proxy, strict=True):
            assert answer["choices"][0]["token_ids"] == answers_by_prompt[str(body["prompt"])]
    log.check_lockstep(num_ranks=2, width=1 + K)
    pushed = [
        sum(node.by_rank("lockstep_kv_pushed_bytes_total").values())
        for node in (cluster.stack.prefill, cluster.second_prefill)
    ]
    assert min(pushed) > 0, "one of the prefill nodes had nothing to do"
