import functools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes import ROOT, program

Render = Callable[..., list[dict[str, Any]]]


class Refused(Exception):
    """helm's own words."""


@pytest.fixture(scope="session")
def helm() -> Path:
    found = program("helm")
    if found is None:
        pytest.skip("no helm: install it, or set SOJOURN_KUBE_CLUSTER")
    return found


@pytest.fixture(scope="session")
def render_text(helm: Path) -> Callable[..., str]:
    """Output of `helm template`; the same question is asked once."""

    @functools.cache
    def asked(chart: str, values: str, more: tuple[str, ...], release: str) -> str:
        command = [helm, "template", release, ROOT / "charts" / chart, "-n", "studio", "-f", "-", *more]
        done = subprocess.run(command, input=values, capture_output=True, text=True)
        if done.returncode:
            raise Refused(done.stderr)
        return done.stdout

    def render(chart: str, values: dict[str, Any], *more: str, release: str = "dsvc-demo") -> str:
        return asked(chart, json.dumps(values), more, release)

    return render


@pytest.fixture(scope="session")
def render(render_text: Callable[..., str]) -> Render:
    """Objects of `helm template`."""

    def objects(chart: str, values: dict[str, Any], *more: str, release: str = "dsvc-demo") -> list[dict[str, Any]]:
        documents = yaml.safe_load_all(render_text(chart, values, *more, release=release))
        return [document for document in documents if document]

    return objects
