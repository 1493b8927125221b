"""Reads which metrics and labels PromQL names, and the PromQL of the dashboard and the rules."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "lockstep.json"
RULES = sorted((DEPLOY / "prometheus" / "rules").glob("*.yaml"))

_WORDS = frozenset(
    {"by", "without", "on", "ignoring", "group_left", "group_right", "bool", "and", "or", "unless"}
)
_SELECTOR = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{(?P<labels>[^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_LABEL_LIST = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_RANGE = re.compile(r"\[[^\]]*\]|\boffset\s+\w+")


@dataclass(frozen=True, slots=True)
class Selector:
    """One metric as an expression names it; `matchers` are (label, operator, value)."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]


def selectors(expression: str) -> list[Selector]:
    """All metrics that are read. A name before a parenthesis is a function, a number is no name."""
    text = _RANGE.sub(" ", _LABEL_LIST.sub(" ", expression))
    found = []
    position = 0
    while (match := _SELECTOR.search(text, position)) is not None:
        position = match.end()
        number = match.start() > 0 and text[match.start() - 1].isdigit()
        call = text[match.end() :].lstrip().startswith("(") and match["labels"] is None
        if match["name"] not in _WORDS and not call and not number:
            matchers = tuple(_MATCHER.findall(match["labels"] or ""))
            found.append(Selector(match["name"], matchers))
    return found


def grouped_by(expression: str) -> set[str]:
    """The labels that an expression aggregates or joins by."""
    return {
        label.strip()
        for labels in _LABEL_LIST.findall(expression)
        for label in labels.split(",")
        if label.strip()
    }


def panels() -> Iterator[dict[str, Any]]:
    """The panels of the dashboard that show something."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] != "row":
            yield panel


def alerts() -> Iterator[dict[str, Any]]:
    """The alerts of all rule files."""
    for path in RULES:
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from group["rules"]


def expressions() -> dict[str, str]:
    """All PromQL that is deployed, by where it is."""
    of_panels = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in panels()
        for target in panel["targets"]
    }
    return of_panels | {alert["alert"]: alert["expr"] for alert in alerts()}
