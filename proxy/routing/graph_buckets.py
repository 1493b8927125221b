"""What one more request does to the size of a decode group's steps."""

from collections.abc import Iterable

from proxy.routing.load import RankLoad


class GroupSteps:
    """The steps of all groups as they are now, for one decision.

    All ranks of a group run the graph that the fullest of them needs.
    """

    def __init__(self, live: Iterable[RankLoad]) -> None:
        self._tokens: dict[str, int] = {}
        for load in live:
            padded = load.shape.padded_tokens(load.requests)
            group = load.node.group_id
            self._tokens[group] = max(padded, self._tokens.get(group, 0))

    def growth_tokens(self, load: RankLoad) -> int:
        """By how much one more request there makes the group's steps larger; 0 if graphs are not known."""
        if not load.shape.graphs:
            return 0
        now = self._tokens.get(load.node.group_id, 0)
        return max(0, load.shape.padded_tokens(load.requests + 1) - now)
