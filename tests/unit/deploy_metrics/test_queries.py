"""The dashboard and the alerts ask for metrics, labels and label values that the code has."""

import re
from typing import Any

import pytest
from prometheus_client.metrics import MetricWrapperBase
from unit.deploy_metrics import promql
from unit.deploy_metrics.promql import Selector

from kv_transfer.counters import KVCounters
from lockstep.errors import ERROR_CLASSES
from lockstep.node.metrics import NodeMetrics
from proxy.metrics import OUTCOMES, AttemptReason, HandOffOutcome, ProxyMetrics

OF_THE_SCRAPE = {"job", "instance"}
"""Labels that Prometheus itself adds; the jobs are those of prometheus.yaml and of the ServiceMonitor."""

JOBS = {"prefill", "decode", "proxy"}

OF_VLLM = {
    "vllm:inter_token_latency_seconds_bucket": {"model_name", "engine", "le"},
    "vllm:prompt_tokens_total": {"model_name", "engine"},
    "vllm:generation_tokens_total": {"model_name", "engine"},
}
"""Held to vLLM by tests/component/proxy/test_vllm_metrics.py."""

VALUES: dict[tuple[str, str], set[str]] = {
    ("lockstep_proxy_requests_total", "outcome"): set(OUTCOMES),
    ("lockstep_proxy_attempts_total", "reason"): set(AttemptReason),
    ("lockstep_proxy_hand_offs_total", "outcome"): set(HandOffOutcome),
    ("lockstep_kv_events_total", "kind"): set(KVCounters().snapshot()) - {"histograms", "pushed_bytes"},
    ("lockstep_decode_steps_total", "mode"): {"FULL", "PIECEWISE", "NONE"},
    ("lockstep_decode_steps_total", "origin"): {"", "own", "peer"},
}


def series_of(metrics: object) -> dict[str, set[str]]:
    """The labels of each series of a definition, by the name that a scrape has."""
    found: dict[str, set[str]] = {}
    for metric in vars(metrics).values():
        if not isinstance(metric, MetricWrapperBase):
            continue
        family, labels = metric.describe()[0], set(metric._labelnames)
        if family.type == "histogram":
            found[f"{family.name}_bucket"] = labels | {"le"}
            found |= {family.name + suffix: labels for suffix in ("_sum", "_count")}
        else:
            found[family.name + "_total" * (family.type == "counter")] = labels
    return found


KNOWN = series_of(NodeMetrics()) | series_of(ProxyMetrics()) | OF_VLLM | {"up": set()}
EXPRESSIONS = promql.expressions()


@pytest.mark.parametrize(
    ("expression", "metrics", "labels"),
    [
        ("sum by (a, le) (rate(x_total[5m])) / 2", ["x_total"], {"a", "le"}),
        ('1 - x{a="b", c!~"d|e"} offset 5m > 0.99', ["x"], set()),
        ("(sum(up) or vector(0)) == 0 or on (i) y:z unless 0 * w", ["up", "y:z", "w"], {"i"}),
        ("histogram_quantile(0.95, sum by (le) (rate(h_bucket[$__rate_interval])))", ["h_bucket"], {"le"}),
    ],
)
def test_reading_promql(expression: str, metrics: list[str], labels: set[str]) -> None:
    """Functions, numbers, ranges and keywords are no metrics."""
    assert [selector.metric for selector in promql.selectors(expression)] == metrics
    assert promql.grouped_by(expression) == labels


def test_matchers_are_read() -> None:
    """With their operator."""
    assert promql.selectors('sum(x{a="b", c!~"d|e"})') == [
        Selector("x", (("a", "=", "b"), ("c", "!~", "d|e")))
    ]


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_names_exist(where: str) -> None:
    """Every metric that is asked for is counted somewhere, and has the labels that it is asked by."""
    expression = EXPRESSIONS[where]
    found = promql.selectors(expression)
    assert found
    labels: set[str] = set(OF_THE_SCRAPE)
    for selector in found:
        assert selector.metric in KNOWN, selector.metric
        labels |= KNOWN[selector.metric]
        asked = {label for label, _, _ in selector.matchers}
        assert asked <= KNOWN[selector.metric] | OF_THE_SCRAPE, (selector.metric, asked)
    assert promql.grouped_by(expression) <= labels


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_label_values_exist(where: str) -> None:
    """A value that the code does not know would match nothing, and an alert would be silent for ever."""
    for selector in promql.selectors(EXPRESSIONS[where]):
        for label, operator, value in selector.matchers:
            known = JOBS if label == "job" else VALUES[selector.metric, label]
            matching = (
                {one for one in known if re.fullmatch(value, one)} if "~" in operator else {value} & known
            )
            assert matching, (selector.metric, label, value)
            if "~" in operator:
                for part in value.split("|"):
                    assert any(re.fullmatch(part, one) for one in known), (selector.metric, label, part)


def test_every_metric_of_ours_is_shown_or_alerted_on() -> None:
    """But for what only explains another one."""
    asked = {s.metric for expression in EXPRESSIONS.values() for s in promql.selectors(expression)}
    ours = {name for name in KNOWN if not name.endswith(("_sum", "_count", "_bucket"))} - set(OF_VLLM)
    explaining = {"lockstep_kv_block_bytes", "lockstep_kv_quarantined_requests", "lockstep_proxy_nodes"}
    assert ours - asked == explaining


def test_panels_are_whole() -> None:
    """Each has an id and a place of its own, and says what it shows, in which unit and from which source."""
    panels = list(promql.panels())
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        sources: list[dict[str, Any]] = [
            panel["datasource"],
            *(one["datasource"] for one in panel["targets"]),
        ]
        assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not mine & cells, panel["title"]
        cells |= mine


def test_alerts_say_what_is_wrong_and_how_bad_it_is() -> None:
    """With labels that their own expression keeps."""
    for alert in promql.alerts():
        assert alert["labels"]["severity"] in {"info", "warning", "critical"}
        texts = alert["annotations"]
        assert set(texts) == {"summary", "description"}
        kept = promql.grouped_by(alert["expr"]) or set.union(
            OF_THE_SCRAPE, *(KNOWN[s.metric] for s in promql.selectors(alert["expr"]))
        )
        assert set(re.findall(r"\$labels\.(\w+)", " ".join(texts.values()))) <= kept, alert["alert"]


def test_failed_requests_are_those_that_clients_did_not_cause() -> None:
    """The alert leaves out exactly the errors of the 4xx kind."""
    (alert,) = (alert for alert in promql.alerts() if alert["alert"] == "LockstepRequestsFail")
    left_out = {value for s in promql.selectors(alert["expr"]) for _, how, value in s.matchers if how == "!~"}
    theirs = {name for name in OUTCOMES if name in ERROR_CLASSES and ERROR_CLASSES[name].http_status < 500}
    assert {name for value in left_out for name in value.split("|")} == theirs


def test_alerts_are_documented() -> None:
    """docs/watching.md has each with its severity, in the order of the rules, and no other."""
    page = (promql.DEPLOY.parent / "docs" / "watching.md").read_text()
    rows = re.findall(r"^\| `(Lockstep\w+)` \| (\w+) \|", page, re.MULTILINE)
    assert rows == [(alert["alert"], alert["labels"]["severity"]) for alert in promql.alerts()]
