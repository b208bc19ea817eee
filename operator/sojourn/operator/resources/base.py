"""What every model of a custom resource shares: camelCase names, no unknown fields, quantities, sections.

Enumerations never say On, Off, Yes or No, and no property is called `n` or `y`: YAML 1.1 reads them as booleans.
"""

import re
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel

# The syntax that the API server itself accepts, without a sign: negative sizes have no meaning here.
QUANTITY_PATTERN = r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"
MAX_QUANTITY_CHARACTERS = 32

_SUFFIXES = {
    "": 1.0,
    **{unit: 1024.0**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)},
    **{unit: 1000.0**power for power, unit in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"), start=-3)},
}


def quantity_value(text: str) -> float:
    """The number that a quantity stands for: bytes, or cores.

    Raises:
        ValueError: the text is not a quantity.
    """
    if not re.match(QUANTITY_PATTERN, text):
        raise ValueError(f"{text!r} is not a quantity such as 500m, 2 or 16Gi")
    if re.search(r"[eE][+-]?[0-9]+$", text):
        return float(text)
    digits = text.rstrip("numkKMGTPEi")
    return float(digits) * _SUFFIXES[text[len(digits) :]]


def _as_text(value: object) -> object:
    """Quantities may be written as whole numbers; inside they are text."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    BeforeValidator(_as_text),
    Field(pattern=QUANTITY_PATTERN, max_length=MAX_QUANTITY_CHARACTERS),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "pattern": QUANTITY_PATTERN,
            "maxLength": MAX_QUANTITY_CHARACTERS,
        }
    ),
]
SHARE_PATTERN = r"^[1-9][0-9]?%$"


def number_or_share(*, most: int) -> tuple[Any, ...]:
    """Annotations of a field that is a whole number, or a share in whole percent, as Kubernetes writes its own."""

    def check(value: int | str) -> int | str:
        if isinstance(value, str) and not re.match(SHARE_PATTERN, value):
            raise ValueError(f"{value!r} is neither a whole number nor a share from 1% to 99%")
        if isinstance(value, int) and not 0 <= value <= most:
            raise ValueError(f"{value} is not from 0 to {most}")
        return value

    schema: dict[str, Any] = {
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "x-kubernetes-int-or-string": True,
        "pattern": SHARE_PATTERN,
        "minimum": 0,
        "maximum": most,
    }
    return AfterValidator(check), WithJsonSchema(schema)


# A name that other objects carry: a DNS subdomain.
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
AbsolutePath = Annotated[str, Field(max_length=1024, pattern=r"^/[^:]*$")]
SecretKey = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
# Labels and label selectors. Bounded so that CEL rules stay within their cost budget.
Labels = Annotated[dict[str, Annotated[str, Field(max_length=253)]], Field(max_length=32)]


class Model(BaseModel):
    """Base of all parts of a spec."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


Part = TypeVar("Part", bound=Model)


def rules(*pairs: tuple[str, str]) -> dict[str, Any]:
    """CEL rules, each a pair of expression and message, as a model's `json_schema_extra`."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in pairs]}


def section(model: type[Part], description: str) -> Any:
    """A field that holds a part whose own defaults apply when it is left out."""
    return Field(default_factory=model, description=description, json_schema_extra={"default": {}})
