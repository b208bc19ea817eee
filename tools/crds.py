"""Generates what is derived from the models of the custom resources: the chart's CRDs and their documentation.

python -m tools.crds           write them
python -m tools.crds --check   exit 1 and name each file that differs
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from sojourn.operator.resources import API_VERSION
from sojourn.operator.resources.definitions import KINDS, Kind, definition

ROOT = Path(__file__).resolve().parent.parent
CRDS = ROOT / "charts/sojourn/templates/crds"
DOCUMENT = ROOT / "docs/custom-resources.md"

TEMPLATE = """{{{{- /* Made by `make crds` from the models in operator/; edit those. */ -}}}}
{{{{- if .Values.crds.install }}}}
{before}  annotations:
    helm.sh/resource-policy: keep
  labels: {{{{- include "sojourn.labels" . | nindent 4 }}}}
{after}{{{{- end }}}}
"""

INTRODUCTION = f"""<!-- Made by `make crds` from the models in operator/; edit those. -->
# Custom resources

Group and version: `{API_VERSION}`. All three kinds are namespaced; `kubectl get sojourn` lists them together and
`kubectl explain dsvc.spec --recursive` says the same as this page.

Sizes are quantities (`16Gi`). Fields without a default are optional unless marked as required.
"""


def template(kind: Kind) -> str:
    """The CRD as a chart template: kept on uninstall, and brought up to date by an upgrade."""
    text = yaml.safe_dump(definition(kind), sort_keys=False, allow_unicode=True, width=110)
    before, after = text.split("spec:\n", 1)
    return TEMPLATE.format(before=before, after="spec:\n" + after)


def document() -> str:
    """docs/custom-resources.md."""
    return INTRODUCTION + "".join(_chapter(kind) for kind in KINDS)


def _chapter(kind: Kind) -> str:
    schema = definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    rules = [rule["message"] for node in _nodes(schema) for rule in node.get("x-kubernetes-validations", [])]
    lines = [f"\n## {kind.name} (`{kind.short}`)", kind.summary, ""]
    for part in ("spec", "status"):
        lines += [f"### {part}", "| field | type | default | says |", "|---|---|---|---|"]
        lines += [_row(path, node, required) for path, node, required in _fields(schema["properties"][part])]
        lines.append("")
    lines += ["### Refused by the API server", *(f"- {message}" for message in rules), ""] if rules else []
    return "\n".join(lines)


def _nodes(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    children = [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]
    for child in children:
        if isinstance(child, dict):
            yield from _nodes(child)


def _fields(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any], bool]]:
    for name, node in schema.get("properties", {}).items():
        path = f"{prefix}{name}"
        yield path, node, name in schema.get("required", [])
        yield from _fields(node, f"{path}.")
        if isinstance(node.get("items"), dict):
            yield from _fields(node["items"], f"{path}[].")


def _row(path: str, node: dict[str, Any], required: bool) -> str:
    default = "required" if required else _default(node)
    return f"| `{path}` | {_type(node)} | {default} | {node.get('description', '').replace('|', '/')} |"


def _default(node: dict[str, Any]) -> str:
    return "" if node.get("default") in (None, {}, []) else f"`{node['default']}`"


def _type(node: dict[str, Any]) -> str:
    if node.get("x-kubernetes-int-or-string") and "maximum" in node:
        return f"integer, {node['minimum']} to {node['maximum']}, or percentage"
    if node.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "enum" in node:
        return ", ".join(f"`{value}`" for value in node["enum"])
    if "minimum" in node or "maximum" in node:
        return f"integer, {node.get('minimum', '…')} to {node.get('maximum', '…')}"
    if node.get("type") == "array":
        return f"list of {_type(node['items'])}"
    if isinstance(node.get("additionalProperties"), dict):
        return f"map of {_type(node['additionalProperties'])}"
    return str(node.get("type", ""))


def wanted() -> dict[Path, str]:
    """Every generated file and its content."""
    return {CRDS / f"{kind.plural}.yaml": template(kind) for kind in KINDS} | {DOCUMENT: document()}


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    check = parser.parse_args().check
    outdated = [path for path, text in wanted().items() if not path.exists() or path.read_text() != text]
    for path in outdated:
        if check:
            print(f"{path.relative_to(ROOT)}: out of date, run `make crds`", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted()[path])
    return 1 if check and outdated else 0


if __name__ == "__main__":
    sys.exit(main())
