"""The command line: `residencyd serve`, `scan` and `top`.

What goes wrong on purpose is one line on stderr and exit status 1; wrong usage is 2.
"""

import dataclasses
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from sojourn.residencyd import logs
from sojourn.residencyd.errors import InvalidSetting, ResidencydError
from sojourn.residencyd.kernel.errors import KernelError
from sojourn.residencyd.kernel.process import PROC
from sojourn.residencyd.settings import MAP_FOLDER, Settings

app = typer.Typer(
    help="The kernel's word on every weight: what is mapped, what is in memory, what could be given back.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# Points in the sparkline of `top`.
HISTORY = 60

# Where output goes to no terminal.
PIPE_COLUMNS = 160

SERVING_MODULE = "sojourn.residencyd.serving"

MapOption = Annotated[
    str,
    typer.Option("--map", envvar="RESIDENCYD_MAP", help="File, folder (every *.pb in it) or glob of component maps."),
]
ProcOption = Annotated[Path, typer.Option(envvar="RESIDENCYD_PROC", help="Root of the proc file system.")]
CgroupOption = Annotated[
    Path | None,
    typer.Option(envvar="RESIDENCYD_CGROUP_ROOT", help="Where control groups are mounted. As the process sees them."),
]
HostPidsOption = Annotated[
    bool, typer.Option(envvar="RESIDENCYD_HOST_PIDS", help="Find containers' processes from the host's pid namespace.")
]
PidOption = Annotated[int | None, typer.Option(min=1, help="A process; without a component map, by mapped file.")]
RowsOption = Annotated[int, typer.Option(min=1, help="Most mapped files to show.")]


@app.command()
def serve(
    *,
    map_pattern: MapOption = MAP_FOLDER,
    metrics_address: Annotated[str, typer.Option(envvar="RESIDENCYD_METRICS", help="Of /metrics.")] = "0.0.0.0:9465",
    grpc_address: Annotated[str, typer.Option(envvar="RESIDENCYD_GRPC", help="Of ResidencyService.")] = "0.0.0.0:50052",
    floor_seconds: Annotated[
        float, typer.Option(min=0, envvar="RESIDENCYD_FLOOR_SECONDS", help="Least time between two looks.")
    ] = 5.0,
    deep_share: Annotated[
        float, typer.Option(envvar="RESIDENCYD_DEEP_SHARE", help="Share of one core for counting pages.")
    ] = 0.001,
    proc: ProcOption = PROC,
    cgroup_root: CgroupOption = None,
    host_pids: HostPidsOption = False,
    log_level: Annotated[str, typer.Option(envvar="RESIDENCYD_LOG_LEVEL", help=" | ".join(logs.LEVELS))] = "info",
    log_text: Annotated[bool, typer.Option(envvar="RESIDENCYD_LOG_TEXT", help="Lines for people, not JSON.")] = False,
    grace_seconds: Annotated[float, typer.Option(min=0, help="For running calls at shutdown.")] = 5.0,
) -> None:
    """Serves metrics and ResidencyService beside a model process, until it is told to end."""
    if log_level.lower() not in logs.LEVELS:
        raise InvalidSetting(f"--log-level is {log_level!r}: give one of {', '.join(logs.LEVELS)}")
    if not deep_share > 0:
        raise InvalidSetting(f"--deep-share is {deep_share}: give a share above 0, such as 0.001")
    options = {
        "map_pattern": map_pattern,
        "proc": str(proc),
        "cgroup_root": str(cgroup_root) if cgroup_root else None,
        "floor_seconds": floor_seconds,
        "deep_share": deep_share,
        "host_pids": host_pids,
        "metrics_address": metrics_address,
        "grpc_address": grpc_address,
        "log_level": log_level.lower(),
        "log_text": log_text,
        "grace_seconds": grace_seconds,
    }
    # The same process, without what only the command line needs.
    os.execv(sys.executable, [sys.executable, "-m", SERVING_MODULE, json.dumps(options)])


@app.command()
def scan(
    *,
    pid: PidOption = None,
    map_pattern: MapOption = MAP_FOLDER,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    children: Annotated[bool, typer.Option(help="Descendants of the process, too.")] = False,
    rows: RowsOption = 20,
    proc: ProcOption = PROC,
    cgroup_root: CgroupOption = None,
    host_pids: HostPidsOption = False,
) -> None:
    """Looks once: at the components of published maps, or at any process by --pid."""
    settings = _local(map_pattern, proc, cgroup_root, host_pids)
    if pid is not None:
        _scan_process(pid, settings, as_json=as_json, children=children, rows=rows)
    else:
        _scan_maps(settings, as_json=as_json, children=children)


def _local(map_pattern: str, proc: Path, cgroup_root: Path | None, host_pids: bool) -> Settings:
    """A person looks now and then, and wants to see what is now: no floor, no share."""
    return Settings(map_pattern, proc, cgroup_root, floor_seconds=0.0, deep_share=1e9, host_pids=host_pids)


def _scan_process(pid: int, settings: Settings, *, as_json: bool, children: bool, rows: int) -> None:
    from sojourn.residencyd import tables
    from sojourn.residencyd.family import read_children
    from sojourn.residencyd.grouping import read_groups

    pids = [pid, *(child.pid for child in read_children(pid, proc=settings.proc))] if children else [pid]
    found = [read_groups(member, proc=settings.proc) for member in pids]
    if as_json:
        _print_json([dataclasses.asdict(groups) for groups in found])
    else:
        _print(*(lambda width, groups=groups: tables.process(groups, limit=rows, width=width) for groups in found))


def _scan_maps(settings: Settings, *, as_json: bool, children: bool) -> None:
    from google.protobuf import json_format
    from sojourn.residencyd import messages, tables
    from sojourn.residencyd.devices import load_nvml
    from sojourn.residencyd.family import Child, read_children
    from sojourn.residencyd.scanner import Scanner

    snapshot = Scanner(settings, nvml=load_nvml()).snapshot(time.time())

    def family(pid: int) -> tuple[Child, ...]:
        return read_children(pid, proc=settings.proc) if children else ()

    if as_json:
        message = messages.residency(snapshot, children=family)
        _print_json(json_format.MessageToDict(message, preserving_proto_field_name=True))
    else:
        _print(lambda width: tables.residency(snapshot, width=width, children=family))
    if not snapshot.seen:
        raise ResidencydError("; ".join(reading.blind_message for reading in snapshot.processes))


@app.command()
def top(
    *,
    pid: PidOption = None,
    map_pattern: MapOption = MAP_FOLDER,
    interval_seconds: Annotated[float, typer.Option(min=0.1, help="Between two looks.")] = 2.0,
    count: Annotated[int, typer.Option(min=0, help="Looks to take; 0 goes on until interrupted.")] = 0,
    rows: RowsOption = 20,
    proc: ProcOption = PROC,
    cgroup_root: CgroupOption = None,
    host_pids: HostPidsOption = False,
) -> None:
    """Keeps looking: a live table with bars, sorted by what is in memory."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    look = _looker(pid, _local(map_pattern, proc, cgroup_root, host_pids), rows)
    taken = 0
    with Live(look(console.width), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while not count or (taken := taken + 1) < count:
            time.sleep(interval_seconds)
            live.update(look(console.width), refresh=True)


def _looker(pid: int | None, settings: Settings, rows: int) -> Callable[[int], Any]:
    """Something that looks, and remembers how much was resident."""
    from sojourn.residencyd import tables
    from sojourn.residencyd.devices import load_nvml
    from sojourn.residencyd.grouping import read_groups
    from sojourn.residencyd.scanner import Scanner

    history: deque[float] = deque(maxlen=HISTORY)
    scanner = Scanner(settings, nvml=load_nvml())

    def look_at_maps(width: int) -> Any:
        snapshot = scanner.snapshot(time.time())
        history.append(sum(part.resident_bytes for reading in snapshot.seen for part in reading.components))
        return tables.residency(snapshot, width=width, history=list(history))

    def look_at_process(width: int) -> Any:
        groups = read_groups(pid or 0, proc=settings.proc)
        history.append(groups.rss_bytes)
        return tables.process(groups, limit=rows, width=width, history=list(history))

    return look_at_maps if pid is None else look_at_process


def _print_json(what: object) -> None:
    # A file's name may be no UTF-8: the bytes that are none are escaped.
    text = json.dumps(what, indent=2, ensure_ascii=False)
    print(text.encode("utf-8", "backslashreplace").decode())


def _print(*parts: Callable[[int], Any]) -> None:
    """Prints what is made for a width: the terminal's, or enough for anything where there is none."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    for part in parts:
        console.print(part(console.width))


def main() -> None:
    """Entry point of `residencyd`."""
    try:
        app()
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (KernelError, ResidencydError, OSError) as error:
        print(f"residencyd: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
