"""The CustomResourceDefinitions: names, columns and subresources around the schemas of the models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from sojourn.operator.resources import GROUP, VERSION, AdaLNCacheSpec, DiffusionServiceSpec, LayerwiseOffloadSpec
from sojourn.operator.resources.diffusion_service import MAX_NAME_CHARACTERS
from sojourn.operator.resources.schema import Schema, structural
from sojourn.operator.resources.status import UNSEEN, DiffusionServiceStatus, PolicyStatus


@dataclass(frozen=True)
class Kind:
    """One custom resource.

    Attributes:
        name: as in `kind`.
        plural: as in the address of the API.
        short: as people type it.
        summary: what it says, for `kubectl explain` and the documentation.
        columns: header, type and JSON path of what `kubectl get` prints.
        scales: whether `kubectl scale` works on it.
        born: the status of a new object, until the operator writes one.
        rules: CEL rules over the whole object, each an expression and a message.
    """

    name: str
    plural: str
    short: str
    summary: str
    spec: type[BaseModel]
    status: type[BaseModel]
    columns: tuple[tuple[str, str, str], ...]
    scales: bool = False
    born: Mapping[str, Any] | None = None
    rules: tuple[tuple[str, str], ...] = ()


_AGE = ("Age", "date", ".metadata.creationTimestamp")
_POLICY_COLUMNS = (("Used-By", "integer", ".status.usedBy"), _AGE)

KINDS = (
    Kind(
        name="AdaLNCache",
        plural="adalncaches",
        short="adaln",
        summary="How services keep the modulation rows of their schedules instead of the weights that make them.",
        spec=AdaLNCacheSpec,
        status=PolicyStatus,
        columns=(("Mode", "string", ".spec.mode"), *_POLICY_COLUMNS),
    ),
    Kind(
        name="LayerwiseOffload",
        plural="layerwiseoffloads",
        short="lwo",
        summary="Where services keep weights that do not fit in device memory.",
        spec=LayerwiseOffloadSpec,
        status=PolicyStatus,
        columns=(("Mode", "string", ".spec.mode"), *_POLICY_COLUMNS),
    ),
    Kind(
        name="DiffusionService",
        plural="diffusionservices",
        short="dsvc",
        summary="One diffusion model, served over gRPC by pods that say where each of its weights is.",
        spec=DiffusionServiceSpec,
        status=DiffusionServiceStatus,
        columns=(
            ("Ready", "string", ".status.conditions[?(@.type=='Ready')].status"),
            ("Reason", "string", ".status.conditions[?(@.type=='Ready')].reason"),
            ("Model", "string", ".status.model"),
            ("Replicas", "string", ".status.replicasSummary"),
            ("VRAM", "string", ".status.residency.vram"),
            ("Host", "string", ".status.residency.host"),
            ("Saved", "string", ".status.adaLN.saved"),
            ("Hit%", "string", ".status.adaLN.hitRatio"),
            _AGE,
        ),
        scales=True,
        born=UNSEEN,
        rules=(
            (
                f"self.metadata.name.size() <= {MAX_NAME_CHARACTERS} && "
                "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                f"the name must be a DNS label of at most {MAX_NAME_CHARACTERS} characters that starts with a letter",
            ),
        ),
    ),
)


def definition(kind: Kind) -> dict[str, Any]:
    """The CustomResourceDefinition of a kind, as the API server takes it."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind.name,
                "listKind": f"{kind.name}List",
                "plural": kind.plural,
                "singular": kind.name.lower(),
                "shortNames": [kind.short],
                "categories": ["sojourn"],
            },
            "versions": [_version(kind)],
        },
    }


def _version(kind: Kind) -> dict[str, Any]:
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _whole(kind)},
        "subresources": {"status": {}, **({"scale": scale} if kind.scales else {})},
        "additionalPrinterColumns": [
            {"name": name, "type": type_, "jsonPath": path} for name, type_, path in kind.columns
        ],
    }


def _whole(kind: Kind) -> Schema:
    whole: Schema = {
        "type": "object",
        "description": kind.summary,
        "required": ["spec"] if structural(kind.spec).get("required") else [],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": _spec(kind),
            "status": _status(kind),
        },
    }
    if kind.rules:
        whole["x-kubernetes-validations"] = [{"rule": rule, "message": message} for rule, message in kind.rules]
    return {key: value for key, value in whole.items() if value != []}


def _status(kind: Kind) -> Schema:
    status = structural(kind.status, defaults=False)
    return {**status, "default": dict(kind.born)} if kind.born else status


def _spec(kind: Kind) -> Schema:
    """A spec that has no required field may be left out altogether."""
    spec = structural(kind.spec)
    return spec if spec.get("required") else {**spec, "default": {}}
