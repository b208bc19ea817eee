"""What people see in a terminal: rows with bars, and a line that shows where it goes. Pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from sojourn.residencyd.claims import Tier
from sojourn.residencyd.family import Child
from sojourn.residencyd.grouping import FileGroup, ProcessGroups
from sojourn.residencyd.snapshots import ProcessReading, Snapshot

BAR_WIDTH = 16
# Of a terminal narrower than this, bars take half.
_WIDE = 100
# Names get what the other columns leave, within bounds.
_OTHER_COLUMNS, _NAME_COLUMNS = 64, (18, 52)
_SPARKS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉█"

# One colour per tier, everywhere.
TIER_STYLES = {
    Tier.VRAM: "magenta",
    Tier.HOST_PINNED: "red",
    Tier.HOST_MAPPED: "green",
    Tier.HOST_PAGEABLE: "yellow",
}

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        name: Of the component or file.
        tier: Where it is; None for what is told of all tiers.
        mapped_bytes: Size of the ranges; None where there is none to tell.
        resident_bytes: In memory.
        swapped_bytes: In swap.
        note: What is remarkable.
    """

    name: str
    tier: Tier | None
    mapped_bytes: int | None
    resident_bytes: int
    swapped_bytes: int = 0
    note: str = ""


def size(count: float) -> str:
    """Bytes with three digits and a binary unit: 1.21 GiB."""
    for unit in _UNITS:
        if abs(count) < 1000 or unit == _UNITS[-1]:
            digits = 0 if unit == "B" else max(0, 3 - len(str(int(abs(count)))))
            return f"{count:.{digits}f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def bar(part: float, whole: float, *, width: int = BAR_WIDTH) -> str:
    """A bar of eighths of a column; a little is never nothing."""
    if whole <= 0 or part <= 0:
        return " " * width
    eighths = max(1, min(8 * width, round(8 * width * part / whole)))
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def sparkline(values: Sequence[float]) -> str:
    """One column a value, between the least and the most of them."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if high == low:
        return _SPARKS[3] * len(values)
    return "".join(_SPARKS[round((value - low) / (high - low) * (len(_SPARKS) - 1))] for value in values)


def shortened(name: str, width: int) -> str:
    """A name that fits: what is cut is its middle, for files are told apart by their ends."""
    name = name.replace("\n", "\\n")
    if len(name) <= width:
        return name
    head = (width - 1) // 3
    return f"{name[:head]}…{name[head + 1 - width :]}"


def component_rows(reading: ProcessReading) -> list[Row]:
    """A row per component and tier, and what is nobody's; most resident first."""
    rows = [
        Row(
            name=part.name,
            tier=tier,
            mapped_bytes=held.mapped_bytes,
            resident_bytes=held.resident_bytes,
            swapped_bytes=part.swapped_bytes if tier is Tier.HOST_PAGEABLE else 0,
            note=_note(reading, part.name, tier),
        )
        for part in reading.components
        for tier, held in part.tiers.items()
    ]
    if reading.unattributed:
        left = reading.unattributed
        parts = (("file", left.file_bytes), ("anonymous", left.anonymous_bytes), ("shared", left.shared_bytes))
        rows += [Row(f"[{kind}]", None, None, size, note="of no component") for kind, size in parts if size]
    return sorted(rows, key=lambda row: (row.tier is None, -row.resident_bytes, row.name))


def _note(reading: ProcessReading, name: str, tier: Tier) -> str:
    part = next(part for part in reading.components if part.name == name)
    notes = ["in use"] if part.claim.in_use else []
    cold = reading.cold.get(name)
    if cold and tier.is_droppable:
        notes += [f"cold {size(cold.cold_bytes)}"] if cold.cold_bytes else []
        notes += [f"stuck {size(count)}: {reason}" for reason, count in cold.stuck_bytes.items() if count]
    if tier is next(iter(part.tiers)):
        notes += [f"disagrees by {size(count)}: {kind}" for kind, count in part.disagreements.items() if count]
    return ", ".join(notes)


def group_rows(groups: Iterable[FileGroup], *, limit: int) -> list[Row]:
    """A row per mapped file, the rest of them in one."""
    groups = list(groups)
    rows = [
        Row(
            name=found.name,
            tier=found.tier,
            mapped_bytes=found.mapped_bytes,
            resident_bytes=found.resident_bytes,
            swapped_bytes=found.swapped_bytes,
            note=", ".join(_group_notes(found)),
        )
        for found in groups[:limit]
    ]
    if rest := groups[limit:]:
        total = sum(found.resident_bytes for found in rest)
        rows.append(Row(f"{len(rest)} more", None, sum(found.mapped_bytes for found in rest), total))
    return rows


def _group_notes(found: FileGroup) -> Iterable[str]:
    if found.deleted:
        yield "deleted"
    if found.written_bytes and found.tier.is_droppable:
        yield f"written {size(found.written_bytes)}"


def table(rows: Sequence[Row], *, title: str, width: int) -> Table:
    """Rows with a bar each, all bars on one scale: full is the largest range.

    Args:
        rows: In order.
        title: Above them.
        width: Columns of the terminal.
    """
    whole = max((max(row.mapped_bytes or 0, row.resident_bytes) for row in rows), default=0)
    name_width = min(max(width - _OTHER_COLUMNS, _NAME_COLUMNS[0]), _NAME_COLUMNS[1])
    bar_width = BAR_WIDTH if width >= _WIDE else BAR_WIDTH // 2
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    made.add_column("what", no_wrap=True)
    made.add_column("tier", no_wrap=True)
    made.add_column("mapped", justify="right", no_wrap=True)
    made.add_column("resident", justify="right", no_wrap=True)
    made.add_column("", no_wrap=True, min_width=bar_width)
    made.add_column("note", style="dim", overflow="fold")
    for row in rows:
        style = TIER_STYLES[row.tier] if row.tier else "cyan"
        made.add_row(
            Text(shortened(row.name, name_width)),
            Text(row.tier.value if row.tier else "", style=style),
            "" if row.mapped_bytes is None else size(row.mapped_bytes),
            size(row.resident_bytes),
            Text(bar(row.resident_bytes, whole, width=bar_width), style=style),
            Text(_with_swap(row)),
        )
    return made


def _with_swap(row: Row) -> str:
    swapped = [f"swapped {size(row.swapped_bytes)}"] if row.swapped_bytes else []
    return ", ".join([*swapped, *([row.note] if row.note else [])])


def residency(
    snapshot: Snapshot,
    *,
    width: int,
    history: Sequence[float] = (),
    children: Callable[[int], Iterable[Child]] = lambda pid: (),
) -> RenderableType:
    """All of a snapshot: a table per process, headroom, and the way of the resident bytes.

    Args:
        snapshot: The look.
        width: Columns of the terminal.
        history: Resident bytes of the looks before, and of this one.
        children: Descendants of a process that was seen.
    """
    parts: list[RenderableType] = []
    for reading in snapshot.processes:
        if reading.seen:
            parts.append(table(component_rows(reading), title=f"process {reading.pid}", width=width))
            parts += [
                Text(f"child {child.pid} ({child.name}), resident {size(child.resident_bytes)}, shared pages too")
                for child in children(reading.pid)
            ]
        else:
            parts.append(Text(f"blind ({reading.blind_reason}): {reading.blind_message}", style="bold red"))
    parts += [Text(line) for line in footer(snapshot)]
    return Group(*parts, *_history(history))


def footer(snapshot: Snapshot) -> list[str]:
    """Headroom and what bounds it."""
    lines = []
    if snapshot.headroom:
        had = snapshot.headroom
        verdict = "enough" if had.room_bytes + had.cold_bytes >= had.need_bytes else "SHORT"
        lines.append(
            f"headroom  room {size(had.room_bytes)} + cold {size(had.cold_bytes)} against need "
            f"{size(had.need_bytes)}: {verdict}; stuck {size(had.stuck_bytes)}"
        )
    group = snapshot.tightest
    if group and group.limit_bytes is not None:
        lines.append(f"cgroup    {size(group.usage_bytes)} of {size(group.limit_bytes)} at {group.path}")
    if snapshot.memory:
        lines.append(f"machine   {size(snapshot.memory.available_bytes)} available")
    return lines


def process(groups: ProcessGroups, *, limit: int, width: int, history: Sequence[float] = ()) -> RenderableType:
    """Any process by mapped file."""
    title = f"process {groups.pid} ({groups.name}), resident {size(groups.rss_bytes)}"
    return Group(table(group_rows(groups.groups, limit=limit), title=title, width=width), *_history(history))


def _history(values: Sequence[float]) -> list[RenderableType]:
    if len(values) < 2:
        return []
    line = f"resident  {sparkline(values)}  {size(min(values))} to {size(max(values))}"
    return [Text(line, style="cyan")]
