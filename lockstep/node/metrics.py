"""The Prometheus metrics of a node; their one definition."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from lockstep.kv_buckets import BYTES, SECONDS
from lockstep.node.totals_histogram import TotalsHistogram


class NodeMetrics:
    """Counters and gauges of one node process; rank labels are global data-parallel ranks."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.decode_steps = Counter(
            "lockstep_decode_steps",
            "Engine steps by what the CUDA graph dispatch decided; dummy steps of an idle rank included.",
            ["rank", "mode", "cause", "origin"],
            registry=self.registry,
        )
        self.step_records_dropped = Counter(
            "lockstep_step_records_dropped",
            "Step records lost before they were counted.",
            ["rank"],
            registry=self.registry,
        )
        self.draft_tokens = Counter(
            "lockstep_draft_tokens",
            "Draft tokens verified; placeholders left out, unless vLLM's own scheduler runs.",
            ["rank"],
            registry=self.registry,
        )
        self.accepted_tokens = Counter(
            "lockstep_accepted_tokens", "Draft tokens accepted.", ["rank"], registry=self.registry
        )
        self.hand_offs = Counter(
            "lockstep_decode_hand_offs",
            "Requests that went on from prefill's first token.",
            ["rank"],
            registry=self.registry,
        )
        self.handed_over_drafts = Counter(
            "lockstep_decode_handed_over_drafts",
            "Drafts that came with prefill's first token and were scheduled.",
            ["rank"],
            registry=self.registry,
        )
        self.padded_arrivals = Counter(
            "lockstep_decode_padded_arrivals",
            "Requests whose first row was filled up to 1 + K tokens with placeholders.",
            ["rank"],
            registry=self.registry,
        )
        self.reentries = Counter(
            "lockstep_decode_reentries",
            "Rows of requests that the step before had left out.",
            ["rank"],
            registry=self.registry,
        )
        self.placeholder_drafts = Counter(
            "lockstep_decode_placeholder_drafts",
            "Drafts of scheduled rows that nobody proposed.",
            ["rank"],
            registry=self.registry,
        )
        self.bounced = Counter(
            "lockstep_decode_bounced",
            "Requests handed back to be tried anew.",
            ["rank", "reason"],
            registry=self.registry,
        )
        self.violations = Counter(
            "lockstep_decode_violations",
            "Scheduled steps with a row of another width than 1 + K tokens, by cause.",
            ["rank", "cause"],
            registry=self.registry,
        )
        self.kv_pushed_bytes = Counter(
            "lockstep_kv_pushed_bytes",
            "KV cache bytes written to decode ranks.",
            ["rank"],
            registry=self.registry,
        )
        self.kv_events = Counter(
            "lockstep_kv_events",
            "KV transfer events by kind, as the connector counts them.",
            ["rank", "kind", "reason"],
            registry=self.registry,
        )
        self.kv_block_bytes = Gauge(
            "lockstep_kv_block_bytes",
            "Bytes of one KV block over all layers, on one worker.",
            ["rank"],
            registry=self.registry,
        )
        self.kv_quarantined_blocks = Gauge(
            "lockstep_kv_quarantined_blocks",
            "Decode blocks that are not reused because a late write could still hit them.",
            ["rank"],
            registry=self.registry,
        )
        self.kv_quarantined_requests = Gauge(
            "lockstep_kv_quarantined_requests",
            "Requests whose blocks are in quarantine.",
            ["rank"],
            registry=self.registry,
        )
        self.kv_leases_held = Gauge(
            "lockstep_kv_leases_held",
            "Finished prefills whose blocks wait for decode, or for the end of their push.",
            ["rank"],
            registry=self.registry,
        )
        self.kv_leases_overdue = Gauge(
            "lockstep_kv_leases_overdue",
            "Finished prefills whose blocks are still held although their lease is over.",
            ["rank"],
            registry=self.registry,
        )
        self.kv_write_seconds = TotalsHistogram(
            "lockstep_kv_write_seconds",
            "Seconds from handing a write to NIXL until it is done.",
            ["rank"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.kv_write_bytes = TotalsHistogram(
            "lockstep_kv_write_bytes", "Bytes of a write.", ["rank"], buckets=BYTES, registry=self.registry
        )
        self.kv_push_tail_seconds = TotalsHistogram(
            "lockstep_kv_push_tail_seconds",
            "Seconds from the end of a prefill that decode waits for until its last write is done.",
            ["rank"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.kv_receive_seconds = TotalsHistogram(
            "lockstep_kv_receive_seconds",
            "Seconds from the registration of decode's blocks until all of them are written.",
            ["rank"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.kv_histograms = {
            "write_seconds": self.kv_write_seconds,
            "write_bytes": self.kv_write_bytes,
            "push_tail_seconds": self.kv_push_tail_seconds,
            "receive_seconds": self.kv_receive_seconds,
        }
        self.kv_cache_usage = Gauge(
            "lockstep_kv_cache_usage_ratio",
            "Share of the KV blocks in use, 0 to 1.",
            ["rank"],
            registry=self.registry,
        )
        self.requests_running = Gauge(
            "lockstep_requests_running", "Requests in the running batch.", ["rank"], registry=self.registry
        )
        self.requests_waiting = Gauge(
            "lockstep_requests_waiting",
            "Requests that wait: for a place, or for their KV cache.",
            ["rank"],
            registry=self.registry,
        )
        self.sessions = Gauge("lockstep_sessions", "Connected proxies.", registry=self.registry)
