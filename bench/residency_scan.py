"""What a look at a model process costs, beside the ways that others take for the same answer.

The target has thousands of mappings, 200 of which are ranges of weights that cannot be joined, 64 MiB of resident
weights and 64 MiB of resident anonymous memory in small pages. The answer is: resident bytes of each component, by
tier, and what is nobody's. Ratios are of times taken in turn in one run; times are CPU seconds of the looking thread.
What a GiB more would cost is measured apart, on 1 GiB of small pages: there the kernel walks for all of them.

    python bench/residency_scan.py            a table beside the goals; exit 1 when short
    python bench/residency_scan.py --json     the figures

On a machine that does other work the last figure, the target's own latency, says little.
"""

import argparse
import contextlib
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "proto"), str(ROOT / "residencyd")]

import psutil  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from sojourn.residencyd import attribution  # noqa: E402
from sojourn.residencyd.attribution import ComponentBytes, Piece, Unattributed  # noqa: E402
from sojourn.residencyd.deep import UNWRITTEN_LOOKS, Shape, count_pieces, shapes_of, unwritten_of  # noqa: E402
from sojourn.residencyd.kernel import atomic_file  # noqa: E402
from sojourn.residencyd.kernel.maps import Mapping, MapsTable, parse_line  # noqa: E402
from sojourn.residencyd.kernel.mounts import read_mounts  # noqa: E402
from sojourn.residencyd.kernel.pages import PageCounts, PageTable  # noqa: E402
from sojourn.residencyd.kernel.process import PROC, Status, read_stat, read_status  # noqa: E402
from sojourn.residencyd.map_shelf import MapShelf, ShelvedMap  # noqa: E402
from sojourn.residencyd.reading import look_up  # noqa: E402
from sojourn.residencyd.scanner import Scanner  # noqa: E402
from sojourn.residencyd.settings import Settings  # noqa: E402
from sojourn.v1 import residency_pb2 as pb  # noqa: E402

# Bytes of each component by tier, and of nobody.
Answer = tuple[tuple[ComponentBytes, ...], Unattributed]

RANGES = 200
WEIGHTS_BYTES = ANONYMOUS_BYTES = 64 << 20
GIB = 1 << 30
# A sidecar is scraped so often.
INTERVAL_SECONDS = 10

TARGET = """
import ctypes, json, mmap, os, sys, time
path, mappings, ranges, anonymous = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
fd = os.open(path, os.O_RDONLY)
part = os.fstat(fd).st_size // ranges // 4096 * 4096
starts = []
for i in range(ranges):  # each with a hole behind it, so that no two can be joined
    at = libc.mmap(None, part + 8192, 0, 0x22, -1, 0)
    libc.mmap(at, part, 1, 0x12, fd, i * part)
    libc.madvise(at, part, 22)
    starts.append(at)
big = libc.mmap(None, anonymous, 3, 0x22, -1, 0)
libc.madvise(big, anonymous, 15)
libc.madvise(big, anonymous, 23)
filler = max(0, mappings - 2 * ranges - 60)
at = libc.mmap(None, filler * 4096, 3, 0x22, -1, 0)
for i in range(0, filler, 2):  # every other page read-only: that many mappings
    libc.mprotect(at + i * 4096, 4096, 1)
print(json.dumps([starts, part, big]), flush=True)
for line in sys.stdin:  # how long mmap, touch and munmap of 64 KiB take, for so many seconds
    end, taken = time.perf_counter() + float(line), []
    while time.perf_counter() < end:
        begun = time.perf_counter()
        address = libc.mmap(None, 65536, 3, 0x22, -1, 0)
        ctypes.c_char.from_address(address).value = b"x"
        libc.munmap(address, 65536)
        taken.append(time.perf_counter() - begun)
    taken.sort()
    print(json.dumps(taken[len(taken) * 99 // 100]), flush=True)
"""


@dataclass(frozen=True)
class Figure:
    """One figure beside its goal."""

    name: str
    value: float
    goal: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the goal is reached."""
        return self.value >= self.goal if self.at_least else self.value < self.goal


@dataclass(frozen=True)
class Target:
    """A process whose memory is looked at, and the folder that its map is in."""

    process: "subprocess.Popen[str]"
    folder: Path
    starts: tuple[int, ...]
    part_bytes: int

    @property
    def pid(self) -> int:
        """Its id."""
        return self.process.pid

    def latency(self, seconds: float) -> Callable[[], float]:
        """Starts its loop; the result waits for the loop's end and returns the 99th percentile in seconds."""
        assert self.process.stdin
        print(seconds, file=self.process.stdin, flush=True)
        return lambda: float(_line(self.process))


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"the target ended with status {process.wait()}")
    return line


@contextlib.contextmanager
def target(folder: Path, mappings: int, anonymous_bytes: int = ANONYMOUS_BYTES) -> Iterator[Target]:
    """A process with so many mappings that has published its map."""
    weights = folder / "weights"
    if not weights.exists():
        weights.write_bytes(os.urandom(WEIGHTS_BYTES))
    arguments = [str(weights), str(mappings), str(RANGES), str(anonymous_bytes)]
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", TARGET, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        starts, part_bytes, big = json.loads(_line(process))
        maps = folder / f"maps-{process.pid}"
        maps.mkdir()
        publish(maps, process.pid, starts, part_bytes, (big, anonymous_bytes), weights)
        yield Target(process, maps, tuple(starts), part_bytes)
    finally:
        process.kill()
        process.wait()


def publish(
    folder: Path, pid: int, starts: list[int], part_bytes: int, anonymous: tuple[int, int], weights: Path
) -> None:
    """A map of a transformer of 200 mapped ranges, and a text encoder in anonymous memory."""
    file = weights.stat()
    where = {
        "device_major": os.major(file.st_dev),
        "device_minor": os.minor(file.st_dev),
        "inode": file.st_ino,
        "tier": pb.TIER_HOST_MAPPED,
    }
    dit = pb.Component(name="transformer", needed_now=True)
    dit.storages.extend(pb.Storage(address=start, length_bytes=part_bytes, **where) for start in starts)
    encoder = pb.Component(name="text_encoder")
    encoder.storages.add(address=anonymous[0], length_bytes=anonymous[1], tier=pb.TIER_HOST_PAGEABLE)
    claim = pb.ComponentMap(
        schema_version=1, generation=1, pid=pid, start_ticks=read_stat(pid).start_ticks, components=[dit, encoder]
    ).SerializeToString()
    content = pb.ComponentMapFile(crc32=zlib.crc32(claim), component_map=claim).SerializeToString()
    atomic_file.replace(folder / "model.pb", content)


def whole(it: Target) -> Callable[[], Answer]:
    """All that a scrape does: processes, page cache, cgroups, PSI, headroom. Pages are counted every time."""
    scanner = Scanner(Settings(map_pattern=str(it.folder), floor_seconds=0.0, deep_share=1e9))

    def look() -> Answer:
        (found,) = scanner.snapshot(time.time()).processes
        if found.blind_reason or found.unattributed is None:
            raise SystemExit(found.blind_message)
        return found.components, found.unattributed

    return look


def ours(it: Target) -> Callable[[], Answer]:
    """The part of it that smaps could answer too."""
    shelved, file_systems = _published(it)
    unwritten: frozenset[Shape] = frozenset()
    looks = 0

    def look() -> Answer:
        nonlocal unwritten, looks
        status = read_status(it.pid)
        pieces = look_up(it.pid, shelved.ranges, file_systems, proc=PROC)
        shapes = shapes_of(pieces)
        # As in a scrape: every tenth look asks again whether pages were written that may not be.
        believed = unwritten if looks % UNWRITTEN_LOOKS else frozenset()
        looks += 1
        with PageTable(it.pid) as table:
            counts = count_pieces(table, pieces, shapes, believed)
        unwritten = believed or unwritten_of(pieces, shapes, counts)
        return _answer(shelved, list(zip(pieces, counts, strict=True)), status)

    return look


def by_smaps(it: Target) -> Callable[[], Answer]:
    """The same out of smaps."""
    shelved, file_systems = _published(it)
    path, keys = f"/proc/{it.pid}/smaps", (b"Rss:", b"Anonymous:", b"Swap:")

    def look() -> Answer:
        status = read_status(it.pid)
        sizes: dict[Mapping, dict[bytes, int]] = {}
        values: dict[bytes, int] = {}
        with open(path, "rb") as file:
            for line in file:
                if line.startswith(keys):
                    key, size, _ = line.split()
                    values[key] = int(size) * 1024
                elif not line[:1].isupper():
                    values = sizes[parse_line(line[:-1])] = {}
        pieces = attribution.pieces_of(shelved.ranges, MapsTable(tuple(sizes)), file_systems)
        return _answer(shelved, [(piece, _counts(sizes[piece.mapping])) for piece in pieces], status)

    return look


def by_psutil(it: Target) -> Callable[[], Answer]:
    """Every mapping by psutil; and only the transformer out of that, so rather less than the answer."""
    process, starts, expected = psutil.Process(it.pid), frozenset(it.starts), whole(it)()
    transformer = next(part.resident_bytes for part in expected[0] if part.name == "transformer")

    def look() -> Answer:
        rows = process.memory_maps(grouped=False)
        found = sum(row.rss for row in rows if int(row.addr.split("-")[0], 16) in starts)
        if found != transformer:
            raise SystemExit(f"psutil says {found}, we say {transformer}")
        return expected

    return look


def _published(it: Target) -> tuple[ShelvedMap, dict[tuple[int, int], str]]:
    return MapShelf(str(it.folder)).read(it.folder / "model.pb"), dict(read_mounts(it.pid))


def _counts(values: dict[bytes, int]) -> PageCounts:
    anonymous = values[b"Anonymous:"]
    return PageCounts(values[b"Rss:"] - anonymous, anonymous, values[b"Swap:"])


def _answer(shelved: ShelvedMap, counted: list[tuple[Piece, PageCounts]], status: Status) -> Answer:
    parts = attribution.attribute(shelved.claim.components, shelved.claimed_bytes, counted)
    return parts, attribution.unattributed(status, counted)


def taken(look: Callable[[], Answer]) -> tuple[float, Answer]:
    """CPU seconds of this thread for one look, and its answer."""
    begun = time.thread_time()
    answer = look()
    return time.thread_time() - begun, answer


def in_turn(looks: dict[str, Callable[[], Answer]], rounds: int) -> dict[str, list[float]]:
    """Times of several ways, taken in turn. All must give one answer."""
    times: dict[str, list[float]] = {name: [] for name in looks}
    for _ in range(rounds):
        answers = []
        for name, look in looks.items():
            seconds, answer = taken(look)
            times[name].append(seconds)
            answers.append(answer)
        if any(answer != answers[0] for answer in answers):
            raise SystemExit(f"the ways disagree: {answers}")
    return times


def percentile(values: list[float], share: float) -> float:
    """The value that this share of values is not above."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def measure_looks(folder: Path, rounds: int) -> list[Figure]:
    """Ratios at 2000 mappings, tails at 2000 and 10 000."""
    figures = []
    for mappings, goal in ((2_000, 0.005), (10_000, 0.015)):
        with target(folder, mappings) as it:
            look = whole(it)
            for _ in range(10):
                look()
            times = [taken(look)[0] for _ in range(rounds)]
            figures.append(Figure(f"p99 at {mappings} mappings", percentile(times, 0.99), goal, "s"))
            if mappings == 2_000:
                share = statistics.mean(times) / INTERVAL_SECONDS
                figures.append(Figure(f"share of a core, a look every {INTERVAL_SECONDS} s", share, 0.001, ""))
            both = in_turn({"ours": ours(it), "psutil": by_psutil(it), "smaps": by_smaps(it)}, max(5, rounds // 20))
            least = statistics.median(both["ours"])
            for name, label in (("psutil", "psutil.memory_maps"), ("smaps", "parsing smaps")):
                ratio = statistics.median(both[name]) / least
                figures.append(Figure(f"times faster than {label}, {mappings} mappings", ratio, 10, "×", at_least=True))
    return figures


def measure_walk(folder: Path, rounds: int) -> list[Figure]:
    """What 1 GiB more of small pages adds, beside what it adds to reading smaps."""
    medians = []
    for anonymous_bytes in (ANONYMOUS_BYTES, ANONYMOUS_BYTES + GIB):
        with target(folder, 1_000, anonymous_bytes) as it:
            times = in_turn({"ours": ours(it), "smaps": by_smaps(it)}, max(10, rounds // 20))
            medians.append({name: statistics.median(values) for name, values in times.items()})
    added = {name: medians[1][name] - medians[0][name] for name in medians[0]}
    return [
        Figure("a GiB more of small pages", added["ours"], 0.005, "s"),
        Figure("times faster than smaps a GiB more", added["smaps"] / added["ours"], 2, "×", at_least=True),
    ]


def measure_memory(folder: Path) -> list[Figure]:
    """Resident memory of the whole sidecar after a hundred scrapes."""
    command = [sys.executable, "-m", "sojourn.residencyd.cli", "serve", "--floor-seconds", "0", "--deep-share", "1"]
    command += ["--metrics-address", "127.0.0.1:0", "--grpc-address", "127.0.0.1:0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[:2])}
    with (
        target(folder, 2_000) as it,
        subprocess.Popen(
            [*command, "--map", str(it.folder)], stderr=subprocess.PIPE, text=True, env=environment
        ) as served,
    ):
        try:
            assert served.stderr
            port = re.search(r"metrics on port (\d+)", served.stderr.readline())
            assert port
            for _ in range(100):
                with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/metrics", timeout=60) as answer:
                    answer.read()
            resident = psutil.Process(served.pid).memory_info().rss
        finally:
            served.terminate()
    return [Figure("resident memory of the sidecar", resident / 1e6, 60, "MB")]


def measure_target(folder: Path, windows: int) -> list[Figure]:
    """The target's own latency with a look a second, against none: windows of 3 s, in turn."""
    seconds = 3
    with target(folder, 2_000) as it:
        look = whole(it)
        alone, watched = [], []
        for _ in range(windows):
            alone.append(it.latency(seconds)())
            wait = it.latency(seconds)
            for _ in range(seconds):
                look()
                time.sleep(1 - 0.01)
            watched.append(wait())
    return [Figure("target's p99 latency, watched against alone", min(watched) / min(alone), 1.1, "×")]


def table(figures: list[Figure]) -> Table:
    """Figures beside their goals."""
    made = Table(box=None, pad_edge=False)
    for title in ("figure", "measured", "goal", ""):
        made.add_column(title, justify="left" if title in ("figure", "") else "right")
    for figure in figures:
        sign = "≥" if figure.at_least else "<"
        made.add_row(
            figure.name,
            f"{figure.value:.4g} {figure.unit}",
            f"{sign} {figure.goal:g} {figure.unit}",
            "met" if figure.met else "[bold red]SHORT[/]",
        )
    return made


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    parser.add_argument("--rounds", type=int, default=400, help="looks per target; a twentieth of each other way")
    parser.add_argument("--windows", type=int, default=4, help="windows of the target's latency")
    arguments = parser.parse_args()
    gc.collect()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        figures = measure_looks(folder, arguments.rounds)
        figures += measure_walk(folder, arguments.rounds)
        figures += measure_memory(folder)
        figures += measure_target(folder, arguments.windows)
    if arguments.json:
        print(json.dumps([asdict(figure) | {"met": figure.met} for figure in figures], indent=2))
    else:
        Console().print(table(figures))
    return 0 if all(figure.met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
