"""A real Prometheus with the shipped rules, whose minutes are over sooner.

A minute of the rules takes a second, three on a machine that is busy with other things; the two thresholds that are in
seconds are divided likewise.
"""

import asyncio
import json
import os
import re
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.kubernetes import ROOT

RULES = ROOT / "charts/sojourn/rules/sojourn.yaml"
POLL_SECONDS = 0.5

# How long a minute of the rules takes, and how often is scraped and evaluated.
MINUTE_SECONDS = 1 if os.getloadavg()[0] < 1.5 * (os.cpu_count() or 1) else 3


def hurried(rules: str) -> str:
    """The rules with minutes that are over sooner."""

    def shorter(found: re.Match[str]) -> str:
        return f"{found[1]}{int(found[2]) * MINUTE_SECONDS}s{found[3]}"

    text = re.sub(r"(\[)(\d+)m(\])", shorter, rules)
    text = re.sub(r"^(\s+for: )(\d+)m()$", shorter, text, flags=re.MULTILINE)
    for seconds in (600, 900):
        text = text.replace(f"> {seconds}", f"> {seconds // 60 * MINUTE_SECONDS}")
    return text


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def fetch(url: str) -> Any:
    """JSON of a page."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


class Prometheus:
    """The server, scraping and evaluating once a minute of the rules.

    Attributes:
        fired: Names of the alerts that ever fired, by pod.
        texts: Annotations of those, by pod and name.
    """

    def __init__(self, program: Path, folder: Path, targets: list[dict[str, Any]]) -> None:
        (folder / "rules.yaml").write_text(hurried(RULES.read_text()))
        every = f"{MINUTE_SECONDS}s"
        config = {
            "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [{"job_name": "pods", "honor_labels": True, "static_configs": targets}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.fired: dict[str, set[str]] = defaultdict(set)
        self.texts: dict[tuple[str, str], dict[str, str]] = {}
        self._log = (folder / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"],
            stdout=self._log, stderr=self._log,
        )  # fmt: skip

    def close(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.wait(30)
        self._log.close()

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Series of an instant query."""
        answer = fetch(f"{self.url}/api/v1/query?query={urllib.parse.quote(expr)}")
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def value(self, expr: str) -> float:
        """The one value of an instant query; 0 where there is none."""
        found = self.query(expr)
        return float(found[0]["value"][1]) if found else 0.0

    def look(self) -> dict[str, set[str]]:
        """Alerts that fire now, by pod; those of none under the name of the resource, or "". Remembers them."""
        now: dict[str, set[str]] = defaultdict(set)
        for alert in fetch(f"{self.url}/api/v1/alerts")["data"]["alerts"]:
            if alert["state"] == "firing":
                labels = alert["labels"]
                pod = labels.get("pod") or labels.get("resource_name", "")
                now[pod].add(labels["alertname"])
                self.fired[pod].add(labels["alertname"])
                self.texts[pod, labels["alertname"]] = alert["annotations"]
        return now

    async def until(self, condition: Callable[[], Any], *, seconds: float, what: str) -> None:
        """Looks until something holds; longer where minutes are."""
        limit = time.monotonic() + seconds * MINUTE_SECONDS
        while not condition():
            assert time.monotonic() < limit, f"{what}: not within {seconds:g} s; fired so far: {dict(self.fired)}"
            await asyncio.sleep(POLL_SECONDS)

    async def until_firing(self, pod: str, alert: str, *, seconds: float = 90) -> None:
        """Waits for an alert of a pod."""
        await self.until(lambda: alert in self.look()[pod], seconds=seconds, what=f"{pod} fires {alert}")

    async def until_quiet(self, pod: str, *, seconds: float = 90) -> None:
        """Waits until nothing of a pod fires."""
        await self.until(lambda: not self.look()[pod], seconds=seconds, what=f"{pod} is quiet")
