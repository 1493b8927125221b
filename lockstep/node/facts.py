"""What an engine core says it made of its configuration, once it is up."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Of one rank; ranks have one configuration, but what it becomes on their devices may differ.

    Attributes:
        scheduler_cls: module and name of the scheduler's class.
        async_scheduling: whether the engine core overlaps scheduling with the step before.
        cudagraph_mode: name of the mode after the attention backend had its say, "" if the runner has none.
        full_graph_tokens: tokens of the full graphs for uniform decode steps, ascending.
        num_kv_blocks: of this rank; the node's own configuration has the sum over its ranks
            (vllm/v1/engine/core_client.py:852).
        records_steps: whether the worker records how each step was dispatched.
    """

    scheduler_cls: str
    async_scheduling: bool
    cudagraph_mode: str
    full_graph_tokens: list[int]
    num_kv_blocks: int
    records_steps: bool
