import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.inference.cli.conftest import Run

from sojourn.inference.pipeline import Pipeline


def test_what_it_says_is_what_a_loaded_model_holds(
    sojourn: Callable[..., Run], tiny_folder: Path, tiny: Pipeline
) -> None:
    status, out, _ = sojourn("inspect", tiny_folder, "--json")
    told = {part["name"]: part for part in json.loads(out)["components"]}
    assert status == 0
    for summary in tiny.summaries():
        if summary.parameters:
            assert told[summary.name]["class_name"] == summary.class_name
            assert told[summary.name]["parameters"] >= summary.parameters
    assert json.loads(out)["size_bytes"] == sum(part["size_bytes"] for part in told.values())


def test_the_table_names_every_component(sojourn: Callable[..., Run], tiny_folder: Path) -> None:
    status, out, _ = sojourn("inspect", tiny_folder)
    assert status == 0
    for name in ("transformer", "text_encoder", "vae", "audio_vae", "MiB"):
        assert name in out


@pytest.mark.parametrize("broken", ["index", "weights"])
def test_a_broken_folder_is_told_in_one_line(
    sojourn: Callable[..., Run], tiny_folder: Path, tmp_path: Path, broken: str
) -> None:
    copy = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    if broken == "index":
        (copy / "modular_model_index.json").unlink()
    else:
        weights = next((copy / "vae").glob("*.safetensors"))
        weights.write_bytes(weights.read_bytes()[:-1])
    status, out, err = sojourn("inspect", copy)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"sojourn: {copy}")
