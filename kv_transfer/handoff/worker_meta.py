"""What decode's workers tell the scheduler besides vLLM's own: payloads, and prefill's answers."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

MISMATCH = b"\x00"
"""Instead of a payload: workers were told different ones. No version of the codec begins with it."""


class HandOffWorkerMetadata(KVConnectorWorkerMetadata):
    """Pickled when the executor has several processes.

    `payloads` of the receives that ended, by request id; `offered`: requests without blocks here whose prompt
    prefill holds computed; `revoked`: requests whose blocks prefill has given up unused.
    """

    def __init__(
        self,
        payloads: dict[str, bytes],
        offered: frozenset[str] = frozenset(),
        revoked: frozenset[str] = frozenset(),
    ) -> None:
        self.payloads = payloads
        self.offered = offered
        self.revoked = revoked

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "HandOffWorkerMetadata":
        """Join those of two workers; vLLM calls this once for each of its workers after the first."""
        assert isinstance(other, HandOffWorkerMetadata)
        joined = dict(self.payloads)
        add(joined, other.payloads)
        return HandOffWorkerMetadata(joined, self.offered | other.offered, self.revoked | other.revoked)


def add(payloads: dict[str, bytes], others: dict[str, bytes]) -> None:
    """Add what other workers were told, in place."""
    for request_id, payload in others.items():
        payloads[request_id] = payload if payloads.get(request_id, payload) == payload else MISMATCH
