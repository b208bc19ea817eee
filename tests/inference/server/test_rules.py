"""Single values: refused, with the nearest valid ones named."""

import math

import pytest
from sojourn.inference.requests import Limits
from sojourn.inference.server import rules

H3 = Limits(
    size_multiple=32, min_edge=32, max_edge=1536, max_pixels=768 * 1344, min_aspect_ratio=1 / 4, max_aspect_ratio=4,
    min_frames=124, max_frames=345, frames_step=17, frames_offset=5, min_steps=2, max_steps=1000, max_count=16,
    max_prompt_characters=100, max_prompt_tokens=10, max_media_bytes=1000,
)  # fmt: skip


@pytest.mark.parametrize(
    ("value", "nearest"),
    [(1080, (1056, 1088)), (0, (32,)), (1, (32,)), (-8, (32,)), (8, (32,)), (2**31, (1536,)), (33, (32, 64)),
     (2**63 - 1, (1536,)), (-(2**63), (32,)), (1535, (1504, 1536)), (1537, (1536,))],
)  # fmt: skip
def test_edges_are_refused_with_the_nearest_valid(value: int, nearest: tuple[int, ...]) -> None:
    told = rules.wrong_edge(value, H3)
    assert told is not None
    assert f"{value} is not a multiple of 32" in told
    assert told.endswith("nearest valid: " + " or ".join(map(str, nearest)))
    assert all(rules.wrong_edge(pixels, H3) is None for pixels in nearest)


@pytest.mark.parametrize("value", [32, 64, 768, 1344, 1536])
def test_valid_edges_pass(value: int) -> None:
    assert rules.wrong_edge(value, H3) is None


def test_areas_are_refused_with_both_ways_to_fit() -> None:
    assert rules.wrong_area(1344, 768, H3) is None
    told = rules.wrong_area(1536, 1536, H3)
    assert told is not None
    assert "nearest valid: 672×1536 or 1536×672" in told
    for text in told.rpartition(": ")[2].split(" or "):
        width, height = map(int, text.split("×"))
        assert (
            rules.wrong_edge(width, H3) is rules.wrong_edge(height, H3) is rules.wrong_area(width, height, H3) is None
        )


@pytest.mark.parametrize(
    ("value", "nearest"),
    [(0, (124,)), (-1, (124,)), (123, (124,)), (125, (124, 141)), (140, (124, 141)), (344, (328, 345)), (346, (345,)),
     (10**18, (345,))],
)  # fmt: skip
def test_frames_are_refused_with_the_nearest_two(value: int, nearest: tuple[int, ...]) -> None:
    told = rules.wrong_frames(value, H3)
    assert told is not None
    assert told.endswith("nearest valid: " + " or ".join(map(str, nearest)))
    assert all(rules.wrong_frames(frames, H3) is None for frames in nearest)


@pytest.mark.parametrize("seconds", [124 / 24, 5.17, 5.18, 345 / 24])
def test_durations_within_half_a_frame_pass(seconds: float) -> None:
    assert rules.wrong_duration(seconds, 24, H3) is None


@pytest.mark.parametrize(
    ("seconds", "nearest"),
    [(5.0, "5.16667 (124 frames)"), (5.5, "5.16667 (124 frames) or 5.875 (141 frames)"), (0.0, "5.16667 (124 frames)"),
     (-3.0, "5.16667 (124 frames)"), (1e308, "14.375 (345 frames)")],
)  # fmt: skip
def test_durations_are_refused_with_the_nearest_two(seconds: float, nearest: str) -> None:
    told = rules.wrong_duration(seconds, 24, H3)
    assert told is not None
    assert told.endswith(f"nearest valid: {nearest}")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_durations_and_shifts_must_be_finite(value: float) -> None:
    assert "finite" in (rules.wrong_duration(value, 24, H3) or "")
    assert "finite" in (rules.wrong_shift(value, 12, H3) or "")


@pytest.mark.parametrize(
    ("shift", "nearest"),
    [(0.0, "any above 0 (the model's: 12)"), (-1.0, "any above 0 (the model's: 12)"), (100.5, "100")],
)
def test_shifts_are_refused_with_the_nearest(shift: float, nearest: str) -> None:
    assert (rules.wrong_shift(shift, 12, H3) or "").endswith(f"nearest valid: {nearest}")


@pytest.mark.parametrize("shift", [5e-324, 0.5, 12, 100])
def test_valid_shifts_pass(shift: float) -> None:
    assert rules.wrong_shift(shift, 12, H3) is None


@pytest.mark.parametrize(("steps", "nearest"), [(0, 2), (-1, 2), (1, 2), (1001, 1000), (10**9, 1000), (-(2**63), 2)])
def test_steps_are_refused_with_the_nearest(steps: int, nearest: int) -> None:
    assert (rules.wrong_steps(steps, H3) or "").endswith(f"nearest valid: {nearest}")


def test_one_step_is_told_why() -> None:
    assert "the transformer would never be evaluated" in (rules.wrong_steps(1, H3) or "")


@pytest.mark.parametrize(("count", "nearest"), [(0, 1), (-1, 1), (17, 16), (2**62, 16)])
def test_counts_are_refused_with_the_nearest(count: int, nearest: int) -> None:
    assert (rules.wrong_count(count, H3) or "").endswith(f"nearest valid: {nearest}")


@pytest.mark.parametrize(
    ("width", "height", "nearest"),
    [(5, 1, "4:1"), (1, 5, "1:4"), (2**63 - 1, 1, "4:1"), (1, 2**63 - 1, "1:4"), (400000001, 100000000, "4:1")],
)
def test_aspect_ratios_are_refused_with_the_nearest(width: int, height: int, nearest: str) -> None:
    assert (rules.wrong_aspect_ratio(width, height, H3) or "").endswith(f"nearest valid: {nearest}")


@pytest.mark.parametrize(("width", "height"), [(0, 1), (1, 0), (-16, 9), (-16, -9)])
def test_aspect_ratios_are_positive(width: int, height: int) -> None:
    assert "positive" in (rules.wrong_aspect_ratio(width, height, H3) or "")


@pytest.mark.parametrize(("width", "height"), [(4, 1), (1, 4), (16, 9), (2**62, 2**62)])
def test_valid_aspect_ratios_pass(width: int, height: int) -> None:
    assert rules.wrong_aspect_ratio(width, height, H3) is None


@pytest.mark.parametrize(
    ("prompt", "told"),
    [("", "empty"), ("x" * 101, "101 characters"), ("a\x00b", "character 1 is U+0000"), ("a\x1b[2J", "U+001B"),
     ("\x85", "U+0085")],
)  # fmt: skip
def test_prompts_are_judged_without_being_repeated(prompt: str, told: str) -> None:
    message = rules.wrong_prompt_text(prompt, H3)
    assert message is not None
    assert told in message
    assert len(message) < 120


@pytest.mark.parametrize("prompt", ["x" * 100, "zwei\nZeilen\tund mehr", "七が動く", "🎬", " "])
def test_valid_prompts_pass(prompt: str) -> None:
    assert rules.wrong_prompt_text(prompt, H3) is None


@pytest.mark.parametrize(("tokens", "told"), [(0, "0 tokens"), (11, "11 tokens")])
def test_tokens_are_bounded(tokens: int, told: str) -> None:
    assert told in (rules.wrong_prompt_tokens(tokens, H3) or "")
    assert rules.wrong_prompt_tokens(10, H3) is None


def test_reference_kinds_are_bounded() -> None:
    assert rules.wrong_reference_kinds(["image"] * 9) is None
    assert rules.wrong_reference_kinds(["image", "audio"]) is None
    assert "10 image" in (rules.wrong_reference_kinds(["image"] * 10) or "")
    assert "4 video" in (rules.wrong_reference_kinds(["video"] * 4) or "")
    assert "4 audio" in (rules.wrong_reference_kinds(["image"] + ["audio"] * 4) or "")
    assert "only audio" in (rules.wrong_reference_kinds(["audio"]) or "")
