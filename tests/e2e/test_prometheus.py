"""Every query of the shipped dashboards and rules, asked of a Prometheus that scrapes the running demo."""

import json
import math
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.e2e.client import Client
from tests.e2e.node import PORT, STUDIO, Object, apply, demo_as_written, has, kubectl, patch, ready, until
from tests.e2e.prometheus import RULES, SCRAPE_SECONDS, Prometheus, prometheus
from tests.kubernetes import ROOT
from tools.dashboards import lint

pytestmark = pytest.mark.timeout(600)
ENDPOINT = f"dsvc-demo.{STUDIO}.svc.cluster.local:{PORT}"
BOARDS = {
    path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "charts/sojourn/dashboards").glob("*.json"))
}
# What a viewer takes in at a glance, by kind of panel.
MOST_SERIES = {"stat": 4, "bargauge": 32, "timeseries": 32, "table": 128}
# What Grafana puts in for its variables, with All chosen; the rate interval is four scrapes.
FILLED = {"__rate_interval": f"{4 * SCRAPE_SECONDS}s", "__range": "5m", "namespace": ".+", "model": ".+"}
WINDOW_SECONDS = 120
PROCESSES = {"inference", "residencyd", "operator"}


@pytest.fixture(scope="module")
def scraped(installed: None, neighbour: Client) -> Iterator[Prometheus]:
    """A Prometheus that has seen the demo make clips, refuse a request, give one up and page out; the operator at work,
    and a service that it cannot help.
    """
    demo_as_written()
    ready()
    # As much as the limit lets one ask for, and more than the process leaves: what a stage is done with is paged out.
    patch(STUDIO, "lwo", "demo", mode="Component", nextStageHeadroom="2900Mi")
    apply(stalled(), namespace=STUDIO)
    until(lambda: not has(STUDIO, "demo", "Ready", "True"), 30, "not Ready after the edit")
    ready()
    with prometheus() as found:
        until(lambda: up(found) == PROCESSES, 60, "three processes scraped")
        assert "INVALID_ARGUMENT" in neighbour.generate(ENDPOINT, "--frames", "7", check=False)
        # More clips than any machine makes in that time, which is long enough to be scraped in the middle of it.
        long = ("--steps", "60", "--count", "16", "--timeout", str(2 * SCRAPE_SECONDS + 2))
        late = neighbour.generate(ENDPOINT, *long, check=False)
        assert "DEADLINE_EXCEEDED" in late
        for steps in ("4", "5", "4"):
            neighbour.generate(ENDPOINT, "--steps", steps)
        # A new release, and the same pods.
        patch(STUDIO, "dsvc", "demo", network={"allowFrom": []})
        # In two scrapes, and evaluations of the rules after them.
        time.sleep(3 * SCRAPE_SECONDS)
        yield found
    kubectl("-n", STUDIO, "delete", "dsvc", "stalled", "--timeout=60s")
    demo_as_written()


def stalled() -> Object:
    """A service whose policy asks for more than its limit: it has no pods, and two alerts have something to look at."""
    spec = {
        "model": {"builtIn": {}},
        "resources": {"limits": {"memory": "64Mi"}},
        "sharedHostMemory": {"size": "32Mi"},
        "adaLNCacheRef": {"name": "demo"},
    }
    metadata = {"name": "stalled"}
    return {"apiVersion": "sojourn.dev/v1alpha1", "kind": "DiffusionService", "metadata": metadata, "spec": spec}


def shipped_rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def up(found: Prometheus) -> set[str]:
    return {series["metric"]["container"] for series in found.query("up == 1")}


def fill(expression: str, pods: str) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda name: (FILLED | {"pod": pods})[name[1]], expression)


QUERIES = [
    pytest.param(board, panel["type"], target["expr"], id=f"{board}-{panel['title']}-{target['refId']}")
    for board, content in BOARDS.items()
    for panel in lint.panels(content)
    for target in panel["targets"]
]


RECORDS = [rule for rule in shipped_rules() if "record" in rule]
ALERTS = [rule for rule in shipped_rules() if "alert" in rule]
# A name of ours with its labels.
SELECTOR = re.compile(r"\b(?:[\w:]*:)?sojourn_[\w:]+(?:\{[^}]*\})?")


def test_all_three_processes_are_scraped_and_nothing_else(scraped: Prometheus) -> None:
    assert up(scraped) == PROCESSES
    assert not scraped.query("up == 0")


def test_pages_of_a_stage_that_is_over_leave_memory(scraped: Prometheus) -> None:
    """By the kernel's page table: the checkpoint in the image belongs to the pods' user.

    Of files that are not the user's nothing would leave. A few pages may stay for now: the kernel passes over those
    that another processor has yet to put on its list.
    """
    found = scraped.query("sum(sojourn_pageout_verified_bytes_total) / sum(sojourn_pageout_requested_bytes_total)")
    (share,) = (float(series["value"][1]) for series in found)
    assert 0.9 < share <= 1


@pytest.mark.parametrize(("board", "kind", "expression"), QUERIES)
def test_a_panel_has_data_and_no_more_than_it_can_show(
    scraped: Prometheus, board: str, kind: str, expression: str
) -> None:
    pods = "|".join(series["metric"]["pod"] for series in scraped.query("sojourn_model_info"))
    query = fill(expression, pods)
    assert len(scraped.query(query)) <= MOST_SERIES[kind]
    found = scraped.over(query, WINDOW_SECONDS)
    values = [float(value) for series in found for _, value in series["values"]]
    assert any(not math.isnan(value) for value in values), found


def test_every_rule_is_evaluated_and_no_alert_fires(scraped: Prometheus) -> None:
    rules = [rule for group in scraped.ask("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {rule.get("alert") or rule["record"] for rule in shipped_rules()}
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    assert [rule["name"] for rule in rules if rule["type"] == "alerting" and rule["state"] == "firing"] == []


@pytest.mark.parametrize("rule", RECORDS, ids=lambda rule: rule["record"])
def test_a_recording_rule_records(scraped: Prometheus, rule: dict[str, Any]) -> None:
    found = scraped.over(rule["record"], WINDOW_SECONDS)
    assert 1 <= len(found) <= MOST_SERIES["timeseries"]
    assert any(not math.isnan(float(value)) for series in found for _, value in series["values"])


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_looks_at_series_that_are_there(scraped: Prometheus, rule: dict[str, Any]) -> None:
    """An alert that asks for a name or a label that nobody exports never fires."""
    for selector in sorted(set(SELECTOR.findall(rule["expr"]))):
        assert scraped.over(selector, WINDOW_SECONDS), selector
