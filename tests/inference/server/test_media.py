"""Untrusted bytes: what is not a medium is refused, and nothing unpacks without a bound or opens a second file."""

import io
import wave
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image
from sojourn.inference.server import media
from sojourn.inference.server.media import UndecodableMedium

from tests.inference.server.test_generate import png


def encoded(kind: str, size: tuple[int, int] = (8, 4), **options: object) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (255, 0, 0)).save(out, kind, **options)
    return out.getvalue()


def video(frames: int = 12, *, sound: bool = True, width: int = 32, height: int = 16) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=12)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        audio = container.add_stream("aac", rate=32000, layout="mono") if sound else None
        for index in range(frames):
            pixels = np.full((height, width, 3), index * 20, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
        if audio is not None:
            for start in range(0, 32000, 1024):
                piece = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
                piece.sample_rate, piece.pts = 32000, start
                container.mux(audio.encode(piece))
            container.mux(audio.encode(None))
    return out.getvalue()


def sound() -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(np.full((80, 2), 16384, "<i2").tobytes())
    return out.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_stills_become_rgb(kind: str) -> None:
    image = media.decode_still(encoded(kind))
    assert (image.mode, image.size) == ("RGB", (8, 4))


def test_stills_stand_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    assert media.decode_still(encoded("JPEG", exif=exif)).size == (4, 8)


@pytest.mark.parametrize("data", [b"", b"x", png()[:100], encoded("GIF"), encoded("BMP"), b"<html></html>", sound()])
def test_other_bytes_are_no_still(data: bytes) -> None:
    with pytest.raises(UndecodableMedium, match="not a complete PNG, JPEG or WebP"):
        media.decode_still(data)


def test_decompression_bomb_is_refused_before_it_unpacks() -> None:
    side = 9000
    out = io.BytesIO()
    Image.new("1", (side, side)).save(out, "PNG")
    assert len(out.getvalue()) < 20_000
    with pytest.raises(UndecodableMedium, match="pixels"):
        media.decode_still(out.getvalue())


def test_video_comes_with_rate_and_soundtrack() -> None:
    decoded = media.decode_video(video())
    assert (decoded.frames.shape, decoded.frames.dtype) == ((12, 16, 32, 3), np.uint8)
    assert (decoded.frames_per_second, decoded.sample_rate) == (12.0, 32000)
    assert decoded.audio is not None
    assert (decoded.audio.shape[0], decoded.audio.dtype) == (1, np.float32)
    assert media.decode_video(video(sound=False)).audio is None


def test_audio_keeps_rate_and_channels() -> None:
    decoded = media.decode_audio(sound())
    assert (decoded.samples.shape, decoded.sample_rate) == ((2, 80), 8000)
    assert np.allclose(decoded.samples, 0.5)
    assert media.decode_audio(video()).sample_rate == 32000


@pytest.mark.parametrize("data", [b"", b"x", b"<html></html>", video()[:200], sound()])
def test_other_bytes_are_no_video(data: bytes) -> None:
    with pytest.raises(UndecodableMedium):
        media.decode_video(data)


@pytest.mark.parametrize("data", [b"", b"RIFF", video(sound=False), png()])
def test_other_bytes_are_no_audio(data: bytes) -> None:
    with pytest.raises(UndecodableMedium):
        media.decode_audio(data)


def test_video_is_bounded_while_it_unpacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "MAX_VIDEO_BYTES", 5 * 32 * 16 * 3)
    media.decode_video(video(5, sound=False))
    with pytest.raises(UndecodableMedium, match="send a shorter one"):
        media.decode_video(video(6, sound=False))


def test_audio_is_bounded_while_it_unpacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "MAX_AUDIO_BYTES", 100)
    with pytest.raises(UndecodableMedium, match="send a shorter one"):
        media.decode_audio(sound())


@pytest.mark.parametrize(
    "playlist",
    ["#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{path}\n#EXT-X-ENDLIST\n", "ffconcat version 1.0\nfile {path}\n"],
)
def test_playlists_open_no_other_file(tmp_path: Path, playlist: str) -> None:
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(video())
    for name in (str(secret), f"file://{secret}"):
        for decode in (media.decode_video, media.decode_audio):
            with pytest.raises(UndecodableMedium):
                decode(playlist.format(path=name).encode())
