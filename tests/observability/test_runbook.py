"""The runbook has one heading for each alert, each with its four parts, and every link of an alert leads to one."""

import re

import pytest
import yaml

from tests.observability.conftest import DASHBOARDS, RULES, RUNBOOK
from tests.observability.exported import metrics, series

TEXT = RUNBOOK.read_text()
ALERTS = [
    rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"] if "alert" in rule
]
SECTIONS = dict(re.findall(r"^## (\w+)$\n(.*?)(?=^## |\Z)", TEXT, flags=re.MULTILINE | re.DOTALL))
PARTS = ("**Meaning.**", "**Impact.**", "**Diagnosis.**", "**Mitigation.**")


def test_headings_are_the_alerts() -> None:
    assert [heading for heading in SECTIONS if heading.startswith("Sojourn")] == list(SECTIONS)
    assert set(SECTIONS) == set(ALERTS)


@pytest.mark.parametrize("alert", ALERTS)
def test_every_entry_leads_from_the_page_to_the_cure(alert: str) -> None:
    entry = SECTIONS[alert]
    assert [entry.index(part) for part in PARTS] == sorted(entry.index(part) for part in PARTS)
    diagnosis = entry[entry.index(PARTS[2]) : entry.index(PARTS[3])]
    assert "- Panel: *" in diagnosis
    assert re.search(r"`[^`]*sojourn_\w+[^`]*`", diagnosis), "no query"
    assert "kubectl" in diagnosis


def test_panels_that_it_names_are_there() -> None:
    titles = {f'"title": "{title}"' for line in TEXT.splitlines() for title in _panels(line)}
    shipped = "".join(path.read_text() for path in DASHBOARDS.glob("*.json"))
    missing = {title for title in titles if title.replace("×", "\\u00d7") not in shipped}
    assert missing == set()


def _panels(line: str) -> list[str]:
    """Panels of a line such as `- Panel: *Service* › Ended calls, Refused; *Residency* › Pressure.`"""
    if not line.startswith("- Panel: "):
        return []
    parts = [part.split("›")[1] for part in line.removeprefix("- Panel: ").rstrip(".").split(";") if "›" in part]
    text = re.sub(r"\([^)]*\)", "", ", ".join(parts)).replace("Cold, but stuck", "Cold# but stuck")
    return [title.strip().replace("#", ",") for title in text.split(",") if title.strip()]


def test_metrics_that_it_names_are_exported() -> None:
    named = set(re.findall(r"(?<![:\w])sojourn_\w+", TEXT))
    assert named - metrics() - series() == set()


def test_lines_at_debug_that_it_names_are_said() -> None:
    """In the module that the table names, and at that level."""
    from tests.kubernetes import ROOT

    rows = re.findall(r"^\| [^|]+\? \| (.+?) \| .+ \|$", TEXT, flags=re.MULTILINE)
    assert len(rows) >= 10
    logger = ""
    for row in rows:
        logger = (re.findall(r"\(`(sojourn[\w.]+)`\)", row) or [logger])[0]
        part = logger.split(".")[1]
        source = (ROOT / part / (logger.replace(".", "/") + ".py")).read_text()
        said = re.findall(r"\.debug\(\s*\"([^\"]+)\"", source)
        for line in re.findall(r"`([^`]+)`", row.split("(`")[0]):
            pattern = re.escape(line).replace("…", "%s").replace("\\ N:", "\\ %d:")
            assert any(re.match(pattern, text) for text in said), f"{logger} does not say {line!r}"
