"""The commands on a folder of Helios; the server's side is in tests/inference/server/test_helios.py."""

import json
from collections.abc import Callable
from pathlib import Path

import av
import pytest
from safetensors.numpy import load_file
from sojourn.inference.tiny import tiny_random

from tests.inference.cli.conftest import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random("helios-base", tmp_path_factory.mktemp("models") / "base")


def test_inspect_tells_of_every_component(sojourn: Callable[..., Run], folder: Path) -> None:
    status, out, _ = sojourn("inspect", folder, "--json")
    found = json.loads(out)
    assert status == 0
    assert found["pipeline_class"] == "HeliosModularPipeline"
    names = {part["name"] for part in found["components"]}
    assert names == {"text_encoder", "tokenizer", "transformer", "vae", "scheduler"}


def test_plan_places_every_weight(sojourn: Callable[..., Run], folder: Path) -> None:
    status, out, _ = sojourn("plan", folder, "--device-memory", "1Gi", "--host-memory", "8Gi", "--json")
    assert status == 0
    assert {part["name"] for part in json.loads(out)["components"]} == {"text_encoder", "transformer", "vae"}


def test_generate_writes_the_frames_asked_for_and_no_audio(
    sojourn: Callable[..., Run], folder: Path, tmp_path: Path
) -> None:
    files = tmp_path / "a.mp4", tmp_path / "a.safetensors"
    outputs = ("-o", files[0], "-o", files[1])
    common = ("generate", "a moving seven", *outputs, "--model", folder, "--steps", 1, "--frames", 34, "--json")
    status, out, _ = sojourn(*common)
    assert status == 0
    assert json.loads(out)["accepted"]["parameters"]["frames"] == "34"
    with av.open(str(files[0])) as video:
        assert sum(1 for _ in video.decode(video=0)) == 34
        assert not video.streams.audio
    assert set(load_file(files[1])) == {"latents"}
    status, _, err = sojourn(*common, "--width", 64, "--height", 128)
    assert (status, "untrained_size" in err) == (2, True)
    assert sojourn(*common, "--width", 64, "--height", 128, "--untrained-size")[0] == 0


def test_schedules_for_a_plan_cache_are_refused_with_the_reason(
    sojourn: Callable[..., Run], folder: Path, tmp_path: Path
) -> None:
    status, _, err = sojourn("adaln", "build", "--model", folder, "--steps", 5, "-o", tmp_path)
    assert status != 0
    assert "HeliosTransformer3DModel has no modulation projection per block" in " ".join(err.split())
    assert "Traceback" not in err
