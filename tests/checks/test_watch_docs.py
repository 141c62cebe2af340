"""The dashboard, the alert rules and the tables of docs/watching.md name metrics and labels that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from tests.helpers.watching import tell_session, trainer_events
from weightcast.rollout.operator_routes import Metrics
from weightcast.rollout.scheduler import Stats
from weightcast.watch import PrometheusMetrics
from weightcast.watch.engine_metrics import EngineMetrics
from weightcast.watch.listeners import Events

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "watching.md"
DASHBOARD = DOCS / "watching" / "dashboard.json"
ALERTS = DOCS / "watching" / "alerts.yaml"
SCRAPED = {"job", "instance"}  # labels that Prometheus adds
# Grafana replaces these before Prometheus sees them.
GRAFANA = {"$__rate_interval": "5m", "$__range": "3h", "$trainer": ".*", "$engine": ".*"}


def families() -> list[Metric]:
    """Every metric of ours, after an update on both sides."""
    registry = CollectorRegistry()
    events = Events([PrometheusMetrics(registry)])
    for event in trainer_events():
        events.emit(event)
    tell_session(EngineMetrics(registry, model_name="m", version=0))
    stats = Stats(
        running=0,
        waiting=0,
        version=0,
        state="running",
        steps=0,
        prompt_tokens=0,
        generated_tokens=0,
        finished={"s": 1},
    )
    return [*registry.collect(), *Metrics(lambda: stats, model="m", updates=registry).collect()]


def labels_by_name() -> dict[str, set[str]]:
    """The labels of each series, by the name that a query uses."""
    found: dict[str, set[str]] = {}
    for family in families():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


LABELS = labels_by_name()


def parse(expression: str) -> Any:
    for name, value in GRAFANA.items():
        expression = expression.replace(name, value)
    return promql.parse(expression)


def selectors(node: Any) -> Iterator[tuple[str, set[str]]]:
    """Every series that an expression reads, with the labels that it selects by."""
    if isinstance(node, promql.VectorSelector):
        yield node.name, {matcher.name for matcher in node.matchers.matchers}
        return
    for part in ("expr", "lhs", "rhs", "vector_selector", "param"):
        child = getattr(node, part, None)
        if child is not None:
            yield from selectors(child)
    for child in getattr(node, "args", ()):
        yield from selectors(child)


def check(expression: str) -> set[str]:
    """Checks one query; returns the series that it reads."""
    found = list(selectors(parse(expression)))
    assert found, expression
    for name, labels in found:
        assert name in LABELS, f"{name} is no metric of ours: {expression}"
        assert labels <= LABELS[name] | SCRAPED, f"{name} has no labels {labels - LABELS[name]}: {expression}"
    grouped = re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", expression)
    known = set().union(*(LABELS[name] for name, _ in found)) | SCRAPED | {"le"}
    for name in {name.strip() for group in grouped for name in group.split(",")}:
        assert name in known, f"no series of the query has a label {name}: {expression}"
    return {name for name, _ in found}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_every_panel_of_the_dashboard_reads_metrics_that_exist(panel):
    for target in panel["targets"]:
        read = check(target["expr"])
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
            assert label in SCRAPED or all(label in LABELS[name] for name in read), target["legendFormat"]


def test_the_dashboard_can_be_imported():
    """No two panels share an id or a place, and every variable that a query uses is defined."""
    dashboard = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    defined = {variable["name"] for variable in dashboard["templating"]["list"]}
    text = DASHBOARD.read_text()
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "__range", "__all"}
    assert used == defined
    for variable in dashboard["templating"]["list"]:
        for name in re.findall(r"label_values\((\w+),", variable.get("definition", "")):
            assert name in LABELS


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_every_alert_reads_metrics_that_exist_and_says_what_to_do(rule):
    read = check(rule["expr"])
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert len(rule["annotations"]["summary"]) < 120
    assert rule["annotations"]["description"]
    for label in re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])):
        assert label in SCRAPED or any(label in LABELS[name] for name in read), label


def test_stuck_stale_and_quarantined_engines_have_alerts():
    names = " ".join(rule["alert"] for rule in rules())
    for word in ("Stuck", "Stale", "Quarantined"):
        assert word in names


def test_the_checks_above_find_what_is_wrong():
    for wrong in (
        "weightcast_versions",
        'weightcast_version{targets="a"}',
        "sum by (targets) (weightcast_version)",
        "1 + 1",
    ):
        with pytest.raises(AssertionError):
            check(wrong)
    with pytest.raises(ValueError, match="parenthesis"):
        check("sum(weightcast_version")


def rows_of(heading: str) -> list[list[str]]:
    """Cells of the first table below a heading of the page."""
    text = PAGE.read_text().split(f"\n{heading}\n", 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert lines is not None
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for line in lines[0].splitlines()[2:]]


@pytest.mark.parametrize(("heading", "prefix"), [("### Trainer", ""), ("### Engine", "weightcast_engine_")])
def test_the_page_lists_every_metric_with_its_type_and_labels(heading, prefix):
    ends = {"counter": "_total"}
    expected = {
        (
            family.name + ends.get(family.type, ""),
            family.type,
            tuple(sorted(set().union(*(sample.labels for sample in family.samples)) - {"le"})),
        )
        for family in families()
        if family.name.startswith("weightcast_engine_") == bool(prefix) and not is_the_reference_engines(family)
    }
    listed = {(row[0].strip("`"), row[1], tuple(sorted(re.findall(r"`(\w+)`", row[2])))) for row in rows_of(heading)}
    assert listed == expected


def is_the_reference_engines(family: Metric) -> bool:
    """True for the metrics of generation, which docs/reference-engine.md lists."""
    engine = "model_name" in {name for sample in family.samples for name in sample.labels}
    return engine and not family.name.startswith("weightcast_engine_")


def test_the_reference_engines_page_lists_its_metrics():
    text = (DOCS / "reference-engine.md").read_text()
    for family in filter(is_the_reference_engines, families()):
        name = family.name + ("_total" if family.type == "counter" else "")
        assert f"`{name}`" in text, name
