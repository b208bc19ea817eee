"""The metrics that the three processes export, under the names that Prometheus stores."""

from tools.metrics_table import PROCESSES, rows

_PARTS = {"histogram": ("_bucket", "_sum", "_count")}


def metrics() -> set[str]:
    """Names as docs/metrics.md lists them."""
    return {row.name for process in PROCESSES.values() for row in rows(process())}


def series() -> set[str]:
    """Names as queries use them: a histogram by its parts."""
    listed = [row for process in PROCESSES.values() for row in rows(process())]
    return {row.name + part for row in listed for part in _PARTS.get(row.kind, ("",))}
