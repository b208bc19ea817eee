"""The memory plan for people and for programs: a table, JSON, and the figures that metrics show."""

import dataclasses
import json

from rich.console import Group, RenderableType
from rich.table import Table
from sojourn.inference.offload.memory_plan import ComponentPlan, MemoryPlan
from sojourn.inference.offload.observer import Observer

GIB = 1 << 30


def as_text(size_bytes: int) -> str:
    """In GiB, or MiB below one."""
    if abs(size_bytes) >= GIB:
        return f"{size_bytes / GIB:.2f} GiB"
    return f"{size_bytes / (1 << 20):.1f} MiB"


def as_table(plan: MemoryPlan) -> RenderableType:
    """Component, bytes, mode and places, with peak and headroom below."""
    table = Table(title="Memory plan")
    for heading, justify in (("component", "left"), ("bytes", "right"), ("mode", "left"), ("where", "left")):
        table.add_column(heading, justify="right" if justify == "right" else "left")
    for part in plan.components:
        table.add_row(part.name, as_text(part.size_bytes), part.mode.value, "\n".join(_places(part)))
    return Group(table, *_summary(plan))


def _places(part: ComponentPlan) -> list[str]:
    lines = [f"{place}: {place.tier}, {as_text(place.size_bytes)}" for place in part.ranges]
    if part.streamed:
        lines.append(f"{part.streamed} of {part.layers} layers stream, {part.prefetch} ahead")
    if part.cached:
        lines.append(
            f"plan cache: {as_text(part.projection_bytes)} of projections not loaded, slab {as_text(part.slab_bytes)}, "
            f"host tier {as_text(part.cache_host_bytes)}"
        )
    elif part.projection_bytes:
        lines.append(f"{as_text(part.projection_bytes)} of it are projections that the plan cache could replace")
    return lines


def _summary(plan: MemoryPlan) -> list[str]:
    left = plan.headroom_bytes()
    lines = [f"everything resident would take {as_text(plan.resident_bytes)}"]
    if plan.machine.device_bytes is not None:
        lines.append(
            f"device: peak {as_text(plan.device_peak_bytes)} in stage {plan.busiest} of "
            f"{as_text(plan.machine.device_bytes)}, headroom {as_text(left['device'])}"
        )
    at = f" in stage {plan.busiest}" if plan.machine.device_bytes is None else ""
    lines.append(
        f"host: peak {as_text(plan.host_peak_bytes)}{at} of {as_text(plan.machine.host_bytes)} that cannot be dropped, "
        f"headroom {as_text(left['host'])}"
    )
    lines.append("fits" if plan.fits else "does not fit: " + "; or ".join(plan.changes))
    return lines


def as_json(plan: MemoryPlan) -> str:
    """Every field, sizes in bytes."""
    fields = dataclasses.asdict(plan) | {"fits": plan.fits, "headroom_bytes": dict(plan.headroom_bytes())}
    return json.dumps(fields, indent=2)


def tell(plan: MemoryPlan, observer: Observer) -> None:
    """Hands the plan to the metrics."""
    for part in plan.components:
        observer.planned(component=part.name, bytes_by_tier=part.bytes_by_tier())
        observer.placed(component=part.name, layers_by_tier=part.layers_by_tier())
    if plan.machine.device_bytes is not None:
        observer.peak(space="device", expected_bytes=plan.device_peak_bytes, budget_bytes=plan.machine.device_bytes)
    observer.peak(space="host", expected_bytes=plan.host_peak_bytes, budget_bytes=plan.machine.host_bytes)
