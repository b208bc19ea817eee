"""What an installation asks of offload, as command lines and charts write it. Without torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from sojourn.inference.offload.activations import Workload
from sojourn.inference.offload.memory_plan import CacheSize
from sojourn.inference.offload.settings import Selection

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30,
          "Ti": 1 << 40}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OffloadOptions:
    """What an installation asks of offload.

    Attributes:
        device_memory_bytes: What the model may take of the device; None for what is free.
        host_memory_bytes: What it may take of the host; None for what is available.
        settings: Of all components and of single ones.
        caches: Plan caches by component name; those that are missing have none.
        workload: The largest request; None for the family's.
        passes: Passes through the transformer that a request makes; None for the family's usual number.
        component_map: Where to publish the component map; None to publish none.
        pinning: Whether streamed weights may be locked in host memory, as far as the budget goes.
        cold_advice: Whether the kernel is told which mapped weights it may take back when a stage ends.
        next_stage_headroom_bytes: Host memory to keep free for the next stage besides its weights; None for an
            estimate of what it allocates.
    """

    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    settings: Selection = field(default_factory=Selection)
    caches: Mapping[str, CacheSize] = field(default_factory=dict)
    workload: Workload | None = None
    passes: int | None = None
    component_map: str | None = None
    pinning: bool = True
    cold_advice: bool = True
    next_stage_headroom_bytes: int | None = None


def parse_size(text: str) -> int:
    """A quantity as Kubernetes writes it: "24Gi", "500M", "1.5Ti", "4096".

    Raises:
        ValueError: It is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(k|M|G|T|Ki|Mi|Gi|Ti)?", text.strip())
    if not found:
        raise ValueError(f"{text!r} is no size; write bytes, or a number with one of k, M, G, T, Ki, Mi, Gi, Ti")
    return int(float(found[1]) * _UNITS[found[2] or ""])
