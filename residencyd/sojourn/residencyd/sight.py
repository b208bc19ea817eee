"""Tells, once per change, which process can be seen and which cannot, and why."""

import logging

from sojourn.residencyd.snapshots import Snapshot

logger = logging.getLogger(__name__)


class Sight:
    """Follows snapshots."""

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}
        self._unusable: dict[str, str] = {}

    def saw(self, snapshot: Snapshot) -> None:
        """Logs what differs from the snapshot before."""
        reasons = {reading.pid: reading.blind_reason for reading in snapshot.processes}
        for reading in snapshot.processes:
            if self._reasons.get(reading.pid) == reading.blind_reason:
                logger.debug("process %d: as before (%s)", reading.pid, reading.blind_reason or "seen")
            elif reading.blind_reason:
                logger.warning("blind (%s): %s", reading.blind_reason, reading.blind_message)
            else:
                logger.info("process %d is seen: %d components", reading.pid, len(reading.components))
        self._reasons = reasons
        self._report_sources(snapshot)

    def _report_sources(self, snapshot: Snapshot) -> None:
        """The map and the process are told of above."""
        unusable = {name: why for name, why in snapshot.sources.items() if why and name not in ("map", "process")}
        for name in unusable.keys() - self._unusable.keys():
            logger.warning("source %s is not usable: %s", name, unusable[name])
        for name in self._unusable.keys() - unusable.keys():
            logger.info("source %s is usable again", name)
        self._unusable = unusable
