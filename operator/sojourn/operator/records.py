"""Helm's release records, read without helm: state from their labels, the manifest from their body."""

import base64
import contextlib
import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from sojourn.operator.errors import NotFound, Transient
from sojourn.operator.kube.client import CONFIG_MAPS, SECRETS, Kube, Object, Resource
from sojourn.operator.naming import DIGEST_LABEL, INPUTS_LABEL, SWEEP_LABEL

Driver = Literal["configmap", "secret"]

_RESOURCES: dict[str, Resource] = {"configmap": CONFIG_MAPS, "secret": SECRETS}


class UnreadableRecord(Transient):
    """The body of a record is not what helm writes."""

    reason = "ReleaseRecordUnreadable"


@dataclass(frozen=True)
class Record:
    """One revision of a release."""

    name: str
    namespace: str
    release: str
    revision: int
    status: str
    created: datetime
    digest: str = ""
    inputs: str = ""
    sweep: str = ""

    @property
    def pending(self) -> bool:
        """Whether helm is at work, or was killed at it."""
        return self.status.startswith("pending-")


Records = tuple[Record, ...]


def newest(records: Iterable[Record]) -> Record | None:
    """The record with the highest revision."""
    return max(records, key=lambda record: record.revision, default=None)


def deployed(records: Iterable[Record]) -> Record | None:
    """The newest record that says deployed."""
    return newest(record for record in records if record.status == "deployed")


@dataclass
class RecordBook:
    """What is known of the records of all releases: from one metadata-only LIST, brought up to date per release.

    Once everything was read, a release that was not seen has no records, and a first install asks nothing. Where
    somebody else made one meanwhile helm says so, and the release is read anew.
    """

    kube: Kube
    driver: Driver = "configmap"
    _known: dict[tuple[str, str], Records] = field(default_factory=dict)
    # Releases that were worked on since they were read, and since the last listing of all began.
    _stale: set[tuple[str, str]] = field(default_factory=set)
    _touched: set[tuple[str, str]] = field(default_factory=set)
    _complete: bool = False

    @property
    def resource(self) -> Resource:
        """Where the records lie."""
        return _RESOURCES[self.driver]

    async def read_all(self, namespaces: Iterable[str | None] = (None,)) -> None:
        """Reads the state of all releases in some namespaces; None stands for everywhere.

        What happens to a release while the listing is on its way is not in it, or half: such a release is read anew.
        """
        self._touched = set()
        by_release: dict[tuple[str, str], list[Record]] = {}
        for namespace in namespaces:
            for item in await self.kube.list_metadata(self.resource, namespace, labels="owner=helm"):
                if record := parse(item):
                    by_release.setdefault((record.namespace, record.release), []).append(record)
        self._known = {key: tuple(records) for key, records in by_release.items() if key not in self._touched}
        self._stale = self._touched
        self._complete = True

    async def of(self, namespace: str, release: str) -> Records:
        """The records of one release: as known, else as read now."""
        key = (namespace, release)
        if key not in self._known and self._complete and key not in self._stale:
            return ()
        if key not in self._known:
            items = await self.kube.list_metadata(self.resource, namespace, labels=f"owner=helm,name={release}")
            self._known[key] = tuple(record for item in items if (record := parse(item)))
        return self._known[key]

    def forget(self, namespace: str, release: str) -> None:
        """Has the records of a release read anew at the next look."""
        self._known.pop((namespace, release), None)
        for touched in (self._stale, self._touched):
            touched.add((namespace, release))

    def note_only(self, record: Record) -> None:
        """Notes the only record of a release, as helm has just told of it."""
        key = (record.namespace, record.release)
        self._touched.add(key)
        self._known[key] = (record,)

    def releases(self) -> set[tuple[str, str]]:
        """Namespace and name of each release that was seen."""
        return {key for key, records in self._known.items() if records}

    async def manifest(self, record: Record) -> str:
        """The manifest that a record holds.

        Raises:
            UnreadableRecord: it is not what helm writes.
        """
        body = await self.kube.get(self.resource, record.namespace, record.name)
        return stored_manifest(body)

    async def label(self, record: Record, labels: dict[str, str]) -> None:
        """Sets labels of a record."""
        body = {"metadata": {"labels": labels}}
        await self.kube.merge(self.resource, record.namespace, record.name, body)
        self.forget(record.namespace, record.release)

    async def delete(self, records: Iterable[Record]) -> None:
        """Deletes records; the objects of the release stay."""
        for record in records:
            with contextlib.suppress(NotFound):
                await self.kube.delete(self.resource, record.namespace, record.name)
            self.forget(record.namespace, record.release)


def record_name(release: str, revision: int) -> str:
    """What helm calls the record of a revision."""
    return f"sh.helm.release.v1.{release}.v{revision}"


def parse(item: Object) -> Record | None:
    """A record by its metadata; None for what is not one."""
    metadata = item["metadata"]
    labels = metadata.get("labels") or {}
    try:
        return Record(
            name=metadata["name"],
            namespace=metadata["namespace"],
            release=labels["name"],
            revision=int(labels["version"]),
            status=labels["status"],
            created=datetime.fromisoformat(metadata["creationTimestamp"]),
            # helm takes a label away on an upgrade that sets it to null, but writes the word on an install.
            digest=labels.get(DIGEST_LABEL, "").removeprefix("null"),
            inputs=labels.get(INPUTS_LABEL, ""),
            sweep=labels.get(SWEEP_LABEL, ""),
        )
    except (KeyError, ValueError):
        return None


def stored_manifest(body: Object) -> str:
    """The manifest inside a record: base64 of gzip of JSON, in a Secret base64 once more.

    Raises:
        UnreadableRecord: it is not that.
    """
    try:
        packed = body["data"]["release"]
        if body.get("kind") == "Secret":
            packed = base64.b64decode(packed).decode()
        manifest = json.loads(gzip.decompress(base64.b64decode(packed)))["manifest"]
    except (KeyError, TypeError, ValueError, OSError, EOFError) as error:
        raise UnreadableRecord(f"release record {body['metadata']['name']} cannot be read: {error!r}") from error
    return str(manifest)
