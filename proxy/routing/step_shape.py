"""How the steps of one decode rank are sized."""

import bisect
from dataclasses import dataclass

from proxy.nodes import Node, Rank


@dataclass(frozen=True, slots=True)
class StepShape:
    """From what the rank's node describes."""

    width: int
    """Tokens of a row, 1 + K."""
    rows: int | None
    """That one step has room for; None if the node does not say."""
    graphs: tuple[int, ...]
    """Tokens of the full graphs, ascending; empty where there are none of known sizes."""

    @classmethod
    def of(cls, node: Node, rank: Rank) -> "StepShape":
        """Of one rank."""
        width = 1 + node.key.num_speculative_tokens
        engine = node.description.engine
        budget = engine.max_num_scheduled_tokens or rank.max_num_batched_tokens
        rows = min(rank.max_num_seqs, budget // width) or None
        return cls(width, rows, tuple(engine.full_graph_tokens))

    def padded_tokens(self, requests: int) -> int:
        """Of the graph that a step with these requests runs in; beyond the largest, those of its rows."""
        rows = requests if self.rows is None else min(requests, self.rows)
        tokens = rows * self.width
        index = bisect.bisect_left(self.graphs, tokens)
        return self.graphs[index] if index < len(self.graphs) else tokens
