"""The metrics of several workers on one page: what is summed, and what becomes of a dead worker's."""

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry, multiprocess

from proxy.workers.supervisor import MULTIPROC_DIR

WORKER = """
import sys
from proxy.metrics import ProxyMetrics
queued, not_ready, live = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
metrics = ProxyMetrics()
with metrics.published(lambda: queued, lambda: not_ready, lambda role, state: live if state == "live" else 0):
    metrics.ended("stop", 1)
    metrics.first_token(0.25)
    metrics.write_gauges()
"""


def worker(folder: Path, queued: int, not_ready_because: str, live: int) -> int:
    """A process that counts one request and ends; its pid. Its files stay, as a killed worker's do."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", WORKER, str(queued), not_ready_because, str(live)],
        env=os.environ | {MULTIPROC_DIR: str(folder)},
    )
    assert process.wait(60) == 0
    return process.pid


def page(folder: Path) -> dict[str, float]:
    """Values by name, of the labels that a test looks at."""
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(folder))
    return {
        sample.name: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.labels in ({}, {"outcome": "stop"}, {"role": "decode", "state": "live"})
    }


def test_one_page_for_all_workers(tmp_path: Path) -> None:
    """Counters are summed; of gauges, what waits is summed, and readiness is that of the worst."""
    worker(tmp_path, queued=3, not_ready_because="", live=2)
    gone = worker(tmp_path, queued=4, not_ready_because="draining", live=1)
    both = page(tmp_path)
    assert both["lockstep_proxy_requests_total"] == 2
    assert both["lockstep_proxy_ttft_seconds_count"] == 2
    assert both["lockstep_proxy_requests_queued"] == 7
    assert both["lockstep_proxy_ready"] == 0
    assert both["lockstep_proxy_nodes"] == 2

    multiprocess.mark_process_dead(gone, str(tmp_path))
    one = page(tmp_path)
    assert one["lockstep_proxy_requests_total"] == 2
    assert one["lockstep_proxy_requests_queued"] == 3
    assert one["lockstep_proxy_ready"] == 1
