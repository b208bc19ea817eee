"""For each alert: series that make it fire, series just below, and how it recovers; times in minutes.

Values are in promtool's notation, one a minute: `a+bxn` is a and then n times b more, `_xn` is n times nothing.
"""

from dataclasses import dataclass, field

POD = 'namespace="studio", pod="dsvc-demo-0"'
Series = dict[str, str]


@dataclass(frozen=True)
class Case:
    """One alert.

    Attributes:
        fires: Series with which it fires; the fault ends in them after a while.
        firing: A minute at which it fires.
        silent: Series just below the threshold, at which it never does.
        recovered: A minute at which it has cleared again with the series of `fires`.
        labels: Labels of the alert besides severity.
        vanishes: Series of a pod that goes while the alert fires; None where absence is the fault.
        vanished: A minute at which the alert is gone with them.
        pending: A minute at which it must not fire yet.
    """

    fires: Series
    firing: int
    silent: Series
    recovered: int
    labels: dict[str, str] = field(default_factory=lambda: {"namespace": "studio", "pod": "dsvc-demo-0"})
    vanishes: Series | None = None
    vanished: int = 0
    pending: int | None = None


def on_pod(name: str, **labels: str) -> str:
    """A series of the pod."""
    more = "".join(f', {label}="{value}"' for label, value in labels.items())
    return f"sojourn_{name}{{{POD}{more}}}"


def of_component(**labels: str) -> dict[str, str]:
    return {"namespace": "studio", "pod": "dsvc-demo-0", **labels}


_GIB = 1 << 30
_REQUESTS, _BUILT = (on_pod("plan_cache_requests_total", result=result) for result in ("hit", "built"))
_SKIPPED = on_pod("plan_cache_host_skipped_groups_total", reason="pressure")
_REQUESTED, _VERIFIED = (
    on_pod(f"pageout_{what}_bytes_total", component="transformer") for what in ("requested", "verified")
)
_ROOM, _NEED = on_pod("headroom_room_bytes"), on_pod("headroom_need_bytes")
_COLD = on_pod("headroom_cold_bytes", component="vae")
_BLIND = on_pod("residency_blind", reason="other_uid")
_SERVING, _LOADING, _FAILED = (on_pod("service_state", state=state) for state in ("serving", "loading", "failed"))
_DISAGREEMENT = on_pod("residency_disagreement_bytes", component="vae", kind="not_mapped")
_MAPPED = on_pod("residency_mapped_bytes", component="vae", tier="host_mapped")
_TRANSFORMER = on_pod("residency_mapped_bytes", component="transformer", tier="host_mapped")
_READ, _STEPS = on_pod("stage_read_bytes_total", stage="denoise"), on_pod("step_duration_seconds_count")
_STREAMED = on_pod("offload_streamed_bytes", component="transformer")
_QUEUE_FULL = on_pod("requests_refused_total", reason="queue_full")
_NONFINITE = on_pod("nonfinite_outputs_total", stage="denoise")
_OK, _INTERNAL = (on_pod("requests_total", workflow="t2va", code=code) for code in ("OK", "INTERNAL"))
_PROGRESS, _RUNNING = on_pod("last_progress_timestamp_seconds"), on_pod("requests_running")
_PROBLEM = 'sojourn_operator_resource_problem{{kind="DiffusionService", resource_namespace="studio", resource_name="demo", condition="{}", reason="{}"}}'  # noqa: E501
_NOT_READY, _STALLED = _PROBLEM.format("Ready", "PodsNotReady"), _PROBLEM.format("Stalled", "ValuesRefused")
_OPERATOR = 'sojourn_build_info{process="operator"}'
_EVENT = "sojourn_operator_last_event_timestamp_seconds"

CASES: dict[str, list[Case]] = {
    "SojournPlanCacheRebuilding": [
        Case(
            fires={_REQUESTS: "0x200", _BUILT: "0+1x60 60x140"},
            firing=40,
            recovered=90,
            silent={_REQUESTS: "0+1.1x200", _BUILT: "0+1x200"},
            vanishes={_REQUESTS: "0x60 _x100", _BUILT: "0+1x60 _x100"},
            vanished=90,
            pending=12,
        ),
        # A warm-up of four requests is none.
        Case(fires={_BUILT: "0+1x60"}, firing=40, recovered=0, silent={_BUILT: "0 1 2 3 4 4x200"}),
    ],
    "SojournHostTierSkipping": [
        Case(
            fires={_SKIPPED: "0+1x60 60x140", _BUILT: "0+1x60 60x140"},
            firing=40,
            recovered=90,
            silent={_SKIPPED: "0+0.4x200", _BUILT: "0+1x200"},
            vanishes={_SKIPPED: "0+1x60 _x100", _BUILT: "0+1x60 _x100"},
            vanished=90,
            pending=12,
        )
    ],
    "SojournPageoutIneffective": [
        Case(
            fires={_REQUESTED: f"0+{_GIB}x200", _VERIFIED: f"0x40 0+{_GIB}x160"},
            firing=30,
            recovered=60,
            labels=of_component(component="transformer"),
            silent={_REQUESTED: "0+1000x200", _VERIFIED: "0+101x200"},
            vanishes={_REQUESTED: f"0+{_GIB}x40 _x60", _VERIFIED: "0x40 _x60"},
            vanished=65,
            pending=4,
        ),
        # Nothing to give back is no failure.
        Case(
            fires={_REQUESTED: f"0+{_GIB}x60", _VERIFIED: "0x60"},
            firing=30,
            recovered=0,
            labels=of_component(component="transformer"),
            silent={_REQUESTED: "0x200", _VERIFIED: "0x200"},
        ),
    ],
    "SojournHeadroomShort": [
        Case(
            fires={_ROOM: "10x60", _COLD: "5x60", _NEED: "16x20 15x40"},
            firing=15,
            recovered=30,
            silent={_ROOM: "10x60", _COLD: "5x60", _NEED: "15x60"},
            vanishes={_ROOM: "10x20 _x40", _COLD: "5x20 _x40", _NEED: "16x20 _x40"},
            vanished=30,
            pending=4,
        ),
        # Where nothing is cold there is no series of it.
        Case(
            fires={_ROOM: "10x60", _NEED: "11x20 9x40"},
            firing=15,
            recovered=30,
            silent={_ROOM: "10x60", _NEED: "10x60"},
        ),
    ],
    "SojournResidencyBlind": [
        Case(
            fires={_BLIND: "1x20 0x40", _SERVING: "1x60"},
            firing=15,
            recovered=25,
            labels=of_component(reason="other_uid"),
            # A model that never served has published nothing.
            silent={_BLIND: "1x60", _SERVING: "0x60"},
            vanishes={_BLIND: "1x20 _x40", _SERVING: "1x20 _x40"},
            vanished=30,
            pending=4,
        ),
        Case(
            fires={on_pod("model_info", model="m"): "1x60", _BLIND: "_x20 0x40"},
            firing=15,
            recovered=25,
            labels=of_component(reason="no_sidecar"),
            silent={on_pod("model_info", model="m"): "1x60", _BLIND: "0x60"},
        ),
    ],
    "SojournResidencyDisagreement": [
        Case(
            fires={_DISAGREEMENT: "101x30 0x40", _MAPPED: "10000x70"},
            firing=20,
            recovered=35,
            labels=of_component(component="vae"),
            silent={_DISAGREEMENT: "100x60", _MAPPED: "10000x60"},
            vanishes={_DISAGREEMENT: "101x30 _x40", _MAPPED: "10000x30 _x40"},
            vanished=40,
            pending=9,
        )
    ],
    "SojournWeightsThrashing": [
        Case(
            fires={_READ: "0+6000x40 240000x60", _STEPS: "0+10x100", _TRANSFORMER: "10000x100", _STREAMED: "0x100"},
            firing=30,
            recovered=60,
            silent={_READ: "0+4900x100", _STEPS: "0+10x100", _TRANSFORMER: "10000x100", _STREAMED: "0x100"},
            vanishes={
                _READ: "0+6000x40 _x40",
                _STEPS: "0+10x40 _x40",
                _TRANSFORMER: "10000x40 _x40",
                _STREAMED: "0x40 _x40",
            },
            vanished=50,
            pending=9,
        ),
        # What is streamed by plan is no thrashing; more than that is.
        Case(
            fires={_READ: "0+86000x100", _STEPS: "0+10x100", _TRANSFORMER: "10000x100", _STREAMED: "4000x100"},
            firing=30,
            recovered=0,
            silent={_READ: "0+84000x100", _STEPS: "0+10x100", _TRANSFORMER: "10000x100", _STREAMED: "4000x100"},
        ),
    ],
    "SojournQueueFull": [
        Case(
            fires={_QUEUE_FULL: "0+1x20 20x40"},
            firing=15,
            recovered=30,
            # One burst.
            silent={_QUEUE_FULL: "0 5 5x60"},
            vanishes={_QUEUE_FULL: "0+1x20 _x40"},
            vanished=30,
            pending=4,
        )
    ],
    "SojournNonFiniteOutputs": [
        Case(
            fires={_NONFINITE: "0x5 1x60"},
            firing=8,
            recovered=30,
            labels=of_component(stage="denoise"),
            silent={_NONFINITE: "3x60"},
            vanishes={_NONFINITE: "0x5 1x5 _x60"},
            vanished=30,
            pending=4,
        )
    ],
    "SojournRequestErrors": [
        Case(
            fires={_OK: "0+94x100", _INTERNAL: "0+6x40 240x60"},
            firing=25,
            recovered=60,
            silent={_OK: "0+95x100", _INTERNAL: "0+4.9x100"},
            vanishes={_OK: "0+94x40 _x40", _INTERNAL: "0+6x40 _x40"},
            vanished=60,
            pending=9,
        )
    ],
    "SojournProgressStalled": [
        Case(
            fires={_PROGRESS: "0+60x10 600x20 1860+60x20", _RUNNING: "1x60"},
            firing=25,
            recovered=35,
            silent={_PROGRESS: "0+60x10 600x50", _RUNNING: "0x60"},
            vanishes={_PROGRESS: "0+60x10 600x20 _x20", _RUNNING: "1x30 _x20"},
            vanished=40,
            pending=20,
        )
    ],
    "SojournModelNotServing": [
        Case(
            fires={_LOADING: "1x30 0x30", _SERVING: "0x30 1x30"},
            firing=20,
            recovered=35,
            silent={_LOADING: "1x10 0x50", _SERVING: "0x10 1x50"},
            vanishes={_LOADING: "1x30 _x40", _SERVING: "0x30 _x40"},
            vanished=50,
            pending=14,
        ),
        # A crash loop: there for a minute in five.
        Case(
            fires={_FAILED: "1 _x5 1 _x5 1 _x5 1 _x5 1 _x5 1 _x30"},
            firing=26,
            recovered=60,
            silent={_FAILED: "0x60"},
        ),
    ],
    "SojournServiceNotReady": [
        Case(
            fires={_NOT_READY: "1x20 _x40"},
            firing=18,
            recovered=30,
            labels={"resource_namespace": "studio", "resource_name": "demo"},
            silent={_NOT_READY: "1x14 stale"},
            pending=14,
        )
    ],
    "SojournOperatorStalled": [
        Case(
            fires={_STALLED: "1x20 _x40"},
            firing=15,
            recovered=30,
            labels={
                "kind": "DiffusionService",
                "resource_namespace": "studio",
                "resource_name": "demo",
                "reason": "ValuesRefused",
            },
            silent={_NOT_READY: "1x60"},
            pending=9,
        )
    ],
    "SojournOperatorDown": [
        Case(
            fires={_OPERATOR: "1x5 _x30 1x30", _EVENT: "0+60x100"},
            firing=22,
            recovered=40,
            labels={"process": "operator"},
            silent={_OPERATOR: "1x100", _EVENT: "0+60x100"},
            pending=12,
        ),
        Case(
            fires={_OPERATOR: "1x100", _EVENT: "0x50 3060+60x50"},
            firing=30,
            recovered=55,
            labels={},
            silent={_OPERATOR: "1x100", _EVENT: "0x14 0+60x100"},
            pending=24,
        ),
    ],
}
