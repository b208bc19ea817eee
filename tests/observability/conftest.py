from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kubernetes import ROOT
from tools import prometheus

RULES = ROOT / "charts/sojourn/rules/sojourn.yaml"
DASHBOARDS = ROOT / "charts/sojourn/dashboards"
RUNBOOK = ROOT / "docs/runbook.md"


@pytest.fixture(scope="session")
def program() -> Callable[[str], Path]:
    """Where prometheus and promtool are."""

    def find(name: str) -> Path:
        found = prometheus.program(name)
        if found is None:
            pytest.skip(prometheus.MISSING)
        return found

    return find
