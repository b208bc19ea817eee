"""Pydantic models to structural schemas of Kubernetes.

JSON Schema as pydantic writes it is not structural: references, `anyOf` with null and titles must go, and what the
API server cannot express any other way (CEL rules, list types, integers that are also text) comes from the models'
`json_schema_extra`.
"""

from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

_DROPPED = ("title", "$defs", "additionalProperties")


def structural(model: type[BaseModel], *, defaults: bool = True) -> Schema:
    """The structural schema of a model, with bounds, descriptions, CEL rules and, unless refused, defaults.

    A status has no defaults: the API server would write into it what the operator did not.
    """
    schema = model.model_json_schema(by_alias=True)
    converted = _convert(schema, schema.get("$defs", {}))
    return converted if defaults else _without_defaults(converted)


def _without_defaults(node: Schema) -> Schema:
    kept = {key: value for key, value in node.items() if key != "default"}
    for part in ("items", "additionalProperties"):
        if isinstance(kept.get(part), dict):
            kept[part] = _without_defaults(kept[part])
    if "properties" in kept:
        kept["properties"] = {name: _without_defaults(child) for name, child in kept["properties"].items()}
    return kept


def _convert(node: Schema, definitions: dict[str, Schema]) -> Schema:
    node = _without_null(_resolved(node, definitions), definitions)
    converted = {key: value for key, value in node.items() if key not in _DROPPED and value is not None}
    if "const" in converted:
        converted["enum"] = [converted.pop("const")]
    if node.get("type") == "integer":
        converted["format"] = "int64"
    if isinstance(node.get("items"), dict):
        converted["items"] = _convert(node["items"], definitions)
    if isinstance(node.get("additionalProperties"), dict):
        converted["additionalProperties"] = _convert(node["additionalProperties"], definitions)
    if "properties" in node:
        converted["properties"] = {name: _convert(child, definitions) for name, child in node["properties"].items()}
    return converted


def _resolved(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """A reference replaced by what it refers to; what stands beside the reference wins."""
    if "$ref" not in node:
        return node
    beside = {key: value for key, value in node.items() if key != "$ref"}
    return {**definitions[node["$ref"].rsplit("/", 1)[1]], **beside}


def _without_null(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """An optional field: the API server leaves out what is absent, so null is no value of its own."""
    choices = node.get("anyOf", [])
    if {"type": "null"} not in choices:
        return node
    (only,) = (choice for choice in choices if choice != {"type": "null"})
    beside = {key: value for key, value in node.items() if key != "anyOf"}
    return {**_resolved(only, definitions), **beside}
