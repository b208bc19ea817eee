"""Descendants of a model process, for people who look.

Workers share most pages with their parent, so their memory goes into no sum.
"""

from dataclasses import dataclass
from pathlib import Path

from sojourn.residencyd.kernel import process
from sojourn.residencyd.kernel.errors import KernelError


@dataclass(frozen=True)
class Child:
    """A descendant.

    Attributes:
        pid: Its id.
        name: Its command.
        resident_bytes: In memory, pages shared with its parent too.
    """

    pid: int
    name: str
    resident_bytes: int


def read_children(pid: int, *, proc: Path) -> tuple[Child, ...]:
    """Every descendant that is there, in order of id. Reads the stat of every process."""
    found = []
    for child in process.children(pid, proc=proc):
        try:
            stat = process.read_stat(child, proc=proc)
            found.append(Child(child, stat.name, process.read_status(child, proc=proc).rss_bytes))
        except KernelError:  # ended meanwhile
            continue
    return tuple(found)
