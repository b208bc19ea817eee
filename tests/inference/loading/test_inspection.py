import subprocess
import sys
from pathlib import Path

from sojourn.inference.loading.inspection import inspect_folder
from sojourn.inference.pipeline import Pipeline


def test_inspection_tells_what_loading_finds(digits_folder: Path, digits: Pipeline) -> None:
    found = {part.name: part for part in inspect_folder(digits_folder).components}
    for summary in digits.summaries():
        assert found[summary.name].class_name == summary.class_name
        if found[summary.name].dtypes and summary.name != "audio_vae":  # which keeps constants as buffers
            assert found[summary.name].parameters == summary.parameters


def test_inspection_tells_the_share_of_the_adaln_projections(digits_folder: Path, digits: Pipeline) -> None:
    part = next(part for part in inspect_folder(digits_folder).components if part.name == "transformer")
    model = digits.components["transformer"].value
    linears = [*(block.adaln_proj.linear for block in model.transformer_blocks), model.norm_out.linear]
    expected = sum(parameter.numel() for linear in linears for parameter in linear.parameters())
    assert part.adaln_parameters == expected == 580_800
    assert part.adaln_bytes == 2 * expected
    assert part.dtypes == ("BF16",)


def test_inspection_lists_the_largest_first_and_what_is_absent(digits_folder: Path) -> None:
    found = inspect_folder(digits_folder)
    assert [part.name for part in found.components[:2]] == ["transformer", "vae"]
    assert found.absent == ("transformer_ref",)


def test_inspection_needs_no_torch(digits_folder: Path) -> None:
    code = (
        "import sys, pathlib; from sojourn.inference.loading.inspection import inspect_folder; "
        f"inspect_folder(pathlib.Path({str(digits_folder)!r})); "
        "assert not {'torch', 'diffusers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
