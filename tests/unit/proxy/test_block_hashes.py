"""The proxy hashes prompts as vLLM's engines do, and knows what a rank's prefix cache has."""

import struct

import pytest
from unit.proxy.nodes_for_tests import node
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_none_hash_seed,
)
from vllm.v1.request import Request

from lockstep.rpc.generated import lockstep_pb2 as pb
from proxy.routing.cached_blocks import CachedBlocks
from proxy.routing.prefix_hashes import PrefixHashes

BLOCK_TOKENS = 16
TOKENS = list(range(1000, 1000 + 5 * BLOCK_TOKENS + 3))


def vllm_keys(tokens: list[int], algorithm: str, salt: str | None) -> list[int]:
    """The low 64 bits of the hashes that an engine gives the blocks of this prompt."""
    hash_fn = get_hash_fn_by_name(algorithm)
    init_none_hash(hash_fn)
    hasher = get_request_block_hasher(BLOCK_TOKENS, hash_fn)
    request = Request("r", tokens, SamplingParams(), None, cache_salt=salt, block_hasher=hasher)
    return [int.from_bytes(h[-8:], "big") for h in request.block_hashes]


def frame(
    number: int, stored: list[int], removed: list[int] | None = None, snapshot: bool = False
) -> pb.KVBlocks:
    return pb.KVBlocks(
        number=number,
        snapshot=snapshot,
        stored=struct.pack(f">{len(stored)}Q", *stored),
        removed=struct.pack(f">{len(removed or ())}Q", *removed or ()),
    )


def cached(*keys: int) -> CachedBlocks:
    blocks = CachedBlocks(0)
    assert blocks.take(frame(1, list(keys), snapshot=True))
    return blocks


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("salt", [None, "tenant"])
@pytest.mark.parametrize("seed", [None, "42"])
def test_hashes_are_those_of_vllm(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, salt: str | None, seed: str | None
) -> None:
    """For each function and seed that a node describes; the proxy's own environment does not matter."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    keys = vllm_keys(TOKENS, algorithm, salt)
    described = resolve_none_hash_seed(get_hash_fn_by_name(algorithm))
    monkeypatch.setenv("PYTHONHASHSEED", "another")
    key = node("prefill", "p", hash_algorithm=algorithm, hash_seed=described).key
    for blocks in range(6):
        prefix = PrefixHashes(TOKENS, salt)
        assert prefix.cached_tokens(key, cached(*keys[:blocks])) == blocks * BLOCK_TOKENS
    assert PrefixHashes(TOKENS, "other").cached_tokens(key, cached(*keys)) == 0


def test_a_cache_that_is_gone_is_not_taken_for_the_one_after_it() -> None:
    """A node that comes back has a new one, which may well be where the old one was in memory."""
    key = node("prefill", "p", hash_algorithm="sha256", hash_seed="s").key
    whole = PrefixHashes(TOKENS)
    first, second = (whole._chain(key).key(index) for index in range(2))
    old = cached(first)
    assert whole.cached_tokens(key, old) == BLOCK_TOKENS
    place = id(old)
    del old
    others = [CachedBlocks(0)]
    while id(others[-1]) != place and len(others) < 1000:
        others.append(CachedBlocks(0))
    new = others[-1]
    assert new.take(frame(1, [first, second], snapshot=True))
    assert whole.cached_tokens(key, new) == 2 * BLOCK_TOKENS


def test_only_what_follows_on_the_beginning_counts() -> None:
    """Blocks behind a gap are of no use, and the last token is computed even where its block is there."""
    key = node("prefill", "p", hash_algorithm="sha256", hash_seed="s").key
    whole = PrefixHashes(TOKENS[: 3 * BLOCK_TOKENS])
    chain = whole._chain(key)
    first, second, third = (chain.key(index) for index in range(3))
    assert whole.cached_tokens(key, cached(first, third)) == BLOCK_TOKENS
    assert whole.cached_tokens(key, cached(first, second, third)) == 2 * BLOCK_TOKENS
    assert whole.cached_tokens(key, None) == 0


def test_engines_with_seeds_of_their_own_are_not_read() -> None:
    """A node describes no seed then: its keys mean nothing to anybody else."""
    key = node("prefill", "p", hash_algorithm="xxhash", hash_seed="").key
    assert PrefixHashes(TOKENS).cached_tokens(key, cached(1, 2)) == 0


def test_prompt_that_nobody_has_costs_one_hash() -> None:
    """However long it is and however often it is asked about."""
    key = node("prefill", "p", hash_algorithm="sha256", hash_seed="s").key
    prefix = PrefixHashes(TOKENS)
    for other in (cached(1), cached(2), cached(1)):
        assert prefix.cached_tokens(key, other) == 0
    assert len(prefix._chain(key).keys) == 1


def test_changes_are_followed() -> None:
    """What was found before is looked for anew."""
    key = node("prefill", "p", hash_algorithm="sha256", hash_seed="s").key
    prefix = PrefixHashes(TOKENS)
    first = prefix._chain(key).key(0)
    blocks = cached()
    assert prefix.cached_tokens(key, blocks) == 0
    assert blocks.take(frame(2, [first, 7]))
    assert prefix.cached_tokens(key, blocks) == BLOCK_TOKENS
    assert blocks.take(frame(3, [8], [first]))
    assert blocks.keys == {7, 8}
    assert prefix.cached_tokens(key, blocks) == 0


def test_gap_is_asked_about_once_and_nothing_is_believed_until_the_snapshot() -> None:
    blocks = cached(1, 2)
    assert not blocks.take(frame(3, [3]))
    assert blocks.keys == set()
    assert blocks.take(frame(4, [4]))
    assert blocks.keys == set()
    assert blocks.take(frame(4, [1, 2, 3, 4], snapshot=True))
    assert blocks.take(frame(5, [5], [1]))
    assert blocks.keys == {2, 3, 4, 5}


def test_more_blocks_than_the_rank_has_are_not_believed() -> None:
    """Else what a faulty node tells would grow without bound."""
    blocks = CachedBlocks(3)
    assert blocks.take(frame(1, [1, 2, 3], snapshot=True))
    assert not blocks.take(frame(2, [4]))
    assert blocks.keys == set()
