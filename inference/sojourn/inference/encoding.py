"""A clip → the bytes of an artifact: mp4, a zip of PNG frames, or the latents.

Equal clips give equal PNG frames and latents, byte for byte. Of mp4 that is what one gets as a rule (the number of
encoder threads is fixed, neither dates nor versions are written) and not a promise: of 180 encodings of one clip x264
made one that differed. Each artifact goes to a file of its own that lives in memory while it is small and on disk
without a name when it is not.
"""

import hashlib
import io
import tempfile
import wave
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import IO

import av
import numpy as np
import safetensors.numpy
from PIL import Image
from sojourn.inference.requests import Clip, OutputFormat

MIME_TYPES = {
    OutputFormat.MP4: "video/mp4",
    OutputFormat.PNG_FRAMES: "application/zip",
    OutputFormat.LATENTS: "application/x-safetensors",
}

# Artifacts up to this size stay in memory.
SPOOL_BYTES = 4 * 2**20

# x264's output depends on its number of threads; a fixed number keeps it independent of the machine.
VIDEO_THREADS = 4

# Visually lossless to most eyes (x264's own default is 23).
VIDEO_CRF = 18

# 160 kbit/s AAC, stereo.
AUDIO_BIT_RATE = 160_000

# Samples of one AAC frame.
AUDIO_FRAME_SAMPLES = 1024

# zlib level of the PNG frames: 1 takes a fifth of the time of Pillow's default 6, for files a tenth larger.
PNG_LEVEL = 1

# The earliest date that a zip can hold.
ZIP_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """One encoded result.

    Attributes:
        file: At its begin; whoever holds the artifact closes it.
        sha256: Over all its bytes, lower-case hexadecimal.
    """

    format: OutputFormat
    file: IO[bytes]
    size_bytes: int
    sha256: str

    @property
    def mime_type(self) -> str:
        """Mime type of `format`."""
        return MIME_TYPES[self.format]


def _never(*args: object) -> None:
    """The check of an encoding that nobody stops."""


def encode(clip: Clip, output: OutputFormat, *, check: Callable[[], None] = _never) -> Artifact:
    """Encodes a clip.

    Args:
        clip: With frames, unless `output` is LATENTS.
        output: The format.
        check: Called before each frame; what it raises ends the encoding.

    Raises:
        ValueError: The clip has no frames, or a number of audio channels that the format does not take.
    """
    if clip.frames is None and output is not OutputFormat.LATENTS:
        raise ValueError("a clip without frames can be encoded as latents only")
    file: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115 - the artifact's holder closes it
    try:
        _ENCODERS[output](clip, file, check)
        size_bytes = file.seek(0, io.SEEK_END) or file.tell()
        sha256 = _sha256(file)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return Artifact(format=output, file=file, size_bytes=size_bytes, sha256=sha256)


def latents_sha256(clip: Clip) -> str:
    """SHA-256 over the float32 little-endian bytes of the latents, video first, then audio."""
    digest = hashlib.sha256()
    for tensor in _latents(clip).values():
        digest.update(tensor.astype("<f4", copy=False).data)
    return digest.hexdigest()


def _sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while block := file.read(2**20):
        digest.update(block)
    return digest.hexdigest()


def _latents(clip: Clip) -> dict[str, np.ndarray]:
    tensors = {"latents": clip.latents}
    if clip.audio_latents is not None:
        tensors["audio_latents"] = clip.audio_latents
    return {name: np.ascontiguousarray(tensor.detach().cpu().float().numpy()) for name, tensor in tensors.items()}


def _write_latents(clip: Clip, file: IO[bytes], check: Callable[[], None]) -> None:
    check()
    file.write(safetensors.numpy.save(_latents(clip)))


def _pixels(clip: Clip, check: Callable[[], None]) -> Iterator[np.ndarray]:
    """Frames as uint8 [H, W, 3], one by one: a second copy of the whole clip would double its memory."""
    assert clip.frames is not None
    for frame in clip.frames:
        check()
        yield np.ascontiguousarray((np.clip(frame, 0.0, 1.0) * 255.0).round().astype(np.uint8))


def _write_mp4(clip: Clip, file: IO[bytes], check: Callable[[], None]) -> None:
    # bitexact: the muxer writes no version of itself.
    with av.open(file, "w", format="mp4", options={"fflags": "+bitexact"}) as container:
        video = _add_video(container, clip)
        audio = _add_audio(container, clip) if clip.audio is not None else None
        for index, pixels in enumerate(_pixels(clip, check)):
            # Converted here: the conversion that encode() would do gives other bytes each time (seen with PyAV 18.1).
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format=video.pix_fmt)
            frame.pts, frame.time_base = index, 1 / _rate(clip)
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        if audio is not None:
            for sound in _sound_frames(clip, check):
                container.mux(audio.encode(sound))
            container.mux(audio.encode(None))


def _add_video(container: "av.container.OutputContainer", clip: Clip) -> "av.VideoStream":
    assert clip.frames is not None
    height, width = clip.frames.shape[1:3]
    stream = container.add_stream("libx264", rate=_rate(clip))
    stream.width, stream.height = width, height
    # 4:2:0 halves both axes, which odd sizes do not allow; 4:4:4 keeps their exact size.
    stream.pix_fmt = "yuv420p" if width % 2 == 0 and height % 2 == 0 else "yuv444p"
    stream.options = {"crf": str(VIDEO_CRF), "threads": str(VIDEO_THREADS)}
    return stream


def _rate(clip: Clip) -> Fraction:
    return Fraction(clip.frames_per_second).limit_denominator(1001)


def _add_audio(container: "av.container.OutputContainer", clip: Clip) -> "av.AudioStream":
    stream = container.add_stream("aac", rate=clip.sample_rate, layout=_layout(clip))
    stream.bit_rate = AUDIO_BIT_RATE
    stream.codec_context.flags |= av.codec.context.Flags.bitexact
    return stream


def _layout(clip: Clip) -> str:
    assert clip.audio is not None
    channels = clip.audio.shape[0]
    if channels not in (1, 2):
        raise ValueError(f"{channels} audio channels; mono and stereo can be encoded")
    return "stereo" if channels == 2 else "mono"


def _sound_frames(clip: Clip, check: Callable[[], None]) -> Iterator["av.AudioFrame"]:
    assert clip.audio is not None
    samples = clip.audio.astype(np.float32, copy=False)
    for start in range(0, samples.shape[1], AUDIO_FRAME_SAMPLES):
        check()
        piece = np.ascontiguousarray(samples[:, start : start + AUDIO_FRAME_SAMPLES])
        frame = av.AudioFrame.from_ndarray(piece, format="fltp", layout=_layout(clip))
        frame.sample_rate, frame.pts = clip.sample_rate, start
        frame.time_base = Fraction(1, clip.sample_rate)
        yield frame


def _write_png_frames(clip: Clip, file: IO[bytes], check: Callable[[], None]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for index, pixels in enumerate(_pixels(clip, check)):
            png = io.BytesIO()
            Image.fromarray(pixels).save(png, format="PNG", compress_level=PNG_LEVEL)
            archive.writestr(zipfile.ZipInfo(f"frame_{index:05d}.png", ZIP_DATE), png.getvalue())
        if clip.audio is not None:
            archive.writestr(zipfile.ZipInfo("audio.wav", ZIP_DATE), _wav(clip))


def _wav(clip: Clip) -> bytes:
    assert clip.audio is not None
    samples = (np.clip(clip.audio, -1.0, 1.0) * 32767.0).round().astype("<i2")
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(samples.shape[0])
        file.setsampwidth(2)
        file.setframerate(clip.sample_rate)
        file.writeframes(np.ascontiguousarray(samples.T).tobytes())
    return out.getvalue()


_ENCODERS: dict[OutputFormat, Callable[[Clip, IO[bytes], Callable[[], None]], None]] = {
    OutputFormat.MP4: _write_mp4,
    OutputFormat.PNG_FRAMES: _write_png_frames,
    OutputFormat.LATENTS: _write_latents,
}
