"""What the server needs of an engine. `sojourn.inference.pipeline.Pipeline` is the one that there is.

A protocol, so that the server answers health checks and `GetInfo` before torch has been imported.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from sojourn.inference.requests import Clip, Defaults, GenerationRequest, Limits, QualityTier, Workflow
from sojourn.inference.watch import Watch


class Named(Protocol):
    """A family of models."""

    @property
    def name(self) -> str:
        """Such as "minimax-h3"."""
        ...


class Component(Protocol):
    """One component of the model, as in the message `sojourn.v1.ComponentInfo`."""

    @property
    def name(self) -> str:
        """Such as "transformer"."""
        ...

    @property
    def class_name(self) -> str:
        """Such as "MiniMaxH3Transformer3DModel"."""
        ...

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of parameters and buffers."""
        ...


class MeasuredError(Protocol):
    """What was measured of a tier, as in the message `sojourn.v1.MeasuredError`."""

    @property
    def lowest_psnr_db(self) -> float: ...  # noqa: D102
    @property
    def lowest_ssim(self) -> float: ...  # noqa: D102
    @property
    def largest_latents_error(self) -> float: ...  # noqa: D102
    @property
    def skipped_share(self) -> float: ...  # noqa: D102
    @property
    def clips(self) -> int: ...  # noqa: D102
    @property
    def min_steps(self) -> int: ...  # noqa: D102
    @property
    def max_steps(self) -> int: ...  # noqa: D102
    @property
    def provenance(self) -> str: ...  # noqa: D102


class Offer(Protocol):
    """One quality tier, offered or not, as in the message `sojourn.v1.QualityTierInfo`."""

    @property
    def tier(self) -> QualityTier: ...  # noqa: D102
    @property
    def obstacle(self) -> str | None: ...  # noqa: D102
    @property
    def error(self) -> MeasuredError | None: ...  # noqa: D102


class Engine(Protocol):
    """A loaded model; see `Pipeline` for what each of these means."""

    @property
    def model_name(self) -> str: ...  # noqa: D102
    @property
    def family(self) -> Named: ...  # noqa: D102
    @property
    def device(self) -> object: ...  # noqa: D102
    @property
    def dtype_name(self) -> str: ...  # noqa: D102
    @property
    def workflows(self) -> Sequence[Workflow]: ...  # noqa: D102
    @property
    def unavailable(self) -> Mapping[Workflow, str]: ...  # noqa: D102
    @property
    def limits(self) -> Limits: ...  # noqa: D102
    @property
    def defaults(self) -> Defaults: ...  # noqa: D102
    @property
    def frames_per_second(self) -> float: ...  # noqa: D102
    @property
    def known_fingerprint(self) -> str: ...  # noqa: D102
    @property
    def offers(self) -> Sequence[Offer]: ...  # noqa: D102

    def fingerprint(self) -> str: ...  # noqa: D102
    def summaries(self) -> Sequence[Component]: ...  # noqa: D102
    def count_tokens(self, prompt: str) -> int: ...  # noqa: D102
    def resolve_canvas(self, aspect_width: float, aspect_height: float) -> tuple[int, int]: ...  # noqa: D102
    def reference(self, kind: str, medium: object) -> object: ...  # noqa: D102
    def evaluations(self, request: GenerationRequest) -> int: ...  # noqa: D102
    def step_frames(self, request: GenerationRequest) -> int: ...  # noqa: D102
    def require_tier(self, tier: QualityTier) -> None: ...  # noqa: D102
    def check(self, request: GenerationRequest) -> None: ...  # noqa: D102
    def run_clip(self, request: GenerationRequest, clip_index: int, watch: Watch) -> Clip: ...  # noqa: D102
