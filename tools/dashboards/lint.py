"""What must hold for every board; each rule is a function that yields what is wrong.

The first twelve are those of Grafana's dashboard linter as far as they fit us, made anew; its rules on job and instance
are replaced by one on namespace and pod. Whether PromQL parses is promtool's to say, see `expressions`.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

Board = dict[str, Any]
Rule = Callable[[Board], Iterator[str]]

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Names of Grafana's units that we use.
UNITS = frozenset({"bytes", "s", "percentunit", "reqps", "Bps", "none", "ops"})
SINGLE = frozenset({"stat", "table", "bargauge"})
BUILTIN_VARIABLES = frozenset({"__rate_interval", "__range", "__interval", "__all"})

_VARIABLE = re.compile(r"\$\{?(\w+)")
_SELECTOR = re.compile(r"\b((?:sojourn|process)_\w+)(\{[^}]*\})?")
_WINDOWED = re.compile(r"\b(rate|irate|increase)\(\s*\w+(?:\{[^}]*\})?\[([^\]]+)\]")


def panels(board: Board) -> list[Board]:
    """Every panel but row headings."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def variables(board: Board) -> list[Board]:
    """The variables, in order."""
    listed: list[Board] = board["templating"]["list"]
    return listed


def queries(board: Board) -> Iterator[tuple[str, str]]:
    """Panel title and expression of every query."""
    for panel in panels(board):
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def expressions(board: Board) -> list[str]:
    """Every expression, with its variables filled in, so that Prometheus can parse it."""
    filled = {"__rate_interval": "5m", "__range": "1h", "__interval": "1m"}
    return [_VARIABLE.sub(lambda found: filled.get(found[1], ".+"), expr) for _, expr in queries(board)]


def datasource_is_a_variable(board: Board) -> Iterator[str]:
    """1: one data source variable, first, of that name and label, without a value of its own."""
    first = variables(board)[0]
    if (first["type"], first["name"], first.get("label")) != ("datasource", "datasource", "Data source"):
        yield "the first variable is not the data source, labelled Data source"
    if first.get("query") != "prometheus" or "current" in first:
        yield "the data source variable has another type, or a value of its own"


def everything_uses_it(board: Board) -> Iterator[str]:
    """2: panels, targets, query variables and annotations."""
    for panel in panels(board):
        if any(part.get("datasource") != DATASOURCE for part in [panel, *panel.get("targets", [])]):
            yield f"{panel['title']}: another data source"
    for variable in variables(board)[1:]:
        if variable.get("datasource") != DATASOURCE:
            yield f"variable {variable['name']}: another data source"


def title_and_description(board: Board) -> Iterator[str]:
    """3: and the description names a metric."""
    for panel in panels(board):
        if not panel.get("title"):
            yield f"panel {panel.get('id')}: no title"
        if not re.search(r"\b(sojourn|process)_\w+", panel.get("description", "")):
            yield f"{panel.get('title')}: the description names no metric"


def unit(board: Board) -> Iterator[str]:
    """4: one of Grafana's."""
    for panel in panels(board):
        if panel["fieldConfig"]["defaults"].get("unit") not in UNITS:
            yield f"{panel['title']}: no unit, or one that is not known"


def has_targets(board: Board) -> Iterator[str]:
    """5."""
    for panel in panels(board):
        if not panel.get("targets"):
            yield f"{panel['title']}: no query"


def braces_balance(board: Board) -> Iterator[str]:
    """6, as far as can be said without a parser; promtool says the rest."""
    for title, expr in queries(board):
        if any(expr.count(opening) != expr.count(closing) for opening, closing in ("()", "[]", "{}")):
            yield f"{title}: unbalanced: {expr}"


def rates_over_the_rate_interval(board: Board) -> Iterator[str]:
    """7: rate over $__rate_interval, increase over that or the whole range; never a fixed one."""
    allowed = {"rate": {"$__rate_interval"}, "irate": {"$__rate_interval"}}
    for title, expr in queries(board):
        for function, window in _WINDOWED.findall(expr):
            if window not in allowed.get(function, {"$__rate_interval", "$__range"}):
                yield f"{title}: {function} over {window}"


def counters_inside_rates(board: Board) -> Iterator[str]:
    """8: nothing with _total, _count, _sum or _bucket is shown as it stands."""
    for title, expr in queries(board):
        for found in re.finditer(r"\b\w+_(?:total|count|sum|bucket)\b", expr):
            if not re.search(r"\b(?:rate|irate|increase)\(\s*$", expr[: found.start()]):
                yield f"{title}: {found[0]} outside of rate and increase"


def query_variables_refresh(board: Board) -> Iterator[str]:
    """9: whenever the range of time changes."""
    for variable in variables(board):
        if variable["type"] == "query" and variable.get("refresh") != 2:
            yield f"variable {variable['name']}: refresh is not 2"


def label_queries(board: Board) -> Iterator[str]:
    """10: of the form that Grafana knows, each narrowed by those before it."""
    for index, variable in enumerate(variables(board)):
        if variable["type"] != "query":
            continue
        query = variable["query"]["query"]
        if not re.fullmatch(r"label_values\(\w+(\{[^}]+\})?, \w+\)", query):
            yield f"variable {variable['name']}: {query}"
        for earlier in variables(board)[1:index]:
            if f"${earlier['name']}" not in query:
                yield f"variable {variable['name']}: not narrowed by {earlier['name']}"


def all_is_anything(board: Board) -> Iterator[str]:
    """11: but for pod, where All must mean those that the model has."""
    for variable in variables(board):
        wanted = None if variable["name"] in {"pod", "datasource"} else ".+"
        if variable.get("allValue") != wanted:
            yield f"variable {variable['name']}: All is {variable.get('allValue')}"


def not_editable(board: Board) -> Iterator[str]:
    """12."""
    if board.get("editable") is not False:
        yield "editable"


def selectors_are_scoped(board: Board) -> Iterator[str]:
    """13: namespace and pod in every selector, on boards that have these variables."""
    scoped = any(variable["name"] == "pod" for variable in variables(board))
    for title, expr in queries(board) if scoped else ():
        for metric, matchers in _SELECTOR.findall(expr):
            if 'namespace=~"$namespace"' not in matchers or 'pod=~"$pod"' not in matchers:
                yield f"{title}: {metric} is not held to namespace and pod"


def loads_untouched(board: Board) -> Iterator[str]:
    """14: nothing that provisioning or the ConfigMap sidecar refuses."""
    for key in ("__inputs", "id", "apiVersion", "elements"):
        if key in board:
            yield f"has {key}"
    if board.get("schemaVersion") != 42:
        yield "schemaVersion is not 42"


def uid_is_stable(board: Board) -> Iterator[str]:
    """15: short, and ours; that it is unique is for whoever has all boards."""
    if not re.fullmatch(r"sojourn-[a-z-]{1,32}", board.get("uid", "")):
        yield f"uid {board.get('uid')!r}"


def panels_do_not_overlap(board: Board) -> Iterator[str]:
    """16: and their ids are unique."""
    ids = Counter(panel.get("id") for panel in board["panels"])
    for twice in [number for number, count in ids.items() if count > 1 or number is None]:
        yield f"panel id {twice} is missing or not unique"
    taken: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        at = panel["gridPos"]
        if at["x"] + at["w"] > 24:
            yield f"{panel['title']}: out of the grid"
        for cell in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            if cell in taken:
                yield f"{panel['title']} lies on {taken[cell]}"
                break
            taken[cell] = panel["title"]


def ref_ids_unique(board: Board) -> Iterator[str]:
    """17."""
    for panel in panels(board):
        ids = [target.get("refId") for target in panel.get("targets", [])]
        if len(set(ids)) != len(ids) or None in ids:
            yield f"{panel['title']}: refIds {ids}"


def time_series_have_legends(board: Board) -> Iterator[str]:
    """18: a name that tells series apart, and the legend as a table."""
    for panel in panels(board):
        if panel["type"] != "timeseries":
            continue
        if panel["options"].get("legend", {}).get("displayMode") != "table":
            yield f"{panel['title']}: legend is no table"
        for target in panel.get("targets", []):
            grouped = re.match(r".*?\bby \(([\w, ]+)\)", target["expr"])
            labels = set(re.findall(r"\w+", grouped[1])) - {"le"} if grouped else set()
            if not target.get("legendFormat"):
                yield f"{panel['title']}: a query without legend"
            elif unnamed := labels - set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])):
                yield f"{panel['title']}: the legend does not name {unnamed}"


def single_values_are_instant(board: Board) -> Iterator[str]:
    """19: stat, table and bar gauge ask once; time series over the range."""
    for panel in panels(board):
        for target in panel.get("targets", []):
            if target.get("instant") is not (panel["type"] in SINGLE):
                yield f"{panel['title']}: instant is {target.get('instant')}"


def no_unknown_variable(board: Board) -> Iterator[str]:
    """20."""
    known = {variable["name"] for variable in variables(board)} | BUILTIN_VARIABLES
    for name in set(_VARIABLE.findall(json.dumps(board))) - known:
        yield f"variable {name} is not known"


def metrics(board: Board) -> set[str]:
    """21: the metrics that its queries read; whoever has the registries compares."""
    return {metric for _, expr in queries(board) for metric, _ in _SELECTOR.findall(expr)}


# 22, that the file is what the builder writes, is `python -m tools.dashboards --check`.
RULES: tuple[Rule, ...] = (
    datasource_is_a_variable,
    everything_uses_it,
    title_and_description,
    unit,
    has_targets,
    braces_balance,
    rates_over_the_rate_interval,
    counters_inside_rates,
    query_variables_refresh,
    label_queries,
    all_is_anything,
    not_editable,
    selectors_are_scoped,
    loads_untouched,
    uid_is_stable,
    panels_do_not_overlap,
    ref_ids_unique,
    time_series_have_legends,
    single_values_are_instant,
    no_unknown_variable,
)
