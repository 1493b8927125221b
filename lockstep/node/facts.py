"""What an engine core says it made of its configuration, once it is up."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Of one rank; all of a node's ranks have the same configuration and hardware.

    Attributes:
        scheduler_cls: module and name of the scheduler's class.
        async_scheduling: whether the engine core overlaps scheduling with the step before.
        cudagraph_mode: name of the mode after the attention backend had its say, "" if the runner has none.
        full_graph_tokens: tokens of the full graphs for uniform decode steps, ascending.
        records_steps: whether the worker records how each step was dispatched.
    """

    scheduler_cls: str
    async_scheduling: bool
    cudagraph_mode: str
    full_graph_tokens: list[int]
    records_steps: bool
