"""Every alert fires on its fault, not just below it, and clears again; judged by promtool."""

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.observability.alert_cases import CASES, Case, Series
from tests.observability.conftest import DASHBOARDS, RULES

GROUPS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in GROUPS for rule in group["rules"] if "alert" in rule
}
END = 100


def promtool(program: Callable[[str], Path], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program("promtool"), *arguments], capture_output=True, text=True)


def test_promtool_finds_nothing_to_say(program: Callable[[str], Path]) -> None:
    done = promtool(program, "check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert done.returncode == 0, done.stderr + done.stdout


def test_every_alert_has_its_cases() -> None:
    assert set(ALERTS) == set(CASES)
    assert len(ALERTS) == 15


@pytest.mark.parametrize("name", ALERTS)
def test_alerts_tell_what_a_page_must_tell(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert set(rule["annotations"]) == {"summary", "description", "dashboard", "runbook_url"}
    assert rule["annotations"]["runbook_url"].endswith(f"/runbook.md#{name.lower()}")
    uid = rule["annotations"]["dashboard"].removeprefix("/d/")
    assert any(f'"uid": "{uid}"' in path.read_text() for path in DASHBOARDS.glob("*.json"))


def test_windows_outlast_four_scrapes() -> None:
    """Of a minute: Prometheus 3 leaves the left edge of a window out."""
    windows = re.findall(r"\[(\d+)([smh])\]", RULES.read_text())
    assert windows
    assert all(int(length) * {"s": 1, "m": 60, "h": 3600}[unit] >= 240 for length, unit in windows)


def without_annotations(folder: Path) -> Path:
    """The rules as they are but for the texts, which promtool would compare letter by letter."""
    groups = [
        group | {"rules": [{k: v for k, v in rule.items() if k != "annotations"} for rule in group["rules"]]}
        for group in GROUPS
    ]
    path = folder / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": groups}))
    return path


def checks(name: str, series: Series, at: dict[int, list[dict[str, str]]]) -> dict[str, Any]:
    return {
        "interval": "1m",
        "input_series": [{"series": selector, "values": values} for selector, values in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": [{"exp_labels": labels} for labels in alerts]}
            for minute, alerts in at.items()
        ],
    }


def cases_of(name: str, case: Case) -> Iterator[dict[str, Any]]:
    alert = [case.labels | ALERTS[name]["labels"]]
    at = {case.firing: alert}
    if case.pending is not None:
        at[case.pending] = []
    if case.recovered:
        at[case.recovered] = []
    yield checks(name, case.fires, at)
    yield checks(name, case.silent, {minute: [] for minute in range(0, END, 5)})
    if case.vanishes is not None:
        yield checks(name, case.vanishes, {case.firing: alert, case.vanished: []})


@pytest.mark.parametrize("name", CASES)
def test_alert_fires_on_its_fault_and_clears(program: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    tests = [test for case in CASES[name] for test in cases_of(name, case)]
    if name != "SojournOperatorDown":
        for test in tests:
            test["input_series"].append({"series": 'sojourn_build_info{process="operator"}', "values": f"1x{END}"})
    file = tmp_path / "test.yaml"
    rules = without_annotations(tmp_path)
    file.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}))
    done = promtool(program, "test", "rules", file)
    assert done.returncode == 0, done.stderr + done.stdout
