"""Models and requests that the tests of the inference process share."""

import hashlib
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import diffusers
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from sojourn.inference.pipeline import DeviceChoice, Pipeline, load_pipeline
from sojourn.inference.quality.settings import Fusions, QualitySettings
from sojourn.inference.requests import Clip, GenerationRequest, Workflow
from sojourn.inference.tiny import tiny_random
from sojourn.inference.watch import Watch

# Tensors here are too small to share out: on a busy machine more threads wait for each other ten times as long.
torch.set_num_threads(1)

# What a machine's speed would decide is decided here.
UNFUSED = QualitySettings(fusions=Fusions.OFF)
DIGITS = Path(__file__).parents[2] / "models" / "h3-digits"


@pytest.fixture(scope="session")
def digits_folder() -> Path:
    return DIGITS


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random("minimax-h3", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def digits(digits_folder: Path) -> Pipeline:
    return load_pipeline(digits_folder, device=DeviceChoice.CPU, quality_settings=UNFUSED)


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Pipeline:
    return load_pipeline(tiny_folder, device=DeviceChoice.CPU, quality_settings=UNFUSED)


@pytest.fixture(scope="session")
def stock_digits(digits_folder: Path) -> Any:
    """The stock pipeline on the shipped model, with the smallest processor that its text-only workflow runs with."""
    module = types.ModuleType("text_only_processor")
    module.TextOnlyProcessor = _StockTextOnlyProcessor  # type: ignore[attr-defined]
    sys.modules["text_only_processor"] = module
    return _load_stock(digits_folder)


@pytest.fixture(scope="session")
def stock_tiny(tiny_folder: Path, tiny: Pipeline) -> Any:
    stock = _load_stock(tiny_folder)
    stock.update_components(processor=tiny.components["processor"].value)
    return stock


class _StockTextOnlyProcessor(transformers.ProcessorMixin):
    def __init__(self, tokenizer: Any = None, **kwargs: Any) -> None:
        super().__init__(tokenizer)

    def create_mm_token_type_ids(self, input_ids: list[list[int]]) -> list[list[int]]:
        return [[0] * len(ids) for ids in input_ids]


def _load_stock(folder: Path) -> Any:
    diffusers.utils.logging.set_verbosity(50)
    stock = diffusers.ModularPipeline.from_pretrained(str(folder))
    stock.load_components(dtype=torch.bfloat16)
    return stock


@pytest.fixture(scope="session")
def make_request() -> Callable[..., GenerationRequest]:
    """Makes a short request; keyword arguments replace its fields."""

    def make(**changes: Any) -> GenerationRequest:
        fields: dict[str, Any] = {
            "prompt": "a moving seven",
            "workflow": Workflow.T2VA,
            "width": 32,
            "height": 32,
            "frames": 124,
            "steps": 3,
            "flow_shift": 12.0,
            "audio_flow_shift": 3.0,
            "seeds": (7,),
        }
        return GenerationRequest(**(fields | changes))

    return make


@pytest.fixture
def make_watch() -> Callable[..., Watch]:
    """Makes a watch with a real clock; keyword arguments replace its fields."""

    def make(**changes: Any) -> Watch:
        return Watch(**({"clock": time.monotonic} | changes))

    return make


@pytest.fixture(scope="session")
def pictures() -> tuple[Image.Image, Image.Image]:
    """Two pictures of different shapes, neither of them the canvas's."""
    noise = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    first = Image.fromarray(noise)
    return first, first.transpose(Image.Transpose.ROTATE_90)


@pytest.fixture(scope="session")
def digest() -> Callable[[Clip], dict[str, str]]:
    """Hashes everything that a clip holds."""

    def of(clip: Clip) -> dict[str, str]:
        parts = {
            "latents": clip.latents,
            "audio_latents": clip.audio_latents,
            "frames": clip.frames,
            "audio": clip.audio,
        }
        return {name: sha256(part) for name, part in parts.items() if part is not None}

    return of


@pytest.fixture(scope="session")
def stock_digest() -> Callable[[Any, GenerationRequest], dict[str, str]]:
    """Runs a request on a stock pipeline, as its documentation says, and hashes what comes out."""

    def of(stock: Any, request: GenerationRequest) -> dict[str, str]:
        stock.scheduler.set_shift(request.flow_shift)
        stock.audio_scheduler.set_shift(request.audio_flow_shift)
        media = {"image": request.first_image, "last_image": request.last_image, "references": request.references}
        values = stock(
            prompt=request.prompt,
            width=request.width,
            height=request.height,
            num_frames=request.frames,
            num_inference_steps=request.steps,
            generator=torch.Generator().manual_seed(request.seeds[0]),
            output_type="np",
            **{name: medium for name, medium in media.items() if medium},
        ).values
        return {
            "latents": sha256(values["latents"]),
            "audio_latents": sha256(values["audio_latents"]),
            "frames": sha256(values["videos"][0]),
            "audio": sha256(values["audio"][0]),
        }

    return of


def sha256(part: torch.Tensor | np.ndarray) -> str:
    array = part.numpy() if isinstance(part, torch.Tensor) else part
    return f"{array.dtype}{array.shape}" + hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
