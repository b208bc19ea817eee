"""What serving costs: Generate against the bare stock pipeline, and time to ready against loading it.

Both are ratios of medians over interleaved rounds of one run, so that a machine that slows down slows both sides. A
process keeps the speed it begins with: of ten pairs of a server and a stock pipeline, each pair's ratio lay anywhere
from 0.92 to 1.18 and hardly moved from round to round. Each side therefore starts anew several times, and what counts
is the median of the pairs' ratios.

- generate: a clip of the shipped model through gRPC from a server in a process of its own, first byte of the request to
  last byte of the mp4, divided by the same clip from the stock diffusers pipeline, called directly, and encoded by the
  same encoder.
- ready: start of a server process to SERVING, divided by the start of a process to a loaded stock pipeline
  (`from_pretrained` and `load_components`).

    python bench/service.py [--pairs 11] [--rounds 3] [--json]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCES = [str(ROOT / folder) for folder in ("proto", "inference", "residencyd", "operator")]
sys.path[:0] = SOURCES
os.environ["HF_HUB_OFFLINE"] = os.environ["TQDM_DISABLE"] = "1"

import grpc  # noqa: E402
from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: E402
from sojourn.v1 import inference_pb2 as pb  # noqa: E402
from sojourn.v1 import inference_pb2_grpc as pb_grpc  # noqa: E402

MODEL = ROOT / "models" / "h3-digits"
REQUEST = pb.GenerateRequest(prompt="a moving seven", steps=20, seed=1, outputs=[pb.OUTPUT_FORMAT_MP4])

SERVE = """
import sys
from pathlib import Path
from sojourn.inference import logs
from sojourn.inference.server.config import Address, ServerConfig
from sojourn.inference.server.main import run
def load():
    from sojourn.inference.pipeline import load_pipeline
    return load_pipeline(Path(sys.argv[1]))
logs.configure()
sys.exit(run(ServerConfig(listen=Address(host="127.0.0.1", port=0), metrics_listen=None), load))
"""

LOAD_STOCK = """
import sys
sys.path.insert(0, sys.argv[2])
from service import stock_pipeline
stock_pipeline(sys.argv[1])
print("loaded", flush=True)
"""


@dataclass(frozen=True)
class Figure:
    """One ratio beside its goal; it may be at most the goal.

    Attributes:
        ours_seconds, theirs_seconds: Medians of each side.
        ratio: The median of the pairs' own.
    """

    name: str
    ours_seconds: float
    theirs_seconds: float
    ratio: float
    goal: float

    @property
    def met(self) -> bool:
        """Whether the goal is reached."""
        return self.ratio <= self.goal


def stock_pipeline(folder: str) -> Any:
    """The stock pipeline as its documentation loads it. The model names a processor that diffusers does not bring."""
    import diffusers
    import torch
    import transformers

    class TextOnlyProcessor(transformers.ProcessorMixin):  # type: ignore[misc]
        def __init__(self, tokenizer: Any = None, **kwargs: Any) -> None:
            super().__init__(tokenizer)

        def create_mm_token_type_ids(self, input_ids: list[list[int]]) -> list[list[int]]:
            return [[0] * len(ids) for ids in input_ids]

    module = types.ModuleType("text_only_processor")
    module.TextOnlyProcessor = TextOnlyProcessor  # type: ignore[attr-defined]
    sys.modules["text_only_processor"] = module
    stock = diffusers.ModularPipeline.from_pretrained(folder)
    stock.load_components(dtype=torch.bfloat16)
    return stock


def bare_call(stock: Any, size: tuple[int, int], frames: int) -> str:
    """The clip of REQUEST without a server; answers the hash of its latents, as the server does."""
    import torch
    from sojourn.inference.encoding import encode, latents_sha256
    from sojourn.inference.requests import Clip, OutputFormat

    names = ["latents", "audio_latents", "videos", "audio", "sampling_rate"]
    values = stock(
        prompt=REQUEST.prompt, width=size[0], height=size[1], num_frames=frames, num_inference_steps=REQUEST.steps,
        generator=torch.Generator().manual_seed(REQUEST.seed), output_type="np", output=names,
    )  # fmt: skip
    clip = Clip(
        latents=values["latents"], audio_latents=values["audio_latents"], frames=values["videos"][0],
        audio=values["audio"][0].float().numpy(), sample_rate=values["sampling_rate"], frames_per_second=24.0,
    )  # fmt: skip
    digest = latents_sha256(clip)
    with encode(clip, OutputFormat.MP4).file as file:
        file.read()
    return digest


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(SOURCES)}


@contextmanager
def server() -> Iterator[tuple[grpc.Channel, float]]:
    """A server process that serves, and the seconds until it did."""
    began = time.monotonic()
    command = [sys.executable, "-c", SERVE, str(MODEL)]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        address = json.loads(process.stderr.readline())["address"]
        with grpc.insecure_channel(address) as channel:
            until_serving(channel)
            yield channel, time.monotonic() - began
    finally:
        process.terminate()
        process.communicate()


def until_serving(channel: grpc.Channel) -> None:
    for response in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
        if response.status == health_pb2.HealthCheckResponse.SERVING:
            return


def generate(channel: grpc.Channel) -> str:
    *_, last = pb_grpc.InferenceServiceStub(channel).Generate(REQUEST)
    return last.completed.clips[0].latents_sha256


def seconds(function: Callable[[], Any]) -> float:
    began = time.monotonic()
    function()
    return time.monotonic() - began


def generate_pair(rounds: int) -> tuple[float, float]:
    """Median seconds of a served clip and of a bare one; a server and, in this process, a stock pipeline, both new."""
    stock = stock_pipeline(str(MODEL))
    with server() as (channel, _):
        info = pb_grpc.InferenceServiceStub(channel).GetInfo(pb.GetInfoRequest())
        size, frames = (info.defaults.width, info.defaults.height), info.defaults.frames
        # The first calls warm both sides up, and show that they do the same work.
        if bare_call(stock, size, frames) != generate(channel):
            raise SystemExit("the served clip differs from the stock one: nothing to compare")
        ours, theirs = [], []
        for index in range(rounds):
            sides = [
                (theirs, lambda: bare_call(stock, size, frames)),
                (ours, lambda: generate(channel)),
            ]
            for times, function in sides if index % 2 else reversed(sides):
                times.append(seconds(function))
    return statistics.median(ours), statistics.median(theirs)


def generate_pair_apart(rounds: int) -> tuple[float, float]:
    """`generate_pair` in a process of its own."""
    command = [sys.executable, __file__, "--pair", "--rounds", str(rounds)]
    output = subprocess.run(command, env=environment(), check=True, stdout=subprocess.PIPE, text=True).stdout
    ours, theirs = json.loads(output.splitlines()[-1])
    return ours, theirs


def ready_pair() -> tuple[float, float]:
    """Seconds to ready of a server, and of a stock pipeline."""
    with server() as (_, ready_seconds):
        pass
    command = [sys.executable, "-c", LOAD_STOCK, str(MODEL), str(Path(__file__).parent)]
    return ready_seconds, seconds(lambda: subprocess.run(command, env=environment(), check=True, capture_output=True))


def figure(name: str, pairs: list[tuple[float, float]], *, goal: float) -> Figure:
    ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    return Figure(name, ours, theirs, statistics.median(own / other for own, other in pairs), goal)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=11, help="of a server and a stock pipeline, started anew")
    parser.add_argument("--rounds", type=int, default=3, help="of generate, in each pair")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    parser.add_argument("--pair", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.pair:
        print(json.dumps(generate_pair(arguments.rounds)))
        return 0
    figures = [
        figure("generate", [generate_pair_apart(arguments.rounds) for _ in range(arguments.pairs)], goal=1.01),
        figure("ready", [ready_pair() for _ in range(arguments.pairs)], goal=1.0),
    ]
    if arguments.json:
        print(json.dumps([asdict(figure) | {"met": figure.met} for figure in figures]))
    else:
        print(f"{'figure':10} {'ours':>9} {'stock':>9} {'ratio':>7} {'goal':>8}")
        for figure_ in figures:
            print(
                f"{figure_.name:10} {figure_.ours_seconds:7.3f} s {figure_.theirs_seconds:7.3f} s "
                f"{figure_.ratio:7.3f} {'≤':>3} {figure_.goal:.2f}  {'met' if figure_.met else 'NOT MET'}"
            )
    return 0 if all(figure_.met for figure_ in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
