"""Schedules ahead of requests: what is built offline is what a request asks for."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import MiniMaxH3ModularPipeline, MiniMaxH3Scheduler
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3AudioReference, MiniMaxH3ImageReference
from sojourn.inference.adaln.counters import Counters, Result
from sojourn.inference.adaln.saving import saving_of
from sojourn.inference.adaln.schedules import KEYFRAME_LEVEL, Schedule, build_schedules, forwards_of
from sojourn.inference.adaln.settings import Mode, PlanCacheSettings
from sojourn.inference.errors import ModelError
from sojourn.inference.loading.folder import read_folder
from sojourn.inference.pipeline import DeviceChoice, load_pipeline
from sojourn.inference.requests import OutputFormat, Workflow


def forwards(schedule: Schedule) -> list[list[float]]:
    schedulers = (MiniMaxH3Scheduler(shift=12.0), MiniMaxH3Scheduler(shift=3.0))
    return [inputs["timestep"].tolist() for inputs in forwards_of(schedule, schedulers)]


def test_a_schedule_of_n_steps_has_a_forward_less_and_its_first_one_is_narrow() -> None:
    found = forwards(Schedule(workflow=Workflow.T2VA, steps=8))
    assert [len(values) for values in found] == [1, 2, 2, 2, 2, 2, 2]
    assert found[0] == [0.0]


@pytest.mark.parametrize(
    ("workflow", "has_soundtrack", "width"),
    [(Workflow.T2VA, False, 2), (Workflow.FL2VA, False, 3), (Workflow.REF2VA, False, 3), (Workflow.REF2VA, True, 4)],
)
def test_each_workflow_has_its_width(workflow: Workflow, has_soundtrack: bool, width: int) -> None:
    found = forwards(Schedule(workflow=workflow, steps=5, has_soundtrack=has_soundtrack))
    assert max(map(len, found)) == width


def test_shifts_change_the_plans() -> None:
    base = Schedule(workflow=Workflow.T2VA, steps=5)
    others = [
        Schedule(workflow=Workflow.T2VA, steps=5, flow_shift=5.0),
        Schedule(workflow=Workflow.T2VA, steps=5, audio_flow_shift=5.0),
    ]
    assert all(forwards(other) != forwards(base) for other in others)


def test_the_level_of_keyframes_is_that_of_the_stock_pipeline() -> None:
    assert MiniMaxH3ModularPipeline.keyframe_noise_aug.fget(None) == KEYFRAME_LEVEL


def test_a_request_maps_what_was_built_offline(
    tiny_folder: Path, tmp_path: Path, make_request: Callable[..., Any], make_watch: Callable[..., Any], pictures: Any
) -> None:
    voice = MiniMaxH3AudioReference(audio=torch.sin(torch.arange(32000) / 20)[None] * 0.3)
    requests = {
        Schedule(workflow=Workflow.T2VA, steps=4, flow_shift=12.0, audio_flow_shift=3.0): {},
        Schedule(workflow=Workflow.T2VA, steps=6, flow_shift=5.0, audio_flow_shift=2.0): {
            "steps": 6, "flow_shift": 5.0, "audio_flow_shift": 2.0,
        },
        Schedule(workflow=Workflow.FL2VA, steps=4): {"first_image": pictures[0]},
        Schedule(workflow=Workflow.REF2VA, steps=4): {"references": (MiniMaxH3ImageReference(image=pictures[0]),)},
        Schedule(workflow=Workflow.REF2VA, steps=4, has_soundtrack=True): {
            "references": (MiniMaxH3ImageReference(image=pictures[0]), voice)
        },
    }  # fmt: skip
    told: list[Any] = []
    built = build_schedules(tiny_folder, list(requests), tmp_path, tell=told.append)
    assert told == built
    assert {part.schedule for part in built} == set(requests)
    assert all(part.is_new and part.path.exists() and part.plans == part.schedule.steps - 1 for part in built)
    counters = Counters()
    settings = PlanCacheSettings(mode=Mode.ON, store=tmp_path, host_bytes=0)
    pipeline = load_pipeline(tiny_folder, device=DeviceChoice.CPU, plan_settings=settings, plan_observer=counters)
    for schedule, changes in requests.items():
        asked = {"workflow": schedule.workflow, "steps": 4, "outputs": (OutputFormat.LATENTS,), **changes}
        pipeline.run_clip(make_request(**asked), 0, make_watch())
    assert counters.requests == {Result.STORE: len(requests)}
    assert not any(part.is_new for part in build_schedules(tiny_folder, list(requests), tmp_path))


def test_a_model_without_the_transformer_says_so(digits_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="component transformer_ref is missing"):
        build_schedules(digits_folder, [Schedule(workflow=Workflow.REF2VA, steps=4)], tmp_path)


def test_a_model_without_the_schedulers_says_so(digits_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(digits_folder, tmp_path / "model")
    shutil.rmtree(folder / "audio_scheduler")
    with pytest.raises(ModelError, match="can be built ahead for MiniMax-H3, other models"):
        build_schedules(folder, [Schedule(workflow=Workflow.T2VA, steps=4)], tmp_path / "store")


def test_the_saving_is_told_from_headers(digits_folder: Path) -> None:
    folder = read_folder(digits_folder)
    saving = saving_of(folder.components["transformer"], PlanCacheSettings(plans=8, width=2))
    assert saving is not None
    # 6 blocks of 18 x 160 outputs and 2 x 160 of the final layer, 32 inputs and a bias each, in bfloat16.
    assert saving.weight_bytes == 33 * (6 * 18 + 2) * 160 * 2
    assert saving.row_bytes == (6 * 18 + 2) * 160 * 2
    assert saving.slab_bytes == 8 * (2 * saving.row_bytes + 8)
    assert saving.saved_bytes == saving.weight_bytes - saving.slab_bytes
    assert 0.20 < saving.share < 0.25
    assert saving_of(folder.components["vae"], PlanCacheSettings()) is None
