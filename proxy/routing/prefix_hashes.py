"""Hashes the blocks of a prompt as vLLM's engines do, one after another and only as far as somebody has them.

A prompt that nobody has costs one hash, not one for each block: 100,000 tokens are 6,250 blocks.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens

from proxy.nodes import CompatibilityKey
from proxy.routing.cached_blocks import CachedBlocks

_KEY_BYTES = 8


class _Chain:
    """The hashes of one prompt for engines that hash alike; each block's includes that of the one before."""

    def __init__(self, tokens: Sequence[int], salt: str | None, key: CompatibilityKey) -> None:
        self._tokens = tokens
        self._salt = salt
        self._block_size = key.block_size
        self._hash = get_hash_fn_by_name(key.hash_algorithm)
        self._last = _seed_hash(self._hash, key.hash_seed)
        self.keys: list[int] = []
        # The last token is computed even if its block is cached (vllm/v1/core/kv_cache_manager.py:216).
        self.length = (len(tokens) - 1) // key.block_size

    def key(self, index: int) -> int:
        """Of a block, as an engine's events have it; `index` is at most the number of those made so far."""
        if index == len(self.keys):
            start = index * self._block_size
            # As generate_block_hash_extra_keys: of what is served only the salt is mixed in, and only here.
            extra = (("cache_salt", self._salt),) if self._salt and not index else None
            tokens = self._tokens[start : start + self._block_size]
            self._last = hash_block_tokens(self._hash, self._last, tokens, extra)
            self.keys.append(int.from_bytes(self._last[-_KEY_BYTES:], "big"))
        return self.keys[index]


class PrefixHashes:
    """Of the tokens of one attempt. Engines of several kinds may be asked about; each hashes its own way."""

    def __init__(self, tokens: Sequence[int], salt: str | None = None) -> None:
        self._tokens = tokens
        self._salt = salt
        self._chains: dict[tuple[str, str, int], _Chain] = {}
        self._found: dict[CachedBlocks, tuple[int, int]] = {}
        """The version that was looked through, and the tokens found."""

    def cached_tokens(self, key: CompatibilityKey, cached: CachedBlocks | None) -> int:
        """How many tokens at the beginning a rank need not compute; 0 if it is not known what it has."""
        if not cached or not cached.keys or not key.hash_seed or not key.hash_algorithm or not key.block_size:
            return 0
        version, tokens = self._found.get(cached, (-1, 0))
        if version != cached.version:
            tokens = self._count(key, cached) * key.block_size
            self._found[cached] = cached.version, tokens
        return tokens

    def _count(self, key: CompatibilityKey, cached: CachedBlocks) -> int:
        chain = self._chain(key)
        for index in range(chain.length):
            if chain.key(index) not in cached.keys:
                return index
        return chain.length

    def _chain(self, key: CompatibilityKey) -> _Chain:
        hashing = (key.hash_algorithm, key.hash_seed, key.block_size)
        if hashing not in self._chains:
            self._chains[hashing] = _Chain(self._tokens, self._salt, key)
        return self._chains[hashing]


@cache
def _seed_hash(hash_fn: Callable[[Any], bytes], seed: str) -> BlockHash:
    """What the first block follows (vllm/v1/core/kv_cache_utils.py, init_none_hash)."""
    return BlockHash(hash_fn(seed))
