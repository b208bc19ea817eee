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
        lines, _ = self.lines(since)
        user = f"system:serviceaccount:{namespace}:{ACCOUNT}"
        found = [_write(entry) for entry in map(_parsed, lines) if entry.get("user", {}).get("username") == user]
        return [write for write in found if write.dry_run == dry_run]

    def lines(self, since: int) -> tuple[list[bytes], int]:
        """Whole lines since a mark, and the mark of their end."""
        with self.path.open("rb") as log:
            log.seek(since)
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        return whole.splitlines(), since + len(whole)


def _parsed(line: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads(line)
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
