"""The shipped model shows the digit that it is asked for, and sounds its tone."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sojourn.inference.pipeline import Pipeline
from sojourn.inference.requests import GenerationRequest, OutputFormat
from sojourn.inference.watch import Watch

from tools.demo_model import data, evaluate

OUT = Path(__file__).parents[2] / "out"
CLIPS_PER_DIGIT = 3


@pytest.fixture(scope="module")
def clips(digits: Pipeline, make_request: Callable[..., GenerationRequest]) -> list[evaluate.Clip]:
    """Three clips of each digit through our pipeline, as a request without a size would make them."""
    made = []
    for digit in range(10):
        request = make_request(
            prompt=evaluate.PROMPT.format(data.WORDS[digit]),
            width=digits.defaults.width,
            height=digits.defaults.height,
            frames=digits.defaults.frames,
            steps=evaluate.STEPS,
            seeds=tuple(range(evaluate.FIRST_CLIP_SEED, evaluate.FIRST_CLIP_SEED + CLIPS_PER_DIGIT)),
            outputs=(OutputFormat.MP4,),
        )
        for index, seed in enumerate(request.seeds):
            clip = digits.run_clip(request, index, Watch(clock=time.monotonic))
            grey = evaluate.as_grey(clip.frames)
            made.append(evaluate.Clip(digit, seed, grey, clip.audio, clip.sample_rate))
    return made


@pytest.fixture(scope="module")
def report(clips: list[evaluate.Clip]) -> evaluate.Report:
    report = evaluate.judge_clips(clips, psnr=0.0, seconds_per_clip=0.0)
    OUT.mkdir(exist_ok=True)
    evaluate.save_sheet(clips[::CLIPS_PER_DIGIT], OUT / "digits.png")
    print(f"\njudge on held-out digits {report.judge_held_out:.1%}; clips {report.clip_accuracy:.1%}, ", end="")
    print(f"frames {report.frame_accuracy:.1%}, tones {report.tone_accuracy:.1%} of {report.clips} clips")
    return report


def test_the_judge_knows_real_digits(report: evaluate.Report) -> None:
    assert report.judge_held_out >= 0.97


def test_nine_of_ten_clips_show_the_digit_asked_for(report: evaluate.Report) -> None:
    assert report.clip_accuracy >= 0.9


def test_every_clip_sounds_the_tone_of_its_digit(report: evaluate.Report) -> None:
    assert report.tone_accuracy == 1.0


def test_the_digit_moves(report: evaluate.Report) -> None:
    assert report.speed_px_per_s >= 6


def test_the_ear_tells_neighbouring_tones_apart() -> None:
    second = np.sin(2 * np.pi * data.tone_hz(6) * np.arange(32_000) / 32_000)
    assert [digit for digit in range(10) if evaluate.sounds_like(second, 32_000, digit)] == [6]
