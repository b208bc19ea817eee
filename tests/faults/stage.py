"""What faults are played on: a real Prometheus with the shipped rules, and pods of real processes.

The rules run with minutes as seconds, and with the two thresholds that are in seconds divided by 60. A pod is a model
process and a residencyd beside it, each scraped with the labels that Kubernetes would give them.
"""

import asyncio
import json
import multiprocessing
import re
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import grpc.aio
import yaml
from sojourn.v1 import inference_pb2 as pb
from sojourn.v1 import inference_pb2_grpc as pb_grpc

from tests.faults import actors
from tests.kubernetes import ROOT

# The processes of all pods are forked from one that has imported everything.
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["tests.faults.actors"])

RULES = ROOT / "charts/sojourn/rules/sojourn.yaml"
NAMESPACE = "studio"
POLL_SECONDS = 0.5


def hurried(rules: str) -> str:
    """The rules with minutes as seconds."""
    text = re.sub(r"\[(\d+)m\]", r"[\1s]", rules)
    text = re.sub(r"^(\s+for: \d+)m$", r"\1s", text, flags=re.MULTILINE)
    for seconds in (600, 900):
        text = text.replace(f"> {seconds}", f"> {seconds // 60}")
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
    """The server, scraping and evaluating every second.

    Attributes:
        fired: Names of the alerts that ever fired, by pod.
        texts: Annotations of those, by pod and name.
    """

    def __init__(self, program: Path, folder: Path, targets: list[dict[str, Any]]) -> None:
        (folder / "rules.yaml").write_text(hurried(RULES.read_text()))
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
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
        """Looks until something holds."""
        limit = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < limit, f"{what}: not within {seconds:g} s; fired so far: {dict(self.fired)}"
            await asyncio.sleep(POLL_SECONDS)

    async def until_firing(self, pod: str, alert: str, *, seconds: float = 90) -> None:
        """Waits for an alert of a pod."""
        await self.until(lambda: alert in self.look()[pod], seconds=seconds, what=f"{pod} fires {alert}")

    async def until_quiet(self, pod: str, *, seconds: float = 90) -> None:
        """Waits until nothing of a pod fires."""
        await self.until(lambda: not self.look()[pod], seconds=seconds, what=f"{pod} is quiet")


@dataclass
class Pod:
    """A model process and a residencyd beside it.

    Attributes:
        name: Label of its series.
        folder: For its map and logs.
        group: Control group that the model process is put in; None for ours.
    """

    name: str
    folder: Path
    group: Path | None = None
    grpc_port: int = field(default_factory=free_port)
    metrics_port: int = field(default_factory=free_port)
    residency_port: int = field(default_factory=free_port)
    processes: list[BaseProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Makes its folder."""
        (self.folder / "map").mkdir(parents=True)
        (self.folder / "map").chmod(0o755)

    @property
    def map(self) -> Path:
        """The component map."""
        return self.folder / "map/component-map.pb"

    def targets(self) -> list[dict[str, Any]]:
        """For Prometheus."""
        labels = {"namespace": NAMESPACE, "pod": self.name}
        return [
            {"targets": [f"127.0.0.1:{self.metrics_port}"], "labels": labels | {"container": "inference"}},
            {"targets": [f"127.0.0.1:{self.residency_port}"], "labels": labels | {"container": "residencyd"}},
        ]

    def _start(self, actor: Callable[..., None], *arguments: Any, grouped: bool) -> BaseProcess:
        log = str(self.folder / f"log-{len(self.processes)}")
        group = str(self.group) if self.group is not None and grouped else ""
        process = FORKING.Process(target=actor, args=(log, group, *arguments), daemon=True)
        process.start()
        self.processes.append(process)
        return process

    def serve(self, model: Path, *options: str) -> BaseProcess:
        """`sojourn serve`."""
        arguments = [
            "serve", "--model", str(model), "--model-name", "tiny", "--listen", f"127.0.0.1:{self.grpc_port}",
            "--metrics-listen", f"127.0.0.1:{self.metrics_port}", "--component-map", str(self.map), *options,
        ]  # fmt: skip
        return self._start(actors.sojourn, arguments, grouped=True)

    def serve_breakable(self, model: Path, **settings: Any) -> BaseProcess:
        """See `actors.breakable`."""
        given = {"model": str(model), "grpc": self.grpc_port, "metrics": self.metrics_port, "map": str(self.map)}
        return self._start(actors.breakable, given | settings, grouped=True)

    def watch(self, *, user: int = 0) -> BaseProcess:
        """residencyd, which looks anew for every scrape."""
        options = {
            "map_pattern": str(self.map), "proc": "/proc", "cgroup_root": None, "floor_seconds": 0.0,
            "deep_share": 1.0, "host_pids": False, "metrics_address": f"127.0.0.1:{self.residency_port}",
            "grpc_address": "127.0.0.1:0", "log_level": "info", "log_text": False, "grace_seconds": 1.0,
        }  # fmt: skip
        return self._start(actors.residencyd, user, options, grouped=False)

    async def until_serving(self, *, seconds: float = 120) -> None:
        """Waits for the model."""
        limit = time.monotonic() + seconds
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            stub = pb_grpc.InferenceServiceStub(channel)
            while True:
                try:
                    info = await stub.GetInfo(pb.GetInfoRequest(), wait_for_ready=True, timeout=seconds)
                    if info.state == pb.SERVICE_STATE_SERVING:
                        return
                except grpc.aio.AioRpcError:
                    pass
                assert time.monotonic() < limit, f"{self.name} does not serve: {self.said()}"
                await asyncio.sleep(POLL_SECONDS)

    async def ask(self, **fields: Any) -> grpc.StatusCode:
        """One small request; answers how it ended."""
        asked: dict[str, Any] = {
            "prompt": "a moving seven", "steps": 4, "seed": 7, "outputs": [pb.OUTPUT_FORMAT_LATENTS],
            "size": pb.Size(width=32, height=32),
        }  # fmt: skip
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            call = pb_grpc.InferenceServiceStub(channel).Generate(pb.GenerateRequest(**(asked | fields)))
            try:
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    def page(self) -> dict[str, float]:
        """The model process's series as they stand on its page."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        split = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in split}

    def said(self) -> str:
        """The end of its logs."""
        return "\n".join(path.read_text()[-1500:] for path in sorted(self.folder.glob("log-*")))

    def end(self) -> None:
        """Ends its processes."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


class Load:
    """Requests that keep coming while the block runs."""

    def __init__(self, pod: Pod, requests: Iterator[dict[str, Any]], *, pause_seconds: float) -> None:
        self._pod, self._requests, self._pause_seconds = pod, requests, pause_seconds
        self.codes: list[grpc.StatusCode] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Load":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        for fields in self._requests:
            self.codes.append(await self._pod.ask(**fields))
            await asyncio.sleep(self._pause_seconds)
