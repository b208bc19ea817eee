"""A model larger than its memory: seconds per step and bytes read per step under a cap, ours beside others.

Makes an H3-shaped transformer (50 layers, bf16, about 2.3 GB, of which 1.0 GB are AdaLN projections; random weights,
seeded) and runs its denoising steps once per contender, each in a process and a control group of its own that is capped
at 2000 MiB, from a cold page cache, those that map the checkpoint from a copy of their own. One contender, the stock
model with all its weights resident, has no cap: it is what the others are measured against. All have the same number of
threads and take turns, a step each, so that whatever else the machine does meets them alike. Every contender computes
the same steps; equal sums mean equal bits.

    python bench/capped_memory.py            # table beside goals; exit code 1 if a goal is missed
    python bench/capped_memory.py --json

Needs a memory controller that it may make a control group in (root, or delegated), v1 or v2; without one it says so and
exits 0. Takes 9 GB of disk (and 4 GB that peers write), 12 GiB of memory and about four minutes. Run it on an otherwise
idle machine.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for part in ("proto", "inference", "residencyd"):
    sys.path.insert(0, str(ROOT / part))

MIB = 1 << 20
CAP_MIB = 2000
WARM_UP, STEPS = 5, 11
# Rows of one step: few, so that a step takes about as long as reading its weights once from memory, which is what is
# measured here. `--rows 12` and `--rows 24` show how computation hides it: the products that the plan cache does not
# replace take a growing share of the step.
ROWS = 6

CONFIG = {
    "num_attention_heads": 10, "attention_head_dim": 128, "hidden_size": 992, "num_layers": 50,
    "num_refiner_layers": 2, "ffn_dim": 2624, "in_channels": 24, "audio_in_channels": 32, "patch_size": (1, 2, 2),
    "text_dim": 992, "freq_dim": 256, "time_embed_hidden_dim": 992, "time_embed_dim": 544, "rope_freq_dim": 16,
}  # fmt: skip

CLASS_NAME = "MiniMaxH3Transformer3DModel"

CONTENDERS = {
    "resident": "stock, resident, no cap",
    "mapped": "plain mapped",
    "accelerate": "accelerate disk offload",
    "diffusers": "diffusers group offload to disk",
    "ours": "ours, without plan cache",
    "cached": "ours, with plan cache",
}


# The model


def make_model(folder: Path) -> None:
    """Writes the checkpoint unless it is there."""
    if (folder / "done").exists():
        return
    import torch
    from diffusers import MiniMaxH3Transformer3DModel
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = MiniMaxH3Transformer3DModel(**CONFIG)
    kept = set(model._keep_in_fp32_modules or ())
    tensors = {}
    for name, parameter in model.state_dict().items():
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:6]))
        dtype = torch.float32 if kept & set(name.split(".")) else torch.bfloat16
        scale = 0.02 if parameter.dim() > 1 else 0.01
        tensor = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * scale
        tensors[name] = (tensor + 1 if "norm" in name and parameter.dim() == 1 and "linear" not in name else tensor).to(
            dtype
        )
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    model.save_config(folder)
    flush(folder)
    (folder / "done").touch()


def flush(folder: Path) -> None:
    """Writes files out and drops them from the page cache, so that whoever reads them pays for it."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def own_checkpoint(contender: str, folder: Path) -> Path:
    """Where a contender reads the checkpoint from: pages of one file are charged to whoever touches them first."""
    if contender not in ("mapped", "ours", "cached"):
        return folder
    own = folder.parent / f"of-{contender}"
    if not (own / "done").exists():
        shutil.copytree(folder, own, dirs_exist_ok=True)
        flush(own)
    return own


def steps(total: int) -> list[dict[str, Any]]:
    """The inputs of every step of so many rows: a schedule of distinct timesteps, two modalities."""
    import torch

    generator = torch.Generator().manual_seed(0)
    audio = text = total // 6
    rows = total - audio - text
    fixed = {
        "hidden_states": torch.randn(1, rows, CONFIG["in_channels"] * 4, generator=generator),
        "audio_hidden_states": torch.randn(1, audio, CONFIG["audio_in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(1, text, CONFIG["text_dim"], generator=generator).bfloat16(),
        "token_tags": torch.tensor([0] * rows + [2] * audio + [1] * text),
        "timestep_indices": torch.tensor([0] * rows + [1] * audio + [0] * text),
        "position_ids": torch.stack([torch.arange(total)] * 3, dim=-1),
        "video_indices": torch.arange(rows),
        "audio_indices": torch.arange(rows, rows + audio),
        "text_indices": torch.arange(rows + audio, total),
        "return_dict": False,
    }
    grid = torch.linspace(0.02, 0.98, WARM_UP + STEPS)
    return [fixed | {"timestep": torch.stack([t, t * 0.9 + 0.01])} for t in grid]


# The contenders, each in a process of its own. Every function returns the model.


def resident(folder: Path) -> Any:
    import torch
    from diffusers import MiniMaxH3Transformer3DModel

    model = MiniMaxH3Transformer3DModel.from_pretrained(folder, dtype=torch.bfloat16)
    for parameter in model.parameters():  # a loader may have mapped them
        parameter.data = parameter.data.clone()
    return model


def mapped(folder: Path) -> Any:
    return our_model(folder)


def accelerate(folder: Path) -> Any:
    import torch
    from accelerate import disk_offload

    # Writes its own copy of the weights the first time.
    return disk_offload(our_model(folder), str(folder.parent / "accelerate"), execution_device=torch.device("cpu"))


def diffusers(folder: Path) -> Any:
    import torch
    from diffusers.hooks import apply_group_offloading

    model = our_model(folder)
    apply_group_offloading(
        model,
        onload_device=torch.device("cpu"),
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        offload_to_disk_path=str(folder.parent / "diffusers"),
    )
    return model


def ours(folder: Path) -> Any:
    model = our_model(folder)
    under_advice(model)
    return model


def cached(folder: Path) -> Any:
    from sojourn.inference.adaln.caches import PlanCaches
    from sojourn.inference.adaln.settings import PlanCacheSettings

    plans = PlanCaches(PlanCacheSettings(mode="on", plans=WARM_UP + STEPS, width=2, host_bytes=0), torch_device())
    component = our_component(folder, leave_out=plans.leave_out)
    plans.open({"transformer": component})
    under_advice(component.value)
    component.value.prepare_plans = plans.transformers["transformer"].prepare
    return component.value


def our_model(folder: Path) -> Any:
    """The model on its mapped weights, as the engine loads it."""
    return our_component(folder).value


def our_component(folder: Path, leave_out: Callable[[Any], Any] = lambda part: None) -> Any:
    """The same as the engine's component; `leave_out` says of its folder what is not loaded."""
    import torch
    from sojourn.inference.loading.components import build_component
    from sojourn.inference.loading.folder import ComponentFolder, ComponentKind
    from sojourn.inference.loading.safetensors_file import read_safetensors

    part = ComponentFolder(
        name="transformer",
        library="diffusers",
        class_name=CLASS_NAME,
        kind=ComponentKind.MODEL,
        path=folder,
        config=json.loads((folder / "config.json").read_text()),
        files=(read_safetensors(folder / "diffusion_pytorch_model.safetensors"),),
    )
    return build_component(part, dtype=torch.bfloat16, device=torch_device(), leave_out=leave_out(part))


def torch_device() -> Any:
    """The CPU."""
    import torch

    return torch.device("cpu")


def under_advice(model: Any) -> None:
    """Page advice within every pass."""
    from sojourn.inference.offload.assemble import paged
    from sojourn.inference.offload.observer import Silent
    from sojourn.inference.offload.settings import OffloadSettings, ResidentPolicy

    class Told(Silent):
        waited_seconds = requested_bytes = verified_bytes = 0.0

        def waited(self, *, component: str, seconds: float) -> None:
            self.waited_seconds += seconds

        def paged_out(self, *, component: str, requested_bytes: int, verified_bytes: int) -> None:
            self.requested_bytes += requested_bytes
            self.verified_bytes += verified_bytes

    model.told = Told()
    strategy = paged(
        "transformer",
        model,
        settings=OffloadSettings(policy=ResidentPolicy.STRIDED),
        layerwise=True,
        observer=model.told,
        warn=lambda text: print(text, file=sys.stderr),
    )
    model.page_window = strategy.window


MAKERS: dict[str, Callable[[Path], Any]] = {
    "resident": resident,
    "mapped": mapped,
    "accelerate": accelerate,
    "diffusers": diffusers,
    "ours": ours,
    "cached": cached,
}


def contend(contender: str, folder: Path, *, rows: int, threads: int) -> None:
    """Runs one contender in this process: a step for every line that comes in, and what it took for every line out."""
    import torch

    torch.set_num_threads(threads)
    inputs = steps(rows)
    model = MAKERS[contender](folder)
    lease = None
    if contender == "cached":
        with torch.inference_mode():
            lease = model.prepare_plans([{"timestep": step["timestep"]} for step in inputs], check=lambda: None)
    tell({"ready": True})
    for step in inputs:
        sys.stdin.readline()
        tell(measured(model, step))
    del lease


def peak_rss_bytes() -> int:
    """Of this program alone: rusage's maximum also knows of the process that has started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024


def measured(model: Any, step: dict[str, Any]) -> dict[str, Any]:
    """One step: what it took, what it made, and what there is now."""
    import torch
    from sojourn.residencyd.kernel.process_io import read_io

    read_before, began = read_io().read_bytes, time.perf_counter()
    with torch.inference_mode():
        outputs = model(**step)
    seconds = time.perf_counter() - began
    read = read_io().read_bytes - read_before
    made = b"".join(output.float().contiguous().numpy().tobytes() for output in outputs)
    return {
        "seconds": seconds,
        "read_bytes": read,
        "sha256": hashlib.sha256(made).hexdigest(),
        "peak_rss_bytes": peak_rss_bytes(),
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "kept_bytes": window_of(model),
        "room_bytes": room_of(model),
        "told": vars(model.told) if hasattr(model, "told") else None,
    }


def tell(what: dict[str, Any]) -> None:
    """To the parent."""
    print(json.dumps(what), flush=True)


def window_of(model: Any) -> int | None:
    """What the page window keeps, of the layers; None without one."""
    window = getattr(model, "page_window", None)
    return window.plan.kept_bytes if window is not None else None


def room_of(model: Any) -> int | None:
    """What the kernel leaves for all weights, as the page window has measured it; None without one.

    The cap less all that is charged to the group and cannot be dropped, less file pages of the code that runs, less
    what a step allocates. The window that streaming needs, and the slack, are not taken off.
    """
    from sojourn.inference.offload.spans import size_of

    window = getattr(model, "page_window", None)
    return window.room_bytes + size_of(window.rest) if window is not None else None


# The runner


class NoControlGroup(Exception):
    """None can be made here."""


@contextmanager
def control_group(limit_bytes: int) -> Iterator[Path]:
    """A new memory control group with a cap, v1 or v2."""
    v1 = Path("/sys/fs/cgroup/memory")
    mount, limit_file = (v1, "memory.limit_in_bytes") if v1.is_dir() else (Path("/sys/fs/cgroup"), "memory.max")
    group = mount / f"sojourn-bench-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / limit_file).write_text(str(limit_bytes))
    except OSError as error:
        raise NoControlGroup(f"{group}: {error}") from error
    try:
        yield group
    finally:
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


class Contender:
    """A contender's process, started from a cold page cache, and the steps that it has run."""

    def __init__(self, name: str, folder: Path, *, rows: int, threads: int, group: Path | None) -> None:
        own = own_checkpoint(name, folder)
        flush(folder.parent)  # the copies that peers make of the weights too
        command = [sys.executable, __file__, "--contender", name, "--folder", str(own), "--rows", str(rows)]
        command += ["--threads", str(threads), *(["--group", str(group)] if group is not None else [])]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        self.failure: str | None = None
        self.steps: list[dict[str, Any]] = []
        self._hear()

    def step(self) -> None:
        """Has it run a step, unless it has ended."""
        if self.failure is None:
            assert self.process.stdin is not None
            print("step", file=self.process.stdin, flush=True)
            if (heard := self._hear()) is not None:
                self.steps.append(heard)

    def _hear(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        self.errors.seek(0)
        status = self.process.wait()
        lines = self.errors.read().strip().splitlines() or [f"ended with status {status}"]
        self.failure = lines[-1][:200]
        return None

    def close(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.communicate()
        self.errors.close()

    def result(self) -> dict[str, Any]:
        """Medians after the warm-up."""
        if self.failure is not None:
            return {"failed": self.failure}
        counted = self.steps[WARM_UP:]
        return self.steps[-1] | {
            "seconds": statistics.median(step["seconds"] for step in counted),
            "read_bytes": statistics.median(step["read_bytes"] for step in counted),
            "sha256": hashlib.sha256("".join(step["sha256"] for step in self.steps).encode()).hexdigest(),
            "all_seconds": [round(step["seconds"], 4) for step in self.steps],
            "all_reads_mib": [round(step["read_bytes"] / MIB, 1) for step in self.steps],
        }


def run(names: list[str], folder: Path, *, rows: int, threads: int) -> dict[str, dict[str, Any]]:
    """Has contenders take turns."""
    with ExitStack() as stack:
        contenders = {}
        for name in names:
            group = None if name == "resident" else stack.enter_context(control_group(CAP_MIB * MIB))
            contenders[name] = Contender(name, folder, rows=rows, threads=threads, group=group)
            stack.callback(contenders[name].close)
        for _ in range(WARM_UP + STEPS):
            for contender in contenders.values():
                contender.step()
        return {name: contender.result() for name, contender in contenders.items()}


def goals(results: dict[str, dict[str, Any]]) -> list[tuple[str, str, bool]]:
    """Each goal: what, as measured, met or not. Those whose contender failed are not met."""
    found: list[tuple[str, str, bool]] = []

    def at_most(what: str, value: float, bound: float, unit: str = "") -> None:
        found.append((f"{what} ≤ {bound:.3g}{unit}", f"{value:.3g}{unit}", value <= bound))

    def at_least(what: str, value: float, bound: float) -> None:
        found.append((f"{what} ≥ {bound:.3g} ×", f"{value:.3g} ×", value >= bound))

    good = {name: result for name, result in results.items() if "failed" not in result}
    if not {"resident", "mapped", "ours", "cached"} <= good.keys():
        return [("every contender of ours runs", ", ".join(sorted(results.keys() - good.keys())), False)]
    cached_s, ours_s = good["cached"]["seconds"], good["ours"]["seconds"]
    sums = {result["sha256"] for result in good.values()}
    found.append(("one output, bit for bit", f"{len(sums)} different", len(sums) == 1))
    at_most("with cache: seconds / stock uncapped", cached_s / good["resident"]["seconds"], 0.75)
    at_most("with cache: read per step", good["cached"]["read_bytes"] / MIB, 0, " MiB")
    at_least("with cache: faster than plain mapped", good["mapped"]["seconds"] / cached_s, 7)
    if "accelerate" in good:
        at_least("with cache: faster than accelerate", good["accelerate"]["seconds"] / cached_s, 10)
    lower_bound = good["ours"]["weight_bytes"] - good["ours"]["room_bytes"]
    at_most("without cache: read / (weights − room)", good["ours"]["read_bytes"] / lower_bound, 1.03)
    for peer in ("mapped", "accelerate", "diffusers"):
        if peer in good:
            saved = good[peer]["read_bytes"] / good["ours"]["read_bytes"]
            at_least(f"without cache: faster than {CONTENDERS[peer]}", good[peer]["seconds"] / ours_s, saved)
    return found


def show(results: dict[str, dict[str, Any]], judged: list[tuple[str, str, bool]]) -> None:
    """Prints both tables."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"One step of an H3-shaped model under a cap of {CAP_MIB} MiB")
    for heading in ("contender", "s / step", "MiB read / step", "peak RSS MiB", "weights MiB", "output"):
        table.add_column(heading, justify="left" if heading in ("contender", "output") else "right")
    for name, result in results.items():
        if "failed" in result:
            table.add_row(CONTENDERS[name], "failed", "", "", "", result["failed"])
            continue
        table.add_row(
            CONTENDERS[name], f"{result['seconds']:.3f}", f"{result['read_bytes'] / MIB:.0f}",
            f"{result['peak_rss_bytes'] / MIB:.0f}", f"{result['weight_bytes'] / MIB:.0f}", result["sha256"][:12],
        )  # fmt: skip
    verdicts = Table(title="Goals")
    for heading in ("goal", "measured", ""):
        verdicts.add_column(heading)
    for goal, measured, met in judged:
        verdicts.add_row(goal, measured, "met" if met else "missed")
    console = Console(width=120)
    console.print(table)
    console.print(verdicts)


def main() -> int:
    """The benchmark, or one contender of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp/sojourn-bench/capped/transformer"))
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=list(CONTENDERS), help="some contenders")
    parser.add_argument("--rows", type=int, default=ROWS, help="of one step; a multiple of 6")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every contender")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--group", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        if arguments.group:
            (arguments.group / "cgroup.procs").write_text("0")
        contend(arguments.contender, arguments.folder, rows=arguments.rows, threads=arguments.threads)
        return 0
    make_model(arguments.folder)
    try:
        results = run(arguments.only, arguments.folder, rows=arguments.rows, threads=arguments.threads)
    except NoControlGroup as error:
        print(f"skipped: no memory control group can be made here ({error}); run as root or delegate the controller")
        return 0
    judged = goals(results)
    if arguments.json:
        print(json.dumps({"results": results, "goals": judged}, indent=2))
    else:
        show(results, judged)
    return 0 if all(met for _, _, met in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
