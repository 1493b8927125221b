"""Which nodes the proxy sends requests to: by what their prefix caches have, by session, by policy."""

import asyncio
from typing import Any

import pytest
from component.proxy.conftest import Start
from component.proxy.fake_node import FakeNode, Wire
from component.proxy.stack import PICO, Stack, until
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_none_hash_seed
from vllm.v1.request import Request

from lockstep.rpc.generated import lockstep_pb2 as pb

PROMPT = list(range(100, 180))
HASHES = {"hash_algorithm": "sha256", "hash_seed": resolve_none_hash_seed(sha256)}


def blocks(number: int, *, snapshot: bool = False, tokens: list[int] = PROMPT) -> pb.KVBlocks:
    """As an engine tells that it has the prompt's blocks."""
    init_none_hash(sha256)
    request = Request("r", tokens, SamplingParams(), None, block_hasher=get_request_block_hasher(16, sha256))
    stored = b"".join(block_hash[-8:] for block_hash in request.block_hashes)
    return pb.KVBlocks(number=number, snapshot=snapshot, stored=stored)


async def started(start: Start, *flags: str, warm: pb.KVBlocks | None = None) -> Stack:
    """Two prefill nodes, the second of which has something cached, and one decode node with two ranks."""
    wire = Wire()
    prefill = [FakeNode("prefill", wire, PICO, **HASHES) for _ in range(2)]
    if warm is not None:
        prefill[1].kv_blocks = [warm]
    decode = [FakeNode("decode", wire, PICO, num_ranks=2, **HASHES)]
    stack = await start(*flags, prefill=prefill, decode=decode)
    await until(lambda: stack.cluster.count("prefill", "live") == 2, "both prefill nodes are used")
    return stack


async def ask(stack: Stack, headers: dict[str, str] | None = None, **body: Any) -> Any:
    asked = {"model": "pico", "prompt": PROMPT, "max_tokens": 3, **body}
    return await stack.http.post("/v1/completions", json=asked, headers=headers)


def sent(stack: Stack) -> list[int]:
    """How many legs each prefill node has had."""
    return [len(node.legs) for node in stack.prefill]


def known(stack: Stack) -> int:
    """Blocks that the proxy knows the second prefill node to have."""
    cached = stack.client.flow.ranks.of(stack.prefill[1].address)[0].cached
    return len(cached.keys) if cached is not None else 0


@pytest.mark.parametrize("name", ["lockstep", "prefix"])
async def test_prompt_goes_to_where_it_is_cached(start: Start, name: str) -> None:
    """By the hashes of vLLM's engines. Another prompt goes to the node that was not used for longer."""
    stack = await started(start, "--routing-policy", name, warm=blocks(1, snapshot=True))
    await until(lambda: known(stack) == 5, "the node's snapshot is known")
    for _ in range(3):
        assert (await ask(stack)).status_code == 200
    assert sent(stack) == [0, 3]
    assert (await ask(stack, prompt=[7] * 80)).status_code == 200
    assert sent(stack) == [1, 3]
    metrics = (await stack.http.get("/metrics")).text
    # The last of 80 tokens is computed, so 4 of 5 blocks are of use.
    assert 'lockstep_proxy_routed_tokens_total{cached="yes"} 192.0' in metrics
    assert 'lockstep_proxy_routed_tokens_total{cached="no"} 128.0' in metrics


async def test_missed_change_is_made_up_for(start: Start) -> None:
    """The node is asked for a snapshot, once, and what it says then counts."""
    stack = await started(start, warm=blocks(1, snapshot=True))
    node = stack.prefill[1]
    await until(lambda: known(stack) == 5, "the node's snapshot is known")
    node.tell(blocks(3))
    node.tell(blocks(4))
    await until(lambda: node.kv_blocks_asked, "the proxy asks")
    assert known(stack) == 0
    node.tell(blocks(4, snapshot=True))
    await until(lambda: known(stack) == 5, "the second snapshot is known")
    assert node.kv_blocks_asked == [0]


async def test_round_robin_does_not_look_at_what_is_cached(start: Start) -> None:
    stack = await started(start, "--routing-policy", "round_robin", warm=blocks(1, snapshot=True))
    for _ in range(4):
        assert (await ask(stack)).status_code == 200
    assert sent(stack) == [2, 2]
    assert known(stack) == 0


async def test_session_keeps_its_ranks(start: Start) -> None:
    """On both sides, and against the prefix; other sessions go elsewhere."""
    stack = await started(start)
    places = set()
    for session in range(8):
        before, first = sent(stack), len(stack.decode[0].legs)
        for _ in range(3):
            assert (await ask(stack, {"X-Session-ID": f"user {session}"})).status_code == 200
        used = [after - number for number, after in zip(before, sent(stack), strict=True)]
        assert sorted(used) == [0, 3]
        ranks = {leg.rank for leg in stack.decode[0].legs[first:]}
        assert len(ranks) == 1
        places.add((used.index(3), *ranks))
    assert len(places) > 1


async def test_rank_that_a_client_asks_for_beats_its_session(start: Start) -> None:
    stack = await started(start)
    for rank in (0, 1):
        headers = {"X-Session-ID": "s", "X-data-parallel-rank": str(rank)}
        assert (await ask(stack, headers)).status_code == 200
        assert stack.decode[0].legs[-1].rank == rank


@pytest.mark.parametrize("value", ["x" * 257, "tab\there"])
async def test_session_that_is_no_short_text_is_refused(start: Start, value: str) -> None:
    stack = await started(start)
    answer = await ask(stack, {"X-Session-ID": value})
    assert answer.status_code == 400
    assert "X-Session-ID must be at most 256 printable ASCII characters." in answer.text


async def test_what_a_step_has_no_room_for_waits_in_the_proxy(start: Start) -> None:
    """A decode rank of 8 rows is sent 16; none of the rest has begun on prefill."""
    wire = Wire()
    decode = FakeNode("decode", wire, PICO)
    stack = await start(
        "--prefill-window-tokens", "10000", decode=[decode], prefill=[FakeNode("prefill", wire, PICO)]
    )
    decode.set.pause_after_tokens = 0
    asking = [asyncio.create_task(ask(stack, prompt=[7] * 8)) for _ in range(18)]
    await until(lambda: len(decode.legs) == 16 and stack.client.flow.num_queued == 2, "two wait")
    assert len(stack.prefill[0].legs) == 16
    decode.set.pause_after_tokens = None
    decode.set.go.set()
    assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 18


async def test_answers_of_one_token_use_no_room_up(start: Start) -> None:
    """They come and go on decode between two load reports, so a node that sees no change tells of none."""
    stack = await started(start)
    for _ in range(40):  # two ranks of eight rows
        answer = await asyncio.wait_for(ask(stack, prompt=PROMPT, max_tokens=1), 10)
        assert answer.status_code == 200
