"""The node's part of parking: its client does not call the ranks that have nothing to run."""

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.node.engine import Engine


class Client:
    """vLLM's client to the engine cores, as `Engine.add` uses it."""

    engine_ranks_managed = (0, 1)

    def __init__(self) -> None:
        self.engines_running = False
        self.called_peers: list[bool] = []

    async def add_request_async(self, request: Any) -> None:
        self.called_peers.append(not self.engines_running)
        self.engines_running = False  # as the coordinator says once a wave is over


@pytest.mark.parametrize("park", [True, False])
async def test_request_calls_no_peers_where_engines_park(park: bool) -> None:
    """Each time: what the coordinator says of the wave in between makes no difference."""
    transfer = SimpleNamespace(kv_connector_extra_config={"lockstep_park": park})
    client: Any = Client()
    engine = Engine(SimpleNamespace(kv_transfer_config=transfer), client)  # type: ignore[arg-type]
    for _ in range(2):
        await engine.add(SimpleNamespace(data_parallel_rank=None), local_rank=1)  # type: ignore[arg-type]
    assert client.called_peers == [not park] * 2
