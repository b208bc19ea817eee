"""Operator: is the operator well, and which resources are not?"""

from tools.dashboards.parts import ORANGE, RATE, RED, Panel, Query, Row, board, lines, number, rows_of

_OWN_BUILD = 'sojourn_build_info{process="operator"}'


def build() -> str:
    """The board as JSON."""
    rows = [
        Row("At a glance", _glance()),
        Row("Resources", _resources()),
        Row("Work", _work()),
        Row("Watching, and the process", _watching()),
    ]
    text = "Which custom resources are not well, and what the operator does about them."
    return board(
        "sojourn-operator", "Sojourn / Operator", text, rows, models_chosen=False, starts='container="operator"'
    )


def _rate(metric: str) -> str:
    return f"rate(sojourn_operator_{metric}{RATE})"


def _p95(metric: str, by: str) -> str:
    return f"histogram_quantile(0.95, sum by (le, {by}) ({_rate(metric + '_bucket')}))"


def _glance() -> list[Panel]:
    return [
        number(
            "Operators",
            "Running operators; anything but 1 is wrong. Metric: sojourn_build_info.",
            "none",
            Query(f"count({_OWN_BUILD}) or vector(0)"),
            (2, RED),
            words={"0": ("down", RED)},
        ),
        number(
            "Services not ready",
            "DiffusionServices that are not Ready. Metric: sojourn_operator_resources.",
            "none",
            Query('sum(sojourn_operator_resources{kind="DiffusionService", ready!="True"})'),
            (1, RED),
        ),
        number(
            "Stalled resources",
            "Resources that need a change by people before they go on. Metric: sojourn_operator_resource_problem.",
            "none",
            Query('count(sojourn_operator_resource_problem{condition="Stalled"}) or vector(0)'),
            (1, RED),
        ),
        number(
            "Waiting for a pass",
            "Resources in the queue. Metric: sojourn_operator_queue_depth.",
            "none",
            Query("sum(sojourn_operator_queue_depth)"),
        ),
        number(
            "Since the last event",
            "Of a watch, or a whole listing. Above 15 minutes is OperatorDown. Metric: "
            "sojourn_operator_last_event_timestamp_seconds.",
            "s",
            Query("time() - max(sojourn_operator_last_event_timestamp_seconds)"),
            (900, RED),
        ),
        number(
            "Problems not listed",
            "Beyond the first hundred. Metric: sojourn_operator_resource_problems_omitted.",
            "none",
            Query("sum(sojourn_operator_resource_problems_omitted)"),
            (1, ORANGE),
        ),
    ]


def _resources() -> list[Panel]:
    return [
        lines(
            "Resources",
            "By kind and status of Ready. Metric: sojourn_operator_resources.",
            "none",
            Query("sum by (kind, ready) (sojourn_operator_resources)", "{{kind}} · {{ready}}"),
            stacked=True,
        ),
        rows_of(
            "Not as it should be",
            "Conditions by resource; empty is good. The message stands in the resource: kubectl describe. Metric: "
            "sojourn_operator_resource_problem.",
            "none",
            Query(
                "sum by (kind, resource_namespace, resource_name, condition, reason) "
                "(sojourn_operator_resource_problem) or vector(0)",
                "problem",
            ),
        ),
    ]


def _work() -> list[Panel]:
    return [
        lines(
            "Passes",
            "By kind and result. failed or retried that goes on names the cause in the resource's conditions. Metric: "
            "sojourn_operator_reconciles_total.",
            "ops",
            Query(f"sum by (kind, result) ({_rate('reconciles_total')})", "{{kind}} · {{result}}"),
            stacked=True,
        ),
        lines(
            "Duration of a pass",
            "95 % of the passes are shorter. Metric: sojourn_operator_reconcile_duration_seconds.",
            "s",
            Query(_p95("reconcile_duration_seconds", "kind"), "{{kind}}"),
        ),
        lines(
            "helm",
            "Processes, and those that failed. An idle cluster has none. Metrics: sojourn_operator_helm_calls_total, "
            "sojourn_operator_helm_failures_total.",
            "ops",
            Query(f"sum by (verb) ({_rate('helm_calls_total')})", "{{verb}}"),
            Query(f"sum by (verb) ({_rate('helm_failures_total')})", "{{verb}} · failed"),
            span=8,
        ),
        lines(
            "Duration of a helm process",
            "95 % are shorter. Metric: sojourn_operator_helm_duration_seconds.",
            "s",
            Query(_p95("helm_duration_seconds", "verb"), "{{verb}}"),
            span=8,
        ),
        lines(
            "Writes to the API server",
            "By what was written; a dry run looks for drift and changes nothing. An idle cluster has no other. Metric: "
            "sojourn_operator_api_writes_total.",
            "ops",
            Query(f"sum by (what) ({_rate('api_writes_total')})", "{{what}}"),
            span=8,
        ),
    ]


def _watching() -> list[Panel]:
    logged = f"sum by (level) (rate(sojourn_log_lines_total{RATE}) * on (instance) group_left () {_OWN_BUILD})"
    pending = "time() - min(sojourn_operator_oldest_pending_timestamp_seconds)"
    return [
        lines(
            "Waiting for a pass",
            "Resources in the queue. Metric: sojourn_operator_queue_depth.",
            "none",
            Query("sum(sojourn_operator_queue_depth)", "waiting"),
            span=8,
        ),
        lines(
            "Longest wait",
            "Of the resources in the queue, back-off included. Metric: "
            "sojourn_operator_oldest_pending_timestamp_seconds (absent while none waits).",
            "s",
            Query(f"{pending} or vector(0)", "longest"),
            span=8,
        ),
        lines(
            "Resyncs, drift and recoveries",
            "Listings of everything, by result; objects that others changed, by kind; releases brought out of a "
            "cut-off operation. Metrics: sojourn_operator_resyncs_total, sojourn_operator_drifted_objects_total, "
            "sojourn_operator_release_recoveries_total.",
            "ops",
            Query(f"sum by (result) ({_rate('resyncs_total')})", "resync · {{result}}"),
            Query(f"sum by (kind) ({_rate('drifted_objects_total')}) or vector(0)", "drift · {{kind}}"),
            Query(f"sum({_rate('release_recoveries_total')})", "recoveries"),
            span=8,
        ),
        lines(
            "Answers of the webhook",
            "Admission reviews by result. Refusals are people's mistakes told in time; errors let objects through "
            "unseen. Metric: sojourn_operator_admission_reviews_total.",
            "ops",
            Query(f"sum by (result) ({_rate('admission_reviews_total')}) or vector(0)", "{{result}}"),
            span=8,
        ),
        lines(
            "Log lines",
            "Of the operator, by level. Metric: sojourn_log_lines_total.",
            "ops",
            Query(logged, "{{level}}"),
            span=8,
        ),
        lines(
            "Memory",
            "Resident set of the operator; each helm process takes 21 MiB beside it. Metric: "
            "process_resident_memory_bytes.",
            "bytes",
            Query(f"sum(process_resident_memory_bytes * on (instance) group_left () {_OWN_BUILD})", "operator"),
            span=8,
        ),
    ]
