"""Helm as a library would be: calls with arguments, values on stdin, errors by type.

Helm exits with 0 or 1 and says why only in words, so one table turns words into types. Flags are those measured to be
cheap and safe: no waiting (it stretches the lock of the release over a model's load), no rollback on failure (it
fights the spec), values never reused, fields taken from whoever holds them, and no download of the API's schemas.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, Field, ValidationError
from sojourn.operator.errors import OperatorError, Permanent, Transient


class HelmFailed(Transient):
    """A helm call failed for a reason that has no type of its own."""

    reason = "HelmFailed"


class HelmTimedOut(HelmFailed):
    """A helm call did not end in time and was stopped."""

    reason = "HelmTimedOut"


class ReleaseNotFound(HelmFailed):
    """There is no record of the release."""

    reason = "ReleaseNotFound"


class ReleaseLocked(HelmFailed):
    """Another operation holds the release, or was killed while it did."""

    reason = "ReleaseLocked"


class ReleaseBroken(HelmFailed):
    """The records cannot serve as a base: unreadable, or none that was ever deployed."""

    reason = "ReleaseBroken"


class KindMissing(HelmFailed):
    """The cluster does not know a kind that the release has or had."""

    reason = "KindMissing"


class HelmForbidden(HelmFailed):
    """A right is missing, or the namespace is being deleted."""

    reason = "Forbidden"


class Unreachable(HelmFailed):
    """The API server does not answer."""

    reason = "ApiUnreachable"


class ImmutableField(Permanent):
    """An object would have to be replaced."""

    reason = "ImmutableField"


class InvalidManifest(Permanent):
    """The API server refuses an object."""

    reason = "InvalidManifest"


class InvalidValues(Permanent):
    """The chart refuses the values."""

    reason = "InvalidValues"


class ForeignObject(Permanent):
    """An object of the same name belongs to somebody else."""

    reason = "ForeignObject"


_BY_WORDS: tuple[tuple[str, type[OperatorError], str], ...] = (
    ("release: not found", ReleaseNotFound, ""),
    ("another operation (install/upgrade/rollback) is in progress", ReleaseLocked, ""),
    ("release: already exists", ReleaseLocked, ""),
    ("has no deployed releases", ReleaseBroken, ""),
    ("no revision for release", ReleaseBroken, ""),
    ("no release provided", ReleaseBroken, ""),
    ("no matches for kind", KindMissing, "install the missing CustomResourceDefinition, or switch its user off"),
    ("kubernetes cluster unreachable", Unreachable, ""),
    ("field is immutable", ImmutableField, "delete the named object; the operator makes it anew"),
    ("cannot be imported into the current release", ForeignObject, "rename or delete the named object"),
    ("values don't meet the specifications", InvalidValues, "correct the spec"),
    ("execution error at", InvalidValues, "correct the spec"),
    ("failed to create typed patch object", InvalidManifest, "correct the spec"),
    ("is forbidden", HelmForbidden, ""),
    ("is invalid:", InvalidManifest, "correct the spec"),
)


@dataclass(frozen=True)
class HelmSettings:
    """How helm is called.

    Attributes:
        program: the helm binary.
        chart: folder or archive of the chart of a service.
        scratch: writable folder for caches; without one each call asks the API server 67 instead of 25 times.
        driver: where release records are kept, configmap or secret.
        timeout_seconds: helm's own timeout, and so the age at which a lock is stale.
        concurrency: helm processes at once; each takes up to 21 MiB of its own.
        history: revisions that are kept.
    """

    program: str = "helm"
    chart: Path = Path("/charts/sojourn-service")
    scratch: Path = Path("/tmp/helm")
    driver: str = "configmap"
    timeout_seconds: int = 60
    concurrency: int = 6
    history: int = 3


class Applied(BaseModel):
    """What helm says of a release that it has installed or upgraded.

    Attributes:
        revision: number of the record that it wrote.
        manifest: what it applied.
    """

    revision: int = Field(validation_alias="version")
    manifest: str


# verb, seconds, error or None
Observer = Callable[[str, float, OperatorError | None], None]


class Helm:
    """One chart, any release."""

    def __init__(
        self,
        settings: HelmSettings,
        *,
        environ: Mapping[str, str] | None = None,
        observe: Observer = lambda verb, seconds, error: None,
    ) -> None:
        """Calls are told to `observe` when they end."""
        self.settings = settings
        self._observe = observe
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._environ = {**(os.environ if environ is None else environ), **_environment(settings)}

    async def template(self, release: str, namespace: str, values: Any) -> str:
        """The manifest that these values give. Asks the cluster nothing.

        Raises:
            InvalidValues: the chart refuses them.
        """
        arguments = ("template", release, self.settings.chart, "-n", namespace, "-f", "-")
        return await self._call(*arguments, stdin=json.dumps(values))

    async def upgrade(self, release: str, namespace: str, values: Any, labels: Mapping[str, str]) -> Applied:
        """Installs or upgrades, and returns when every object is applied, ready or not."""
        said = await self._call(
            *("upgrade", "--install", release, self.settings.chart, "-n", namespace, "-f", "-"),
            *("--reset-values", "--server-side=true", "--force-conflicts", "--disable-openapi-validation"),
            *("--history-max", self.settings.history, "--timeout", f"{self.settings.timeout_seconds}s"),
            *("--labels", ",".join(f"{key}={value}" for key, value in sorted(labels.items())), "-o", "json"),
            stdin=json.dumps(values),
        )
        try:
            return Applied.model_validate_json(said)
        except ValidationError as error:
            raise HelmFailed(f"helm upgrade answered something else than a release: {said[:200]!r}") from error

    async def rollback(self, release: str, namespace: str, revision: int) -> None:
        """Applies the manifest of an older revision as a new one."""
        await self._call(
            *("rollback", release, revision, "-n", namespace, "--server-side=true", "--force-conflicts"),
            *("--history-max", self.settings.history, "--timeout", f"{self.settings.timeout_seconds}s"),
        )

    async def uninstall(self, release: str, namespace: str) -> None:
        """Deletes every object and the records.

        Never with --ignore-not-found: it also ignores that records could not be read, and then nothing is deleted.

        Raises:
            ReleaseNotFound: there is no record.
        """
        await self._call("uninstall", release, "-n", namespace, "--timeout", f"{self.settings.timeout_seconds}s")

    async def _call(self, *arguments: object, stdin: str = "") -> str:
        async with self._slots:
            started = time.monotonic()
            error: OperatorError | None = None
            try:
                return await self._run([str(argument) for argument in arguments], stdin)
            except OperatorError as failure:
                error = failure
                raise
            finally:
                self._observe(str(arguments[0]), time.monotonic() - started, error)

    async def _run(self, arguments: list[str], stdin: str) -> str:
        # Files in memory: a pipe each would wake the loop for every piece of what helm says.
        with _memory(stdin) as given, _memory() as output, _memory() as errors:
            process = await asyncio.create_subprocess_exec(
                self.settings.program, *arguments, stdin=given, stdout=output, stderr=errors, env=self._environ
            )
            # helm's own timeout ends its waits, not its requests.
            limit = self.settings.timeout_seconds + 30
            # Not wait_for: it makes a task, and kopf, when it ends, cancels every task that was made after its start.
            try:
                async with asyncio.timeout(limit):
                    await process.wait()
            except TimeoutError:
                raise HelmTimedOut(f"helm {arguments[0]} did not end within {limit} s") from None
            finally:
                await _stop(process)
            if process.returncode:
                raise error_of(arguments[0], process.returncode, _text(errors))
            return _text(output)


def _memory(text: str = "") -> IO[bytes]:
    file = os.fdopen(os.memfd_create("helm"), "w+b")
    file.write(text.encode())
    file.seek(0)
    return file


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def error_of(verb: str, status: int, text: str) -> OperatorError:
    """The typed error for what helm said."""
    said = " ".join(line for line in text.strip().splitlines() if not line.startswith("level=")) or text.strip()
    for words, type_, cure in _BY_WORDS:
        if words.lower() in text.lower():
            return type_(f"helm {verb}: {said}" + (f". What to do: {cure}" if cure else ""))
    return HelmFailed(f"helm {verb} exited with {status}: {said}")


async def _stop(process: asyncio.subprocess.Process, grace_seconds: float = 10) -> None:
    """SIGTERM, which lets an install or upgrade end its record as failed; then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await process.wait()


def _environment(settings: HelmSettings) -> dict[str, str]:
    return {
        "HELM_DRIVER": settings.driver,
        "HELM_NO_PLUGINS": "1",
        "KUBECACHEDIR": str(settings.scratch / "kube"),
        "HELM_CACHE_HOME": str(settings.scratch),
        "HELM_CONFIG_HOME": str(settings.scratch),
        "HELM_DATA_HOME": str(settings.scratch),
        # The collector is most of the work of so short a process.
        "GOGC": "200",
    }
