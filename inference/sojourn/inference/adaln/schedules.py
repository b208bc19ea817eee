"""Schedules ahead of any request: what each forward will receive, and their rows built into a store."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import MiniMaxH3Scheduler
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3SetTimestepsStep
from sojourn.inference.adaln.cache import PlanCache
from sojourn.inference.adaln.caches import PlanCaches
from sojourn.inference.adaln.counters import Counters, Result
from sojourn.inference.adaln.families import family_of
from sojourn.inference.adaln.family import Inputs
from sojourn.inference.adaln.overrides import Overrides, check_components
from sojourn.inference.adaln.plans import distinct
from sojourn.inference.adaln.settings import Mode, PlanCacheSettings, Precision
from sojourn.inference.errors import ModelError
from sojourn.inference.loading import errors
from sojourn.inference.loading.components import build_component
from sojourn.inference.loading.folder import ComponentFolder, ModelFolder, read_folder
from sojourn.inference.requests import Workflow

KEYFRAME_LEVEL = 0.999
"""Where the stock pipeline holds video conditions (`keyframe_noise_aug` of the pinned version)."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """All that fixes the plans of a MiniMax-H3 request.

    Attributes:
        workflow: Decides which conditions are there, and which transformer runs.
        steps: Points of the noise schedule; one forward less.
        flow_shift, audio_flow_shift: None for those of the model's schedulers.
        has_soundtrack: Of ref2va: whether a reference brings sound.
    """

    workflow: Workflow
    steps: int
    flow_shift: float | None = None
    audio_flow_shift: float | None = None
    has_soundtrack: bool = False

    @property
    def transformer(self) -> str:
        """The component that runs it."""
        return "transformer_ref" if self.workflow is Workflow.REF2VA else "transformer"


@dataclass(frozen=True, kw_only=True)
class Built:
    """What became of a schedule.

    Attributes:
        schedule: Which.
        plans: Its distinct plans.
        is_new: Whether it was built now; False where the store had it.
        path: Its file.
    """

    schedule: Schedule
    plans: int
    is_new: bool
    path: Path


def forwards_of(schedule: Schedule, schedulers: tuple[MiniMaxH3Scheduler, MiniMaxH3Scheduler]) -> list[Inputs]:
    """What each forward receives, by the stock schedulers and the stock rule of which rows there are.

    Args:
        schedule: Which.
        schedulers: The model's, for video and for audio; they are changed.
    """
    scheduler, audio_scheduler = schedulers
    for one, shift in ((scheduler, schedule.flow_shift), (audio_scheduler, schedule.audio_flow_shift)):
        if shift is not None:
            one.set_shift(shift)
        one.set_timesteps(schedule.steps)
    pairs = zip(scheduler.timesteps, audio_scheduler.timesteps, strict=False)
    return [{"timestep": _distinct_timesteps(schedule, float(video), float(audio))} for video, audio in pairs]


def _distinct_timesteps(schedule: Schedule, video: float, audio: float) -> torch.Tensor:
    """Of a sequence with one row of each kind: text, generated video and audio, and the conditions that there are."""
    video_conditions = int(schedule.workflow is not Workflow.T2VA)
    audio_conditions = int(schedule.workflow is Workflow.REF2VA and schedule.has_soundtrack)
    videos, audios = 1 + video_conditions, 1 + audio_conditions
    timesteps, _ = MiniMaxH3SetTimestepsStep.build_row_timesteps(
        torch.arange(1, 1 + videos),
        torch.arange(1 + videos, 1 + videos + audios),
        video_conditions,
        audio_conditions,
        1,
        video,
        audio,
        max(video, KEYFRAME_LEVEL),
        1.0,
    )
    return timesteps


def build_schedules(
    model: Path,
    schedules: Sequence[Schedule],
    store: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device = torch.device("cpu"),  # noqa: B008
    precision: Precision = Precision.MATCH,
    store_bytes: int = PlanCacheSettings.store_bytes,
    families: Overrides | None = None,
    tell: Callable[[Built], None] = lambda built: None,
) -> list[Built]:
    """Builds schedules into a store, for the processes that will map them.

    Rows are bound to the arithmetic that made them: build on the device, with the torch and with as many threads as
    will serve them, or the server will not find them.

    Args:
        model: A diffusers modular model folder.
        schedules: Which.
        store: Directory of the store.
        dtype: Of the computation, as the server will load the model.
        device: As the server's.
        precision: As the server's.
        store_bytes: Size cap of the store.
        families: Component -> the family that it is treated as, as the server's.
        tell: Hears of each schedule when it is done.

    Raises:
        ModelError: The folder has no such transformer.
        SettingRefused: A family was named for a component that there is not, or that is not of it.
        ModelRefused: The model cannot be served from the cache.
    """
    folder = read_folder(model)
    check_components(families or {}, folder.components)
    done: list[Built] = []
    for name in sorted({schedule.transformer for schedule in schedules}):
        part = _cacheable(folder, name, families or {})
        wanted = [schedule for schedule in schedules if schedule.transformer == name]
        forwards = {schedule: forwards_of(schedule, _schedulers(folder)) for schedule in wanted}
        settings = PlanCacheSettings(
            mode=Mode.ON,
            plans=max(map(len, forwards.values())),
            width=max(inputs["timestep"].numel() for one in forwards.values() for inputs in one),
            host_bytes=0,
            store=store,
            store_bytes=store_bytes,
            precision=precision,
            families=families or {},
        )
        counters = Counters()
        cache = _open(part, settings, counters, dtype, device)
        for schedule in wanted:
            done.append(_build(cache, schedule, forwards[schedule], counters))
            tell(done[-1])
    return done


def _build(cache: PlanCache, schedule: Schedule, forwards: Sequence[Inputs], counters: Counters) -> Built:
    """Looks for a schedule in the store and builds it there if need be."""
    store = cache.store
    assert store is not None
    # Plans that the slab holds from the schedule before would be a hit, and hits are not written to the store.
    cache.invalidate(store=store)
    before = counters.requests[Result.BUILT]
    cache.prepare(forwards).release()
    plans = distinct(plan for inputs in forwards for plan in cache.family.plans(inputs))
    return Built(
        schedule=schedule,
        plans=len(plans),
        is_new=counters.requests[Result.BUILT] > before,
        path=store.path([plan.key for plan in plans]),
    )


def _cacheable(folder: ModelFolder, name: str, families: Overrides) -> ComponentFolder:
    """A transformer that is there and, by its class or by what is said of it, can have a cache."""
    part = folder.components.get(name)
    if part is None:
        raise ModelError(
            errors.COMPONENT_MISSING, folder.path / name, f"component {name} is missing; fetch the whole folder"
        )
    if name not in families:
        family_of(part.class_name)
    return part


def _open(
    part: ComponentFolder, settings: PlanCacheSettings, counters: Counters, dtype: torch.dtype, device: torch.device
) -> PlanCache:
    """The cache of a transformer that is loaded alone."""
    name, caches = part.name, PlanCaches(settings, device, counters)
    component = build_component(part, dtype=dtype, device=device, leave_out=caches.leave_out(part))
    caches.open({name: component})
    return caches.transformers[name].cache


def _schedulers(folder: ModelFolder) -> tuple[MiniMaxH3Scheduler, MiniMaxH3Scheduler]:
    """The two schedulers of MiniMax-H3, whose schedules alone are known without a request."""
    names = ("scheduler", "audio_scheduler")
    for name in names:
        if name not in folder.components:
            raise ModelError(
                errors.COMPONENT_MISSING,
                folder.path / name,
                f"component {name} is missing; schedules can be built ahead for MiniMax-H3, other models build theirs "
                "with the first request",
            )
    video, audio = (dict(folder.components[name].config) for name in names)
    return MiniMaxH3Scheduler.from_config(video), MiniMaxH3Scheduler.from_config(audio)
