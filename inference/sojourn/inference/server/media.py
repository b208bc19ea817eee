"""Bytes of a request → pictures, videos and waveforms, with a bound on everything that they unpack to.

What comes over the network is untrusted: only still formats and containers of the lists below are opened, no demuxer
may open a second file or address (playlists, external references), and a medium that would unpack to more than the
bounds is refused before or while it unpacks.
"""

import io
import itertools
from dataclasses import dataclass

import av
import numpy as np
from PIL import Image, ImageOps

STILL_FORMATS = ("PNG", "JPEG", "WEBP")

# libavformat's own names of the demuxers that read one self-contained file.
CONTAINERS = "aac,avi,flac,flv,gif,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mp3,mpeg,mpegts,ogg,wav"

# 64 megapixels, a large camera's picture; 192 MB as RGB.
MAX_STILL_PIXELS = 64 * 10**6
# Frames of a video as RGB. 15 s (the longest clip of MiniMax-H3) of 1080p at 30 frames per second are 2.8 GB.
MAX_VIDEO_BYTES = 3 * 2**30
# A waveform as float32. Ten minutes of stereo at 48 kHz are 230 MB.
MAX_AUDIO_BYTES = 256 * 2**20


class UndecodableMedium(Exception):
    """The bytes are not a medium of the asked-for kind, or unpack to too much. The message is for the client."""


@dataclass(frozen=True, kw_only=True)
class Video:
    """A decoded video.

    Attributes:
        frames: RGB, uint8 [F, H, W, 3], upright.
        frames_per_second: As the container says.
        audio: Its soundtrack, float32 [channels, samples]; None without one.
        sample_rate: Samples per second of `audio`; None without one.
    """

    frames: np.ndarray
    frames_per_second: float
    audio: np.ndarray | None
    sample_rate: int | None


@dataclass(frozen=True, kw_only=True)
class Audio:
    """A decoded waveform: float32 [channels, samples]."""

    samples: np.ndarray
    sample_rate: int


def decode_still(data: bytes) -> Image.Image:
    """Decodes a picture to upright RGB.

    Raises:
        UndecodableMedium: Not a complete PNG, JPEG or WebP, or more than MAX_STILL_PIXELS.
    """
    try:
        with Image.open(io.BytesIO(data), formats=STILL_FORMATS) as image:
            width, height = image.size
            if width * height > MAX_STILL_PIXELS:
                raise UndecodableMedium(f"{width}×{height} is more than {MAX_STILL_PIXELS} pixels")
            return ImageOps.exif_transpose(image).convert("RGB")
    except UndecodableMedium:
        raise
    except Image.DecompressionBombError as error:
        raise UndecodableMedium(f"more than {MAX_STILL_PIXELS} pixels") from error
    except Exception as error:  # Pillow's decoders raise whatever the bytes lead them to
        raise UndecodableMedium("not a complete PNG, JPEG or WebP picture") from error


def decode_video(data: bytes) -> Video:
    """Decodes a video with its soundtrack.

    Raises:
        UndecodableMedium: No video that PyAV decodes, or more than MAX_VIDEO_BYTES of frames.
    """
    try:
        frames, rate = _frames(data)
        soundtrack = _waveform(data, required=False)
    except (av.FFmpegError, ValueError, OverflowError) as error:
        raise UndecodableMedium("not a video that can be decoded") from error
    return Video(
        frames=frames,
        frames_per_second=rate,
        audio=soundtrack.samples if soundtrack else None,
        sample_rate=soundtrack.sample_rate if soundtrack else None,
    )


def decode_audio(data: bytes) -> Audio:
    """Decodes an audio file, or the soundtrack of a video.

    Raises:
        UndecodableMedium: No audio that PyAV decodes, or more than MAX_AUDIO_BYTES of samples.
    """
    try:
        waveform = _waveform(data, required=True)
    except (av.FFmpegError, ValueError, OverflowError) as error:
        raise UndecodableMedium("not audio that can be decoded") from error
    assert waveform is not None
    return waveform


def _open(data: bytes) -> av.container.InputContainer:
    return av.open(io.BytesIO(data), options={"format_whitelist": CONTAINERS, "protocol_whitelist": "none"})


def _frames(data: bytes) -> tuple[np.ndarray, float]:
    with _open(data) as container:
        if not container.streams.video:
            raise UndecodableMedium("it holds no video")
        stream = container.streams.video[0]
        frames: list[np.ndarray] = []
        total_bytes, rotation = 0, 0.0
        for frame in container.decode(stream):
            total_bytes += frame.width * frame.height * 3
            if total_bytes > MAX_VIDEO_BYTES:
                raise UndecodableMedium(f"its frames unpack to more than {MAX_VIDEO_BYTES} bytes; send a shorter one")
            rotation = frame.rotation
            frames.append(frame.to_ndarray(format="rgb24"))
        rate = stream.average_rate or stream.guessed_rate
    if not frames or not rate:
        raise UndecodableMedium("it holds no frames, or does not say at which rate")
    stacked = np.stack(frames)
    # Undoes the display matrix to the nearest quarter turn, as diffusers' MiniMaxH3VideoReference.from_file does.
    turns = round(rotation / 90.0) % 4
    return (np.ascontiguousarray(np.rot90(stacked, k=-turns, axes=(1, 2))) if turns else stacked), float(rate)


def _waveform(data: bytes, *, required: bool) -> Audio | None:
    with _open(data) as container:
        if not container.streams.audio:
            if required:
                raise UndecodableMedium("it holds no audio")
            return None
        stream = container.streams.audio[0]
        rate = int(stream.codec_context.sample_rate)
        resampler = av.AudioResampler(format="fltp", layout=stream.layout, rate=rate)
        chunks: list[np.ndarray] = []
        total_bytes = 0
        for frame in itertools.chain(container.decode(stream), (None,)):
            for piece in resampler.resample(frame):
                chunks.append(piece.to_ndarray())
                total_bytes += chunks[-1].nbytes
            if total_bytes > MAX_AUDIO_BYTES:
                raise UndecodableMedium(f"it unpacks to more than {MAX_AUDIO_BYTES} bytes; send a shorter one")
    if not chunks:
        raise UndecodableMedium("it holds no audio samples")
    return Audio(samples=np.concatenate(chunks, axis=-1).astype(np.float32, copy=False), sample_rate=rate)
