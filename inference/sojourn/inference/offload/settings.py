"""What an installation may ask of offload, and how its numbers become layers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Mode(StrEnum):
    """Where a component's weights are between and during its uses."""

    AUTO = "auto"
    RESIDENT = "resident"
    COMPONENT = "component"
    LAYERWISE = "layerwise"


class ResidentPolicy(StrEnum):
    """Which layers stay on the device when some may."""

    LEADING = "leading"
    STRIDED = "strided"


@dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """How one component is offloaded.

    Attributes:
        mode: `auto` lets the memory plan choose.
        prefetch: Layers on their way ahead of the one that computes: a share of all layers below 1, a count from 1
            on. 0 and None mean one layer.
        resident: Layers that never stream: a share of all layers below 1, a count from 1 on. None lets the memory
            plan keep as many as fit.
        policy: Which those are.

    Raises:
        ValueError: A number is negative or not finite.
    """

    mode: Mode = Mode.AUTO
    prefetch: float | None = None
    resident: float | None = None
    policy: ResidentPolicy = ResidentPolicy.LEADING

    def __post_init__(self) -> None:
        for name in ("prefetch", "resident"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"offload {name} is {value}: give a share from 0 to 1, or a number of layers")


_FORM = (
    "MODE for all components, or COMPONENT=MODE for one, each once, followed by any of prefetch=N, resident=N and "
    "policy=leading|strided, with commas between; modes are auto, resident, component and layerwise"
)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Settings of a model's components.

    Attributes:
        default: Of those that are not named.
        named: Of those that are.
    """

    default: OffloadSettings = OffloadSettings()
    named: Mapping[str, OffloadSettings] = field(default_factory=dict)

    def of(self, component: str) -> OffloadSettings:
        """Those that apply to a component."""
        return self.named.get(component, self.default)


def parse_settings(texts: Iterable[str]) -> Selection:
    """Settings as "layerwise,prefetch=2" for all, and "transformer=layerwise,resident=0.5,policy=strided" for one.

    What one for a component leaves out is as in the one for all.

    Raises:
        ValueError: One is not of that form, comes twice, or gives numbers to a mode that has no use for them.
    """
    by_name: dict[str, str] = {}
    for text in texts:
        name, rest = _target(text)
        if name in by_name:
            raise ValueError(f"{text!r} is the second offload setting for {name or 'all components'}; write {_FORM}")
        by_name[name] = rest
    default = _parsed(by_name.pop(ALL, Mode.AUTO), OffloadSettings())
    return Selection(default=default, named={name: _parsed(rest, default) for name, rest in by_name.items()})


# Stands for every component that no setting names.
ALL = ""


def _target(text: str) -> tuple[str, str]:
    """The component that a setting is for, and the setting."""
    name, equals, mode = text.partition(",")[0].partition("=")
    if not equals:
        return ALL, text
    if not name or not mode:
        raise ValueError(f"{text!r} is no offload setting; write {_FORM}")
    return name, text[len(name) + 1 :]


def _parsed(text: str, default: OffloadSettings) -> OffloadSettings:
    mode, *others = text.split(",")
    fields = dict(other.partition("=")[::2] for other in others)
    known = fields.keys() <= {"prefetch", "resident", "policy"}
    if not known or mode not in list(Mode) or fields.get("policy", ResidentPolicy.LEADING) not in list(ResidentPolicy):
        raise ValueError(f"{text!r} is no offload setting; write {_FORM}")
    numbers = {name: _number(name, fields[name]) for name in ("prefetch", "resident") if name in fields}
    if numbers and mode in (Mode.RESIDENT, Mode.COMPONENT):
        raise ValueError(f"{text!r}: prefetch and resident have an effect with mode auto or layerwise only")
    policy = ResidentPolicy(fields.get("policy", default.policy))
    return replace(default, mode=Mode(mode), policy=policy, **numbers)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"offload {name} is {text!r}: give a share from 0 to 1, or a number of layers") from None


def prefetch_layers(value: float | None, layers: int) -> int:
    """How many layers are fetched ahead, from 1 to `layers`.

    Args:
        value: As in `OffloadSettings.prefetch`.
        layers: Layers of the component, at least 1.
    """
    value = value or 0.0
    wanted = int(value) if value >= 1 else 1 + round(value * (layers - 1))
    return max(1, min(wanted, layers))


def resident_layers(value: float | None, layers: int) -> int:
    """How many layers stay on the device, from 0 to `layers`; a share above 0 is at least one layer."""
    if not value:
        return 0
    return min(layers, int(value)) if value >= 1 else max(1, round(value * layers))


def streamed_layers(layers: int, resident: int, policy: ResidentPolicy) -> tuple[int, ...]:
    """Indices of the layers that stream, ascending; the others stay.

    Leading keeps the first ones. Strided spreads the streamed ones evenly, so that each copy has the computation of
    the resident layers before it to hide behind: the same bytes with less traffic at any one time.

    Args:
        layers: All layers.
        resident: How many of them stay.
        policy: Which of them stay.
    """
    streamed = layers - resident
    if policy is ResidentPolicy.LEADING:
        return tuple(range(resident, layers))
    return tuple(round(k * layers / streamed) for k in range(streamed))
