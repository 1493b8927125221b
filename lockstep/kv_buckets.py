"""The bounds of the KV transfer histograms, for the connector that counts and the node that publishes."""

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
BYTES = tuple(float(4**power) for power in range(7, 18))
"""16 KiB to 16 GiB."""

BOUNDS = {
    "write_seconds": SECONDS,
    "write_bytes": BYTES,
    "push_tail_seconds": SECONDS,
    "receive_seconds": SECONDS,
}
"""By the name under which kv_transfer.counters observes them."""
