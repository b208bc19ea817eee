"""What rows are bound to: the content of the weights that make them, and the arithmetic that they are made with.

Content, and not size and mtime: a fine-tune has equal sizes, and image layers may normalise times. Reading it once is
the price; the result is kept under the identity of the files, and blocks sampled from the files confirm it at each
start.
"""

import hashlib
import json
import os
import platform
import random
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from sojourn.inference.adaln.family import Family
from sojourn.inference.adaln.layers import LINE_BYTES
from sojourn.inference.adaln.weights import Part, WeightFiles

_SAMPLES = 256
_SAMPLE_BYTES = 4096
_CHUNK_BYTES = 32 * 1024**2
"""Tensors are hashed in parts of this size, so that hashing 24 GiB never holds more than that."""


def rows_fingerprint(
    weights: WeightFiles,
    family: Family,
    *,
    config: Mapping[str, object],
    arithmetic: Mapping[str, object],
    memory: Path | None = None,
) -> str:
    """A hex digest that two caches share exactly if their rows are interchangeable.

    Args:
        weights: Projections and embedders of one component.
        family: Says which tensors these are.
        config: The transformer's config, which the parts of the embedding without weights follow.
        arithmetic: See `arithmetic_of`.
        memory: Folder in which content digests are remembered; None to read all content.
    """
    names = [name for name in weights.places if family.is_projection_tensor(name) or family.is_embedder_tensor(name)]
    settings = {key: value for key, value in config.items() if not key.startswith("_")}
    parts = [
        family.name,
        content_digest(weights, sorted(names), memory),
        _canonical(_alignments(weights, sorted(names))),
        _canonical(settings),
        _canonical(arithmetic),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def arithmetic_of(
    device: torch.device, *, dtypes: Iterable[torch.dtype], precision: str, sharing: str, ranks: int
) -> dict[str, object]:
    """Everything besides weights and inputs that may decide a row's last bits."""
    chip: dict[str, object]
    if device.type == "cuda":
        chip = {"name": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    else:
        chip = {
            "machine": platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "features": _cpu_features(),
            "threads": torch.get_num_threads(),
            "blas": torch.__config__.show(),
        }
    return {
        "device": device.type,
        "chip": chip,
        "torch": torch.__version__,
        "dtypes": sorted(str(dtype) for dtype in dtypes),
        "precision": precision,
        "matmul": torch.get_float32_matmul_precision(),
        "sharing": f"{sharing} of {ranks}" if ranks > 1 and sharing != "layers" else "whole",
    }


def content_digest(weights: WeightFiles, names: list[str], memory: Path | None = None) -> str:
    """Digest over names, shapes, dtypes and content of tensors; remembered under the identity of their files."""
    record = None if memory is None else memory / f"{_identity_digest(weights, names)}.json"
    samples = _sample_digest(weights, names)
    if record is not None and (known := _remembered(record, samples)) is not None:
        return known
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(lambda name: _tensor_digest(weights, name), names))
    content = hashlib.sha256("".join(digests).encode()).hexdigest()
    if record is not None:
        _remember(record, content=content, samples=samples)
    return content


def _tensor_digest(weights: WeightFiles, name: str) -> str:
    place = weights.places[name]
    digest = hashlib.sha256(f"{name}:{place.dtype}:{place.shape}".encode())
    rows = place.shape[0] if place.shape else 1
    step = max(1, _CHUNK_BYTES // max(1, place.nbytes // max(1, rows)))
    buffer = memoryview(bytearray(place.nbytes // max(1, rows) * min(step, rows)))
    for first in range(0, rows, step):
        part = Part(name, first, min(rows, first + step))
        stored = buffer[: part.span(place)[1]]
        absent = weights.absent([part])
        weights.will_need(absent)
        weights.read(part, stored)
        digest.update(stored)
        weights.forget(absent)
    return digest.hexdigest()


def _alignments(weights: WeightFiles, names: list[str]) -> list[int]:
    """Where in a cache line the float32 tensors lie, mapped or read: the bits of products of one row depend on it."""
    places = [weights.places[name] for name in names]
    return [place.offset % LINE_BYTES for place in places if place.dtype is torch.float32]


def _identity_digest(weights: WeightFiles, names: list[str]) -> str:
    """Of the files as they were mapped, and of which tensors are meant."""
    return hashlib.sha256(_canonical({"files": weights.identities, "names": names}).encode()).hexdigest()


def _sample_digest(weights: WeightFiles, names: list[str]) -> str:
    """Of blocks at places that follow from the tensors' extents alone: the same at each start."""
    digest = hashlib.sha256()
    total = sum(weights.places[name].nbytes for name in names)
    draw = random.Random(total)
    offsets = sorted(draw.randrange(max(1, total)) for _ in range(_SAMPLES))
    begin = 0
    for name in names:
        place = weights.places[name]
        while offsets and offsets[0] < begin + place.nbytes:
            digest.update(_block(weights, name, offsets.pop(0) - begin))
        begin += place.nbytes
    return digest.hexdigest()


def _block(weights: WeightFiles, name: str, offset: int) -> bytes:
    place = weights.places[name]
    rows = place.shape[0] if place.shape else 1
    row_bytes = max(1, place.nbytes // max(1, rows))
    first = offset // row_bytes
    part = Part(name, first, min(rows, first + max(1, _SAMPLE_BYTES // row_bytes)))
    stored = bytearray(part.span(place)[1])
    weights.read(part, memoryview(stored))
    return bytes(stored[:_SAMPLE_BYTES])


def _remembered(record: Path, samples: str) -> str | None:
    try:
        known = json.loads(record.read_text())
        return str(known["content"]) if known["samples"] == samples else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(record: Path, **known: str) -> None:
    """Best effort: a read-only folder costs the next start another read."""
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        temporary = record.with_name(f"{record.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(known))
        temporary.replace(record)
    except OSError:
        return


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _cpu_features() -> list[str]:
    """Instruction sets that the BLAS may choose its kernels by; empty where the kernel does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return sorted(
        flag for flag in flags.split() if flag.startswith(("avx", "amx", "fma", "sse4", "asimd", "sve", "bf16"))
    )
