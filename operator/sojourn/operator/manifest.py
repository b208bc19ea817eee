"""Rendered manifests: their objects, their digest, and what helm adds to each object on its way to the cluster."""

import hashlib
from pathlib import Path
from typing import Any

import yaml
from sojourn.operator.desired import canonical
from sojourn.operator.kube.client import CHART_KINDS, Object, Resource

# Hexadecimal digits of a digest. Labels hold 63 characters; 40 are beyond accident.
DIGEST_CHARACTERS = 40

_RESOURCES = {(resource.api_version, resource.kind): resource for resource in CHART_KINDS}
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def objects(manifest: str) -> list[Object]:
    """The objects of a manifest, in its order."""
    return [document for document in yaml.load_all(manifest, Loader=_Loader) if document]


def digest(manifest: str) -> str:
    """Hash of what a manifest says; comments, blank lines and the order of keys are not part of it."""
    return _hash(canonical(objects(manifest)))


def inputs_digest(chart_digest: str, values: object) -> str:
    """Hash of what a manifest is rendered from."""
    return _hash(chart_digest + canonical(values))


def chart_digest(chart: Path) -> str:
    """Hash of every file of a chart folder, or of a chart archive."""
    files = [chart] if chart.is_file() else sorted(path for path in chart.rglob("*") if path.is_file())
    whole = hashlib.sha256()
    for path in files:
        whole.update(str(path.relative_to(chart.parent)).encode() + b"\0" + path.read_bytes() + b"\0")
    return whole.hexdigest()


def chart_label(chart: Path) -> str:
    """Name and version of a chart folder, as helm writes them."""
    metadata = yaml.safe_load((chart / "Chart.yaml").read_text())
    return f"{metadata['name']}-{metadata['version']}"


def resource_of(item: Object) -> Resource | None:
    """How the API addresses an object of our chart; None for kinds that it cannot make."""
    return _RESOURCES.get((item["apiVersion"], item["kind"]))


def as_applied(item: Object, *, release: str, namespace: str) -> Object:
    """The object with the label and the annotations that helm adds, which are not in the stored manifest."""
    metadata = item["metadata"]
    return {
        **item,
        "metadata": {
            **metadata,
            "namespace": metadata.get("namespace", namespace),
            "labels": {**metadata.get("labels", {}), "app.kubernetes.io/managed-by": "Helm"},
            "annotations": {
                **metadata.get("annotations", {}),
                "meta.helm.sh/release-name": release,
                "meta.helm.sh/release-namespace": namespace,
            },
        },
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]
