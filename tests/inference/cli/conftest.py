import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sojourn.inference import cli

# What a run of the command left: its exit status, stdout, stderr.
Run = tuple[int, str, str]


@pytest.fixture
def sojourn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    """Runs the `sojourn` command in this process."""

    def run(*arguments: object) -> Run:
        monkeypatch.setattr(sys, "argv", ["sojourn", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        return int(exit_.value.code or 0), out, err

    return run


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def wait_until_serving(address: str, process: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + 90
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while process.poll() is None and time.monotonic() < limit:
            with contextlib.suppress(grpc.RpcError):
                if health.Check(health_pb2.HealthCheckRequest(), timeout=1).status == 1:
                    return
            time.sleep(0.1)
    raise AssertionError("the server did not become ready")


@pytest.fixture(scope="session")
def served(tiny_folder: Path) -> Iterator[str]:
    """Address of `sojourn serve` on the tiny model, in a process of its own that must end well."""
    address = free_address()
    command = [sys.executable, "-m", "sojourn.inference.cli", "serve", "--model", str(tiny_folder), "--listen", address]
    process = subprocess.Popen([*command, "--metrics-listen", "off"])
    try:
        wait_until_serving(address, process)
        yield address
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0
