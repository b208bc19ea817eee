"""What the plan cache would save of a model, from the headers of its weights alone: no torch, no weights read."""

from dataclasses import dataclass

from sojourn.inference.adaln.settings import PlanCacheSettings
from sojourn.inference.families.projections import is_projection
from sojourn.inference.loading.folder import ComponentFolder
from sojourn.inference.loading.safetensors_file import DTYPE_BITS

_LENGTH_BYTES = 8  # of one slot


@dataclass(frozen=True, kw_only=True)
class Saving:
    """The plan cache of one transformer, in bytes as stored.

    Attributes:
        component: Its name.
        weight_bytes: Projections that need not be loaded.
        share: Of the component's bytes.
        row_bytes: One row of one plan over all projections.
        slab_bytes: What the rows on the device take.
    """

    component: str
    weight_bytes: int
    share: float
    row_bytes: int
    slab_bytes: int

    @property
    def saved_bytes(self) -> int:
        """Device memory that is saved; negative where the cache costs more."""
        return self.weight_bytes - self.slab_bytes


def saving_of(folder: ComponentFolder, settings: PlanCacheSettings) -> Saving | None:
    """What the cache would save of a component; None where it has no projections."""
    tensors = list(folder.tensors)
    transformer = settings.projected_as(folder.name, folder.class_name)
    projections = [tensor for tensor in tensors if is_projection(transformer, tensor.name)]
    if not projections:
        return None
    weight_bytes = sum(tensor.size_bytes for tensor in projections)
    row_bytes = sum(
        tensor.shape[0] * DTYPE_BITS[tensor.dtype] // 8 for tensor in projections if tensor.name.endswith(".weight")
    )
    return Saving(
        component=folder.name,
        weight_bytes=weight_bytes,
        share=weight_bytes / sum(tensor.size_bytes for tensor in tensors),
        row_bytes=row_bytes,
        slab_bytes=settings.plans * (settings.width * row_bytes + _LENGTH_BYTES),
    )
