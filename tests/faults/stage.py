"""What faults are played on: pods of real processes.

A pod is a model process and a residencyd beside it, each scraped with the labels that Kubernetes would give them.
"""

import asyncio
import multiprocessing
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import grpc.aio
from sojourn.v1 import inference_pb2 as pb
from sojourn.v1 import inference_pb2_grpc as pb_grpc

from tests.faults import actors
from tests.faults.prometheus import POLL_SECONDS, free_port

NAMESPACE = "studio"

# The processes of all pods are forked from one that has imported everything.
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["tests.faults.actors"])


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

    async def until_serving(self, *, seconds: float = 240) -> None:
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
