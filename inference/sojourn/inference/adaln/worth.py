"""Whether it pays to run a transformer on stored rows."""

from sojourn.inference.adaln.family import Family
from sojourn.inference.adaln.refusals import ModelReason, ModelRefused
from sojourn.inference.adaln.settings import MODE_SETTING, PLANS_SETTING, WIDTH_SETTING, PlanCacheSettings
from sojourn.inference.adaln.table import Table


def slab_bytes(table: Table, *, plans: int, width: int) -> int:
    """Bytes that a slab allocates, before it does."""
    return plans * (width * table.row_bytes + 8)


def check_worth(settings: PlanCacheSettings, family: Family, table: Table) -> None:
    """Whether rows cost less than the weights that they replace, and are used again.

    What is compared is the slab as it is allocated. Rows cost as much as weights at in + 1 of them: 2689 for
    MiniMax-H3, that is 672 plans of width 4.

    Raises:
        ModelRefused: It does not pay; asked of `auto` alone.
    """
    if not family.reusable:
        raise ModelRefused(
            ModelReason.ROWS_NOT_REUSED,
            f"rows of {family.name} depend on the prompt, so each new one would read all projections again; "
            f"set {MODE_SETTING} on for repeated prompts",
        )
    costs = slab_bytes(table, plans=settings.plans, width=settings.width)
    if costs >= table.weight_bytes:
        raise ModelRefused(
            ModelReason.COSTS_MORE,
            f"{settings.plans} plans of {settings.width} rows take {costs} bytes and the projections "
            f"{table.weight_bytes}; lower {PLANS_SETTING} or {WIDTH_SETTING}, or set {MODE_SETTING} on",
        )
