"""Whatever is exported is told somewhere, and whatever is told is exported."""

import json
import re

import yaml

from tests.observability import exported
from tests.observability.conftest import DASHBOARDS, RULES, RUNBOOK

# Words of the runbook that begin like a metric and are none.
NAME = re.compile(r"\bsojourn_[a-z_]*[a-z]\b")


def queried() -> set[str]:
    """Names in queries of dashboards and expressions of rules; recording rules' names have colons before."""
    boards = [json.loads(path.read_text()) for path in DASHBOARDS.glob("*.json")]
    asked = [target["expr"] for board in boards for panel in board["panels"] for target in panel.get("targets", [])]
    asked += [variable["definition"] for board in boards for variable in board["templating"]["list"][1:]]
    rules = [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    return {name for text in asked + rules for name in re.findall(r"(?<![:\w])sojourn_\w+", text)}


def told() -> set[str]:
    """Names in descriptions of panels, and in the runbook."""
    boards = [json.loads(path.read_text()) for path in DASHBOARDS.glob("*.json")]
    texts = [panel.get("description", "") for board in boards for panel in board["panels"]]
    return {name for text in [*texts, RUNBOOK.read_text()] for name in re.findall(r"(?<![:\w])sojourn_\w+", text)}


def base(name: str) -> str:
    """A histogram by the name that people know."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


def test_what_is_queried_is_exported() -> None:
    """A board of another exporter's names stays empty without a word (dragonflydb/dragonfly-operator#256)."""
    assert queried() - exported.series() == set()


def test_what_is_told_is_exported() -> None:
    assert told() - exported.metrics() - exported.series() == set()


def test_what_is_exported_is_on_a_dashboard_or_in_an_alert() -> None:
    assert exported.metrics() - {base(name) for name in queried()} == set()
