"""Prometheus's own tool on the configuration, the rules and their unit tests."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from unit.deploy_metrics import promql

PROMETHEUS = promql.DEPLOY / "prometheus"
TESTS = sorted((PROMETHEUS / "tests").glob("*.yaml"))


def promtool(*arguments: str) -> None:
    """Run it; skips where it is not installed."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    done = subprocess.run([found, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_configuration() -> None:
    """Valid, the rule files that it names included."""
    promtool("check", "config", str(PROMETHEUS / "prometheus.yaml"))


def test_rules() -> None:
    """Valid, and none twice."""
    promtool("check", "rules", "--lint-fatal", *map(str, promql.RULES))


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_alerts_fire_when_they_should(path: Path) -> None:
    """And do not when they should not."""
    promtool("test", "rules", str(path))


def test_every_alert_has_a_test_of_both_kinds() -> None:
    """One in which it fires, and one in which it does not."""
    fires: dict[bool, set[str]] = {True: set(), False: set()}
    for path in TESTS:
        for case in yaml.safe_load(path.read_text())["tests"]:
            for test in case["alert_rule_test"]:
                fires[bool(test["exp_alerts"])].add(test["alertname"])
    assert fires[True] == fires[False] == {alert["alert"] for alert in promql.alerts()}


def test_jobs_are_the_roles() -> None:
    """The alerts and the dashboard tell prefill, decode and proxies apart by them."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yaml").read_text())
    assert [job["job_name"] for job in config["scrape_configs"]] == ["prefill", "decode", "proxy"]
