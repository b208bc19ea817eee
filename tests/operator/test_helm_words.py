"""helm's words as types, and its records without helm."""

import asyncio
import base64
import gzip
import json
from pathlib import Path

import pytest
from sojourn.operator.errors import OperatorError, Permanent, Transient
from sojourn.operator.helm import (
    ForeignObject,
    Helm,
    HelmFailed,
    HelmForbidden,
    HelmSettings,
    ImmutableField,
    InvalidManifest,
    InvalidValues,
    KindMissing,
    ReleaseBroken,
    ReleaseLocked,
    ReleaseNotFound,
    Unreachable,
    error_of,
)
from sojourn.operator.manifest import as_applied, digest
from sojourn.operator.records import UnreadableRecord, parse, stored_manifest

# As helm 4.3.1 says it.
SAID: list[tuple[str, type[OperatorError]]] = [
    ("Error: uninstall: Release not loaded: a: release: not found", ReleaseNotFound),
    ("Error: UPGRADE FAILED: another operation (install/upgrade/rollback) is in progress", ReleaseLocked),
    ("Error: UPGRADE FAILED: release: already exists", ReleaseLocked),
    ('Error: UPGRADE FAILED: "a" has no deployed releases', ReleaseBroken),
    ("Error: no revision for release a", ReleaseBroken),
    ('Error: unable to build: no matches for kind "PodMonitor" in version "monitoring.coreos.com/v1"', KindMissing),
    ("Error: kubernetes cluster unreachable: dial tcp", Unreachable),
    ('Error: Deployment.apps "a" is invalid: spec.selector: field is immutable', ImmutableField),
    ('Error: Service "a" exists and cannot be imported into the current release: missing key', ForeignObject),
    ("Error: values don't meet the specifications of the schema(s)", InvalidValues),
    ("Error: execution error at (a/templates/b.yaml:3:4): images.inference is required", InvalidValues),
    ('Error: Deployment.apps "a" is invalid: spec.replicas: Invalid value', InvalidManifest),
    ("Error: failed to create typed patch object: field not declared in schema", InvalidManifest),
    ('Error: query: configmaps is forbidden: User "x" cannot list', HelmForbidden),
    ("Error: something nobody has seen yet", HelmFailed),
]


@pytest.mark.parametrize(("said", "type_"), SAID, ids=[case[1].__name__ + str(i) for i, case in enumerate(SAID)])
def test_what_helm_says_becomes_a_type(said: str, type_: type[OperatorError]) -> None:
    error = error_of("upgrade", 1, said)
    assert type(error) is type_
    assert said.removeprefix("Error: ") in str(error)
    assert isinstance(error, Permanent | Transient)


def test_an_answer_that_is_no_release_is_a_failure(tmp_path: Path) -> None:
    helm = program(tmp_path, "cat > /dev/null; echo done")
    with pytest.raises(HelmFailed, match="something else than a release: 'done"):
        asyncio.run(helm.upgrade("a", "b", {}, {}))


def program(folder: Path, script: str) -> Helm:
    path = folder / "helm"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return Helm(HelmSettings(program=str(path)))


def test_values_and_answers_larger_than_any_pipe_go_through(tmp_path: Path) -> None:
    values = {"text": "ä" * 2**20}
    helm = program(tmp_path, "cat")
    assert json.loads(asyncio.run(helm.template("a", "b", values))) == values
    helm = program(tmp_path, "cat >&2; exit 1")
    with pytest.raises(HelmFailed, match="u00e4"):
        asyncio.run(helm.template("a", "b", values))


def test_a_call_leaves_no_file_open(tmp_path: Path) -> None:
    async def calls() -> tuple[int, int]:
        helm = program(tmp_path, "cat")
        await helm.template("a", "b", {})
        before = len(list(Path("/proc/self/fd").iterdir()))
        await asyncio.gather(*(helm.template("a", "b", {}) for _ in range(20)))
        return before, len(list(Path("/proc/self/fd").iterdir()))

    before, after = asyncio.run(calls())
    assert before == after


def test_a_call_that_is_given_up_ends_its_helm(tmp_path: Path) -> None:
    async def give_up() -> int:
        helm = program(tmp_path, f"echo $$ > {tmp_path / 'pid'}; exec sleep 600")
        call = asyncio.create_task(helm.template("a", "b", {}))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return int((tmp_path / "pid").read_text())

    assert not Path(f"/proc/{asyncio.run(give_up())}").exists()


def test_what_stays_until_somebody_acts_says_what_to_do() -> None:
    for said, type_ in SAID:
        if issubclass(type_, Permanent):
            assert "What to do:" in str(error_of("upgrade", 1, said))


def body(manifest: str) -> dict[str, object]:
    packed = base64.b64encode(gzip.compress(json.dumps({"manifest": manifest}).encode())).decode()
    return {"metadata": {"name": "r"}, "data": {"release": packed}}


def test_the_manifest_is_read_from_both_kinds_of_records() -> None:
    record = body("kind: A")
    assert stored_manifest(record) == "kind: A"
    twice = base64.b64encode(str(record["data"]["release"]).encode()).decode()  # type: ignore[index]
    assert stored_manifest({"metadata": {"name": "r"}, "kind": "Secret", "data": {"release": twice}}) == "kind: A"


@pytest.mark.parametrize("data", [None, {}, {"release": "!"}, {"release": "aGVsbG8="}, {"release": body("")}])
def test_a_record_that_is_none_is_unreadable(data: object) -> None:
    with pytest.raises(UnreadableRecord):
        stored_manifest({"metadata": {"name": "r"}, "data": data})


def test_a_foreign_config_map_is_no_record() -> None:
    assert parse({"metadata": {"name": "a", "namespace": "b", "labels": {"owner": "helm"}}}) is None


def test_the_digest_knows_content_only() -> None:
    assert digest("a: 1\nb: 2\n---\nc: 3\n") == digest("# hello\nb: 2\na: 1\n\n---\n---\nc: 3\n")
    assert digest("a: 1") != digest("a: 2")


def test_an_object_is_compared_with_what_helm_adds() -> None:
    item = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a", "labels": {"x": "y"}}}
    applied = as_applied(item, release="r", namespace="n")
    assert applied["metadata"]["labels"] == {"x": "y", "app.kubernetes.io/managed-by": "Helm"}
    assert applied["metadata"]["annotations"]["meta.helm.sh/release-name"] == "r"
    assert applied["metadata"]["namespace"] == "n"
    assert "namespace" not in item["metadata"]
