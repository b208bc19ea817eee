"""The component maps that are published, parsed once each.

A map is replaced as a whole, so a file of the same inode, size and time is the same map.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sojourn.residencyd.claims import ComponentMap, Range, Tier, claimed_bytes, host_ranges, read_map, unreadable


@dataclass
class ShelvedMap:
    """A map, and what is derived from it once.

    Attributes:
        claim: The map.
        ranges: What it claims of the host's address space.
        claimed_bytes: Their sizes by component and tier.
        file_systems: The process's, by device number; filled in by who first needs them.
    """

    claim: ComponentMap
    ranges: tuple[Range, ...]
    claimed_bytes: Mapping[tuple[str, Tier], int]
    file_systems: Mapping[tuple[int, int], str] = field(default_factory=dict)


def shelve(claim: ComponentMap) -> ShelvedMap:
    """A map with what is derived from it."""
    ranges = host_ranges(claim.components)
    return ShelvedMap(claim, ranges, claimed_bytes(ranges))


class MapShelf:
    """Maps by file.

    Args:
        pattern: A file, a folder (in which every *.pb is one) or a glob.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._maps: dict[Path, tuple[tuple[int, ...], ShelvedMap]] = {}

    def paths(self) -> Sequence[Path]:
        """Files that are there; where none is, the place where one should be, so that its absence is told."""
        place = Path(self.pattern)
        root = Path(place.anchor)
        try:
            if place.is_dir():
                return sorted(place.glob("*.pb")) or [place / "*.pb"]
            return sorted(root.glob(str(place.relative_to(root)))) or [place]
        except OSError:  # a folder above that is not ours to enter; reading says so
            return [place]

    def read(self, path: Path) -> ShelvedMap:
        """The map in a file, parsed only if it is new.

        Raises:
            MapMissing, MapForbidden, MapTorn, MapSchemaUnknown: It is of no use.
        """
        identity = _identity(path)
        kept = self._maps.get(path)
        if kept and kept[0] == identity:
            return kept[1]
        self._maps.pop(path, None)
        claim = read_map(path)
        shelved = shelve(claim)
        # Read, then looked at once more: a file that was replaced meanwhile is parsed again next time.
        if _identity(path) == identity:
            self._maps[path] = identity, shelved
        return shelved


def _identity(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
