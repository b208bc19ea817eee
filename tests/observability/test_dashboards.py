"""The dashboards load untouched, and keep every rule of `tools.dashboards.lint`."""

import copy
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.observability.conftest import DASHBOARDS
from tools.dashboards import lint
from tools.dashboards.__main__ import wanted

BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))}
Board = dict[str, Any]


def test_all_four_are_there() -> None:
    assert set(BOARDS) == {"residency", "cache-and-offload", "service", "operator"}


def test_files_are_what_the_builder_writes() -> None:
    assert {path: path.read_text() for path in wanted()} == wanted()


@pytest.mark.parametrize("name", BOARDS)
@pytest.mark.parametrize("rule", lint.RULES, ids=lambda rule: rule.__name__)
def test_boards_keep_the_rules(name: str, rule: lint.Rule) -> None:
    assert list(rule(BOARDS[name])) == []


def test_uids_are_unique() -> None:
    assert len({board["uid"] for board in BOARDS.values()}) == len(BOARDS)


@pytest.mark.parametrize("name", BOARDS)
def test_prometheus_parses_every_expression(program: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    rules = [{"record": f"q{number}", "expr": expr} for number, expr in enumerate(lint.expressions(BOARDS[name]))]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    command = [program("promtool"), "check", "rules", "--lint=none", file]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout


def panel(board: Board, kind: str) -> Board:
    return next(panel for panel in board["panels"] if panel["type"] == kind)


def first_query(board: Board) -> Board:
    target: Board = panel(board, "timeseries")["targets"][0]
    return target


# How each rule is broken: a rule that cannot fail says nothing.
BREAKS: dict[lint.Rule, Callable[[Board], object]] = {
    lint.datasource_is_a_variable: lambda b: b["templating"]["list"][0].update(current={"value": "mine"}),
    lint.everything_uses_it: lambda b: first_query(b).update(datasource={"uid": "mine"}),
    lint.title_and_description: lambda b: panel(b, "stat").update(description=""),
    lint.unit: lambda b: panel(b, "stat")["fieldConfig"]["defaults"].update(unit="GiB"),
    lint.has_targets: lambda b: panel(b, "stat").update(targets=[]),
    lint.braces_balance: lambda b: first_query(b).update(expr="sum(sojourn_x{)"),
    lint.rates_over_the_rate_interval: lambda b: first_query(b).update(expr="rate(sojourn_x_total[5m])"),
    lint.counters_inside_rates: lambda b: first_query(b).update(expr="sum(sojourn_x_total)"),
    lint.query_variables_refresh: lambda b: b["templating"]["list"][1].update(refresh=1),
    lint.label_queries: lambda b: b["templating"]["list"][3].update(query={"query": "label_values(a, pod)"}),
    lint.all_is_anything: lambda b: b["templating"]["list"][1].update(allValue=".*"),
    lint.not_editable: lambda b: b.update(editable=True),
    lint.selectors_are_scoped: lambda b: first_query(b).update(expr="sojourn_x"),
    lint.loads_untouched: lambda b: b.update(__inputs=[]),
    lint.uid_is_stable: lambda b: b.update(uid=""),
    lint.panels_do_not_overlap: lambda b: b["panels"][2].update(gridPos=b["panels"][1]["gridPos"]),
    lint.ref_ids_unique: lambda b: panel(b, "table")["targets"][1].update(refId="A"),
    lint.time_series_have_legends: lambda b: first_query(b).update(legendFormat="{{wrong}}", expr="sum by (a) (b)"),
    lint.single_values_are_instant: lambda b: panel(b, "stat")["targets"][0].update(instant=False),
    lint.no_unknown_variable: lambda b: first_query(b).update(expr="a[$window]"),
}


@pytest.mark.parametrize("rule", lint.RULES, ids=lambda rule: rule.__name__)
def test_every_rule_can_fail(rule: lint.Rule) -> None:
    board = copy.deepcopy(BOARDS["residency"])
    BREAKS[rule](board)
    assert list(rule(board))
