"""What an attempt that wants two ranks is known by."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from proxy.routing.load import RankKey, RankLoad
from proxy.routing.prefix_hashes import PrefixHashes


@dataclass(frozen=True, slots=True)
class Asked:
    """`tokens` are those of its prompt and of earlier attempts."""

    tokens: int
    prefix: PrefixHashes | None = None
    """None where the prefix cache is of no use to it: every token is computed."""
    failed_at: Mapping[RankKey, int] = field(default_factory=dict)
    """Ranks that an attempt failed on, with the number of the last such attempt."""
    session: str | None = None
    """What the client says its requests have in common."""

    def cached_tokens(self, load: RankLoad) -> int:
        """What the rank has of it, as far as known."""
        return self.prefix.cached_tokens(load.node.key, load.cached) if self.prefix is not None else 0

    def uncached_tokens(self, load: RankLoad) -> int:
        """What the rank would have to compute."""
        return self.tokens - self.cached_tokens(load)
