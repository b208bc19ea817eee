"""Runs requests on a loaded model.

The model's modules are shared by all requests; what a quality tier changes on them is mounted and taken off between
requests, never beside one of another tier. What a request changes is its own: a shallow copy of the stock pipeline
object that holds components of its own, such as schedulers, a pipeline state, a generator, and its watch. So nothing
has to be put back after a failure, and requests of one tier may run side by side.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from sojourn.inference.adaln.block import release_plans, with_plans
from sojourn.inference.adaln.caches import PlanCaches
from sojourn.inference.errors import FieldViolation, InvalidRequest, Unsupported
from sojourn.inference.families.family import Family, Medium
from sojourn.inference.loading.components import Component
from sojourn.inference.loading.fingerprint import BackgroundFingerprint
from sojourn.inference.offload.install import Offload
from sojourn.inference.offload.lifecycle import LifeCycle, declare, driving
from sojourn.inference.pipeline.guards import EVALUATIONS_INPUT, guard_scheduler
from sojourn.inference.pipeline.workflow import components_of, guarded, stage_components, workflow_leaves
from sojourn.inference.quality.observer import Observer as QualityObserver
from sojourn.inference.quality.observer import silent
from sojourn.inference.quality.quality import Offer, Quality
from sojourn.inference.quality.settings import QualitySettings
from sojourn.inference.quality.sites import SITES
from sojourn.inference.requests import Clip, Defaults, GenerationRequest, Limits, QualityTier, Workflow
from sojourn.inference.watch import WATCH_INPUT, Stage, Watch


@dataclass(frozen=True, kw_only=True)
class ComponentSummary:
    """One component as GetInfo tells of it."""

    name: str
    class_name: str
    parameters: int
    size_bytes: int


class Pipeline:
    """A loaded model that makes clips.

    Attributes:
        model_name: Name of the model.
        family: What is known of its family.
        device: Where it runs.
        dtype: Of its computation.
        limits: What a request may ask for.
        defaults: What a request gets that does not say.
        components: Its components by name, in the order of the model's index.
        unavailable: Why a workflow cannot be served, for those that cannot.
        life: When components come and go; where nothing else is set, all of them stay.
        offload: Where the weights are and by which plan; None where the pipeline was made without one.
        plans: The AdaLN plan caches of its transformers.
        quality: The tiers that it offers, and what is mounted on its transformers.
    """

    def __init__(
        self,
        *,
        model_name: str,
        family: Family,
        stock: Any,
        components: Mapping[str, Component],
        device: torch.device,
        dtype: torch.dtype,
        fingerprint: BackgroundFingerprint,
        plans: PlanCaches,
        quality_settings: QualitySettings | None = None,
        quality_observer: QualityObserver = silent,
    ) -> None:
        self.model_name = model_name
        self.family = family
        self.device = device
        self.dtype = dtype
        self.components = components
        self.limits: Limits = family.limits(stock)
        self.defaults: Defaults = family.defaults(stock)
        self.life = LifeCycle({})
        self.offload: Offload | None = None
        self._stock = stock
        self._fingerprint = fingerprint
        self.plans = plans
        family.adapt(stock)
        leaves = {workflow: workflow_leaves(family, workflow) for workflow in family.workflows}
        obstacles = {workflow: self._obstacle(workflow, leaves.get(workflow)) for workflow in Workflow}
        self.unavailable: Mapping[Workflow, str] = {
            workflow: reason for workflow, reason in obstacles.items() if reason
        }
        self._cached = {workflow: plans.for_component(components_of(blocks)) for workflow, blocks in leaves.items()}
        self._blocks = {
            (workflow, until): guarded(with_plans(blocks, self._cached[workflow]), family, until=until)
            for workflow, blocks in leaves.items()
            for until in (Stage.DENOISE, Stage.DECODE)
        }
        self._uses = {
            (workflow, until): declare(stage_components(blocks, family.stages, until=until))
            for workflow, blocks in leaves.items()
            for until in (Stage.DENOISE, Stage.DECODE)
        }
        self._names = {workflow: sorted(components_of(blocks)) for workflow, blocks in leaves.items()}
        self.quality = Quality(
            model_name=model_name,
            transformers=self._transformers,
            device=device,
            dtype=dtype,
            fingerprint=lambda: self.known_fingerprint,
            settings=quality_settings,
            observer=quality_observer,
        )

    def _transformers(self) -> Mapping[str, Any]:
        """What the tiers know to change, as it is now; None for one that is not loaded."""
        parts = [part for part in self.components.values() if part.class_name in SITES]
        return {part.name: getattr(self._stock, part.name, None) for part in parts}

    def _obstacle(self, workflow: Workflow, leaves: Mapping[str, Any] | None) -> str | None:
        """Says why a workflow cannot be served; None where it can."""
        if leaves is None:
            served = ", ".join(self.family.workflows)
            return f"models of the family {self.family.name} have no such workflow; ask for one of {served}"
        missing = sorted(name for name in components_of(leaves) if getattr(self._stock, name, None) is None)
        if missing:
            return f"the model folder has no {', '.join(missing)}; fetch the model's whole folder"
        blind = self.family.media[workflow] - self._media()
        return _install_advice(blind) if blind else None

    def _media(self) -> frozenset[Medium]:
        """What the processor can show to the text encoder."""
        processor = getattr(self._stock, "processor", None)
        present = {medium for medium in Medium if getattr(processor, f"{medium}_processor", None) is not None}
        return frozenset(present)

    @property
    def workflows(self) -> tuple[Workflow, ...]:
        """Workflows that can be served: weights loaded, pre-processing installed."""
        return tuple(workflow for workflow in self.family.workflows if workflow not in self.unavailable)

    @property
    def frames_per_second(self) -> float:
        """Rate of the clips."""
        return self.family.frames_per_second

    @property
    def dtype_name(self) -> str:
        """Name of the dtype of the computation, such as "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    def summaries(self) -> tuple[ComponentSummary, ...]:
        """Says what the model consists of."""
        return tuple(
            ComponentSummary(
                name=part.name, class_name=part.class_name, parameters=part.parameters, size_bytes=part.size_bytes
            )
            for part in self.components.values()
        )

    def start_fingerprint(self) -> None:
        """Begins to hash the checkpoint in a thread of low priority. Reads all of it once."""
        self._fingerprint.start()

    def fingerprint(self) -> str:
        """Returns SHA-256 over the checkpoint's tensors, waiting for it where it is not known yet."""
        return self._fingerprint.result()

    @property
    def known_fingerprint(self) -> str:
        """The fingerprint, or "" while it is being computed. Never waits."""
        return self._fingerprint.known or ""

    def evaluations(self, request: GenerationRequest) -> int:
        """Steps of the denoising loop of each clip of a request, over all chunks and levels."""
        return self.family.schedule(self._stock, request).evaluations

    def step_frames(self, request: GenerationRequest) -> int:
        """Frames that one step of a request works on."""
        return self.family.loop.frames(request.frames)

    @property
    def offers(self) -> Sequence[Offer]:
        """Every quality tier, offered or not."""
        return self.quality.offers

    def require_tier(self, tier: QualityTier) -> None:
        """Refuses a quality tier that is not offered.

        Raises:
            TierUnavailable: Saying why, and what to change.
        """
        self.quality.require(tier)

    def count_tokens(self, prompt: str) -> int:
        """Counts a prompt's tokens in the model's own tokenizer."""
        return self.family.count_tokens(self._stock, prompt)

    def resolve_canvas(self, aspect_width: float, aspect_height: float) -> tuple[int, int]:
        """Returns the canvas (width, height) in pixels for an aspect ratio, or for the size of a keyframe.

        Raises:
            InvalidRequest: The ratio is not within the limits.
        """
        try:
            return self.family.canvas(self._stock, aspect_width, aspect_height)
        except ValueError as error:
            raise InvalidRequest(FieldViolation("aspect_ratio", str(error))) from error

    def reference(self, kind: str, medium: object) -> object:
        """Returns a decoded medium as the reference that the model's blocks take.

        Args:
            kind: "image", "video" or "audio".
            medium: A PIL image, or a `Video` or `Audio` of `sojourn.inference.server.media`.

        Raises:
            InvalidRequest: The model takes none.
        """
        try:
            return self.family.reference(kind, medium)
        except ValueError as error:
            raise InvalidRequest(FieldViolation("references", str(error))) from error

    def check(self, request: GenerationRequest) -> None:
        """Refuses what this model or installation cannot do, before any work. Limits are not looked at.

        Raises:
            InvalidRequest: Prompt or references hold what the model cannot take.
            Unsupported: The workflow, a kind of reference, the quality tier or so many steps cannot be served; the
                message says what to change.
        """
        if request.workflow in self.unavailable:
            raise Unsupported(
                f"{self.model_name} cannot serve workflow {request.workflow}: {self.unavailable[request.workflow]}"
            )
        blind = self.family.media_of(request) - self._media()
        if blind:
            raise Unsupported(f"{self.model_name} cannot take {_install_advice(blind)}")
        violations = self.family.violations(request)
        if violations:
            raise InvalidRequest(*violations)
        self.quality.check(request)
        cached = self._cached[request.workflow]
        if cached is not None:
            cached.cache.admit(self.evaluations(request))

    def run_clip(self, request: GenerationRequest, clip_index: int, watch: Watch) -> Clip:
        """Makes one clip of a request. May be called from several threads at once.

        Args:
            request: The request; every value within the limits.
            clip_index: Which clip; its seed is `request.seeds[clip_index]`.
            watch: Hears of stages and steps and stops the run.

        Returns:
            The clip; frames and audio only where the request needs them.

        Raises:
            InvalidRequest, Unsupported: See `check`; also Unsupported where a block lacks a package.
            RequestStopped: Cancelled, out of time, or a NaN or infinity came up.
            ModelError: A weight file was cut while it was mapped.
            UnmountFailed: What an earlier request had mounted cannot be taken off.
        """
        self.check(request)
        until = Stage.DECODE if request.decodes else Stage.DENOISE
        blocks = self._blocks[request.workflow, until]
        schedule = self.family.schedule(self._stock, request)
        state = PipelineState()
        for name, value in self.family.inputs(request).items():
            state.set(name, value)
        # Noise is drawn on the CPU whatever the device: a seed means the same noise everywhere.
        state.set("generator", torch.Generator().manual_seed(request.seeds[clip_index]))
        state.set(EVALUATIONS_INPUT, schedule.evaluations)
        try:
            with (
                self.quality.at(request.quality, self._names[request.workflow], watch.check) as used,
                self.life.open(self._uses[request.workflow, until]) as uses,
                self.family.memory(),
                torch.no_grad(),
            ):
                driven = driving(uses, watch)
                state.set(WATCH_INPUT, driven)
                if self.family.loop.scheduler is not None:
                    guard_scheduler(schedule.own[self.family.loop.scheduler], driven, steps=schedule.evaluations)
                blocks(self._for_request(schedule.own), state)
        except ImportError as error:
            raise Unsupported(str(error)) from error
        finally:
            release_plans(state)
        return replace(self.family.clip(state.values), quality=used.tier, quality_reason=used.reason)

    def _for_request(self, own: Mapping[str, Any]) -> Any:
        """Returns a shallow copy of the stock pipeline object that holds the request's own components."""
        stock = copy.copy(self._stock)
        for name, component in own.items():
            setattr(stock, name, component)
        return stock


def _install_advice(media: frozenset[Medium]) -> str:
    """Says what a model or installation lacks to take such media."""
    advice = {
        Medium.IMAGE: "pictures: its folder configures no image processor (processor/preprocessor_config.json), "
        "so install a model whose processor has one",
        Medium.VIDEO: "video references: their pre-processing needs torchvision, so pip install torchvision "
        "beside a matching torch, and a model whose folder configures a video processor",
    }
    return "; ".join(advice[medium] for medium in sorted(media))
