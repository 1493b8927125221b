"""vLLM's NIXL statistics, with the bytes of each finished write also added to our counters."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

from kv_transfer.counters import KVCounters


class CountingStats(NixlKVConnectorStats):
    """`NixlKVConnectorStats` as vLLM clears and sends it, plus our running total of bytes."""

    def __init__(self, counters: KVCounters) -> None:
        super().__init__()
        self._counters = counters

    def record_transfer(self, res: Any) -> None:
        """`res` is NIXL's telemetry of one finished write (nixlXferTelemetry), None if it was off."""
        super().record_transfer(res)
        if res is not None:
            self._counters.add("pushed_bytes", res.totalBytes)

    def clone_and_reset(self) -> NixlKVConnectorStats:
        """The numbers since the last call, without our counters: the result is sent to other processes."""
        sent = NixlKVConnectorStats(data=self.data)
        self.reset()
        return sent
