import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from sojourn.inference.cli.inspect import readable_bytes
from sojourn.inference.pipeline import Pipeline

from tests.inference.cli.conftest import Run


def test_what_it_says_is_what_a_loaded_model_holds(
    sojourn: Callable[..., Run], tiny_folder: Path, tiny: Pipeline
) -> None:
    status, out, _ = sojourn("inspect", tiny_folder, "--json")
    told = {part["name"]: part for part in json.loads(out)["components"]}
    assert status == 0
    for summary in tiny.summaries():
        # The audio VAE keeps buffers in its file beside the parameters.
        assert told[summary.name]["parameters"] >= summary.parameters
        assert told[summary.name]["parameters"] == summary.parameters or summary.name == "audio_vae"
    assert 0 < told["transformer"]["adaln_bytes"] < told["transformer"]["size_bytes"]
    assert told["vae"]["adaln_bytes"] == 0


def test_the_table_names_every_component_and_the_adaln_share(
    sojourn: Callable[..., Run], digits_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    status, out, _ = sojourn("inspect", digits_folder)
    rows = {line.split()[1]: line for line in out.splitlines() if line.startswith("│")}
    assert status == 0
    assert {"transformer", "text_encoder", "vae", "audio_vae", "all", "transformer_ref"} <= rows.keys()
    # 6 blocks of 32 → 6·3·160 and a final layer of 32 → 2·160, with biases, of 2,847,048 parameters in all.
    assert "20.4%" in rows["transformer"]
    assert "not in this folder" in rows["transformer_ref"]


def test_a_family_is_named_by_hand(sojourn: Callable[..., Run], tiny_folder: Path, tmp_path: Path) -> None:
    """Headers alone: the class need not be installed here."""
    copy = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    index = copy / "modular_model_index.json"
    index.write_text(index.read_text().replace("MiniMaxH3Transformer3DModel", "StudioTransformer3DModel"))
    saved = {}
    for name, folder, given in (
        ("stock", tiny_folder, ()),
        ("unknown", copy, ()),
        ("named", copy, ("--adaln-family", "transformer=minimax-h3")),
    ):
        status, out, _ = sojourn("inspect", folder, "--json", *given)
        assert status == 0
        told = json.loads(out)
        saved[name] = {part["component"]: part["saved_bytes"] for part in told["plan_cache"]}
        adaln = {part["name"]: part["adaln_bytes"] for part in told["components"]}
        assert (adaln["transformer"] > 0) == ("transformer" in saved[name])
    assert saved["unknown"] == {}
    assert saved["named"] == {"transformer": saved["stock"]["transformer"]}
    status, _, err = sojourn("inspect", tiny_folder, "--adaln-family", "vea=flux")
    assert (status, "the model has no component vea" in err) == (2, True)


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


@pytest.mark.parametrize(("size", "text"), [(0, "0.00 MiB"), (3 * 2**19, "1.50 MiB"), (5 * 2**30, "5.00 GiB")])
def test_sizes_are_binary_and_say_so(size: int, text: str) -> None:
    assert readable_bytes(size) == text
