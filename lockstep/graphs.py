"""Which batches of uniform decode steps the full graphs of a node cover."""

from collections.abc import Sequence


def uncovered_batch(full_graph_tokens: Sequence[int], width: int, max_num_seqs: int) -> int:
    """The smallest number of requests for whose step there is no full graph, 0 when all are covered.

    A step of n requests has n * width tokens and runs in the smallest captured graph that holds them, if that
    one is a full graph (vllm/v1/cudagraph_dispatcher.py, `_compute_bs_to_padded_graph_size`). vLLM keeps no
    full graph above max_num_seqs * width, so a list that jumps over it leaves the largest batches out.
    """
    largest = max(full_graph_tokens, default=0)
    first = largest // width + 1
    return first if first <= max_num_seqs else 0
