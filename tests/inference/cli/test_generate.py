import hashlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import av
import pytest
from safetensors.numpy import load_file
from sojourn.inference.cli import local, remote
from sojourn.inference.cli.artifacts import ArtifactWriter
from sojourn.v1 import inference_pb2 as pb

from tests.inference.cli.conftest import Run, free_address

SMALL = ("--steps", 3, "--seed", 5, "--width", 32, "--height", 32)
ROOT = Path(__file__).resolve().parents[3]


def test_writes_every_format_that_the_file_names_ask_for(
    sojourn: Callable[..., Run], served: str, tmp_path: Path
) -> None:
    files = [tmp_path / "deep" / name for name in ("a.mp4", "a.zip", "a.safetensors")]
    outputs = [argument for file in files for argument in ("-o", file)]
    status, out, _ = sojourn("generate", "a moving seven", *outputs, "--server", served, *SMALL, "--json")
    made = json.loads(out)
    assert status == 0
    assert made["files"] == [str(file) for file in files]
    digests = [artifact["sha256"] for artifact in made["completed"]["artifacts"]]
    assert digests == [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    with av.open(str(files[0])) as video:
        assert sum(1 for _ in video.decode(video=0)) == 124
    assert len([name for name in zipfile.ZipFile(files[1]).namelist() if name.endswith(".png")]) == 124
    assert set(load_file(files[2])) == {"latents", "audio_latents"}
    assert sorted(path.name for path in files[0].parent.iterdir()) == ["a.mp4", "a.safetensors", "a.zip"]


def test_without_a_server_the_same_bits(
    sojourn: Callable[..., Run], served: str, tiny_folder: Path, tmp_path: Path
) -> None:
    asked = ("generate", "a moving seven", *SMALL, "-o")
    assert sojourn(*asked, tmp_path / "remote.safetensors", "--server", served)[0] == 0
    status, out, _ = sojourn(*asked, tmp_path / "local.safetensors", "--model", tiny_folder, "--json")
    assert status == 0
    assert (tmp_path / "local.safetensors").read_bytes() == (tmp_path / "remote.safetensors").read_bytes()
    assert json.loads(out)["completed"]["model_fingerprint"]


def test_several_clips_get_numbered_files(sojourn: Callable[..., Run], served: str, tmp_path: Path) -> None:
    output = tmp_path / "a.safetensors"
    assert sojourn("generate", "a one", "-o", output, "--server", served, *SMALL, "--count", 2)[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-0.safetensors", "a-1.safetensors"]


def test_the_terminal_shows_stages_steps_and_the_seed(sojourn: Callable[..., Run], served: str, tmp_path: Path) -> None:
    _, out, err = sojourn("generate", "a one", "-o", tmp_path / "a.mp4", "--server", served, *SMALL)
    assert out == ""
    for shown in ("text encode", "denoise", "2/2", "decode", "a.mp4", "seed 5"):
        assert shown in err


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["-o", "a.avi"], 2, ".mp4, .safetensors, .zip"),
        (["-o", "a.mp4", "--width", 32], 2, "--width and --height go together"),
        (["-o", "a.mp4", "--width", 32, "--height", 32, "--aspect-ratio", "1:1"], 2, "not both"),
        (["-o", "a.mp4", "--aspect-ratio", "wide"], 2, "16:9"),
        (["-o", "a.mp4", "--frames", 124, "--duration", 5], 2, "not both"),
        (["-o", "a.mp4", "--seed", 2**64], 2, str(2**64 - 1)),
        (["-o", "a.mp4", "--seed", -1], 2, str(2**64 - 1)),
        (["-o", "a.mp4", "--quality", "best"], 2, "lossless, extra-high, high"),
        (["-o", "a.mp4", "--reference", "nameless"], 2, "neither a picture, a video nor an audio"),
        (["-o", "a.mp4", "--first-image", "absent.png"], 2, "No such file"),
        (["-o", "a.mp4", "--model", "absent"], 2, "no such folder"),
        (["-o", "a.mp4", "--steps", 0], 2, "steps"),
        (["-o", "a.mp4", "--quality", "high"], 3, "high"),
        (["-o", "a.mp4", "--timeout", 0.000001], 4, "DEADLINE_EXCEEDED"),
    ],
)
def test_an_error_is_one_line_and_a_status(
    sojourn: Callable[..., Run], served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: list[object], status: int, said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    got, out, err = sojourn("generate", "a one", "--server", served, *arguments)
    line = err.strip().splitlines()[-1]
    assert (got, out) == (status, "")
    assert said in line
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_no_server_is_said_with_its_address(sojourn: Callable[..., Run], tmp_path: Path) -> None:
    address = free_address()
    status, _, err = sojourn("generate", "a one", "-o", tmp_path / "a.mp4", "--server", address)
    assert status == 3
    assert f"sojourn: {address}: UNAVAILABLE" in err


@pytest.mark.parametrize("local_model", [False, True], ids=["server", "model"])
def test_ctrl_c_stops_the_work_and_leaves_no_file(
    served: str, tiny_folder: Path, tmp_path: Path, local_model: bool
) -> None:
    where = ["--model", str(tiny_folder)] if local_model else ["--server", served]
    command = [sys.executable, "-m", "sojourn.inference.cli", "generate", "a one", "-o", str(tmp_path / "a.mp4")]
    process = subprocess.Popen(
        [*command, *where, "--steps", "1000"], stderr=subprocess.PIPE, env={**os.environ, "FORCE_COLOR": "1"}
    )
    assert process.stderr is not None
    seen = b""
    while b"denoise" not in seen:
        seen += os.read(process.stderr.fileno(), 4096)
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(timeout=30) == 130
    assert b"Traceback" not in rest
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--width", 64, "--height", 32], "size", pb.Size(width=64, height=32)),
        (["--aspect-ratio", "4:3"], "aspect_ratio", pb.AspectRatio(width=4, height=3)),
        (["--frames", 141], "frames", 141),
        (["--duration", 5.5], "duration_seconds", 5.5),
        (["--steps", 9], "steps", 9),
        (["--flow-shift", 7.5], "flow_shift", 7.5),
        (["--audio-flow-shift", 2.5], "audio_flow_shift", 2.5),
        (["--seed", 2**64 - 1], "seed", 2**64 - 1),
        (["--quality", "extra-high"], "quality", pb.QUALITY_TIER_EXTRA_HIGH),
        (["--count", 3], "count", 3),
    ],
)
def test_each_option_reaches_the_request(
    sojourn: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, arguments: list[object], field: str, value: object
) -> None:
    requests: list[pb.GenerateRequest] = []

    @contextmanager
    def stream(server: object, request: pb.GenerateRequest, timeout: float | None) -> Iterator[Iterator[object]]:
        requests.append(request)
        yield iter(())

    monkeypatch.setattr(remote, "stream", stream)
    assert sojourn("generate", "a one", "-o", "a.mp4", "--json", *arguments)[0] == 0
    assert getattr(requests[0], field) == value
    assert requests[0].prompt == "a one"
    assert list(requests[0].outputs) == [pb.OUTPUT_FORMAT_MP4]


def test_pictures_and_references_are_sent_as_they_are(
    sojourn: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("first.png", "last.jpg", "song.wav", "walk.mp4"):
        (tmp_path / name).write_bytes(name.encode())
    requests: list[pb.GenerateRequest] = []

    @contextmanager
    def stream(*arguments: object) -> Iterator[Iterator[object]]:
        requests.extend(argument for argument in arguments if isinstance(argument, pb.GenerateRequest))
        yield iter(())

    monkeypatch.setattr(local, "stream", stream)
    monkeypatch.chdir(tmp_path)
    options = ["--first-image", "first.png", "--last-image", "last.jpg"]
    options += [part for name in ("walk.mp4", "song.wav") for part in ("--reference", name)]
    assert sojourn("generate", "a one", "-o", "a.mp4", "--model", tmp_path, "--json", *options)[0] == 0
    first, last = requests[0].keyframes
    assert (first.image, first.position) == (b"first.png", pb.KEYFRAME_POSITION_FIRST)
    assert (last.image, last.position) == (b"last.jpg", pb.KEYFRAME_POSITION_LAST)
    assert [reference.WhichOneof("media") for reference in requests[0].references] == ["video", "audio"]


def test_an_unfinished_file_is_removed_and_an_old_one_kept(tmp_path: Path) -> None:
    output = tmp_path / "a.mp4"
    output.write_bytes(b"old")
    with ArtifactWriter([output], 1) as writer:
        writer.write(pb.ArtifactChunk(format=pb.OUTPUT_FORMAT_MP4, data=b"half"))
    assert output.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [output]


def test_the_example_client_writes_a_clip(served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = ROOT / "examples" / "generate.py"
    monkeypatch.setattr(sys, "argv", ["generate.py", served, "a one", str(tmp_path / "a.mp4")])
    runpy.run_path(str(example), run_name="__main__")
    with av.open(str(tmp_path / "a.mp4")) as video:
        assert video.streams.audio
    assert len(example.read_text().splitlines()) <= 31


def test_asking_a_server_needs_no_torch() -> None:
    code = "import sys, sojourn.inference.cli; sys.exit('torch' in sys.modules or 'diffusers' in sys.modules)"
    began = time.monotonic()
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    print(f"import of the command line: {time.monotonic() - began:.2f} s")
