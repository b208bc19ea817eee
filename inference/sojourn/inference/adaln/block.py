"""The block that stands before the denoising loop: it has the rows of every step made beforehand."""

from collections.abc import Iterator, Mapping
from typing import Any

from diffusers.modular_pipelines import ModularPipelineBlocks
from diffusers.modular_pipelines.modular_pipeline import LoopSequentialPipelineBlocks, PipelineState
from sojourn.inference.adaln.cache import go_on
from sojourn.inference.adaln.component import CachedTransformer
from sojourn.inference.adaln.lease import Lease
from sojourn.inference.watch import WATCH_INPUT

LEASE = "plan_lease"
_BLOCK_LEAF = "prepare_plans"


class PreparePlans(ModularPipelineBlocks):
    """Prepares the plans of a request and leaves the lease on them in the request's own state.

    Attributes:
        transformer: Whose plans.
    """

    def __init__(self, transformer: CachedTransformer) -> None:
        self.transformer = transformer
        super().__init__()

    @property
    def description(self) -> str:
        """For those who print the pipeline."""
        return "Makes the modulation rows of every step available before the denoising loop."

    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        """Passes the state on with the lease in it."""
        watch = state.get(WATCH_INPUT)
        forwards = self.transformer.forwards(state.get)
        state.set(LEASE, self.transformer.prepare(forwards, check=watch.check if watch else go_on))
        return components, state


def with_plans(
    leaves: Mapping[str, ModularPipelineBlocks], transformer: CachedTransformer | None
) -> dict[str, ModularPipelineBlocks]:
    """The leaves of a workflow with `PreparePlans` before the denoising loop: schedule, text and latents are there.

    Args:
        leaves: Blocks by name, such as "denoise.set_timesteps".
        transformer: Whose plans; None leaves the leaves as they are.
    """
    return dict(leaves) if transformer is None else dict(_inserted(leaves, transformer))


def _inserted(
    leaves: Mapping[str, ModularPipelineBlocks], transformer: CachedTransformer
) -> Iterator[tuple[str, ModularPipelineBlocks]]:
    for name, block in leaves.items():
        if isinstance(block, LoopSequentialPipelineBlocks):
            parent = name.rpartition(".")[0]
            yield f"{parent}.{_BLOCK_LEAF}" if parent else _BLOCK_LEAF, PreparePlans(transformer)
        yield name, block


def release_plans(state: PipelineState) -> None:
    """Lets go of a request's plans, however it has ended."""
    lease = state.get(LEASE)
    if isinstance(lease, Lease):
        lease.release()
