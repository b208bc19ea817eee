"""What the boards are made of: queries, panels, variables, and the frame around them.

Classic dashboards (schema 42), since provisioning, the ConfigMap sidecar and grafana-operator take nothing else.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

# The chart replaces it where the installation keeps its own copy of the runbook.
RUNBOOK_URL = "https://sojourn.dev/docs/runbook.md"

DATASOURCE = common_models.DataSourceRef(type_val="prometheus", uid="${datasource}")
RATE = "[$__rate_interval]"
SCOPE = 'namespace=~"$namespace", pod=~"$pod"'

PALETTE = models.FieldColorModeId.PALETTE_CLASSIC
GREEN, ORANGE, RED = "green", "orange", "red"
STAT_HEIGHT, PANEL_HEIGHT, FULL_WIDTH = 4, 8, 24

Panel = timeseries.Panel | stat.Panel | table.Panel | bargauge.Panel


def of(metric: str, **labels: str) -> str:
    """A selector within the chosen namespaces and pods; labels are matched exactly."""
    matchers = ", ".join([SCOPE, *(f'{name}="{value}"' for name, value in labels.items())])
    return f"sojourn_{metric}{{{matchers}}}"


def per_second(metric: str, **labels: str) -> str:
    """The rate of a counter."""
    return f"rate({of(metric, **labels)}{RATE})"


def quantile(share: float, metric: str, *by: str) -> str:
    """A quantile of a classic histogram."""
    return f"histogram_quantile({share}, sum by ({', '.join(['le', *by])}) ({per_second(metric + '_bucket')}))"


@dataclass(frozen=True)
class Query:
    """One query of a panel.

    Attributes:
        expr: PromQL.
        legend: Legend, or the column's name in a table.
        limit: Drawn as a dashed red line, out of any stack.
        unit: Of its column in a table, where it is not the panel's.
    """

    expr: str
    legend: str = ""
    limit: bool = False
    unit: str = ""


def thresholds(*steps: tuple[float, str]) -> dashboard.ThresholdsConfig:
    """Green, and from each value on another colour."""
    levels = [models.Threshold(value=None, color=GREEN)]
    levels += [models.Threshold(value=value, color=colour) for value, colour in steps]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(levels)


def _target(query: Query, index: int, *, instant: bool, as_table: bool = False) -> prometheus.Dataquery:
    built = prometheus.Dataquery().expr(query.expr).ref_id(chr(ord("A") + index)).legend_format(query.legend)
    built = built.datasource(DATASOURCE)
    built = built.instant() if instant else built.range()
    return built.format(PromQueryFormat.TABLE) if as_table else built


def _limit_line() -> list[models.DynamicConfigValue]:
    return [
        models.DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [10, 10]}),
        models.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
        models.DynamicConfigValue(id_val="custom.stacking", value={"mode": "none", "group": "A"}),
        models.DynamicConfigValue(id_val="custom.lineWidth", value=2),
        models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": RED}),
    ]


def lines(
    title: str,
    text: str,
    unit: str,
    *queries: Query,
    stacked: bool = False,
    span: int = 12,
    colours: dict[str, str] | None = None,
) -> timeseries.Panel:
    """Lines over time, or areas on top of each other.

    Args:
        title: Title.
        text: What it shows, what is bad, and the names of its metrics.
        unit: Grafana's name of the unit.
        queries: At least one.
        stacked: Areas that add up.
        span: Width in 24ths.
        colours: Fixed colours by legend, where colour means something.
    """
    panel = timeseries.Panel().title(title).description(text).unit(unit).min(0).span(span).height(PANEL_HEIGHT)
    panel = panel.datasource(DATASOURCE).color_scheme(dashboard.FieldColor().mode(PALETTE)).thresholds(thresholds())
    panel = panel.legend(_legend()).line_width(1).fill_opacity(30 if stacked else 8).show_points(_NO_POINTS)
    panel = panel.tooltip(common.VizTooltipOptions().mode(_ALL).sort(_DESCENDING))
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    for index, query in enumerate(queries):
        panel = panel.with_target(_target(query, index, instant=False))
        if query.limit:
            panel = panel.override_by_name(query.legend, _limit_line())
    for name, colour in (colours or {}).items():
        fixed = models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": colour})
        panel = panel.override_by_name(name, [fixed])
    return panel


_NO_POINTS = common_models.VisibilityMode.NEVER
_ALL = common_models.TooltipDisplayMode.MULTI
_DESCENDING = common_models.SortOrder.DESCENDING


def _legend() -> common.VizLegendOptions:
    legend = common.VizLegendOptions().display_mode(common_models.LegendDisplayMode.TABLE).show_legend(True)
    return legend.placement(common_models.LegendPlacement.RIGHT).calcs(["lastNotNull", "max"])


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)


def number(
    title: str,
    text: str,
    unit: str,
    query: Query,
    *steps: tuple[float, str],
    span: int = 4,
    no_value: str = "",
    words: dict[str, tuple[str, str]] | None = None,
) -> stat.Panel:
    """One present value.

    Args:
        title: Title.
        text: What it shows, what is bad, and the name of its metric.
        unit: Grafana's name of the unit.
        query: Its one query.
        steps: From which value on it takes which colour.
        span: Width in 24ths.
        no_value: What stands there while there is none.
        words: Value → text and colour.
    """
    panel = stat.Panel().title(title).description(text).unit(unit).span(span).height(STAT_HEIGHT)
    panel = panel.datasource(DATASOURCE).with_target(_target(query, 0, instant=True)).reduce_options(_last())
    panel = panel.thresholds(thresholds(*steps)).graph_mode(common_models.BigValueGraphMode.NONE)
    panel = panel.color_mode(common_models.BigValueColorMode.VALUE)
    panel = panel.text_mode(common_models.BigValueTextMode.VALUE_AND_NAME if query.legend else _VALUE)
    if no_value:
        panel = panel.no_value(no_value)
    if words:
        panel = panel.mappings([_words(words)])
    return panel


_VALUE = common_models.BigValueTextMode.VALUE


def _words(words: dict[str, tuple[str, str]]) -> models.ValueMap:
    results = {
        value: models.ValueMappingResult(text=text, color=colour, index=index)
        for index, (value, (text, colour)) in enumerate(words.items())
    }
    return models.ValueMap(options=results)


def bars(title: str, text: str, unit: str, query: Query, *steps: tuple[float, str], span: int = 8) -> bargauge.Panel:
    """One bar for each present value; shares end at 1."""
    panel = bargauge.Panel().title(title).description(text).unit(unit).min(0).span(span).height(PANEL_HEIGHT)
    panel = panel.datasource(DATASOURCE).with_target(_target(query, 0, instant=True)).reduce_options(_last())
    panel = panel.orientation(common_models.VizOrientation.HORIZONTAL).thresholds(thresholds(*steps))
    panel = panel.display_mode(common_models.BarGaugeDisplayMode.GRADIENT)
    return panel.max(1) if unit == "percentunit" else panel


def rows_of(
    title: str,
    text: str,
    unit: str,
    *queries: Query,
    span: int = 12,
    no_value: str = "",
) -> table.Panel:
    """A table: one column for each query beside the labels, joined on all labels that they share.

    Args:
        title: Title.
        text: What it shows, what is bad, and the names of its metrics.
        unit: Grafana's name of the unit of all columns that have none of their own.
        queries: The legend is the column's name; one without legend only gives labels.
        span: Width in 24ths.
        no_value: What stands in an empty cell.
    """
    panel = table.Panel().title(title).description(text).unit(unit).span(span).height(PANEL_HEIGHT)
    panel = panel.datasource(DATASOURCE).thresholds(thresholds())
    if no_value:
        panel = panel.no_value(no_value)
    columns = [f"Value #{chr(ord('A') + index)}" if len(queries) > 1 else "Value" for index in range(len(queries))]
    for index, query in enumerate(queries):
        panel = panel.with_target(_target(query, index, instant=True, as_table=True))
        if query.unit:
            panel = panel.override_by_name(query.legend, [models.DynamicConfigValue(id_val="unit", value=query.unit)])
    named = {column: query.legend for column, query in zip(columns, queries, strict=True) if query.legend}
    unnamed = [column for column, query in zip(columns, queries, strict=True) if not query.legend]
    organize = {"excludeByName": dict.fromkeys(["Time", *unnamed], True), "renameByName": named}
    panel = panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    return panel.with_transformation(models.DataTransformerConfig(id_val="organize", options=organize))


@dataclass(frozen=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: Sequence[Panel]


def chosen(name: str, label: str, within: str, *, every: bool = True) -> dashboard.QueryVariable:
    """A variable filled from the models that are there, narrowed by those before it.

    Args:
        name: Of the variable and of the label.
        label: What people see.
        within: Matchers on the variables before it.
        every: All is `.+`; without it All means those listed, which is what makes `model` act on the pods.
    """
    query = f"label_values(sojourn_model_info{f'{{{within}}}' if within else ''}, {name})"
    variable = dashboard.QueryVariable(name).label(label).query({"query": query, "refId": "variable"})
    variable = variable.definition(query).datasource(DATASOURCE).refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    variable = variable.multi(True).include_all(True).sort(models.VariableSort.ALPHABETICAL_ASC)
    variable = variable.current(models.VariableOption(text="All", value="$__all", selected=True))
    return variable.all_value(".+") if every else variable


def of_models() -> list[dashboard.QueryVariable]:
    """namespace, model, pod."""
    in_namespace = 'namespace=~"$namespace"'
    return [
        chosen("namespace", "Namespace", ""),
        chosen("model", "Model", in_namespace),
        chosen("pod", "Pod", f'{in_namespace}, model=~"$model"', every=False),
    ]


def _links() -> list[dashboard.DashboardLink]:
    boards = dashboard.DashboardLink("Sojourn").type(models.DashboardLinkType.DASHBOARDS).tags(["sojourn"])
    boards = boards.as_dropdown(True).include_vars(True).keep_time(True).icon("external link").tooltip("")
    runbook = dashboard.DashboardLink("Runbook").type(models.DashboardLinkType.LINK).url(RUNBOOK_URL)
    return [boards, runbook.target_blank(True).icon("doc").tooltip("What each alert means, and what to do")]


def board(uid: str, title: str, text: str, rows: Sequence[Row], *, models_chosen: bool, starts: str) -> str:
    """A board as JSON, sorted, with a line feed at its end.

    Args:
        uid: Stable, ≤ 40 characters.
        title: Title.
        text: What it answers.
        rows: Its panels.
        models_chosen: Whether it has the variables namespace, model and pod.
        starts: Matchers of the processes whose starts are marked.
    """
    with warnings.catch_warnings():
        # The package would rather have the v2 format, which provisioning refuses.
        warnings.simplefilter("ignore", DeprecationWarning)
        built = dashboard.Dashboard(title).uid(uid).description(text).tags(["sojourn"]).refresh("30s")
    built = built.time("now-1h", "now").tooltip(models.DashboardCursorSync.CROSSHAIR).readonly().timezone("browser")
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    built = built.variables([source, *(of_models() if models_chosen else [])]).links(_links())
    built = built.annotation(_starts(starts))
    for row in rows:
        built = built.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            built = built.with_panel(panel)
    return _encode(built.build())


def _starts(matchers: str) -> dashboard.AnnotationQuery:
    expr = f"changes(process_start_time_seconds{{{matchers}}}[$__interval]) > 0"
    query = dashboard.AnnotationQuery().name("Process starts").datasource(DATASOURCE).enable(True).icon_color(ORANGE)
    return query.hide(False).expr(expr).title_format("started").text_format("{{pod}} {{container}}")


def _encode(built: models.Dashboard) -> str:
    for position, panel in enumerate(built.panels or [], start=1):
        panel.id_val = position
    # The package would hide the links in a menu.
    for link in built.links or []:
        link.placement = None
    return JSONEncoder(sort_keys=True, indent=2).encode(built) + "\n"
