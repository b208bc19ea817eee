"""Every bound of every field of every spec, asked of the real API server.

The values are made from the schema that the models give, so that a new field is in here from its first day. The
refusals that need more than one field are in tests/operator/test_resources.py.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from sojourn.operator.errors import ApiError
from sojourn.operator.kube.client import Kube
from sojourn.operator.resources.schema import Schema, structural

from tests.operator.cluster import custom
from tests.operator.test_resources import RESOURCES, SPECS

# In none of the patterns: signs that no name, path or quantity begins or ends with.
ODD = ": ☃\n"
# Values of another type than the schema's.
MISTYPED: dict[str, Any] = {"integer": "text", "boolean": "text", "string": 7, "array": "text", "object": "text"}
Field = tuple[str | int, ...]


def fields(schema: Schema, at: Field = ()) -> Iterator[tuple[Field, Schema]]:
    """Every field with its schema, however deep; an element of a list by its place, a value of a map by some key."""
    for name, child in schema.get("properties", {}).items():
        yield (*at, name), child
        yield from fields(child, (*at, name))
    for part, key in (("items", 0), ("additionalProperties", "key")):
        if isinstance(schema.get(part), dict):
            yield (*at, key), schema[part]
            yield from fields(schema[part], (*at, key))


def wrong(schema: Schema) -> Iterator[tuple[str, Any]]:
    """What each word of a field's schema forbids."""
    if schema.get("x-kubernetes-int-or-string"):
        yield "type", {"a": 1}
    elif "type" in schema:
        yield "type", MISTYPED[schema["type"]]
    if "enum" in schema:
        yield "enum", "SomethingElse"
    if "pattern" in schema:
        assert not re.search(schema["pattern"], ODD), schema["pattern"]
        yield "pattern", ODD
    if "minimum" in schema:
        yield "minimum", schema["minimum"] - 1
    if "maximum" in schema:
        yield "maximum", schema["maximum"] + 1
    if schema.get("minLength"):
        yield "minLength", ""
    if "maxLength" in schema:
        yield "maxLength", "a" * (schema["maxLength"] + 1)
    if "maxItems" in schema:
        yield "maxItems", [_some(schema["items"], number) for number in range(schema["maxItems"] + 1)]
    if "maxProperties" in schema:
        yield "maxProperties", {f"k{number}": "v" for number in range(schema["maxProperties"] + 1)}


def _some(schema: Schema, number: int) -> Any:
    """A value of a list, different from its neighbours."""
    if schema.get("type") == "object":
        return dict.fromkeys(schema.get("required", ()), f"v{number}")
    return schema["enum"][number % len(schema["enum"])] if "enum" in schema else f"v{number}"


def with_value(field: Field, value: Any) -> Any:
    for part in reversed(field):
        value = [value] if isinstance(part, int) else {part: value}
    return value


def named(field: Field) -> str:
    """The field as the API server calls it."""
    return "spec" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in field)


CASES = {
    f"{kind}.{named(field)[5:]}": (kind, field, schema)
    for kind, model in SPECS.items()
    for field, schema in fields(structural(model))
}


def test_there_are_bounds_for_every_field() -> None:
    """Free text without an end would be stored as it comes: a spec is no place for that."""
    assert len(CASES) > 100
    endless = [
        name
        for name, (_, _, schema) in CASES.items()
        if schema.get("type") == "string" and not {"enum", "maxLength", "pattern"} & schema.keys()
    ]
    assert endless == []


@pytest.mark.parametrize("name", list(CASES))
async def test_what_a_field_forbids_is_refused_by_its_name(kube: Kube, name: str) -> None:
    kind, field, schema = CASES[name]
    forbidden = dict(wrong(schema))
    assert forbidden
    for word, value in forbidden.items():
        body = custom(kind, "default", "bad", **with_value(field, value))
        with pytest.raises(ApiError) as refused:
            await kube.create(RESOURCES[kind], body)
        assert refused.value.status in (400, 422), (word, value)
        assert f"{named(field)}: " in str(refused.value), (word, value, str(refused.value))
