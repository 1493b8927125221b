"""docs/metrics.md has what the code has, no less and no more."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics import MetricWrapperBase

from decode_node.scheduler.rows import Violation
from decode_node.step_recorder import Cause
from kv_transfer.counters import KVCounters
from lockstep import status
from lockstep.bounce import Bounce
from lockstep.node.metrics import NodeMetrics
from proxy.metrics import OUTCOMES, AttemptReason, ProxyMetrics, Refusal

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()

Row = tuple[str, str, tuple[str, ...]]
"""Name, type, labels."""


def section(title: str) -> str:
    """The text below `## title`, to the next one."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def table(title: str, heading: str) -> list[list[str]]:
    """The rows of the section's table whose first heading is that."""
    found = re.search(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", section(title), re.MULTILINE)
    assert found, (title, heading)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]


def named(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def documented(title: str) -> set[Row]:
    rows = table(title, "metric")
    assert all(unit and meaning for *_, unit, meaning in rows)
    return {(named(name)[0], kind, tuple(named(labels))) for name, kind, labels, *_ in rows}


def declared(metrics: object) -> set[Row]:
    """The metrics of one definition, under the names that a scrape has."""
    found = [value for value in vars(metrics).values() if isinstance(value, MetricWrapperBase)]
    described = [(metric.describe()[0], metric) for metric in found]
    return {
        (
            family.name + "_total" * (family.type == "counter"),
            family.type,
            tuple(metric._labelnames),  # prometheus_client tells it only once there is a value
        )
        for family, metric in described
    }


@pytest.mark.parametrize(("title", "metrics"), [("Node", NodeMetrics()), ("Proxy", ProxyMetrics())])
def test_every_metric_with_its_type_and_labels(title: str, metrics: Any) -> None:
    """In both directions; and all that the registry has is an attribute of the definition."""
    assert documented(title) == declared(metrics)
    assert {family.name for family in metrics.registry.collect()} == {
        name.removesuffix("_total") for name, *_ in declared(metrics)
    }


def test_causes() -> None:
    """Each cause of a step that was not FULL."""
    assert {named(cause)[0] for cause, _ in table("Node", "cause")} == set(Cause) - {Cause.NONE}


def test_violations_and_reasons() -> None:
    """What the decode scheduler tells apart."""
    assert {named(cause)[0] for cause, _ in table("Node", "violation")} == set(Violation)
    assert {named(reason)[0] for reason, _ in table("Node", "reason")} == set(Bounce)


def test_kinds_of_kv_events() -> None:
    """What the connector counts, but for what has a metric of its own."""
    counted = set(KVCounters().snapshot()) - {"pushed_bytes", "kv_bytes_per_block", "histograms"}
    assert {named(kind)[0] for kind, _ in table("Node", "kind")} == counted


def test_outcomes_and_reasons() -> None:
    """Each label value of the proxy's counters."""
    assert sorted(name for row in table("Proxy", "outcome") for name in named(row[0])) == sorted(OUTCOMES)
    assert [named(row[0])[0] for row in table("Proxy", "reason")] == list(AttemptReason)
    assert sorted(name for row in table("Proxy", "refusal") for name in named(row[0])) == sorted(Refusal)


def test_every_field_of_the_status_document() -> None:
    """All names of the schema are in the table, and the table has no other."""
    classes = [value for value in vars(status).values() if dataclasses.is_dataclass(value)]
    schema = {field.name for cls in classes for field in dataclasses.fields(cls)}
    rows = table("Status", "field")
    paths = [name for row in rows for name in named(row[0])]
    parts = {part.removesuffix("[]") for path in paths for part in path.split(".")}
    text = {name for row in rows for name in named(row[1])}
    assert parts <= schema
    assert schema - parts <= text
