"""Residency: where the weights are, and how much could be given back."""

from tools.dashboards.parts import (
    ORANGE,
    RED,
    SCOPE,
    Panel,
    Query,
    Row,
    bars,
    board,
    lines,
    number,
    of,
    per_second,
    rows_of,
)

_BY_TIER = "sum by (component, tier)"
_ROOM = f"sum by (namespace, pod) ({of('headroom_room_bytes')})"
_COLD = f"sum by (namespace, pod) ({of('headroom_cold_bytes')})"
_NEED = f"sum by (namespace, pod) ({of('headroom_need_bytes')})"
_SEEN = f"group by (namespace, pod) ({of('scan_timestamp_seconds')})"


def build() -> str:
    """The board as JSON."""
    rows = [
        Row("At a glance", _glance()),
        Row("Where are the weights?", _weights()),
        Row("How much could be given back?", _headroom()),
        Row("What the looking itself does", _looking()),
    ]
    text = "Where every weight is, as the kernel sees it, and how much could be given back."
    return board(
        "sojourn-residency", "Sojourn / Residency", text, rows, models_chosen=True, starts=f'{SCOPE}, container!=""'
    )


def _glance() -> list[Panel]:
    blind = (
        f"count((max by (namespace, pod) ({of('residency_blind')}) == 1) or "
        f"(group by (namespace, pod) ({of('model_info')}) unless on (namespace, pod) {_SEEN})) or vector(0)"
    )
    disagreement = f"sum({of('residency_disagreement_bytes')}) or vector(0)"
    return [
        number(
            "Weights in memory",
            "Bytes of weights that are in memory now. Far below their size while requests run means that weights are "
            "read again and again. Metric: sojourn_residency_resident_bytes.",
            "bytes",
            Query(f"sum({of('residency_resident_bytes')})"),
        ),
        number(
            "Size of the weights",
            "Size of all address ranges of components. Metric: sojourn_residency_mapped_bytes.",
            "bytes",
            Query(f"sum({of('residency_mapped_bytes')})"),
        ),
        number(
            "Least headroom left",
            "Room + cold − need of the pod that has least. Below 0 the next stage does not fit. Metrics: "
            "sojourn_headroom_room_bytes, sojourn_headroom_cold_bytes, sojourn_headroom_need_bytes.",
            "bytes",
            Query(f"min({_ROOM} + ({_COLD} or 0 * {_ROOM}) - {_NEED})"),
        ),
        number(
            "Claimed by nobody",
            "In memory and of no component: activations, libraries, leaks. Metric: "
            "sojourn_residency_unattributed_bytes.",
            "bytes",
            Query(f"sum({of('residency_unattributed_bytes')})"),
        ),
        number(
            "Contradicted by the kernel",
            "What processes claim of their components and the kernel contradicts. Anything but 0 makes the figures of "
            "the component doubtful. Metric: sojourn_residency_disagreement_bytes.",
            "bytes",
            Query(disagreement),
            (1, RED),
        ),
        number(
            "Pods that cannot be seen",
            "Pods whose model process residencyd cannot see, or that have no residencyd. Metrics: "
            "sojourn_residency_blind, sojourn_scan_timestamp_seconds, sojourn_model_info.",
            "none",
            Query(blind),
            (1, RED),
        ),
    ]


def _weights() -> list[Panel]:
    mapped, resident = (f"{_BY_TIER} ({of(f'residency_{what}_bytes')})" for what in ("mapped", "resident"))
    in_memory, size = (f"sum by (component) ({of(f'residency_{what}_bytes')})" for what in ("resident", "mapped"))
    share = f"{in_memory} / ({size} > 0)"
    cached = (
        f"sum by (component) ({of('checkpoint_cached_bytes')}) or "
        f"sum by (component) ({of('checkpoint_cached_estimate_bytes')})"
    )
    return [
        rows_of(
            "Component × tier",
            "Size of each component's ranges by the tier that the kernel sees, what of them is in memory, and what the "
            "memory plan had meant to be there. Metrics: sojourn_residency_mapped_bytes, "
            "sojourn_residency_resident_bytes, sojourn_memory_plan_bytes.",
            "bytes",
            Query(f"{mapped} > 0", "size"),
            Query(f"{resident} and {mapped} > 0", "in memory"),
            Query(f"({resident} / ({mapped} > 0))", "share", unit="percentunit"),
            Query(f"{_BY_TIER} ({of('memory_plan_bytes')}) > 0", "planned"),
            span=16,
            no_value="0",
        ),
        bars(
            "Share in memory",
            "What of each component is in memory. The one that the running stage uses should be near 100 % unless it "
            "streams by plan. Metrics: sojourn_residency_resident_bytes, sojourn_residency_mapped_bytes.",
            "percentunit",
            Query(share, "{{component}}"),
        ),
        lines(
            "In memory by component and tier",
            "The areas add up to the weights that are in memory; the dashed line is their whole size. Saw teeth of one "
            "component within a stage mean that it is read again and again. Metrics: "
            "sojourn_residency_resident_bytes, sojourn_residency_mapped_bytes.",
            "bytes",
            Query(f"{resident} and {mapped} > 0", "{{component}} · {{tier}}"),
            Query(f"sum({of('residency_mapped_bytes')})", "size of all", limit=True),
            stacked=True,
            span=24,
        ),
        lines(
            "Claimed by nobody",
            "In memory and of no component, by kind of page. Steady growth is a leak. Metric: "
            "sojourn_residency_unattributed_bytes.",
            "bytes",
            Query(f"sum by (kind) ({of('residency_unattributed_bytes')})", "{{kind}}"),
            stacked=True,
        ),
        lines(
            "Contradicted by the kernel",
            "Claims that the kernel contradicts, by component and kind: not mapped at all, another tier, another file. "
            "Should be 0. Metric: sojourn_residency_disagreement_bytes.",
            "bytes",
            Query(f"sum by (component, kind) ({of('residency_disagreement_bytes')})", "{{component}} · {{kind}}"),
        ),
        lines(
            "In swap",
            "Weights in swap. Anything here makes the next use wait for the disk. Metric: "
            "sojourn_residency_swapped_bytes.",
            "bytes",
            Query(f"sum by (component) ({of('residency_swapped_bytes')})", "{{component}}"),
            stacked=True,
        ),
        lines(
            "Checkpoint files in the page cache",
            "What of the components' files is in the page cache, mapped by whomever; by sampling where the kernel "
            "refuses the exact count. Metrics: sojourn_checkpoint_cached_bytes, "
            "sojourn_checkpoint_cached_estimate_bytes.",
            "bytes",
            Query(cached, "{{component}}"),
            stacked=True,
        ),
    ]


def _headroom() -> list[Panel]:
    devices = f"sum by (device, state) ({of('device_memory_bytes')})"
    return [
        lines(
            "Headroom",
            "Room that costs nothing, and on top what cold components could give back; the dashed "
            "line is what the next "
            "stage needs. Areas below the line: the next stage will thrash or be killed. Metrics: "
            "sojourn_headroom_room_bytes, sojourn_headroom_cold_bytes, sojourn_headroom_need_bytes.",
            "bytes",
            Query(f"sum({of('headroom_room_bytes')})", "room"),
            Query(f"sum by (component) ({of('headroom_cold_bytes')})", "cold · {{component}}"),
            Query(f"sum({of('headroom_need_bytes')})", "need of the next stage", limit=True),
            stacked=True,
        ),
        lines(
            "Control group and machine",
            "Usage of the control group with the least room, the part of it that is reclaimable, what the machine can "
            "still give, and the limit. Usage at the limit is normal as long as it is reclaimable. Metrics: "
            "sojourn_cgroup_usage_bytes, sojourn_cgroup_reclaimable_bytes, sojourn_memory_available_bytes, "
            "sojourn_cgroup_limit_bytes (absent where nothing is capped).",
            "bytes",
            Query(f"sum({of('cgroup_usage_bytes')})", "usage"),
            Query(f"sum({of('cgroup_reclaimable_bytes')})", "reclaimable"),
            Query(f"min({of('memory_available_bytes')})", "available on the machine"),
            Query(f"sum({of('cgroup_limit_bytes')})", "limit", limit=True),
        ),
        lines(
            "Cold, but stuck",
            "What cold components hold and cannot give back, by reason: not_owner, shared, locked, other. See the "
            "runbook for each. Metric: sojourn_headroom_stuck_bytes.",
            "bytes",
            Query(f"sum by (component, reason) ({of('headroom_stuck_bytes')})", "{{component}} · {{reason}}"),
            stacked=True,
        ),
        lines(
            "Pressure",
            "Share of time in which at least one task, and all tasks, waited for a resource (PSI). "
            "Memory waiting above "
            "10 % means thrashing. Metrics: sojourn_pressure_waiting_seconds_total, "
            "sojourn_pressure_stalled_seconds_total (absent where the kernel has no PSI).",
            "percentunit",
            Query(f"max by (resource) ({per_second('pressure_waiting_seconds_total')})", "{{resource}} · waiting"),
            Query(f"max by (resource) ({per_second('pressure_stalled_seconds_total')})", "{{resource}} · stalled"),
        ),
        lines(
            "Memory plan",
            "The most that a stage was expected to take, beside what may be taken, by space. Metrics: "
            "sojourn_memory_plan_peak_bytes, sojourn_memory_plan_budget_bytes.",
            "bytes",
            Query(f"max by (space) ({of('memory_plan_peak_bytes')})", "{{space}} · expected peak"),
            Query(f"max by (space) ({of('memory_plan_budget_bytes')})", "{{space}} · budget"),
        ),
        lines(
            "Device memory",
            "Memory of accelerators; none on a machine without. Where the device shares the host's "
            "memory, free is what "
            "the machine can still give. Metric: sojourn_device_memory_bytes.",
            "bytes",
            Query(f"{devices} or vector(0)", "{{device}} · {{state}}"),
            stacked=True,
            span=8,
        ),
        number(
            "Devices without figures",
            "Accelerators whose memory cannot be had; the label reason says why. Metric: sojourn_device_memory_absent.",
            "none",
            Query(f"sum({of('device_memory_absent')}) or vector(0)"),
            (1, ORANGE),
        ),
    ]


def _looking() -> list[Panel]:
    return [
        lines(
            "Duration of a look",
            "Time that the last look took. Metric: sojourn_scan_duration_seconds.",
            "s",
            Query(f"max by (pod) ({of('scan_duration_seconds')})", "{{pod}}"),
            span=8,
        ),
        lines(
            "Age of the figures",
            "Since pages were last counted, and since the component map was written. Pages are counted when a share of "
            "one core allows it, so minutes are normal for large models. Metrics: sojourn_scan_timestamp_seconds, "
            "sojourn_component_map_timestamp_seconds.",
            "s",
            Query(f"max(time() - {of('scan_timestamp_seconds')})", "pages"),
            Query(f"max(time() - {of('component_map_timestamp_seconds')})", "component map"),
            span=8,
        ),
        lines(
            "Major faults of the model process",
            "Page faults that had to read from storage. Many while a stage runs mean that weights come and go. Metric: "
            "sojourn_target_major_faults_total.",
            "ops",
            Query(f"sum({per_second('target_major_faults_total')})", "major faults"),
            span=8,
        ),
        lines(
            "Sources that failed",
            "Failed reads by source. A source that fails steadily is told by sojourn_scan_source_usable. Metric: "
            "sojourn_scan_errors_total.",
            "ops",
            Query(f"sum by (source) ({per_second('scan_errors_total')})", "{{source}}"),
        ),
        rows_of(
            "Sources",
            "1 for a source that worked in the last look of every pod, 0 for one that did not in some. Metric: "
            "sojourn_scan_source_usable.",
            "none",
            Query(f"min by (source) ({of('scan_source_usable')})", "usable"),
            span=6,
        ),
        rows_of(
            "Component maps",
            "Generation of the map read and mappings met, by pod. A generation that runs away is a map that is "
            "rewritten without end. Metrics: sojourn_component_map_generation, sojourn_scan_mappings.",
            "none",
            Query(f"max by (pod) ({of('component_map_generation')})", "generation"),
            Query(f"max by (pod) ({of('scan_mappings')})", "mappings"),
            span=6,
        ),
        rows_of(
            "Blind",
            "Pods by the reason for which their process cannot be seen; empty is good. Metric: "
            "sojourn_residency_blind.",
            "none",
            Query(f"sum by (reason) ({of('residency_blind')})", "pods"),
            span=6,
        ),
    ]
