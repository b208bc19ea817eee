"""Cache and offload: does the plan cache work, does page-out work, what waits for weights."""

from tools.dashboards.parts import (
    ORANGE,
    RATE,
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


def build() -> str:
    """The board as JSON."""
    rows = [
        Row("At a glance", _glance()),
        Row("Does the plan cache work?", _requests()),
        Row("What the plan cache holds", _held()),
        Row("Does page-out work?", _pageout()),
        Row("Who waits for weights?", _offload()),
    ]
    text = "Whether the AdaLN plan cache hits, whether page-out gives memory back, and who waits for weights."
    return board(
        "sojourn-cache", "Sojourn / Cache and offload", text, rows, models_chosen=True,
        starts=f'{SCOPE}, container!=""',
    )  # fmt: skip


def _within(metric: str, **labels: str) -> str:
    return f"sum(increase({of(metric, **labels)}{_IN_RANGE}))"


def _glance() -> list[Panel]:
    asked = f"({_within('plan_cache_requests_total')} > 0)"
    requested = f"({_within('pageout_requested_bytes_total')} > 0)"
    saved = f"sum({of('plan_cache_unloaded_weight_bytes')}) - sum({of('plan_cache_allocated_bytes', tier='gpu')})"
    return [
        number(
            "Requests without a build",
            "Of the transactions of the plan cache, those that found every plan in a tier. Metric: "
            "sojourn_plan_cache_requests_total.",
            "percentunit",
            Query(f"1 - {_within('plan_cache_requests_total', result='built')} / {asked}"),
            no_value="no traffic",
        ),
        number(
            "Builds per request",
            "Above 0.5 for long the cache is too small for the mix of schedules. Metric: "
            "sojourn_plan_cache_requests_total.",
            "percentunit",
            Query(f"{_within('plan_cache_requests_total', result='built')} / {asked}"),
            (0.5, RED),
            no_value="no traffic",
        ),
        number(
            "Saved by the plan cache",
            "Projections that were never loaded, less the slab in their place. Metrics: "
            "sojourn_plan_cache_unloaded_weight_bytes, sojourn_plan_cache_allocated_bytes.",
            "bytes",
            Query(saved),
            no_value="off",
        ),
        number(
            "Refused by the plan cache",
            "Requests that the cache refused. Metric: sojourn_plan_cache_refused_requests_total.",
            "none",
            Query(_within("plan_cache_refused_requests_total")),
            (1, ORANGE),
        ),
        number(
            "Page-out that worked",
            "Of the bytes given to MADV_PAGEOUT, those found gone afterwards. Below 10 % it is "
            "without effect. Metrics: "
            "sojourn_pageout_requested_bytes_total, sojourn_pageout_verified_bytes_total.",
            "percentunit",
            Query(f"{_within('pageout_verified_bytes_total')} / {requested}"),
            no_value="none asked",
        ),
        number(
            "Stuck after page-out",
            "Left in memory by the last page-out of each component. Metric: sojourn_pageout_stuck_bytes.",
            "bytes",
            Query(f"sum({of('pageout_stuck_bytes')}) or vector(0)"),
            (1, ORANGE),
        ),
    ]


def _requests() -> list[Panel]:
    built = f"sum({per_second('plan_cache_requests_total', result='built')})"
    return [
        lines(
            "Requests of the plan cache",
            "Transactions by how they ended: hit on the device, host tier, store, built, refused, failed. Mostly built "
            "after warm-up is PlanCacheRebuilding. Metric: sojourn_plan_cache_requests_total.",
            "reqps",
            Query(f"sum by (result) ({per_second('plan_cache_requests_total')})", "{{result}}"),
            stacked=True,
        ),
        lines(
            "Plans served",
            "Distinct plans by where they were. Metric: sojourn_plan_cache_plans_total.",
            "ops",
            Query(f"sum by (source) ({per_second('plan_cache_plans_total')})", "{{source}}"),
            stacked=True,
        ),
        lines(
            "Builds per request",
            "Share of transactions that built. Metric: sojourn_plan_cache_requests_total.",
            "percentunit",
            Query(f"{built} / (sum({per_second('plan_cache_requests_total')}) > 0) or vector(0)", "builds per request"),
            span=8,
        ),
        lines(
            "Duration of a build",
            "All ranks together. Metric: sojourn_plan_cache_build_duration_seconds.",
            "s",
            Query(quantile(0.5, "plan_cache_build_duration_seconds"), "median"),
            Query(quantile(0.95, "plan_cache_build_duration_seconds"), "95 %"),
            span=8,
        ),
        lines(
            "Read for builds",
            "AdaLN projections read from the checkpoint. Metric: sojourn_plan_cache_read_bytes_total.",
            "Bps",
            Query(f"sum({per_second('plan_cache_read_bytes_total')})", "read"),
            span=8,
        ),
        lines(
            "Evictions",
            "Plans that lost their place, by tier. Steady evictions beside builds: the tier is too small. Metric: "
            "sojourn_plan_cache_evicted_plans_total.",
            "ops",
            Query(f"sum by (tier) ({per_second('plan_cache_evicted_plans_total')})", "{{tier}}"),
            span=8,
        ),
        lines(
            "Not stored in the host tier",
            "Groups by reason. pressure beside builds is HostTierSkipping; copy_failed is a failure. Metric: "
            "sojourn_plan_cache_host_skipped_groups_total.",
            "ops",
            Query(f"sum by (reason) ({per_second('plan_cache_host_skipped_groups_total')})", "{{reason}}"),
            span=8,
        ),
        lines(
            "Refused, and files not used",
            "Requests that the cache refused, and files of the plan store that were not used or not "
            "written, by reason. "
            "Metrics: sojourn_plan_cache_refused_requests_total, sojourn_plan_store_rejected_files_total.",
            "ops",
            Query(f"sum by (reason) ({per_second('plan_cache_refused_requests_total')})", "request · {{reason}}"),
            Query(f"sum by (reason) ({per_second('plan_store_rejected_files_total')})", "file · {{reason}}"),
            span=8,
        ),
    ]


def _held() -> list[Panel]:
    return [
        lines(
            "Slots",
            "Slots of the slab by state; the sum is its capacity. No free ones are normal; reserved ones without a "
            "running request are not. Metric: sojourn_plan_cache_slots.",
            "none",
            Query(f"sum by (state) ({of('plan_cache_slots')})", "{{state}}"),
            stacked=True,
            span=8,
        ),
        lines(
            "Pages of the host tier",
            "By state; the sum is its capacity, 0 where the tier is off. Metric: sojourn_plan_cache_host_pages.",
            "none",
            Query(f"sum by (state) ({of('plan_cache_host_pages')})", "{{state}}"),
            stacked=True,
            span=8,
        ),
        lines(
            "What it takes, and what it saves",
            "The cache's own memory by tier; the dashed line is the projections that were never loaded. Metrics: "
            "sojourn_plan_cache_allocated_bytes, sojourn_plan_cache_unloaded_weight_bytes.",
            "bytes",
            Query(f"sum by (tier) ({of('plan_cache_allocated_bytes')})", "{{tier}}"),
            Query(f"sum({of('plan_cache_unloaded_weight_bytes')})", "not loaded", limit=True),
            stacked=True,
            span=8,
        ),
        rows_of(
            "How it is set up",
            "Mode, precision, kind of host memory, and the reason where the cache is off. Metric: "
            "sojourn_plan_cache_info.",
            "none",
            Query(f"sum by (pod, mode, precision, host_kind, off_reason) ({of('plan_cache_info')})"),
            span=16,
        ),
        number(
            "Plan store",
            "Size of the store that the processes of a node share: the largest figure, no sum. Metric: "
            "sojourn_plan_store_size_bytes.",
            "bytes",
            Query(f"max({of('plan_store_size_bytes')})"),
            span=8,
        ),
    ]


def _pageout() -> list[Panel]:
    steps = f"(sum(rate({of('step_duration_seconds_count')}{RATE})) > 0)"
    return [
        lines(
            "Requested and verified",
            "Resident bytes given to MADV_PAGEOUT, and those of them found gone afterwards. The "
            "kernel answers 0 either "
            "way; a gap is PageoutIneffective. Metrics: sojourn_pageout_requested_bytes_total, "
            "sojourn_pageout_verified_bytes_total.",
            "Bps",
            Query(f"sum by (component) ({per_second('pageout_requested_bytes_total')})", "{{component}} · requested"),
            Query(f"sum by (component) ({per_second('pageout_verified_bytes_total')})", "{{component}} · verified"),
        ),
        lines(
            "Stuck after page-out",
            "Left by the last page-out, by component and reason: not_owner, shared, locked, in_use, other. Metric: "
            "sojourn_pageout_stuck_bytes.",
            "bytes",
            Query(
                f"sum by (component, reason) ({of('pageout_stuck_bytes')} > 0) or vector(0)",
                "{{component}} · {{reason}}",
            ),
            stacked=True,
        ),
        lines(
            "Read from storage, by stage",
            "What the whole process read while a stage ran. After the first request after a load it should be near 0, "
            "unless the plan streams. Metric: sojourn_stage_read_bytes_total.",
            "Bps",
            Query(f"sum by (stage) ({per_second('stage_read_bytes_total')})", "{{stage}}"),
            stacked=True,
        ),
        lines(
            "Read again for each step",
            "Read from storage while denoising, for each step. The dashed line is where WeightsThrashing begins: 5 % "
            "of the transformer beside twice what offload means to stream in each pass. Metrics: "
            "sojourn_stage_read_bytes_total, sojourn_step_duration_seconds, sojourn_residency_mapped_bytes, "
            "sojourn_offload_streamed_bytes.",
            "bytes",
            Query(
                f"sum({per_second('stage_read_bytes_total', stage='denoise')}) / {steps} or vector(0)", "read a step"
            ),
            Query(f"sum({of('offload_streamed_bytes', component='transformer')})", "streamed by plan"),
            Query(
                f"0.05 * sum({of('residency_mapped_bytes', component='transformer')}) "
                f"+ 2 * sum({of('offload_streamed_bytes', component='transformer')})",
                "too much",
                limit=True,
            ),
        ),
    ]


def _offload() -> list[Panel]:
    return [
        lines(
            "Waiting for weights",
            "Share of time in which computation waited for weights. Metric: sojourn_offload_wait_seconds_total.",
            "percentunit",
            Query(f"sum by (component) ({per_second('offload_wait_seconds_total')})", "{{component}}"),
            span=8,
        ),
        lines(
            "Copied to the device",
            "Weights copied from host to device. Metric: sojourn_offload_copied_bytes_total.",
            "Bps",
            Query(f"sum by (component) ({per_second('offload_copied_bytes_total')})", "{{component}}"),
            span=8,
        ),
        lines(
            "Read around the page cache",
            "Weights read directly from storage, for one use. Metric: sojourn_offload_direct_read_bytes_total.",
            "Bps",
            Query(f"sum by (component) ({per_second('offload_direct_read_bytes_total')})", "{{component}}"),
            span=8,
        ),
        rows_of(
            "Layers by tier",
            "Layers by the tier that the host keeps them in. Metric: sojourn_offload_layers.",
            "none",
            Query(f"sum by (component, tier) ({of('offload_layers')})", "layers"),
            span=8,
            no_value="0",
        ),
        lines(
            "Locked memory",
            "Host memory that is locked for the copy engine; the dashed line is what may be. Metrics: "
            "sojourn_offload_pinned_bytes, sojourn_offload_pin_budget_bytes.",
            "bytes",
            Query(f"sum({of('offload_pinned_bytes')})", "locked"),
            Query(f"sum({of('offload_pin_budget_bytes')})", "budget", limit=True),
            span=8,
        ),
        lines(
            "Fast paths given up",
            "By reason: prefetch, direct, pin, register. Each is told once at WARNING. Metric: "
            "sojourn_offload_fallbacks_total.",
            "ops",
            Query(f"sum by (reason) ({per_second('offload_fallbacks_total')})", "{{reason}}"),
            span=8,
        ),
    ]
