"""The API server's audit log: who wrote what."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.operator.operators import ACCOUNT


@dataclass(frozen=True)
class Write:
    """One request that changed something, or would have."""

    verb: str
    resource: str
    name: str
    dry_run: bool
    code: int

    def __str__(self) -> str:
        return f"{self.verb} {self.resource} {self.name} ({self.code})"


@dataclass(frozen=True)
class Audit:
    """The log of one API server."""

    path: Path

    def mark(self) -> int:
        """The present end of the log."""
        return self.path.stat().st_size

    def writes(self, namespace: str, since: int, *, dry_run: bool = False) -> list[Write]:
        """What the operator and its helm wrote in a namespace since a mark; dry runs apart."""
        with self.path.open("rb") as log:
            log.seek(since)
            lines = log.read().splitlines()
        user = f"system:serviceaccount:{namespace}:{ACCOUNT}"
        found = [_write(entry) for entry in map(_parsed, lines) if entry.get("user", {}).get("username") == user]
        return [write for write in found if write.dry_run == dry_run]


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        entry: dict[str, Any] = json.loads(line)
    except ValueError:  # the last line, half written
        return {}
    return entry


def _write(entry: dict[str, Any]) -> Write:
    reference = entry.get("objectRef", {})
    resource = "/".join(part for part in (reference.get("resource"), reference.get("subresource")) if part)
    return Write(
        entry["verb"],
        resource,
        reference.get("name", ""),
        "dryRun=All" in entry.get("requestURI", ""),
        entry.get("responseStatus", {}).get("code", 0),
    )
