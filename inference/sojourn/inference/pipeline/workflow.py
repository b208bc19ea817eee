"""The blocks of one workflow, flat, with guards in between.

diffusers resolves a workflow to the very blocks that it would run for such a request, as one flat sequence whose names
begin with the top-level block. Between any two of them stands a checkpoint, before the first of each stage a boundary,
and at the end of the denoising loop a guard: the last block of a loop over blocks, and for loops inside a block what
the request's own scheduler does at the end of its step.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import diffusers
from diffusers.modular_pipelines import ModularPipelineBlocks, SequentialPipelineBlocks
from diffusers.modular_pipelines.modular_pipeline import LoopSequentialPipelineBlocks
from sojourn.inference.families.family import Family
from sojourn.inference.pipeline.guards import Checkpoint, StageBoundary, StepGuard
from sojourn.inference.requests import Workflow
from sojourn.inference.watch import Stage


def workflow_leaves(family: Family, workflow: Workflow) -> Mapping[str, ModularPipelineBlocks]:
    """Returns the blocks of a workflow in order, by name such as "denoise.set_timesteps"; they are new ones."""
    blocks = getattr(diffusers, family.blocks_class)().get_workflow(family.workflows[workflow]).sub_blocks
    return {name: family.replaced[name]() if name in family.replaced else block for name, block in blocks.items()}


def components_of(leaves: Mapping[str, ModularPipelineBlocks]) -> frozenset[str]:
    """Returns the names of the components that a workflow's blocks use and a model folder has to bring."""
    specs = (spec for block in leaves.values() for spec in block.expected_components)
    return frozenset(spec.name for spec in specs if spec.default_creation_method == "from_pretrained")


def stage_components(
    leaves: Mapping[str, ModularPipelineBlocks], stages: Mapping[str, Stage], *, until: Stage = Stage.DECODE
) -> list[tuple[Stage, frozenset[str]]]:
    """Returns the names of the components that each stage uses, in order; stages that use none are left out."""
    order = list(Stage)
    used: dict[Stage, frozenset[str]] = {}
    for name, block in leaves.items():
        stage = _stage(name, stages)
        if order.index(stage) <= order.index(until):
            used[stage] = used.get(stage, frozenset()) | components_of({name: block})
    return [(stage, names) for stage, names in used.items() if names]


def served_stages(family: Family, present: Collection[str]) -> list[tuple[Stage, frozenset[str]]]:
    """Returns the stages of every workflow whose components are all there, with the components that each uses.

    Args:
        family: Of the model.
        present: Names of the components that its folder holds.
    """
    stages: list[tuple[Stage, frozenset[str]]] = []
    for workflow in family.workflows:
        used = stage_components(workflow_leaves(family, workflow), family.stages)
        if all(names <= set(present) for _, names in used):
            stages += used
    return stages


def guarded(leaves: Mapping[str, ModularPipelineBlocks], family: Family, *, until: Stage) -> SequentialPipelineBlocks:
    """Returns the leaves up to and with stage `until`, guarded.

    Args:
        leaves: The blocks of a workflow, by name. Loops among them get their guard in place, once.
        family: Whose blocks they are.
        until: The last stage to run.
    """
    order, stages = list(Stage), family.stages
    kept = [(name, block) for name, block in leaves.items() if order.index(_stage(name, stages)) <= order.index(until)]
    return SequentialPipelineBlocks.from_blocks_dict(dict(_with_guards(kept, family)))


def _with_guards(
    leaves: Iterable[tuple[str, ModularPipelineBlocks]], family: Family
) -> Iterator[tuple[str, ModularPipelineBlocks]]:
    running: Stage | None = None
    for name, block in leaves:
        stage = _stage(name, family.stages)
        if stage is not running:
            running = stage
            yield f"{name}.begin", StageBoundary(stage)
        yield name, block
        if isinstance(block, LoopSequentialPipelineBlocks) and family.loop.scheduler is None:
            _guard_loop(block)
            yield f"{name}.check", Checkpoint(stage, ())
        else:
            yield f"{name}.check", Checkpoint(stage, _output_names(block))


def _stage(name: str, stages: Mapping[str, Stage]) -> Stage:
    return stages[name.partition(".")[0]]


def _guard_loop(loop: LoopSequentialPipelineBlocks) -> None:
    """Puts the guard at the end of each iteration and silences the loop's own progress bar."""
    loop.sub_blocks.setdefault("guard", StepGuard(_output_names(loop)))
    loop.set_progress_bar_config(disable=True)


def _output_names(block: Any) -> list[str]:
    return [output.name for output in block.intermediate_outputs]
