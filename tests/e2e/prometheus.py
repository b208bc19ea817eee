"""A real Prometheus in the cluster, with the shipped rules, which scrapes what the shipped PodMonitors select.

Debian's Prometheus is built without discovery by Kubernetes, and there is no Prometheus operator here: `targets` does
what that would do with a PodMonitor.
"""

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from tests.e2e.client import CONTAINER_SECURITY, POD_SECURITY
from tests.e2e.node import KUBECONFIG, MONITORING, STUDIO, SYSTEM, Object, apply, get, image, kubectl, run, running
from tests.kubernetes import ROOT, program

RULES = ROOT / "charts/sojourn/rules/sojourn.yaml"
NAME = "sojourn-e2e-prometheus"
# Often, so that a minute is enough for every rate.
SCRAPE_SECONDS = 5
CHARTS = {
    SYSTEM: ("sojourn", "charts/sojourn", "monitoring.podMonitor=true"),
    STUDIO: ("dsvc-demo", "charts/sojourn-service", "metrics.podMonitor=true,images.inference=a,images.residencyd=a"),
}


class Prometheus:
    """Answers of its HTTP interface."""

    def __init__(self, port: int):
        self._address = f"http://127.0.0.1:{port}/api/v1/"

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer."""
        address = f"{self._address}{path}?{urllib.parse.urlencode(parameters)}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(address, timeout=30) as answer:
            return json.loads(answer.read())["data"]

    def query(self, expression: str) -> list[Object]:
        """The series of an expression, now."""
        data = self.ask("query", query=expression)
        series: list[Object] = data["result"] if data["resultType"] == "vector" else [{"value": data["result"]}]
        return series

    def over(self, expression: str, seconds: int) -> list[Object]:
        """The series of an expression in the last so many seconds, as a graph of them draws it."""
        end = time.time()
        span = {"start": str(end - seconds), "end": str(end), "step": str(SCRAPE_SECONDS)}
        series: list[Object] = self.ask("query_range", query=expression, **span)["result"]
        return series


@contextmanager
def prometheus() -> Iterator[Prometheus]:
    """Prometheus in a pod, until the end of the block."""
    apply(_files(), _pod(), namespace=MONITORING)
    try:
        running(MONITORING, NAME)
        with _forwarded() as port:
            yield Prometheus(port)
    finally:
        kubectl("-n", MONITORING, "delete", "pod", NAME, "--wait=false")


@contextmanager
def _forwarded() -> Iterator[int]:
    command = [str(program("kubectl")), "--kubeconfig", KUBECONFIG, "-n", MONITORING, "port-forward", NAME, ":9090"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        found = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert found, "kubectl port-forward has not begun"
        yield int(found[1])
    finally:
        process.terminate()
        process.wait(10)


def targets() -> list[Object]:
    """The addresses that the shipped PodMonitors select, with the labels that the Prometheus operator gives them."""
    return [
        {
            "targets": [f"{pod['status']['podIP']}:{port['containerPort']}"],
            "labels": {
                "namespace": namespace,
                "pod": pod["metadata"]["name"],
                "container": container["name"],
                "endpoint": port["name"],
                "job": f"{namespace}/{monitor['metadata']['name']}",
            },
        }
        for namespace, chart in CHARTS.items()
        for monitor in _monitors(namespace, *chart)
        for pod in _selected(namespace, monitor)
        for container in pod["spec"]["containers"]
        for port in container["ports"]
        if port["name"] in {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    ]


def _monitors(namespace: str, release: str, chart: str, sets: str) -> list[Object]:
    text = run("helm", "template", release, ROOT / chart, "-n", namespace, "--set", sets)
    return [item for item in yaml.safe_load_all(text) if item and item["kind"] == "PodMonitor"]


def _selected(namespace: str, monitor: Object) -> list[Object]:
    labels = ",".join(f"{key}={value}" for key, value in monitor["spec"]["selector"]["matchLabels"].items())
    items = get(namespace, "pods", "-l", labels, "--field-selector=status.phase=Running")["items"]
    return [item for item in items if "deletionTimestamp" not in item["metadata"]]


def _files() -> Object:
    every = f"{SCRAPE_SECONDS}s"
    settings = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": ["/etc/prometheus/rules.yaml"],
        "scrape_configs": [{"job_name": "pods", "file_sd_configs": [{"files": ["/etc/prometheus/targets.json"]}]}],
    }
    files = {
        "prometheus.yaml": yaml.safe_dump(settings),
        "rules.yaml": RULES.read_text(),
        "targets.json": json.dumps(targets()),
    }
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME}, "data": files}


def _pod() -> Object:
    container = {
        "name": "prometheus",
        "image": image("e2e-prometheus"),
        "imagePullPolicy": "Never",
        "args": ["--config.file=/etc/prometheus/prometheus.yaml", "--storage.tsdb.path=/data"],
        "securityContext": CONTAINER_SECURITY,
        "readinessProbe": {"httpGet": {"path": "/-/ready", "port": 9090}, "periodSeconds": 1},
        "volumeMounts": [
            {"name": "settings", "mountPath": "/etc/prometheus"},
            {"name": "data", "mountPath": "/data"},
        ],
    }
    spec = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "securityContext": {**POD_SECURITY, "fsGroup": 10001},
        "containers": [container],
        "volumes": [
            {"name": "settings", "configMap": {"name": NAME}},
            {"name": "data", "emptyDir": {}},
        ],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": NAME}, "spec": spec}
