"""The KV blocks of one simulated rank: finite, with a prefix cache that forgets the least lately used."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Holding:
    """The blocks of one request: first those with a name in the cache, then nameless ones."""

    names: list[int] = field(default_factory=list)
    nameless: int = 0
    cached_tokens: int = 0
    """Of the prompt, that were there when the blocks were taken."""

    @property
    def blocks(self) -> int:
        return len(self.names) + self.nameless


class KVPool:
    """Blocks are free, held, or cached: named, held by nobody, and gone when a block is needed."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_caching = prefix_caching
        self._used = 0
        """Held blocks, and cached ones."""
        self._holders: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that nobody holds, the one to go first in front."""

    @property
    def usage(self) -> float:
        """Share of the blocks that are held."""
        return (self._used - len(self._idle)) / self.num_blocks

    def take(self, tokens: Sequence[int], salt: str | None, extra_tokens: int = 0) -> Holding | None:
        """Blocks for these tokens and so many more, or None while there are too few.

        Full blocks that are cached are not taken anew, but the last token is always computed
        (vllm/v1/core/kv_cache_manager.py::get_computed_blocks).
        """
        needed = -(-(len(tokens) + extra_tokens) // self.block_size)
        hits = self._hits(tokens, salt)
        free = self.num_blocks - self._used + sum(name not in hits for name in self._idle)
        if needed - len(hits) > free:
            return None
        for name in hits:
            self._hold(name)
        self._make_room(needed - len(hits))
        self._used += needed - len(hits)
        return Holding(hits, needed - len(hits), len(hits) * self.block_size)

    def grow(self, holding: Holding, tokens: int) -> bool:
        """Make a holding large enough for so many tokens; False while there are too few blocks."""
        needed = -(-tokens // self.block_size) - holding.blocks
        if needed <= 0:
            return True
        if needed > self.num_blocks - self._used + len(self._idle):
            return False
        self._make_room(needed)
        self._used += needed
        holding.nameless += needed
        return True

    def name(self, holding: Holding, tokens: Sequence[int], salt: str | None) -> None:
        """These tokens are computed: their full blocks can be found from now on."""
        if not self._prefix_caching:
            return
        for name in self._names(tokens, salt, len(tokens))[len(holding.names) :]:
            if not holding.nameless:
                return
            holding.nameless -= 1
            if name in self._holders or name in self._idle:
                self._used -= 1  # two requests computed the same: one block of them is enough here
            self._hold(name)
            holding.names.append(name)

    def release(self, holding: Holding) -> None:
        """Give all blocks back; those with a name stay in the cache."""
        for name in reversed(holding.names):  # the end of a prefix goes before its beginning
            self._holders[name] -= 1
            if not self._holders[name]:
                del self._holders[name]
                self._idle[name] = None
        self._used -= holding.nameless
        holding.names, holding.nameless = [], 0

    def _hits(self, tokens: Sequence[int], salt: str | None) -> list[int]:
        hits = []
        for name in self._names(tokens, salt, len(tokens) - 1):
            if name not in self._holders and name not in self._idle:
                break
            hits.append(name)
        return hits

    def _names(self, tokens: Sequence[int], salt: str | None, upto: int) -> list[int]:
        """A block's name is that of the block before it with its own tokens; full blocks only."""
        if not self._prefix_caching:
            return []
        names, before = [], hash(salt)
        for end in range(self.block_size, upto + 1, self.block_size):
            before = hash((before, *tokens[end - self.block_size : end]))
            names.append(before)
        return names

    def _hold(self, name: int) -> None:
        self._idle.pop(name, None)
        self._holders[name] = self._holders.get(name, 0) + 1

    def _make_room(self, blocks: int) -> None:
        while self._used + blocks > self.num_blocks:
            self._idle.popitem(last=False)
            self._used -= 1
