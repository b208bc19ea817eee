"""What the AdaLN plan cache costs and saves, on a transformer shaped like MiniMax-H3: 50 layers, 40 % AdaLN.

Every figure is a ratio of medians over interleaved rounds of one run, so that a machine that slows down slows both
sides. The model is random, bfloat16, 3.5 GB on disk, and lies in a temporary folder.

- read: bytes read for a build, against the bytes of the projections.
- build cold, build warm: bytes per second of a build against a plain sequential read of the same bytes, from the disk
  and from the page cache. A build also projects every plan, with the bits of the stock products, which each take the
  whole weights with the rows of one plan: what these products take alone, on weights that lie in memory, is set beside
  a warm build. --steps says how many plans there are.
- swap-in: bytes per second from host pages into the slab, against a plain copy of as many bytes; rows are as large as
  those of MiniMax-H3 (9.7 MB).
- hit: seconds that the cache adds to a request whose rows are held (preparing, hooks, look-ups), in the request's own.
- store: seconds to find and map a stored schedule of 50 plans, without reading its rows.
- memory: how much lower the peak of resident memory is with the cache, over two schedules, against what the projections
  take beyond the slab. Two processes of their own.

    python bench/adaln.py [--steps 8] [--rounds 5] [--threads N] [--json]
"""

import argparse
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCES = [str(ROOT / folder) for folder in ("proto", "inference", "residencyd", "operator")]
sys.path[:0] = SOURCES
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from diffusers import MiniMaxH3Scheduler, MiniMaxH3Transformer3DModel  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from sojourn.inference.adaln.cache import PlanCache  # noqa: E402
from sojourn.inference.adaln.caches import PlanCaches  # noqa: E402
from sojourn.inference.adaln.counters import Counters, Result  # noqa: E402
from sojourn.inference.adaln.families import MINIMAX_H3  # noqa: E402
from sojourn.inference.adaln.family import Inputs  # noqa: E402
from sojourn.inference.adaln.host import HostTier  # noqa: E402
from sojourn.inference.adaln.lanes import Lanes  # noqa: E402
from sojourn.inference.adaln.layers import Layer, Piece  # noqa: E402
from sojourn.inference.adaln.piece_buffer import PieceBuffer  # noqa: E402
from sojourn.inference.adaln.plans import Plan  # noqa: E402
from sojourn.inference.adaln.products import Job  # noqa: E402
from sojourn.inference.adaln.replace import projections_of  # noqa: E402
from sojourn.inference.adaln.schedules import Schedule, forwards_of  # noqa: E402
from sojourn.inference.adaln.settings import Mode, PlanCacheSettings  # noqa: E402
from sojourn.inference.adaln.slab import Slab  # noqa: E402
from sojourn.inference.adaln.table import Table  # noqa: E402
from sojourn.inference.loading.components import Component, build_component  # noqa: E402
from sojourn.inference.loading.folder import ComponentFolder, ComponentKind  # noqa: E402
from sojourn.inference.loading.safetensors_file import read_safetensors  # noqa: E402
from sojourn.inference.pipeline import DeviceChoice, load_pipeline  # noqa: E402
from sojourn.inference.requests import GenerationRequest, OutputFormat, Workflow  # noqa: E402
from sojourn.inference.watch import Watch  # noqa: E402

DIGITS = ROOT / "models" / "h3-digits"
CPU = torch.device("cpu")
# MiniMax-H3 at 1280/5376 of its width: the shares of attention, feed-forward and AdaLN stay what they are.
CONFIG = {
    "num_attention_heads": 10, "attention_head_dim": 128, "hidden_size": 1280, "num_layers": 50,
    "num_refiner_layers": 1, "ffn_dim": 3413, "in_channels": 16, "audio_in_channels": 8, "text_dim": 64, "freq_dim": 64,
    "time_embed_hidden_dim": 1280, "time_embed_dim": 640, "rope_freq_dim": 16,
}  # fmt: skip
READ_BYTES = 8 << 20


@dataclass(frozen=True)
class Figure:
    """One figure beside its goal.

    Attributes:
        ours, theirs: What the ratio is made of, in `unit`.
        at_least: Whether the goal is a lower bound; an upper one otherwise.
    """

    name: str
    unit: str
    ours: float
    theirs: float
    ratio: float
    goal: float | None
    at_least: bool = True

    @property
    def met(self) -> bool:
        """Whether the goal is reached; true where there is none."""
        if self.goal is None:
            return True
        return self.ratio >= self.goal if self.at_least else self.ratio <= self.goal


def write_model(folder: Path) -> ComponentFolder:
    """Random weights of the bench model, all in bfloat16."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in MiniMaxH3Transformer3DModel(**CONFIG).state_dict().items()}
    draw = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.05, 0.05, generator=draw)
        for name, shape in shapes.items()
    }
    path = folder / "diffusion_pytorch_model.safetensors"
    save_file(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return model_at(folder)


def model_at(folder: Path) -> ComponentFolder:
    return ComponentFolder(
        name="transformer", library="diffusers", class_name="MiniMaxH3Transformer3DModel", kind=ComponentKind.MODEL,
        path=folder, config=CONFIG, files=(read_safetensors(folder / "diffusion_pytorch_model.safetensors"),),
    )  # fmt: skip


def load(folder: ComponentFolder, settings: PlanCacheSettings, counters: Counters) -> tuple[Component, PlanCaches]:
    caches = PlanCaches(settings, CPU, counters)
    component = build_component(folder, dtype=torch.bfloat16, device=CPU, leave_out=caches.leave_out(folder))
    caches.open({folder.name: component})
    return component, caches


def schedule(steps: int, flow_shift: float = 12.0) -> list[Inputs]:
    """What a t2va request of so many steps hands to its forwards."""
    schedulers = (MiniMaxH3Scheduler(shift=flow_shift), MiniMaxH3Scheduler(shift=3.0))
    return forwards_of(Schedule(workflow=Workflow.T2VA, steps=steps), schedulers)


def projection_ranges(folder: ComponentFolder) -> list[tuple[int, int]]:
    """Offset and length of every projection's tensors, in the order of the file."""
    (file,) = folder.files
    found = [
        (file.data_offset + info.begin, info.size_bytes)
        for name, info in file.tensors.items()
        if ".adaln_proj.linear." in name or name.startswith("norm_out.linear.")
    ]
    return sorted(found)


def plain_read(path: Path, ranges: list[tuple[int, int]]) -> None:
    """The same bytes by pread into one buffer, in order: as fast as one thread can have them.

    The buffer begins with a page. A copy to slightly beyond where its source lies in a page takes two to five times as
    long (into a bytearray, 16 bytes into its page, from 0 and from 8 bytes into one: 0.048 and 0.125 s for 0.026 s).
    """
    with mmap.mmap(-1, READ_BYTES) as buffer, path.open("rb", buffering=0) as file, memoryview(buffer) as whole:
        for offset, length in ranges:
            for start in range(offset, offset + length, READ_BYTES):
                with whole[: min(READ_BYTES, offset + length - start)] as piece:
                    os.preadv(file.fileno(), [piece], start)


def drop_from_page_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def rounds_of(count: int, *sides: Callable[[], float]) -> list[float]:
    """The median of each side over interleaved rounds, after one that does not count.

    Each round takes the sides in another order: a disk is faster or slower for what came before.
    """
    times: list[list[float]] = [[] for _ in sides]
    draw = random.Random(0)
    for _ in range(count + 1):
        for index in draw.sample(range(len(sides)), len(sides)):
            times[index].append(sides[index]())
    return [statistics.median(side[1:]) for side in times]


class Builds:
    """Builds on the bench model, and what they are compared with."""

    def __init__(self, folder: ComponentFolder, steps: int, rounds: int) -> None:
        self._counters = Counters()
        settings = PlanCacheSettings(mode=Mode.ON, plans=64, width=2, host_bytes=0)
        _, caches = load(folder, settings, self._counters)
        self._cache = caches.transformers["transformer"].cache
        self._path, self._ranges = folder.files[0].path, projection_ranges(folder)
        self._schedules = [schedule(steps)[-1:], schedule(steps)]
        self._rounds = 2 * rounds

    def bytes_figure(self) -> Figure:
        """What a build reads."""
        before = self._counters.read_bytes
        self._build(self._schedules[-1])
        total = sum(length for _, length in self._ranges)
        read = self._counters.read_bytes - before
        return Figure("bytes read per build", "MB", *megabytes(read, total), 1.0, at_least=False)

    def warm_figures(self) -> Iterator[Figure]:
        """From the page cache."""
        for forwards in self._schedules:
            conditioning = conditioning_of(self._cache, forwards)
            products, loop = (side(self._cache, conditioning) for side in (stock_products, bare_loop))
            ours, theirs, stock, least = rounds_of(
                self._rounds, *map(self._warm, (partial(self._build, forwards), self._read, products, loop))
            )
            yield Figure(f"build warm, {plans(forwards)}", "s", ours, theirs, theirs / ours, 0.9)
            yield Figure("  against the stock products", "s", ours, stock, stock / ours, None)
            yield Figure("  against a bare loop", "s", ours, least, least / ours, None)

    def cold_figures(self) -> Iterator[Figure]:
        """From the disk."""
        for forwards in self._schedules:
            ours, theirs = rounds_of(self._rounds, *map(self._cold, (partial(self._build, forwards), self._read)))
            yield Figure(f"build cold, {plans(forwards)}", "s", ours, theirs, theirs / ours, 0.9)

    def _build(self, forwards: list[Inputs]) -> None:
        self._cache.invalidate()
        self._cache.prepare(forwards).release()

    def _read(self) -> None:
        plain_read(self._path, self._ranges)

    def _warm(self, side: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            self._read()
            return seconds(side)

        return run

    def _cold(self, side: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            drop_from_page_cache(self._path)
            return seconds(side)

        return run


def plans(forwards: list[Inputs]) -> str:
    return f"{len(forwards)} plan{'s' * (len(forwards) > 1)}"


def conditioning_of(cache: PlanCache, forwards: list[Inputs]) -> list[Mapping[str, torch.Tensor]]:
    """What the projections read, plan by plan."""
    plans = [plan for inputs in forwards for plan in cache.family.plans(inputs)]
    return [cache.projector.embed(plan, CPU) for plan in plans]


def stock_products(cache: PlanCache, conditioning: list[Mapping[str, torch.Tensor]]) -> Callable[[], None]:
    """The stock matrix products alone, on weights in memory."""
    weights = {layer.name: [tensor.clone() for tensor in read_whole(cache, layer)] for layer in cache.projector._layers}

    def run() -> None:
        for name, (weight, bias) in weights.items():
            for read in conditioning:
                torch.nn.functional.linear(read[name], weight, bias)

    return run


def read_whole(cache: PlanCache, layer: Layer) -> list[torch.Tensor]:
    """Weight and bias of a layer."""
    return [read_piece(cache, piece, PieceBuffer([piece], CPU)) for piece in (*layer.undivided, layer.biases) if piece]


def read_piece(cache: PlanCache, piece: Piece, buffer: PieceBuffer) -> torch.Tensor:
    spot = buffer.spot(piece)
    cache.projector._source.read(piece.part, spot.target)
    return spot.tensor


def bare_loop(cache: PlanCache, conditioning: list[Mapping[str, torch.Tensor]]) -> Callable[[], None]:
    """Copies of the weights alone, and one product of each, on the lanes of a build."""
    layers = cache.projector._layers
    rows = {layer.name: torch.cat([read[layer.name] for read in conditioning]) for layer in layers}
    pieces = [(layer.name, piece) for layer in layers for piece in layer.pieces]
    lanes = Lanes.among(cache.slab.table.weight_bytes, CPU)
    buffers = [PieceBuffer([piece for _, piece in pieces], CPU) for _ in range(max(1, lanes.count))]

    def run() -> None:
        waiting, free = iter(pieces), list(buffers)

        def work() -> None:
            buffer = free.pop()
            while taken := next(waiting, None):  # one step of the interpreter: safe between threads
                name, piece = taken
                torch.nn.functional.linear(rows[name], read_piece(cache, piece, buffer))

        lanes.run_on_all(work)

    return run


def megabytes(ours: int, theirs: int) -> tuple[float, float, float]:
    return ours / 1e6, theirs / 1e6, ours / theirs


class Painter:
    """Stands for a projector where only copies matter: fills every row with the number of its slot."""

    def embed(self, plan: Plan, device: torch.device) -> dict[torch.dtype, torch.Tensor]:  # noqa: D102
        return {}

    def check_source(self) -> None:  # noqa: D102
        pass

    def project_own(self, jobs: list[Job], slab: Slab, check: Callable[[], None]) -> None:  # noqa: D102
        for job in jobs:
            for rows in slab.rows.values():
                rows[job.slot].fill_(job.slot)

    def exchange_buffers(self, jobs: list[Job], slab: Slab) -> dict[torch.dtype, torch.Tensor]:  # noqa: D102
        return {}

    def share(self, jobs: list[Job], slab: Slab, buffers: dict[torch.dtype, torch.Tensor]) -> None:  # noqa: D102
        pass


def swap_in_figure(rounds: int) -> Figure:
    """Two schedules that take turns in a slab of one's size, both in host pages; rows as large as MiniMax-H3's."""
    with torch.device("meta"):
        transformer = MiniMaxH3Transformer3DModel()
    table = Table.of(projections_of(transformer, MINIMAX_H3, lambda name: torch.bfloat16))
    turns = [schedule(13), schedule(13, flow_shift=5.0)]
    cache = PlanCache(
        family=MINIMAX_H3, slab=Slab(table, plans=12, width=2, device=CPU), projector=Painter(),
        observer=Counters(), host=HostTier(table, 48),
    )  # fmt: skip
    for forwards in turns:
        cache.prepare(forwards).release()

    def swap_in() -> float:
        turns.reverse()
        return seconds(lambda: cache.prepare(turns[0]).release())

    rows = sum(inputs["timestep"].numel() for inputs in turns[0])
    source = torch.ones(rows, table.row_elements[torch.bfloat16], dtype=torch.bfloat16)
    target = torch.zeros_like(source)
    ours, theirs = rounds_of(4 * rounds, swap_in, lambda: seconds(lambda: target.copy_(source)))
    assert cache.observer.requests[Result.BUILT] == 2, "every turn but the first two is a swap-in"
    return Figure("swap-in against memcpy", "s", ours, theirs, theirs / ours, 0.8)


def store_figure(folder: ComponentFolder, rounds: int, scratch: Path) -> Figure:
    counters = Counters()
    settings = PlanCacheSettings(mode=Mode.ON, plans=64, width=2, host_bytes=0, store=scratch)
    _, caches = load(folder, settings, counters)
    cache = caches.transformers["transformer"].cache
    forwards = schedule(51)
    cache.prepare(forwards).release()
    plans = [plan for inputs in forwards for plan in cache.family.plans(inputs)]
    assert cache.store is not None
    assert cache.store.find(plans) is not None
    store = cache.store
    (ours,) = rounds_of(4 * rounds, lambda: seconds(lambda: store.find(plans)))
    return Figure(f"store maps {len(plans)} plans", "s", ours, 0.010, ours / 0.010, 1.0, at_least=False)


@contextmanager
def timed(*methods: tuple[Any, str]) -> Iterator[list[float]]:
    """Collects the seconds that methods take; those that call each other are not to be named together."""
    spent: list[float] = []
    originals = [(owner, name, getattr(owner, name)) for owner, name in methods]

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent.append(time.perf_counter() - began)

        return run

    for owner, name, original in originals:
        setattr(owner, name, wrapped(original))
    try:
        yield spent
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def hit_figure(rounds: int) -> Figure:
    """A whole request of the shipped model, latents to mp4's frames, on rows that are held."""
    settings = PlanCacheSettings(mode=Mode.ON, host_bytes=0)
    pipeline = load_pipeline(DIGITS, device=DeviceChoice.CPU, plan_settings=settings)
    cached = pipeline.plans.transformers["transformer"]
    request = GenerationRequest(
        prompt="a moving seven", workflow=Workflow.T2VA, width=64, height=64, frames=124, steps=20, flow_shift=12.0,
        audio_flow_shift=3.0, seeds=(1,), outputs=(OutputFormat.MP4,),
    )  # fmt: skip

    def run() -> float:
        return seconds(lambda: pipeline.run_clip(request, 0, Watch(clock=time.monotonic)))

    run()
    shares: list[tuple[float, float]] = []
    for _ in range(rounds):
        with timed((cached, "prepare"), (cached._cursor, "begin"), (cached._cursor, "rows")) as spent:
            whole = run()
        shares.append((sum(spent), whole))
    ours, theirs = (statistics.median(column) for column in zip(*shares, strict=True))
    return Figure("hit, share of a request", "s", ours, theirs, ours / theirs, 0.005, at_least=False)


def peak_bytes(folder: Path, mode: Mode, plans: int) -> tuple[int, int, int]:
    """Peak of resident memory of a process of its own; weight and slab bytes of its cache."""
    command = [sys.executable, __file__, "--child", str(folder), "--mode", mode.value, "--plans", str(plans)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(SOURCES), "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    peak, weights, slab = json.loads(output.splitlines()[-1])
    return peak, weights, slab


def child(folder: Path, mode: Mode, plans: int) -> None:
    """Two requests of different schedules on the bench model; prints what `peak_bytes` reads."""
    settings = PlanCacheSettings(mode=mode, plans=plans, width=2, host_bytes=0)
    component, caches = load(model_at(folder), settings, Counters())
    cache = caches.transformers["transformer"].cache if caches.transformers else None
    for flow_shift in (12.0, 5.0):
        forwards = schedule(plans + 1, flow_shift)
        lease = cache.prepare(forwards) if cache else None
        for inputs in forwards:
            forward(component.value, inputs["timestep"])
        if lease is not None:
            lease.release()
    status = Path("/proc/self/status").read_text().splitlines()
    peak = int(next(line for line in status if line.startswith("VmHWM:")).split()[1]) * 1024
    print(json.dumps([peak, cache.slab.table.weight_bytes if cache else 0, cache.slab.nbytes if cache else 0]))


@torch.no_grad()
def forward(transformer: Any, timestep: torch.Tensor) -> None:
    """One forward over a short packed sequence: 8 rows of text, 8 of video, 8 of audio."""
    rows = torch.arange(24)
    transformer(
        hidden_states=torch.zeros(1, 8, CONFIG["in_channels"] * 4),
        audio_hidden_states=torch.zeros(1, 8, CONFIG["audio_in_channels"]),
        encoder_hidden_states=torch.zeros(1, 8, CONFIG["text_dim"]),
        timestep=timestep,
        timestep_indices=rows % timestep.numel(),
        token_tags=torch.tensor([1] * 8 + [0] * 8 + [2] * 8),
        position_ids=torch.zeros(24, 3),
        video_indices=rows[8:16],
        audio_indices=rows[16:],
        text_indices=rows[:8],
    )


def memory_figure(folder: Path) -> Figure:
    off, _, _ = peak_bytes(folder, Mode.OFF, 7)
    on, weights, slab = peak_bytes(folder, Mode.ON, 7)
    return Figure("peak memory saved", "MB", *megabytes(off - on, weights - slab), 0.95)


def figures(steps: int, rounds: int) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(Path(scratch))
        builds = Builds(folder, steps, rounds)
        # Read from the disk once: read-ahead keeps it in larger pieces than the write left it in, as any node would.
        drop_from_page_cache(folder.files[0].path)
        yield builds.bytes_figure()
        yield from builds.warm_figures()
        yield store_figure(folder, rounds, Path(scratch) / "store")
        yield memory_figure(Path(scratch))
        # Last, when the disk is done with what was written.
        yield from builds.cold_figures()
    yield swap_in_figure(rounds)
    yield hit_figure(rounds)


def show(found: list[Figure]) -> None:
    print(f"{'figure':<36}{'ours':>12}{'theirs':>12}{'':>4}{'ratio':>10}{'goal':>10}")
    for figure in found:
        goal = "" if figure.goal is None else f"{'≥' if figure.at_least else '≤'} {figure.goal:g}"
        mark = "" if figure.met else "  short"
        sides = f"{figure.ours:>12.4g}{figure.theirs:>12.4g}{figure.unit:>4}"
        print(f"{figure.name:<36}{sides}{figure.ratio:>10.4f}{goal:>10}{mark}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="of the schedule that is built; default 8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch; default: its own")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--mode", type=Mode, default=Mode.ON, help=argparse.SUPPRESS)
    parser.add_argument("--plans", type=int, default=7, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child, options.mode, options.plans)
        return 0
    torch.set_num_threads(options.threads)
    found = list(figures(options.steps, options.rounds))
    if options.json:
        print(json.dumps([asdict(figure) | {"met": figure.met} for figure in found], indent=2))
    else:
        show(found)
    return 0 if all(figure.met for figure in found) else 1


if __name__ == "__main__":
    sys.exit(main())
