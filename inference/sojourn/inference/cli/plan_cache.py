"""The options about the plan cache that commands share. Without torch."""

from typing import Annotated

import typer
from sojourn.inference.adaln.overrides import FAMILY_SETTING

PLANS = "AdaLN plan cache"

FamilyOption = Annotated[
    list[str] | None,
    typer.Option(
        FAMILY_SETTING,
        help="The family that a transformer is treated as, whatever its class, such as transformer=minimax-h3: for a "
        "class of one's own whose forward is that of the family. May be given more than once.",
        metavar="COMPONENT=FAMILY",
        rich_help_panel=PLANS,
    ),
]
