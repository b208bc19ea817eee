"""A clip and its bytes: exact frames, rates and sizes; equal bytes for equal clips."""

import hashlib
import io
import wave
import zipfile
from typing import Any

import av
import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from sojourn.inference import encoding
from sojourn.inference.encoding import encode, latents_sha256
from sojourn.inference.requests import Clip, OutputFormat


def clip(width: int = 32, height: int = 32, frames: int = 9, *, channels: int = 2, rate: float = 24.0) -> Clip:
    random = np.random.default_rng(1)
    ramp = np.linspace(0, 1, frames, dtype=np.float32)[:, None, None, None]
    samples = round(frames / rate * 32000)
    return Clip(
        latents=torch.from_numpy(random.standard_normal((1, 4, 3, 2, 2), dtype=np.float32)),
        audio_latents=torch.from_numpy(random.standard_normal((2, 4, 8), dtype=np.float32)) if channels else None,
        frames=np.broadcast_to(ramp, (frames, height, width, 3)).copy(),
        audio=(random.random((channels, samples), dtype=np.float32) - 0.5) if channels else None,
        sample_rate=32000 if channels else 0,
        frames_per_second=rate,
    )


@pytest.mark.parametrize(("width", "height"), [(32, 32), (64, 16), (33, 16), (16, 33), (31, 47)])
@pytest.mark.parametrize("rate", [24.0, 30000 / 1001])
def test_mp4_keeps_size_count_and_rate(width: int, height: int, rate: float) -> None:
    with encode(clip(width, height, rate=rate), OutputFormat.MP4).file as file:
        container = av.open(file, "r")
        video = container.streams.video[0]
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video)]
        assert float(video.average_rate) == pytest.approx(rate)
    assert np.stack(decoded).shape == (9, height, width, 3)
    brightness = [frame.mean() for frame in decoded]
    assert brightness == pytest.approx(np.linspace(0, 255, 9), abs=4)


@pytest.mark.parametrize("channels", [0, 1, 2])
def test_mp4_carries_the_sound_there_is(channels: int) -> None:
    with encode(clip(channels=channels, frames=24), OutputFormat.MP4).file as file:
        container = av.open(file, "r")
        assert len(container.streams.audio) == bool(channels)
        if channels:
            audio = container.streams.audio[0]
            assert (audio.codec_context.name, audio.rate, audio.channels) == ("aac", 32000, channels)
            assert float(audio.duration * audio.time_base) == pytest.approx(1.0, abs=0.07)


@pytest.mark.parametrize("output", [OutputFormat.PNG_FRAMES, OutputFormat.LATENTS])
def test_equal_clips_give_equal_bytes(output: OutputFormat) -> None:
    first, second = encode(clip(), output), encode(clip(), output)
    with first.file, second.file:
        data = first.file.read()
        assert data == second.file.read()
    assert first.sha256 == second.sha256 == hashlib.sha256(data).hexdigest()
    assert first.size_bytes == len(data)


def test_png_frames_are_lossless_and_sound_is_16_bit() -> None:
    made = clip(33, 17)
    with zipfile.ZipFile(io.BytesIO(encode(made, OutputFormat.PNG_FRAMES).file.read())) as archive:
        assert archive.namelist() == [*(f"frame_{i:05d}.png" for i in range(9)), "audio.wav"]
        assert made.frames is not None
        for index in range(9):
            frame = np.asarray(Image.open(archive.open(f"frame_{index:05d}.png")))
            assert np.array_equal(frame, (made.frames[index] * 255).round().astype(np.uint8))
        with wave.open(archive.open("audio.wav")) as sound:
            assert (sound.getnchannels(), sound.getsampwidth(), sound.getframerate()) == (2, 2, 32000)
            samples = np.frombuffer(sound.readframes(10**6), "<i2").reshape(-1, 2).T
    assert made.audio is not None
    assert np.abs(samples / 32767 - made.audio).max() < 1 / 32767


def test_values_beyond_the_range_are_clipped_and_do_not_wrap() -> None:
    made = clip(16, 16, frames=2)
    assert made.frames is not None
    assert made.audio is not None
    made.frames[0], made.frames[1] = -0.5, 1.5
    made.audio[:, 0], made.audio[:, 1] = -2, 2
    with zipfile.ZipFile(io.BytesIO(encode(made, OutputFormat.PNG_FRAMES).file.read())) as archive:
        assert np.asarray(Image.open(archive.open("frame_00000.png"))).max() == 0
        assert np.asarray(Image.open(archive.open("frame_00001.png"))).min() == 255
        with wave.open(archive.open("audio.wav")) as sound:
            assert np.frombuffer(sound.readframes(2), "<i2").tolist() == [-32767, -32767, 32767, 32767]


def test_latents_survive_bit_for_bit() -> None:
    made = clip()
    tensors = safetensors.torch.load(encode(made, OutputFormat.LATENTS).file.read())
    assert torch.equal(tensors["latents"], made.latents)
    assert made.audio_latents is not None
    assert torch.equal(tensors["audio_latents"], made.audio_latents)
    raw = made.latents.numpy().tobytes() + made.audio_latents.numpy().tobytes()
    assert latents_sha256(made) == hashlib.sha256(raw).hexdigest()


@pytest.mark.parametrize("output", list(OutputFormat))
def test_encoding_can_be_stopped_and_leaves_no_file(output: OutputFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    spooled = encoding.tempfile.SpooledTemporaryFile
    monkeypatch.setattr(
        encoding.tempfile, "SpooledTemporaryFile", lambda **options: opened.append(spooled(**options)) or opened[-1]
    )

    class Stopped(BaseException):
        pass

    def check() -> None:
        raise Stopped

    with pytest.raises(Stopped):
        encode(clip(), output, check=check)
    assert [file.closed for file in opened] == [True]


def test_clip_without_frames_has_latents_only() -> None:
    bare = Clip(**(vars(clip()) | {"frames": None, "audio": None}))
    encode(bare, OutputFormat.LATENTS).file.close()
    with pytest.raises(ValueError, match="latents only"):
        encode(bare, OutputFormat.MP4)
