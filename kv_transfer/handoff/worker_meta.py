"""What decode's workers tell the scheduler besides vLLM's own: the payloads of the receives that ended."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

MISMATCH = b"\x00"
"""Instead of a payload: workers were told different ones. No version of the codec begins with it."""


class HandOffWorkerMetadata(KVConnectorWorkerMetadata):
    """`payloads` by request id; pickled when the executor has several processes."""

    def __init__(self, payloads: dict[str, bytes]) -> None:
        self.payloads = payloads

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "HandOffWorkerMetadata":
        """Join those of two workers; vLLM calls this once for each of its workers after the first."""
        assert isinstance(other, HandOffWorkerMetadata)
        joined = dict(self.payloads)
        add(joined, other.payloads)
        return HandOffWorkerMetadata(joined)


def add(payloads: dict[str, bytes], others: dict[str, bytes]) -> None:
    """Add what other workers were told, in place."""
    for request_id, payload in others.items():
        payloads[request_id] = payload if payloads.get(request_id, payload) == payload else MISMATCH
