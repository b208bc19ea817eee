"""docs/residency-{dark,light}.png and docs/top.svg, from the running demo model.

python -m tools.screenshots   needs node, npm, chromium, and prometheus (`make prometheus`)
"""

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import yaml
from rich.console import Console
from sojourn.residencyd import tables
from sojourn.residencyd.scanner import Scanner
from sojourn.residencyd.settings import Settings
from sojourn.v1 import inference_pb2 as pb
from sojourn.v1 import inference_pb2_grpc as pb_grpc

from tools import prometheus
from tools.demo import MODEL, RESIDENCYD, ROOT, SOJOURN, free_address, wait_until_serving

HERE = Path(__file__).resolve().parent
DOCS = ROOT / "docs"
BOARD = ROOT / "charts/sojourn/dashboards/residency.json"
POD = {"namespace": "studio", "pod": "dsvc-digits-0"}
SCRAPE_SECONDS = 1
CYCLES, PAUSE_SECONDS = 5, 6.0
# Enough before the first request to see that nothing happens.
QUIET_SECONDS = 8.0
# Down to the first panels of headroom; what follows is of interest in trouble only.
GRID_ROWS = 48
TOP_COLUMNS = 104

# As rich has it, without the font that it would fetch from the net.
SVG_FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", ui-monospace, Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: arial, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def require(name: str) -> Path:
    """A program of this machine.

    Raises:
        SystemExit: It is not there.
    """
    found = shutil.which(name) if name != "prometheus" else prometheus.program(name)
    if found is None:
        raise SystemExit(f"no {name}: install it ({prometheus.MISSING if name == 'prometheus' else 'on PATH'})")
    return Path(found)


def configuration(metrics: str, residency: str) -> str:
    """Of Prometheus: both processes, with the labels that Kubernetes would give them."""
    targets = [
        {"targets": [address], "labels": POD | {"container": container}}
        for address, container in ((metrics, "inference"), (residency, "residencyd"))
    ]
    jobs = [{"job_name": "pods", "honor_labels": True, "static_configs": targets}]
    return yaml.safe_dump({"global": {"scrape_interval": f"{SCRAPE_SECONDS}s"}, "scrape_configs": jobs})


@contextlib.contextmanager
def started(*command: str | Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that ends with the block; what it says is not shown."""
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def ask(address: str, seed: int) -> None:
    """One request as the demo makes it."""
    message = pb.GenerateRequest(prompt="a moving seven", steps=12, seed=seed, outputs=[pb.OUTPUT_FORMAT_MP4])
    with grpc.insecure_channel(address) as channel:
        for _ in pb_grpc.InferenceServiceStub(channel).Generate(message):
            pass


class Top:
    """`residencyd top`, looked at now and then."""

    def __init__(self, maps: Path) -> None:
        self._scanner = Scanner(Settings(map_pattern=str(maps), floor_seconds=0.0, deep_share=1e9))
        self._history: list[float] = []

    def look(self) -> None:
        """Remembers how much was resident."""
        self._snapshot = self._scanner.snapshot(time.time())
        self._history.append(sum(part.resident_bytes for seen in self._snapshot.seen for part in seen.components))

    def svg(self) -> str:
        """The last look, as the terminal shows it."""
        console = Console(record=True, width=TOP_COLUMNS, file=io.StringIO(), force_terminal=True)
        console.print(tables.residency(self._snapshot, width=TOP_COLUMNS, history=self._history))
        return console.export_svg(title="residencyd top", code_format=SVG_FORMAT, unique_id="top")


def play(address: str, top: Top) -> None:
    """Requests, with pauses between them."""
    for cycle in range(CYCLES):
        ask(address, seed=cycle)
        end = time.monotonic() + PAUSE_SECONDS
        while time.monotonic() < end:
            top.look()
            time.sleep(1)


def shoot(url: str, theme: str, *, end: float, seconds: float) -> None:
    """Draws the board."""
    query: dict[str, Any] = {"theme": theme, "end": int(end), "range": int(seconds), "scrape": SCRAPE_SECONDS}
    text = "&".join(f"{name}={value}" for name, value in (query | {"width": 1500, "rows": GRID_ROWS}).items())
    out = DOCS / f"residency-{theme}.png"
    subprocess.run([require("node"), HERE / "shoot.mjs", url, BOARD, out, text], check=True, env=os.environ)
    print(out.relative_to(ROOT))


def main() -> int:
    """Command line; returns the exit status."""
    programs = {name: require(name) for name in ("node", "npm", "chromium", "prometheus")}
    if not (HERE / "node_modules").exists():
        install = [programs["npm"], "ci", "--legacy-peer-deps", "--ignore-scripts", "--no-audit", "--no-fund"]
        subprocess.run(install, cwd=HERE, check=True)
    address, metrics, residency, web = (free_address() for _ in range(4))
    with tempfile.TemporaryDirectory() as text, contextlib.ExitStack() as stack:
        folder = Path(text)
        (maps := folder / "maps").mkdir()
        (folder / "prometheus.yml").write_text(configuration(metrics, residency))
        served = stack.enter_context(
            started(*SOJOURN, "serve", "--model", MODEL, "--listen", address, "--metrics-listen", metrics,
                    "--component-map", maps / "digits.pb")
        )  # fmt: skip
        stack.enter_context(
            started(*RESIDENCYD, "serve", "--map", maps, "--metrics-address", residency,
                    "--grpc-address", "127.0.0.1:0", "--floor-seconds", "0", "--deep-share", "1")
        )  # fmt: skip
        wait_until_serving(address, served)
        stack.enter_context(
            started(programs["prometheus"], f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={web}")
        )  # fmt: skip
        begun = time.time()
        time.sleep(QUIET_SECONDS)
        play(address, top := Top(maps))
        end = time.time()
        (DOCS / "top.svg").write_text(top.svg())
        print("docs/top.svg")
        for theme in ("dark", "light"):
            shoot(f"http://{web}", theme, end=end, seconds=end - begun)
    return 0


if __name__ == "__main__":
    sys.exit(main())
