"""What a scrape costs: the pages of a service whose model has 200 ranges of weights.

The target is that of residency_scan.py: a process with 2000 mappings, 200 of them ranges of weights that cannot be
joined. residencyd looks at it for every scrape, no look being carried over. The model process's page is that of a
loaded model with its plan cache open; it does not depend on how many ranges there are. Times are of the whole answer in
the text format that Prometheus asks for, CPU seconds of the thread that makes it: p99 of many.

    python bench/metrics_scrape.py            a table beside the goals; exit 1 when short
    python bench/metrics_scrape.py --json     the figures
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / part) for part in ("proto", "inference", "residencyd", "operator", "bench"))]

from prometheus_client import CollectorRegistry  # noqa: E402
from prometheus_client.openmetrics.exposition import generate_latest  # noqa: E402
from residency_scan import Figure, table, target  # noqa: E402
from rich.console import Console  # noqa: E402
from sojourn.residencyd.scanner import Scanner  # noqa: E402
from sojourn.residencyd.serving import registry_of  # noqa: E402
from sojourn.residencyd.settings import Settings  # noqa: E402

from tools import metrics_table  # noqa: E402

MAPPINGS = 2_000
TIME_GOAL_SECONDS, SIZE_GOAL_BYTES = 0.010, 64 << 10


def measured(registry: CollectorRegistry, rounds: int) -> tuple[float, int]:
    """p99 seconds and bytes of a page."""
    taken, size_bytes = [], 0
    for _ in range(rounds):
        begun = time.thread_time()
        size_bytes = len(generate_latest(registry))
        taken.append(time.thread_time() - begun)
    return statistics.quantiles(taken, n=100)[98], size_bytes


def figures_of(process: str, registry: CollectorRegistry, rounds: int) -> list[Figure]:
    """Time and size of one process's page."""
    seconds, size_bytes = measured(registry, rounds)
    return [
        Figure(f"{process}: p99 of a scrape", seconds * 1e3, TIME_GOAL_SECONDS * 1e3, "ms"),
        Figure(f"{process}: size of a page", size_bytes / 1024, SIZE_GOAL_BYTES / 1024, "KiB"),
    ]


def measure(folder: Path, rounds: int) -> list[Figure]:
    """Both pages of the pod, and the operator's."""
    with target(folder, MAPPINGS) as it:
        settings = Settings(map_pattern=str(it.folder), floor_seconds=0.0, deep_share=1e9)
        figures = figures_of("residencyd", registry_of(Scanner(settings), ()), rounds)
    figures += figures_of("inference", metrics_table.inference(), rounds)
    return figures + figures_of("operator", metrics_table.operator(), rounds)


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    parser.add_argument("--rounds", type=int, default=400, help="scrapes of each page")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), arguments.rounds)
    if arguments.json:
        print(json.dumps([asdict(figure) | {"met": figure.met} for figure in figures], indent=2))
    else:
        Console().print(table(figures))
    return 0 if all(figure.met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
