"""`sojourn generate`: one clip (or several) into files, from a server or in this process."""

import json
import mimetypes
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from sojourn.inference.cli import local, remote
from sojourn.inference.cli.artifacts import ArtifactWriter, format_of
from sojourn.inference.cli.exits import CommandFailed, Exit
from sojourn.inference.cli.loading import DeviceOption, PrecisionOption
from sojourn.inference.cli.show import ProgressView
from sojourn.v1 import inference_pb2 as pb

Responses = AbstractContextManager[Iterator[pb.GenerateResponse]]

WHAT, WHERE, TLS = "What to make", "Where to make it", "Security"


def generate(
    prompt: Annotated[str, typer.Argument(help="What to show, for instance 'a moving seven'.", show_default=False)],
    output: Annotated[
        list[Path],
        typer.Option(
            "--output",
            "-o",
            help="File to write; .mp4 (with audio), .zip (PNG frames) or .safetensors (latents). "
            "Repeat it for several formats of the same clip.",
            show_default=False,
        ),
    ],
    server: Annotated[str, typer.Option(help="Server to ask, HOST:PORT.", rich_help_panel=WHERE)] = "127.0.0.1:50051",
    model: Annotated[
        Path | None,
        typer.Option(help="Model folder to run in this process instead of asking a server.", rich_help_panel=WHERE),
    ] = None,
    device: DeviceOption = "auto",
    dtype: PrecisionOption = "bfloat16",
    timeout: Annotated[
        float | None, typer.Option(help="Give up after this many seconds.", rich_help_panel=WHERE, show_default=False)
    ] = None,
    width: Annotated[int | None, typer.Option(help="Pixels; with --height.", rich_help_panel=WHAT)] = None,
    height: Annotated[int | None, typer.Option(help="Pixels; with --width.", rich_help_panel=WHAT)] = None,
    untrained_size: Annotated[
        bool,
        typer.Option("--untrained-size", help="Take a size that the model was not trained for.", rich_help_panel=WHAT),
    ] = False,
    aspect_ratio: Annotated[
        str | None, typer.Option(help="W:H instead of pixels, such as 16:9.", rich_help_panel=WHAT)
    ] = None,
    frames: Annotated[int | None, typer.Option(help="Frames of the clip.", rich_help_panel=WHAT)] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds instead of frames.", rich_help_panel=WHAT)] = None,
    steps: Annotated[int | None, typer.Option(help="Points of the noise schedule.", rich_help_panel=WHAT)] = None,
    flow_shift: Annotated[float | None, typer.Option(help="Shift of the video schedule.", rich_help_panel=WHAT)] = None,
    audio_flow_shift: Annotated[
        float | None, typer.Option(help="Shift of the audio schedule.", rich_help_panel=WHAT)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the noise; drawn and shown without it.", rich_help_panel=WHAT)
    ] = None,
    quality: Annotated[str, typer.Option(help="lossless, extra-high or high.", rich_help_panel=WHAT)] = "lossless",
    count: Annotated[int, typer.Option(help="Clips to make, with seeds counting up.", rich_help_panel=WHAT)] = 1,
    first_image: Annotated[
        Path | None, typer.Option(help="Picture that the clip starts from.", rich_help_panel=WHAT)
    ] = None,
    last_image: Annotated[
        Path | None, typer.Option(help="Picture that the clip ends on.", rich_help_panel=WHAT)
    ] = None,
    reference: Annotated[
        list[Path] | None,
        typer.Option(
            help="Picture, video or audio file to condition on; repeat it, order matters.", rich_help_panel=WHAT
        ),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File whose first line is the bearer token.", rich_help_panel=TLS)
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="PEM certificates to trust; turns TLS on.", rich_help_panel=TLS)
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate of this client.", rich_help_panel=TLS)] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of this client.", rich_help_panel=TLS)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was made as JSON.")] = False,
) -> None:
    """Generate a clip from text, and from pictures, video or audio where the model takes them.

    For instance: sojourn generate 'a moving seven' -o seven.mp4 --seed 7
    """
    request = pb.GenerateRequest(
        prompt=prompt,
        steps=steps,
        flow_shift=flow_shift,
        audio_flow_shift=audio_flow_shift,
        seed=_seed(seed),
        quality=_quality(quality),
        outputs=[format_of(path) for path in output],
        count=count,
        untrained_size=untrained_size,
        **_canvas(width, height, aspect_ratio),
        **_length(frames, duration),
    )
    request.keyframes.extend(_keyframes(first_image, last_image))
    request.references.extend(_reference(path) for path in reference or [])
    if model is not None:
        responses: Responses = local.stream(model, device, dtype, request, timeout)
    else:
        responses = remote.stream(_server(server, token_file, tls_ca, tls_cert, tls_key), request, timeout)
    console = Console(stderr=True)
    made = _consume(responses, ArtifactWriter(output, count), ProgressView(console))
    print(json.dumps(made)) if as_json else _tell(console, made)


def _consume(responses: Responses, writer: ArtifactWriter, view: ProgressView) -> dict[str, Any]:
    """Runs the request to its end; returns what was accepted, what was completed and the files."""
    made: dict[str, Any] = {}
    with responses as stream, writer, view:
        for response in stream:
            match response.WhichOneof("event"):
                case "accepted":
                    made["accepted"] = _plain(response.accepted)
                case "progress":
                    view.show(response.progress)
                case "artifact":
                    writer.write(response.artifact)
                case "completed":
                    made["completed"] = _plain(response.completed)
    made["files"] = [str(path) for path in writer.finished]
    return made


def _plain(message: pb.Accepted | pb.Completed) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True)


def _tell(console: Console, made: dict[str, Any]) -> None:
    if reason := made.get("completed", {}).get("quality_reason"):
        console.print(f"made at {made['completed']['quality']}: {reason}")
    for path in made["files"]:
        console.print(f"[bold]{path}[/]  seed {made['accepted'].get('seed', 0)}")


def _canvas(width: int | None, height: int | None, aspect_ratio: str | None) -> dict[str, Any]:
    if aspect_ratio is not None:
        if width is not None or height is not None:
            raise CommandFailed("give --aspect-ratio, or --width and --height, not both", Exit.INVALID)
        return {"aspect_ratio": _ratio(aspect_ratio)}
    if width is None and height is None:
        return {}
    if width is None or height is None:
        raise CommandFailed("--width and --height go together", Exit.INVALID)
    return {"size": pb.Size(width=width, height=height)}


def _ratio(text: str) -> pb.AspectRatio:
    try:
        width, height = (int(part) for part in text.split(":"))
    except ValueError:
        raise CommandFailed(f"--aspect-ratio {text}: two whole numbers such as 16:9", Exit.INVALID) from None
    return pb.AspectRatio(width=width, height=height)


def _length(frames: int | None, duration: float | None) -> dict[str, Any]:
    if frames is not None and duration is not None:
        raise CommandFailed("give --frames or --duration, not both", Exit.INVALID)
    if duration is not None:
        return {"duration_seconds": duration}
    return {} if frames is None else {"frames": frames}


def _seed(seed: int | None) -> int | None:
    if seed is not None and not 0 <= seed < 2**64:
        raise CommandFailed(f"--seed {seed}: from 0 to {2**64 - 1}", Exit.INVALID)
    return seed


def _quality(name: str) -> pb.QualityTier.ValueType:
    tiers = {
        "lossless": pb.QUALITY_TIER_LOSSLESS,
        "extra-high": pb.QUALITY_TIER_EXTRA_HIGH,
        "high": pb.QUALITY_TIER_HIGH,
    }
    if name not in tiers:
        raise CommandFailed(f"--quality {name}: one of {', '.join(tiers)}", Exit.INVALID)
    return tiers[name]


def _keyframes(first: Path | None, last: Path | None) -> list[pb.Keyframe]:
    ends = ((first, pb.KEYFRAME_POSITION_FIRST), (last, pb.KEYFRAME_POSITION_LAST))
    return [pb.Keyframe(image=_read(path), position=position) for path, position in ends if path is not None]


def _reference(path: Path) -> pb.Reference:
    kind = (mimetypes.guess_type(path.name)[0] or "").partition("/")[0]
    if kind not in ("image", "video", "audio"):
        raise CommandFailed(f"{path}: neither a picture, a video nor an audio file by its name", Exit.INVALID)
    return pb.Reference(**{kind: _read(path)})


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CommandFailed(f"{path}: {error.strerror}", Exit.INVALID) from None


def _server(
    address: str, token_file: Path | None, tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None
) -> remote.Server:
    token = _read(token_file).decode().splitlines()[0].strip() if token_file else None
    return remote.Server(address=address, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, token=token)
