"""What an installation may ask of offload, and how its numbers become layers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
            on. 0 means one layer.
        resident: Layers that never stream: a share of all layers below 1, a count from 1 on.
        policy: Which those are.

    Raises:
        ValueError: A number is negative or not finite.
    """

    mode: Mode = Mode.AUTO
    prefetch: float = 0.0
    resident: float = 0.0
    policy: ResidentPolicy = ResidentPolicy.LEADING

    def __post_init__(self) -> None:
        for name in ("prefetch", "resident"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"offload {name} is {value}: give a share from 0 to 1, or a number of layers")


def parse_settings(texts: Iterable[str]) -> Mapping[str, OffloadSettings]:
    """Settings by component, each written "transformer=layerwise,prefetch=2,resident=0.5,policy=strided".

    Raises:
        ValueError: One is not of that form, or a component comes twice.
    """
    found: dict[str, OffloadSettings] = {}
    for text in texts:
        name, _, rest = text.partition("=")
        mode, *others = rest.split(",")
        fields = dict(other.partition("=")[::2] for other in others)
        if not name or name in found or not fields.keys() <= {"prefetch", "resident", "policy"}:
            raise ValueError(
                f"{text!r} is no offload setting; write each component once, as "
                "COMPONENT=MODE[,prefetch=N][,resident=N][,policy=leading|strided]"
            )
        found[name] = OffloadSettings(
            mode=Mode(mode),
            prefetch=float(fields.get("prefetch", 0)),
            resident=float(fields.get("resident", 0)),
            policy=ResidentPolicy(fields.get("policy", ResidentPolicy.LEADING)),
        )
    return found


def prefetch_layers(value: float, layers: int) -> int:
    """How many layers are fetched ahead, from 1 to `layers`.

    Args:
        value: As in `OffloadSettings.prefetch`.
        layers: Layers of the component, at least 1.
    """
    wanted = int(value) if value >= 1 else 1 + round(value * (layers - 1))
    return max(1, min(wanted, layers))


def resident_layers(value: float, layers: int) -> int:
    """How many layers stay on the device, from 0 to `layers`; a share above 0 is at least one layer."""
    if value <= 0:
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
