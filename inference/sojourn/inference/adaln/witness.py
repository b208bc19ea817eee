"""Whether a transformer is of the family that it is said to be: by its modules, and by what its projections read.

Names prove little: SD3's and Flux's modules are called alike and their timesteps are scaled apart, so that rows of the
one in the other would be wrong without a word. The forward itself tells: it hands to each projection what the resident
Linear would read. Under an override that is compared, bit for bit, with what the family's embedding says.
"""

import inspect
import re
from collections.abc import Callable, Sequence

import torch
from sojourn.inference.adaln.family import Family, Inputs, Read
from sojourn.inference.adaln.overrides import FAMILY_SETTING
from sojourn.inference.adaln.refusals import ModelReason, ModelRefused, SettingRefused
from torch import nn


def check_modules(transformer: nn.Module, family: Family, component: str) -> None:
    """Refuses an override by what can be seen of a transformer whose weights are not loaded.

    Args:
        transformer: Its parameters may be on the meta device.
        family: That it is said to be of.
        component: Its name.

    Raises:
        SettingRefused: Naming what the family has and the transformer lacks.
    """
    names = [name for name, _ in transformer.named_modules()]
    for what, pattern in (("a projection", family.projections), ("an embedder", family.embedders)):
        if not any(re.fullmatch(pattern, name) for name in names):
            _refuse(transformer, family, component, f"has no module named as {what} of {family.transformer}")
    parameters = inspect.signature(transformer.forward).parameters
    lacking = [name for name in family.inputs if name not in parameters]
    if lacking:
        _refuse(transformer, family, component, f"has a forward without {', '.join(lacking)}, which the rows depend on")


def _refuse(transformer: nn.Module, family: Family, component: str, why: str) -> None:
    valid = f"{type(transformer).__name__} {why}; name another family, or leave it out and set --adaln-cache off"
    raise SettingRefused(FAMILY_SETTING, f"{component}={family.name}", valid)


class Witness:
    """Holds what the projections of a transformer read against what the family says that they do.

    Args:
        transformer: Its resident embedders make what the family says.
        family: Of the override.
        component: Its name, for the message.
    """

    def __init__(self, transformer: nn.Module, family: Family, component: str) -> None:
        self._transformer, self._family, self._component = transformer, family, component

    @torch.no_grad()
    def begin(self, inputs: Inputs) -> "Hearing":
        """A forward begins on these conditioning inputs."""
        calls = self._family.calls(self._family.given(inputs))
        return Hearing([self._family.embed(self._transformer, call) for call in calls], self._refuse)

    def _refuse(self, projection: str) -> None:
        raise ModelRefused(
            ModelReason.OTHER_FAMILY,
            f"{FAMILY_SETTING} {self._component}={self._family.name}: {projection} reads other values than the "
            f"embedding of {self._family.transformer} gives, so that its rows would be wrong; name another family, or "
            "set --adaln-cache off",
        )


class Hearing:
    """One forward before the witness.

    Args:
        said: By call of a projection, what it has to read.
        refuse: Raises, given the first projection that has read something else.
    """

    def __init__(self, said: Sequence[Read], refuse: Callable[[str], None]) -> None:
        self._said, self._refuse = said, refuse
        self._differs: list[tuple[str, torch.Tensor]] = []

    def read(self, projection: str, ordinal: int, conditioning: torch.Tensor) -> None:
        """A projection is handed its input [..., in]. Nothing waits for the device here."""
        said = self._said[ordinal]
        vector = (said if isinstance(said, torch.Tensor) else said[projection]).to(conditioning.dtype)
        rows = conditioning.reshape(-1, conditioning.shape[-1])
        fits = vector.shape[-1] == rows.shape[-1] and (vector.ndim < 2 or vector.shape[0] in (1, rows.shape[0]))
        differs = (vector != rows).any() if fits else torch.ones((), dtype=torch.bool, device=rows.device)
        self._differs.append((projection, differs))

    def end(self) -> None:
        """The forward has an output.

        Raises:
            ModelRefused: A projection has read something else: the rows were not its own.
        """
        if self._differs and bool(torch.stack([differs for _, differs in self._differs]).any()):
            self._refuse(next(projection for projection, differs in self._differs if bool(differs)))
