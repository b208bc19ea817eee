"""The whole line once: serve the shipped model, ask for a clip through gRPC, look at it.

    python -m tools.demo [--prompt 'a moving seven'] [--seed 7]

Starts `sojourn serve` on a free loopback port, waits until its health says SERVING, runs `sojourn generate` against it,
asks `residencyd` where the server's weights are, and stops it again. Leaves out/demo.mp4 and out/demo.png, a sheet of
every 12th frame.
"""

import argparse
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import av
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "h3-digits"
OUT = ROOT / "out"
# What the server publishes of its weights, for residencyd to hold against the kernel's word.
MAP = OUT / "maps" / "demo.pb"
SOJOURN = (sys.executable, "-m", "sojourn.inference.cli")
RESIDENCYD = (sys.executable, "-m", "sojourn.residencyd.cli")
READY_TIMEOUT_SECONDS = 120.0
SHEET_FRAME_STEP, SHEET_SCALE = 12, 3


def free_address() -> str:
    """A loopback address that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextlib.contextmanager
def serving(address: str) -> Iterator[subprocess.Popen[bytes]]:
    """`sojourn serve` on `address` in a process of its own, stopped by SIGTERM at the end."""
    command = [*SOJOURN, "serve", "--model", str(MODEL), "--listen", address, "--component-map", str(MAP)]
    server = subprocess.Popen([*command, "--metrics-listen", free_address(), "--log-format", "human"])
    try:
        wait_until_serving(address, server)
        yield server
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=30)


def wait_until_serving(address: str, server: subprocess.Popen[bytes]) -> None:
    """Returns when the health service says SERVING.

    Raises:
        SystemExit: The server ended, or is not ready in time.
    """
    deadline = time.monotonic() + READY_TIMEOUT_SECONDS
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline and server.poll() is None:
            with contextlib.suppress(grpc.RpcError):
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=1)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            time.sleep(0.1)
    raise SystemExit("the server did not become ready; its messages are above")


def shown(name: str, program: tuple[str, ...], arguments: list[str]) -> int:
    """Prints a command as one would type it, runs it, returns its exit status."""
    print(name, *arguments, flush=True)
    return subprocess.run([*program, *arguments], check=False).returncode


def contact_sheet(video: Path, sheet: Path) -> None:
    """Puts every 12th frame of `video` side by side into the picture `sheet`."""
    with av.open(str(video)) as container:
        frames = [frame.to_image() for frame in container.decode(video=0)][::SHEET_FRAME_STEP]
    width, height = (edge * SHEET_SCALE for edge in frames[0].size)
    picture = Image.new("RGB", (width * len(frames), height))
    for column, frame in enumerate(frames):
        picture.paste(frame.resize((width, height)), (column * width, 0))
    picture.save(sheet)


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompt", default="a moving seven")
    parser.add_argument("--seed", default="7")
    parser.add_argument("--steps", default="12")
    arguments = parser.parse_args()
    MAP.parent.mkdir(parents=True, exist_ok=True)
    video, address = OUT / "demo.mp4", free_address()
    print(f"sojourn serve --model {MODEL.relative_to(ROOT)} --listen {address}", flush=True)
    with serving(address):
        command = ["generate", arguments.prompt, "-o", str(video), "--server", address]
        command += ["--seed", arguments.seed, "--steps", arguments.steps]
        status = shown("sojourn", SOJOURN, command) or shown(
            "residencyd", RESIDENCYD, ["scan", "--map", str(MAP.parent)]
        )
    if status:
        return status
    contact_sheet(video, OUT / "demo.png")
    print(
        f"{video.relative_to(ROOT)}: {arguments.prompt!r}; {OUT.name}/demo.png shows every {SHEET_FRAME_STEP}th frame"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
