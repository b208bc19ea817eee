"""Service: is the service well?"""

from tools.dashboards.parts import (
    GREEN,
    ORANGE,
    RED,
    SCOPE,
    Panel,
    Query,
    Row,
    board,
    lines,
    number,
    of,
    per_second,
    quantile,
    rows_of,
)

_IN_RANGE = "[$__range]"
_CODE_COLOURS = {"OK": GREEN, "INTERNAL": RED, "RESOURCE_EXHAUSTED": ORANGE}


def build() -> str:
    """The board as JSON."""
    rows = [
        Row("At a glance", _glance()),
        Row("Requests", _requests()),
        Row("Where the time goes", _time()),
        Row("Quality tiers", _quality()),
        Row("Processes", _processes()),
    ]
    text = "Requests, queue, stages and steps, failures, and the processes behind them."
    return board(
        "sojourn-service", "Sojourn / Service", text, rows, models_chosen=True, starts=f'{SCOPE}, container!=""'
    )


def _within(metric: str, **labels: str) -> str:
    return f"sum(increase({of(metric, **labels)}{_IN_RANGE}))"


def _glance() -> list[Panel]:
    failed = f'sojourn_requests_total{{{SCOPE}, code=~"INTERNAL|UNKNOWN|DATA_LOSS"}}'
    fault = f"sum(increase({failed}{_IN_RANGE}))"
    silent = (
        f"max((time() - {of('last_progress_timestamp_seconds')}) and on (namespace, pod) {of('requests_running')} > 0)"
    )
    return [
        number(
            "Pods that serve",
            "Pods in state serving; the others load, drain or failed. Metric: sojourn_service_state.",
            "none",
            Query(f"sum({of('service_state', state='serving')})"),
        ),
        number(
            "Pods that failed",
            "Pods whose model could not be loaded: GetInfo and the log say why. Metric: sojourn_service_state.",
            "none",
            Query(f"sum({of('service_state', state='failed')})"),
            (1, RED),
        ),
        number(
            "Failures",
            "Share of ended calls with INTERNAL, UNKNOWN or DATA_LOSS. Above 5 % for ten minutes is RequestErrors. "
            "Metric: sojourn_requests_total.",
            "percentunit",
            Query(f"{fault} / ({_within('requests_total')} > 0)"),
            (0.05, RED),
            no_value="no traffic",
        ),
        number(
            "Non-finite outputs",
            "Requests that failed for a NaN or infinity. One is too many. Metric: sojourn_nonfinite_outputs_total.",
            "none",
            Query(_within("nonfinite_outputs_total")),
            (1, RED),
        ),
        number(
            "Silent while running",
            "Time since the last step or stage boundary, where a request runs. Metrics: "
            "sojourn_last_progress_timestamp_seconds, sojourn_requests_running.",
            "s",
            Query(silent),
            (600, RED),
            no_value="idle",
        ),
        number(
            "Slowest start",
            "From the start of a process to SERVING. Metric: sojourn_time_to_ready_seconds.",
            "s",
            Query(f"max({of('time_to_ready_seconds')})"),
            no_value="not ready",
        ),
    ]


def _requests() -> list[Panel]:
    return [
        lines(
            "Ended calls",
            "By gRPC code, refused ones too. Metric: sojourn_requests_total.",
            "reqps",
            Query(f"sum by (code) ({per_second('requests_total')})", "{{code}}"),
            stacked=True,
            colours=_CODE_COLOURS,
        ),
        lines(
            "Running and waiting",
            "Requests in the pipeline and in the queue; the dashed line is the places of the queue. "
            "At the line callers "
            "are refused: QueueFull. Metrics: sojourn_requests_running, sojourn_requests_waiting, "
            "sojourn_requests_waiting_limit.",
            "none",
            Query(f"sum({of('requests_running')})", "running"),
            Query(f"sum({of('requests_waiting')})", "waiting"),
            Query(f"sum({of('requests_waiting_limit')})", "places", limit=True),
        ),
        lines(
            "Refused before work",
            "By reason. Metric: sojourn_requests_refused_total.",
            "reqps",
            Query(f"sum by (reason) ({per_second('requests_refused_total')})", "{{reason}}"),
        ),
        lines(
            "Non-finite outputs",
            "Requests that failed for a NaN or infinity, by the stage that made it. Metric: "
            "sojourn_nonfinite_outputs_total.",
            "reqps",
            Query(f"sum by (stage) ({per_second('nonfinite_outputs_total')})", "{{stage}}"),
        ),
    ]


def _time() -> list[Panel]:
    return [
        lines(
            "Duration of a request",
            "Accepted to last byte, of calls that ended OK. Metric: sojourn_request_duration_seconds.",
            "s",
            Query(quantile(0.5, "request_duration_seconds", "workflow"), "{{workflow}} · median"),
            Query(quantile(0.95, "request_duration_seconds", "workflow"), "{{workflow}} · 95 %"),
        ),
        lines(
            "Time in the queue",
            "Metric: sojourn_request_queue_seconds.",
            "s",
            Query(quantile(0.5, "request_queue_seconds"), "median"),
            Query(quantile(0.95, "request_queue_seconds"), "95 %"),
        ),
        lines(
            "Duration of a stage",
            "95 % of the uses of each stage are shorter. Metric: sojourn_stage_duration_seconds.",
            "s",
            Query(quantile(0.95, "stage_duration_seconds", "stage"), "{{stage}}"),
        ),
        lines(
            "Time spent by stage",
            "Seconds of each stage in a second; what is missing to 1 is idle. Metric: sojourn_stage_duration_seconds.",
            "percentunit",
            Query(f"sum by (stage) ({per_second('stage_duration_seconds_sum')})", "{{stage}}"),
            stacked=True,
        ),
        lines(
            "Duration of a denoising step",
            "A 99 % line that leaves the median is a step that waits for weights. Metric: "
            "sojourn_step_duration_seconds.",
            "s",
            Query(quantile(0.5, "step_duration_seconds"), "median"),
            Query(quantile(0.95, "step_duration_seconds"), "95 %"),
            Query(quantile(0.99, "step_duration_seconds"), "99 %"),
            span=8,
        ),
        lines(
            "Steps",
            "Denoising steps a second. Metric: sojourn_step_duration_seconds.",
            "ops",
            Query(f"sum by (pod) ({per_second('step_duration_seconds_count')})", "{{pod}}"),
            span=8,
        ),
        lines(
            "From cancel to a free place",
            "95 % of cancels and deadlines of running requests are quicker. Should be about one step. Metric: "
            "sojourn_cancel_latency_seconds.",
            "s",
            Query(quantile(0.95, "cancel_latency_seconds"), "95 %"),
            span=8,
        ),
    ]


def _quality() -> list[Panel]:
    return [
        rows_of(
            "Quality tiers",
            "Requests in the range of time, by tier asked for and used. Metric: sojourn_quality_requests_total.",
            "none",
            Query(f"sum by (asked, used) (increase({of('quality_requests_total')}{_IN_RANGE}))", "requests"),
            span=6,
        ),
        lines(
            "Mounted",
            "Sites of the transformers that run on a part of a quality tier now. Metric: sojourn_fusion_mounted_sites.",
            "none",
            Query(f"sum by (family) ({of('fusion_mounted_sites')})", "{{family}}"),
            span=6,
        ),
        lines(
            "Mounts",
            "Parts mounted, unmounted, and failed to mount. failed means that requests of that tier run on the stock "
            "path. Metric: sojourn_fusion_changes_total.",
            "ops",
            Query(f"sum by (family, action) ({per_second('fusion_changes_total')})", "{{family}} · {{action}}"),
            span=6,
        ),
        lines(
            "Evaluations under the step cache",
            "Evaluations of the transformer that were computed, and those whose result was taken from the step before. "
            "Metric: sojourn_step_cache_evaluations_total.",
            "ops",
            Query(f"sum by (result) ({per_second('step_cache_evaluations_total')})", "{{result}}"),
            stacked=True,
            span=6,
        ),
    ]


def _processes() -> list[Panel]:
    build = f"group_left (process) {of('build_info')}"
    logged = f"sum by (process, level) ({per_second('log_lines_total')} * on (namespace, pod, instance) {build})"
    return [
        lines(
            "Log lines",
            "By process and level, printed or not. INFO stands still while requests run; WARNING moves once for each "
            "change of state. Metric: sojourn_log_lines_total.",
            "ops",
            Query(logged, "{{process}} · {{level}}"),
        ),
        rows_of(
            "What runs",
            "Pods by model. Metric: sojourn_model_info.",
            "none",
            Query(f"sum by (namespace, pod, model, family, dtype, device, fingerprint) ({of('model_info')})"),
        ),
        lines(
            "Memory of the processes",
            "Resident set, weights included. Metric: process_resident_memory_bytes.",
            "bytes",
            Query(f"sum by (pod, container) (process_resident_memory_bytes{{{SCOPE}}})", "{{pod}} · {{container}}"),
            span=8,
        ),
        lines(
            "CPU of the processes",
            "Cores in use. Metric: process_cpu_seconds_total.",
            "none",
            Query(
                f"sum by (pod, container) (rate(process_cpu_seconds_total{{{SCOPE}}}[$__rate_interval]))",
                "{{pod}} · {{container}}",
            ),
            span=8,
        ),
        rows_of(
            "Builds",
            "Which version runs where. Metric: sojourn_build_info.",
            "none",
            Query(f"sum by (pod, process, version) ({of('build_info')})"),
            span=8,
        ),
    ]
