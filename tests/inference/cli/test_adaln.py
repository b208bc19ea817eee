"""`sojourn adaln build`, and the plan cache's options of `sojourn serve`."""

from pathlib import Path

import pytest
from sojourn.inference.adaln.refusals import SettingRefused
from sojourn.inference.cli import app
from sojourn.inference.cli.exits import CommandFailed, Exit
from typer.testing import CliRunner


def run(*arguments: str) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output, result.exception


def test_schedules_are_built_once(tiny_folder: Path, tmp_path: Path) -> None:
    command = [
        "adaln",
        "build",
        "--model",
        str(tiny_folder),
        "--workflow",
        "t2va",
        "--steps",
        "3,5",
        "-o",
        str(tmp_path),
    ]
    code, output, error = run(*command)
    assert (code, error) == (0, None)
    assert output.count("plans built") == 2
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    _, output, _ = run(*command)
    assert output.count("already there") == 2
    _, output, _ = run(*command, "--flow-shift", "5")
    assert output.count("plans built") == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--steps": "8,x"}, "--steps 8,x: whole numbers"),
        ({"--steps": "1"}, "--steps 1: at least 2 each"),
        ({"--adaln-family": "transformer=h4"}, "there is no such family; known are auraflow, .*, minimax-h3, "),
        ({"--adaln-family": "vea=sd3"}, "the model has no component vea; it has audio_scheduler, "),
        ({"--adaln-family": "transformer=sd3"}, "has no module named as an embedder of SD3Transformer2DModel"),
        ({"--adaln-precision": "fp64"}, "--adaln-precision is 'fp64': must be one of match, fp32"),
        ({"--store-bytes": "0"}, "--adaln-store-bytes is 0"),
        ({"--model": "nowhere"}, "nowhere: no such folder"),
        ({"-o": __file__}, "--adaln-store is .* is a file"),
    ],
)
def test_what_cannot_be_built_is_told_in_one_line(
    tiny_folder: Path, tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    given = {"--model": str(tiny_folder), "--steps": "3", "-o": str(tmp_path), **changes}
    _, _, error = run("adaln", "build", *(word for pair in given.items() for word in pair))
    assert error is not None
    assert (error.status if isinstance(error, CommandFailed) else Exit.of(error)) is Exit.INVALID
    with pytest.raises((CommandFailed, SettingRefused), match=message):
        raise error


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--adaln-cache", "maybe"),
        ("--adaln-plans", "0"),
        ("--adaln-plan-width", "0"),
        ("--adaln-host-bytes", "-1"),
        ("--adaln-store", __file__),
        ("--adaln-store-bytes", "0"),
        ("--adaln-precision", "fp64"),
        ("--adaln-family", "transformer=h4"),
        ("--adaln-family", "minimax-h3"),
    ],
)
def test_serve_refuses_a_wrong_value_by_the_name_of_its_option(tiny_folder: Path, option: str, value: str) -> None:
    _, _, error = run("serve", "--model", str(tiny_folder), option, value)
    assert isinstance(error, CommandFailed)
    assert error.status is Exit.INVALID
    assert str(error).startswith(f"{option} is ")
