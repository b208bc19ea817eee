"""The table of families, by the pipeline class that a model's index names."""

from sojourn.inference.errors import ModelError
from sojourn.inference.families.family import Family
from sojourn.inference.families.helios import HELIOS
from sojourn.inference.families.minimax_h3 import MINIMAX_H3
from sojourn.inference.loading import errors
from sojourn.inference.loading.folder import INDEX_NAME, ModelFolder

FAMILIES = (MINIMAX_H3, *HELIOS)


def family_of(folder: ModelFolder) -> Family:
    """Returns the family of a model folder, by the pipeline class that its index names.

    Raises:
        ModelError: No family has that class.
    """
    for family in FAMILIES:
        if family.owns(folder.pipeline_class, folder.values):
            return family
    served = ", ".join(family.pipeline_class for family in FAMILIES)
    raise ModelError(
        errors.FAMILY_UNKNOWN,
        folder.path / INDEX_NAME,
        f"pipelines of class {folder.pipeline_class} are not served; served are {served}",
    )
