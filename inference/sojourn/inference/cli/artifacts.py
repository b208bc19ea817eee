"""Puts the artifacts of a response stream into files: whole under their names, or not at all."""

import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from sojourn.inference.cli.exits import CommandFailed, Exit
from sojourn.v1 import inference_pb2 as pb

SUFFIXES = {
    pb.OUTPUT_FORMAT_MP4: ".mp4",
    pb.OUTPUT_FORMAT_PNG_FRAMES: ".zip",
    pb.OUTPUT_FORMAT_LATENTS: ".safetensors",
}
FORMATS = {suffix: output for output, suffix in SUFFIXES.items()}


def format_of(output: Path) -> pb.OutputFormat.ValueType:
    """The format that a file's name asks for.

    Raises:
        CommandFailed: The suffix is none of .mp4, .zip, .safetensors.
    """
    try:
        return FORMATS[output.suffix.lower()]
    except KeyError:
        raise CommandFailed(
            f"{output}: the suffix says what to make: {', '.join(sorted(FORMATS))}", Exit.INVALID
        ) from None


def file_name(output: Path, clip: int, clips: int) -> Path:
    """Where a clip goes: `output` itself, or with several clips `output` with -CLIP before the suffix."""
    return output if clips == 1 else output.with_stem(f"{output.stem}-{clip}")


class ArtifactWriter:
    """Writes the chunks of the artifacts of one request; a context manager that removes what is unfinished.

    Attributes:
        finished: Files that are whole, in the order of their artifacts.
    """

    def __init__(self, outputs: list[Path], clips: int) -> None:
        self._outputs = {format_of(output): output for output in outputs}
        self._clips = clips
        self._open: tuple[BinaryIO, Path, Path] | None = None
        self.finished: list[Path] = []

    def __enter__(self) -> "ArtifactWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            stream, partial, _ = self._open
            stream.close()
            partial.unlink(missing_ok=True)

    def write(self, chunk: pb.ArtifactChunk) -> None:
        """Appends one chunk; the last one of an artifact gives the file its name."""
        if self._open is None:
            target = file_name(self._outputs[chunk.format], chunk.clip, self._clips)
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{target.name}.{os.getpid()}.part")
            self._open = (partial.open("wb"), partial, target)
        stream, partial, target = self._open
        stream.write(chunk.data)
        if chunk.last:
            stream.close()
            partial.replace(target)
            self._open = None
            self.finished.append(target)
