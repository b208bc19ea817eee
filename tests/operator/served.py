"""A served model for pods that no kubelet runs: the real inference server and the real residencyd, on one address.

The control plane has no nodes; a pod whose status says that it runs at this address is asked there by the operator.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import create_connection

from sojourn.operator.credentials import Caller
from sojourn.operator.observe import summarise
from sojourn.operator.pods import RESIDENCYD_PORT, look

from tests.kubernetes import ROOT

# The default of a DiffusionService.
GRPC_PORT = 50051


def own_address() -> str:
    """A loopback address that no other run of these tests takes."""
    pid = os.getpid()
    return f"127.{100 + pid // 65536 % 100}.{pid // 256 % 256}.{1 + pid % 250}"


@dataclass
class Model:
    """The running pair.

    Attributes:
        address: where both listen.
    """

    address: str
    inference: "subprocess.Popen[bytes]"
    residencyd: "subprocess.Popen[bytes]"

    def wait_serving(self, log: Path, seconds: float = 120) -> None:
        """Until the model is loaded and residencyd sees it."""
        deadline = time.monotonic() + seconds
        pod = {"metadata": {"name": "model"}, "status": {"podIP": self.address}}
        while True:
            view = summarise(asyncio.run(look([pod], Caller(GRPC_PORT))))
            if view.serving == "True" and view.residency:
                return
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """The model's process is stopped: its port is open and nobody answers."""
        self.inference.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.inference.send_signal(signal.SIGCONT)


@contextmanager
def served(folder: Path, address: str, *flags: str) -> Iterator[Model]:
    """Serves a tiny model until the context ends."""
    (folder / "map").mkdir(parents=True, exist_ok=True)
    environ = os.environ | {
        "PYTHONPATH": ":".join(str(ROOT / part) for part in ("proto", "inference", "residencyd")),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SOJOURN_COMPONENT_MAP": str(folder / "map/component-map.pb"),
    }
    with (folder / "model.log").open("ab") as log:
        inference = _started(
            ("sojourn.inference.cli", "serve", f"--model={ROOT / 'models/h3-digits'}", *flags),
            (f"--listen={address}:{GRPC_PORT}", f"--metrics-listen={address}:9464"),
            environ, log,
        )  # fmt: skip
        residencyd = _started(
            ("sojourn.residencyd.cli", "serve", f"--map={folder / 'map'}", "--floor-seconds=0.5"),
            (f"--grpc-address={address}:{RESIDENCYD_PORT}", f"--metrics-address={address}:9465"),
            environ, log,
        )  # fmt: skip
        try:
            for port in (GRPC_PORT, RESIDENCYD_PORT):
                _wait_for(address, port, folder / "model.log")
            model = Model(address, inference, residencyd)
            model.wait_serving(folder / "model.log")
            yield model
        finally:
            for process in (inference, residencyd):
                process.kill()
                process.wait()


def _started(
    module: tuple[str, ...], addresses: tuple[str, ...], environ: dict[str, str], log: object
) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", *module, *addresses]
    return subprocess.Popen(command, env=environ, stdout=log, stderr=log)  # type: ignore[call-overload,no-any-return]


def _wait_for(address: str, port: int, log: Path, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            create_connection((address, port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
