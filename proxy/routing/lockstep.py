"""Routing policy, the default one: by what each choice costs the request, and the group that it joins."""

from collections.abc import Sequence

from proxy.routing.asked import Asked
from proxy.routing.graph_buckets import GroupSteps
from proxy.routing.load import RankLoad

_COMPUTE_COST = 3
"""A token that is computed though another rank has it costs more than the wait of one: it delays whoever
comes after, and evicts what others have cached. By simulation (tests/unit/proxy/routing_simulation.py, six
workloads at 15, 25 and 35 requests a second): at 35 the mean TTFT is 1.04 s with a cost of 1, 0.41 s with 2,
0.31 s with 3, 0.43 s with 4; at 15 and 25 it is the same from 2 on.
"""


class Lockstep:
    """Prefill: the tokens that wait there, and what computing the rest of the prompt costs.

    Decode: first where a row and KV blocks are free; then where the group's steps stay in the graph that they
    run in; then the fewest rows, and the most free KV. A rank takes the rows of two steps at most, those that
    run and as many that wait with their KV computed; what is beyond waits here, where its prefill has not
    begun and another rank may take it.
    """

    reads_prefixes = True

    def prefill(self, ranks: Sequence[RankLoad], asked: Asked) -> RankLoad:
        return min(
            ranks,
            key=lambda load: (
                load.outstanding_tokens + _COMPUTE_COST * asked.uncached_tokens(load),
                load.requests,
                load.last_use,
            ),
        )

    def decode(self, ranks: Sequence[RankLoad], live: Sequence[RankLoad], asked: Asked) -> RankLoad | None:
        open_ranks = [load for load in ranks if _takes_more(load)]
        if not open_ranks:
            return None
        steps = GroupSteps(live)

        def cost(load: RankLoad) -> tuple[float, ...]:
            free_tokens = load.free_kv_tokens
            return (
                not _has_row(load),
                free_tokens < asked.tokens,
                steps.growth_tokens(load),
                load.requests,
                -free_tokens,
                load.last_use,
            )

        return min(open_ranks, key=cost)


def _has_row(load: RankLoad) -> bool:
    rows = load.shape.rows
    return rows is None or load.requests < rows


def _takes_more(load: RankLoad) -> bool:
    rows = load.shape.rows
    return rows is None or load.requests < 2 * rows
