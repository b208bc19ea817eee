"""What a page window brings in and gives back as one: the mapped weights of one module of a layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from sojourn.inference.offload.mapped import mapped_spans
from sojourn.inference.offload.spans import Span, size_of, whole_pages
from sojourn.residencyd.kernel.maps import Lookup
from torch import nn

# Modules with less than this stay: a hook costs about as much as reading so little from the page cache.
MIN_PIECE_BYTES = 256 << 10


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The mapped weights of one module of a layer: what is brought in and given back as one.

    Attributes:
        module: Whose forward uses them.
        spans: Whole pages of its own weights, in order of address.
        weights: Those weights by where they lie, to the byte.
    """

    module: nn.Module
    spans: tuple[Span, ...]
    weights: Mapping[Span, nn.Parameter] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Its pages."""
        return size_of(self.spans)


def find_pieces(layers: Sequence[nn.Module], mappings: Lookup, *, min_bytes: int = MIN_PIECE_BYTES) -> list[Piece]:
    """The modules of the layers whose weights lie in file mappings, in registration order.

    Weights of several modules that share a page, or are tied, belong to the first of them.

    Args:
        layers: Repeated layers.
        mappings: Of this process.
        min_bytes: Modules with less are left out.
    """
    pieces, taken = [], set[int]()
    for layer in layers:
        for module in layer.modules():
            own = [p for p in module.parameters(recurse=False) if p.data_ptr() not in taken and _is_dense(p)]
            taken.update(p.data_ptr() for p in own)
            weights = {span: p for p in own for span in mapped_spans([p], mappings)}
            spans = whole_pages(weights)
            if size_of(spans) >= min_bytes:
                pieces.append(Piece(module=module, spans=spans, weights=weights))
    return pieces


def _is_dense(parameter: torch.Tensor) -> bool:
    """Whether the elements fill their range without holes, in whatever order."""
    reach = sum((size - 1) * stride for size, stride in zip(parameter.size(), parameter.stride(), strict=True))
    return parameter.numel() > 0 and reach + 1 == parameter.numel()
