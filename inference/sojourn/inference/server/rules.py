"""The rules that single values of a request must keep, as pure functions.

Each function answers None where the value is valid, else one line that holds the value, what is valid, and the nearest
valid values. A value is refused, never corrected.
"""

import math
import unicodedata
from collections.abc import Iterable, Sequence
from fractions import Fraction

from sojourn.inference.requests import Limits

# Of one ref2va request, as the proto promises; the same as diffusers' MiniMaxH3Ref2VASetupStep.
MAX_IMAGES = 9
MAX_VIDEOS = 3
MAX_AUDIOS = 3
MAX_REFERENCES = 12
MAX_KEYFRAMES = 2

_WHITESPACE = "\t\n\r"


def nearest_on_grid(value: int, *, low: int, high: int, step: int, offset: int = 0) -> tuple[int, ...]:
    """The one or two numbers `step` × n + `offset` within [low, high] that are nearest to `value`."""
    first = low + (offset - low) % step
    last = high - (high - offset) % step
    if value <= first:
        return (first,)
    if value >= last:
        return (last,)
    below = value - (value - offset) % step
    return (below,) if below == value else (below, below + step)


def _either(values: Iterable[object]) -> str:
    return " or ".join(str(value) for value in values)


def wrong_edge(pixels: int, limits: Limits) -> str | None:
    """Judges a width or a height in pixels."""
    low, high, multiple = limits.min_edge, limits.max_edge, limits.size_multiple
    if low <= pixels <= high and pixels % multiple == 0:
        return None
    nearest = nearest_on_grid(pixels, low=low, high=high, step=multiple)
    return f"{pixels} is not a multiple of {multiple} within {low} to {high}; nearest valid: {_either(nearest)}"


def wrong_area(width: int, height: int, limits: Limits) -> str | None:
    """Judges the area of a canvas whose edges are valid."""
    if width * height <= limits.max_pixels:
        return None
    fitting = []
    if (fit := _longest_edge(limits.max_pixels // height, limits)) is not None:
        fitting.append(f"{fit}×{height}")
    if (fit := _longest_edge(limits.max_pixels // width, limits)) is not None:
        fitting.append(f"{width}×{fit}")
    nearest = f"; nearest valid: {_either(dict.fromkeys(fitting))}" if fitting else ""
    return f"{width}×{height} has {width * height} pixels, more than {limits.max_pixels}{nearest}"


def untrained_size(width: int, height: int, limits: Limits) -> str | None:
    """Judges a canvas that could be made, by what the model was trained for."""
    if not limits.trained_sizes or (width, height) in limits.trained_sizes:
        return None
    trained = _either(f"{width}×{height}" for width, height in limits.trained_sizes)
    return (
        f"{width}×{height} is none of the sizes that the model was trained for ({trained}); to have it all the same, "
        "set untrained_size"
    )


def _longest_edge(bound: int, limits: Limits) -> int | None:
    edge = bound // limits.size_multiple * limits.size_multiple
    return edge if limits.min_edge <= edge else None


def wrong_aspect_ratio(width: int, height: int, limits: Limits) -> str | None:
    """Judges width : height."""
    if width <= 0 or height <= 0:
        return f"{width}:{height} is not positive in both parts; for instance 16:9"
    low, high = limits.min_aspect_ratio, limits.max_aspect_ratio
    # An exact fraction: the two int64 may not both fit into a double.
    ratio = Fraction(width, height)
    if Fraction(low) <= ratio <= Fraction(high):
        return None
    nearest = low if ratio < low else high
    return f"{width}:{height} is not within {_ratio(low)} to {_ratio(high)}; nearest valid: {_ratio(nearest)}"


def _ratio(value: float) -> str:
    fraction = Fraction(value).limit_denominator(100)
    return f"{fraction.numerator}:{fraction.denominator}"


def _frames_form(limits: Limits) -> str:
    return f"{limits.frames_step} × n + {limits.frames_offset} within {limits.min_frames} to {limits.max_frames}"


def _nearest_frames(frames: int, limits: Limits) -> tuple[int, ...]:
    return nearest_on_grid(
        frames, low=limits.min_frames, high=limits.max_frames, step=limits.frames_step, offset=limits.frames_offset
    )


def wrong_frames(frames: int, limits: Limits) -> str | None:
    """Judges a number of frames."""
    nearest = _nearest_frames(frames, limits)
    if nearest == (frames,):
        return None
    return f"{frames} is not {_frames_form(limits)}; nearest valid: {_either(nearest)}"


def wrong_duration(seconds: float, frames_per_second: float, limits: Limits) -> str | None:
    """Judges a duration in seconds, which must come to a valid number of frames within half a frame."""
    if not math.isfinite(seconds):
        return f"{seconds} is not a finite number of seconds"
    low, high = limits.min_frames, limits.max_frames
    # Clamped before rounding: 1e308 s times the rate is infinite.
    frames = round(min(max(seconds * frames_per_second, low - 1), high + 1))
    nearest = _nearest_frames(frames, limits)
    if nearest == (frames,):
        return None
    options = _either(f"{count / frames_per_second:.6g} ({count} frames)" for count in nearest)
    return (
        f"{seconds:.6g} s at {frames_per_second:g} frames per second is not {_frames_form(limits)}; "
        f"nearest valid: {options}"
    )


def wrong_steps(steps: int, limits: Limits) -> str | None:
    """Judges a number of schedule points."""
    low, high = limits.min_steps, limits.max_steps
    if low <= steps <= high:
        return None
    why = ""
    if 0 < steps < low:
        why = f" (between {low} points lies the first step; with {steps} the transformer would never be evaluated)"
    return f"{steps} is not within {low} to {high}{why}; nearest valid: {low if steps < low else high}"


def wrong_shift(shift: float, default: float, limits: Limits) -> str | None:
    """Judges a shift of a noise schedule; `default` is the model's own."""
    if limits.max_flow_shift == 0:
        return f"{shift:g} is not taken: this model sets its shifts by the canvas; leave it out"
    if math.isfinite(shift) and 0 < shift <= limits.max_flow_shift:
        return None
    nearest = (
        f"{limits.max_flow_shift:g}" if shift > limits.max_flow_shift else f"any above 0 (the model's: {default:g})"
    )
    return f"{shift:g} is not a finite number within (0, {limits.max_flow_shift:g}]; nearest valid: {nearest}"


def wrong_count(count: int, limits: Limits) -> str | None:
    """Judges a number of clips."""
    if 1 <= count <= limits.max_count:
        return None
    return f"{count} is not within 1 to {limits.max_count}; nearest valid: {1 if count < 1 else limits.max_count}"


def wrong_prompt_text(prompt: str, limits: Limits) -> str | None:
    """Judges a prompt by its characters. The prompt itself is not repeated: it may be huge or private."""
    if not prompt:
        return f"it is empty; takes 1 to {limits.max_prompt_characters} characters"
    if len(prompt) > limits.max_prompt_characters:
        return f"it has {len(prompt)} characters; at most {limits.max_prompt_characters} are taken"
    for index, character in enumerate(prompt):
        if unicodedata.category(character) == "Cc" and character not in _WHITESPACE:
            return (
                f"character {index} is U+{ord(character):04X}; control characters other than \\t \\n \\r are not taken"
            )
    return None


def wrong_prompt_tokens(tokens: int, limits: Limits) -> str | None:
    """Judges a prompt by its number of tokens."""
    if 1 <= tokens <= limits.max_prompt_tokens:
        return None
    return f"it comes to {tokens} tokens; takes 1 to {limits.max_prompt_tokens}"


def wrong_media_size(size_bytes: int, limits: Limits) -> str | None:
    """Judges the encoded size of one keyframe or reference."""
    if size_bytes == 0:
        return "it is empty"
    if size_bytes > limits.max_media_bytes:
        return f"it has {size_bytes} bytes; at most {limits.max_media_bytes} are taken"
    return None


def wrong_reference_kinds(kinds: Sequence[str]) -> str | None:
    """Judges how many references of each kind ("image", "video", "audio") a request has."""
    for kind, most in (("image", MAX_IMAGES), ("video", MAX_VIDEOS), ("audio", MAX_AUDIOS)):
        if kinds.count(kind) > most:
            return f"{kinds.count(kind)} {kind} references; at most {most} are taken"
    if kinds and set(kinds) == {"audio"}:
        return "only audio; add at least one image or video reference"
    return None
