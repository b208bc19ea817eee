"""Which family a component is treated as, whatever its class says. Without torch, as the command line needs it early.

For classes that diffusers here does not know by that name and whose forward is that of a known family: a fork, a
subclass, a renamed class. What the names of modules cannot prove is proven by values: see `witness`.
"""

from collections.abc import Iterable, Mapping

from sojourn.inference.adaln.refusals import SettingRefused
from sojourn.inference.families.projections import TRANSFORMERS

FAMILY_SETTING = "--adaln-family"

# Component -> name of the family.
Overrides = Mapping[str, str]


def parse_overrides(texts: Iterable[str]) -> dict[str, str]:
    """Reads COMPONENT=FAMILY, each component once.

    Raises:
        SettingRefused: One is not written so, or names a component again.
    """
    found: dict[str, str] = {}
    for text in texts:
        component, equals, family = text.partition("=")
        if not (component and equals and family):
            raise SettingRefused(FAMILY_SETTING, text, "write COMPONENT=FAMILY, such as transformer=minimax-h3")
        if component in found:
            raise SettingRefused(FAMILY_SETTING, text, f"{component} is said to be {found[component]} already")
        found[component] = family
    return found


def check_overrides(overrides: Overrides) -> None:
    """Refuses families that nobody knows.

    Raises:
        SettingRefused: Naming those that are known.
    """
    for component, family in overrides.items():
        if family not in TRANSFORMERS:
            known = ", ".join(sorted(TRANSFORMERS))
            raise SettingRefused(FAMILY_SETTING, f"{component}={family}", f"there is no such family; known are {known}")


def check_components(overrides: Overrides, components: Iterable[str]) -> None:
    """Refuses components that the model does not have.

    Raises:
        SettingRefused: Naming those that it has.
    """
    there = sorted(components)
    for component, family in overrides.items():
        if component not in there:
            valid = f"the model has no component {component}; it has {', '.join(there)}"
            raise SettingRefused(FAMILY_SETTING, f"{component}={family}", valid)


def projected_as(overrides: Overrides, component: str, class_name: str) -> str:
    """The class in diffusers whose projections a component has: its family's, else its own."""
    return TRANSFORMERS[overrides[component]] if component in overrides else class_name
