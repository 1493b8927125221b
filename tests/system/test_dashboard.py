"""A real Prometheus, with the deployed jobs and rules, scrapes the stack; every panel has data then."""

import asyncio
import contextlib
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from system.harness import Stack, complete_all, completion_body, free_port, wait_until
from system.prompts import prompts
from unit.deploy_metrics import promql

RATE_INTERVAL = "15s"
START_S = 30.0
DATA_S = 60.0
MAY_BE_NAN = {"Gap that a new attempt leaves in a stream"}
"""A quantile over nothing: no attempt has failed."""


@contextlib.contextmanager
def prometheus(stack: Stack, directory: Path) -> Iterator[httpx.Client]:
    """prometheus.yaml with this stack's ports and a scrape each second."""
    found = shutil.which("prometheus")
    if found is None:
        pytest.skip("prometheus is not installed (Debian's package of that name)")
    source = promql.DEPLOY / "prometheus"
    config = yaml.safe_load((source / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(source / pattern) for pattern in config["rule_files"]]
    for job in config["scrape_configs"]:
        (static,) = job["static_configs"]
        static["targets"] = [urlsplit(stack.node(job["job_name"]).http_url).netloc]
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [found, f"--config.file={directory / 'prometheus.yaml'}", f"--web.listen-address={address}"]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--storage.tsdb.path={directory / 'data'}"], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            with httpx.Client(base_url=f"http://{address}", timeout=20) as http:
                wait_until(lambda: _ready(http, process), "Prometheus is ready", START_S)
                yield http
        finally:
            process.terminate()
            process.wait(timeout=30)


def _ready(http: httpx.Client, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "Prometheus ended"
    with contextlib.suppress(httpx.TransportError):
        return http.get("/-/ready").status_code == 200
    return False


def query(http: httpx.Client, expression: str) -> list[dict[str, Any]]:
    answer = http.get("/api/v1/query", params={"query": expression})
    assert answer.status_code == 200, (expression, answer.text)
    result: list[dict[str, Any]] = answer.json()["data"]["result"]
    return result


def without_data(http: httpx.Client) -> list[str]:
    """The queries of panels that give nothing now, or no number."""
    missing = []
    for panel in promql.panels():
        for target in panel["targets"]:
            result = query(http, target["expr"].replace("$__rate_interval", RATE_INTERVAL))
            numbers = [float(series["value"][1]) for series in result]
            if not numbers or (panel["title"] not in MAY_BE_NAN and all(map(math.isnan, numbers))):
                missing.append(f"{panel['title']}: {target['expr']}")
    return missing


async def test_every_panel_has_data(stack: Stack, tmp_path: Path) -> None:
    """While requests run; the figures are of both ranks and all in the full graph, and no alert fires."""
    bodies = [
        completion_body(prompt, max_tokens=96, ignore_eos=True)
        for prompt in prompts([20, 130, 300, 64, 40, 260] * 2, seed=90)
    ]
    with prometheus(stack, tmp_path) as http:
        wait_until(lambda: len(query(http, "up == 1")) == 3, "all three are scraped", START_S)
        await complete_all(stack.url, bodies, concurrency=4)
        await asyncio.to_thread(wait_until, lambda: not without_data(http), "data in all panels", DATA_S, 0.5)
        ratio = next(panel for panel in promql.panels() if panel["title"] == "Steps in the full graph")
        found = query(http, ratio["targets"][0]["expr"].replace("$__rate_interval", RATE_INTERVAL))
        assert {series["metric"]["rank"]: series["value"][1] for series in found} == {"0": "1", "1": "1"}
        assert query(http, 'ALERTS{severity!="info"}') == []
        rules = http.get("/api/v1/rules").json()["data"]["groups"]
        assert {rule["health"] for group in rules for rule in group["rules"]} == {"ok"}
