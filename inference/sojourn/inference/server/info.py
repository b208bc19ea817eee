"""The answer to GetInfo, and where memory stands."""

import platform
from importlib import metadata
from pathlib import Path

from sojourn.inference.server.engine import Engine
from sojourn.inference.server.health import Health
from sojourn.inference.server.messages import TIER_NUMBERS, WORKFLOW_NUMBERS
from sojourn.v1 import inference_pb2 as pb

PACKAGES = ("sojourn", "torch", "diffusers", "transformers")


def info(health: Health, *, model_name: str, max_waiting: int) -> pb.GetInfoResponse:
    """What is served; while no model is there, name, state, versions and memory alone."""
    response = pb.GetInfoResponse(
        model=model_name,
        state=pb.ServiceState.Value(f"SERVICE_STATE_{health.state.upper()}"),
        state_reason=health.reason,
        versions=versions(),
        memory=memory(device=health.engine.device if health.engine is not None else "cpu"),
    )
    if health.engine is not None:
        _describe(response, health.engine, max_waiting=max_waiting)
    return response


def _describe(response: pb.GetInfoResponse, engine: Engine, *, max_waiting: int) -> None:
    response.model, response.family = engine.model_name, engine.family.name
    response.device, response.dtype = str(engine.device), engine.dtype_name
    response.model_fingerprint = engine.known_fingerprint
    response.frames_per_second = engine.frames_per_second
    response.workflows.extend(WORKFLOW_NUMBERS[workflow] for workflow in engine.workflows)
    _describe_tiers(response, engine)
    for message, values in ((response.limits, engine.limits), (response.defaults, engine.defaults)):
        for field in message.DESCRIPTOR.fields:
            if hasattr(values, field.name) and field.message_type is None:
                setattr(message, field.name, getattr(values, field.name))
    response.limits.max_waiting = max_waiting
    for width, height in engine.limits.trained_sizes:
        response.limits.trained_sizes.add(width=width, height=height)
    for component in engine.summaries():
        response.components.add(
            name=component.name,
            class_name=component.class_name,
            parameters=component.parameters,
            size_bytes=component.size_bytes,
        )


def _describe_tiers(response: pb.GetInfoResponse, engine: Engine) -> None:
    for offer in engine.offers:
        told = response.tiers.add(tier=TIER_NUMBERS[offer.tier], obstacle=offer.obstacle or "")
        if offer.obstacle is None:
            response.quality_tiers.append(TIER_NUMBERS[offer.tier])
        if offer.error is not None:
            fields = (field.name for field in told.measured_error.DESCRIPTOR.fields)
            told.measured_error.MergeFrom(pb.MeasuredError(**{name: getattr(offer.error, name) for name in fields}))


def versions() -> dict[str, str]:
    """Versions by package, of those that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def memory(
    *, device: object = "cpu", proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> pb.MemoryInfo:
    """Memory of the process and the machine; 0 where it cannot be read."""
    available = _meminfo_bytes(proc, "MemAvailable")
    room = _cgroup_room_bytes(cgroup)
    device_free, device_total = _device_bytes(device)
    return pb.MemoryInfo(
        device_free_bytes=device_free,
        device_total_bytes=device_total,
        process_resident_bytes=_status_bytes(proc, "VmRSS"),
        host_available_bytes=available if room is None else min(available, room),
    )


def _device_bytes(device: object) -> tuple[int, int]:
    """Free and all memory of the device; zeros on the CPU."""
    if not str(device).startswith("cuda"):
        return 0, 0
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return free, total


def _meminfo_bytes(proc: Path, name: str) -> int:
    return _kib_line(proc / "meminfo", name)


def _status_bytes(proc: Path, name: str) -> int:
    return _kib_line(proc / "self" / "status", name)


def _kib_line(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def _cgroup_room_bytes(cgroup: Path) -> int | None:
    """Room below memory.max of the container's own cgroup (version 2); None where there is no limit."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return None
        return max(0, int(limit) - int((cgroup / "memory.current").read_text()))
    except (OSError, ValueError):
        return None
