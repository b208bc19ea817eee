"""What a Deployment and its pods say about a service: a pure verdict, with the reason people need first.

A Deployment that is "available" may serve the previous spec with its old pods. Ready therefore means: the rollout of
the newest spec is complete and all its pods answer their readiness probe, which is the model's own health.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sojourn.operator.conditions import Status
from sojourn.operator.kube.client import Object
from sojourn.operator.resources.status import FailureStatus

# Exit codes above 128 are signals. What they mean for a model server:
_BY_EXIT_CODE = {
    134: "Aborted",
    135: "BusError",  # the checkpoint shrank or its disk failed under a mapping
    137: "Killed",  # OOMKilled where the runtime knows it
    139: "SegmentationFault",
    143: "Terminated",
}
# Reasons of waiting containers that do not go away while one looks on.
_STUCK = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError")


@dataclass(frozen=True)
class Workload:
    """What is known of a service's pods.

    Attributes:
        ready: Ready's status.
        reason: why, in one word.
        message: why, for people.
        progressing: whether it may still get there by itself.
        failed: whether the rollout ran out of its time.
        wanted, existing, updated, serving: pods.
        failure: the last failure of a container.
    """

    ready: Status
    reason: str
    message: str = ""
    progressing: bool = False
    failed: bool = False
    wanted: int = 0
    existing: int = 0
    updated: int = 0
    serving: int = 0
    failure: FailureStatus | None = None


def judge(deployment: Object | None, pods: Sequence[Object] = ()) -> Workload:
    """The verdict over a Deployment as it is and its pods; pods may be left out while all is well."""
    if deployment is None:
        return Workload("False", "DeploymentMissing", "the Deployment is not there", progressing=True)
    spec, status, metadata = deployment["spec"], deployment.get("status") or {}, deployment["metadata"]
    wanted = spec.get("replicas", 1)
    counts = {
        "wanted": wanted,
        "existing": status.get("replicas", 0),
        "updated": status.get("updatedReplicas", 0),
        "serving": status.get("readyReplicas", 0),
    }
    failure = last_failure(pods)
    if status.get("observedGeneration", 0) < metadata["generation"]:
        return Workload("Unknown", "RolloutPending", "the rollout has not begun", True, **counts, failure=failure)
    if wanted == 0:
        return Workload("False", "ScaledToZero", "replicas is 0", **counts, failure=failure)
    if counts["existing"] == counts["updated"] == wanted and status.get("availableReplicas", 0) >= wanted:
        return Workload("True", "Serving", f"{wanted} of {wanted} pods serve", **counts, failure=failure)
    reason, message = _refused(deployment) or _reason(pods, failure) or ("RollingOut", "")
    summary = f"{counts['updated']} of {wanted} pods have the newest spec, {counts['serving']} serve"
    failed = rollout_failed(deployment)
    return Workload(
        "False",
        reason if reason != "RollingOut" or not failed else "RolloutFailed",
        f"{message}; {summary}" if message else summary,
        progressing=not failed,
        failed=failed,
        **counts,
        failure=failure,
    )


def rollout_failed(deployment: Object) -> bool:
    """Whether the newest spec did not come up within its deadline. Old pods serve on."""
    return any(
        condition["type"] == "Progressing" and condition["reason"] == "ProgressDeadlineExceeded"
        for condition in (deployment.get("status") or {}).get("conditions") or []
    )


def _refused(deployment: Object) -> tuple[str, str] | None:
    """That the API server takes no pod: Pod Security, a quota, an admission webhook."""
    for condition in (deployment.get("status") or {}).get("conditions") or []:
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return condition["reason"], condition.get("message", "")[:512]
    return None


def last_failure(pods: Sequence[Object]) -> FailureStatus | None:
    """The newest end of a container with a code other than 0."""
    ended = [failure for pod in pods for failure in _failures(pod)]
    return max(ended, key=lambda failure: failure.finished_at or "", default=None)


def _failures(pod: Object) -> Iterator[FailureStatus]:
    for container in _containers(pod):
        for state in (container.get("state") or {}, container.get("lastState") or {}):
            ended = state.get("terminated")
            if ended and ended.get("exitCode"):
                yield FailureStatus(
                    reason=_failure_reason(ended),
                    message=(ended.get("message") or "")[:1024],
                    exit_code=ended["exitCode"],
                    container=container["name"],
                    pod=pod["metadata"]["name"],
                    finished_at=ended.get("finishedAt"),
                )


def _failure_reason(ended: Object) -> str:
    said = ended.get("reason") or "Error"
    return said if said not in ("Error", "ContainerCannotRun") else _BY_EXIT_CODE.get(ended["exitCode"], said)


def _reason(pods: Sequence[Object], failure: FailureStatus | None) -> tuple[str, str] | None:
    """Why pods do not serve: what is stuck, else what failed last, else what is waited for."""
    return _stuck(pods) or _crashing(pods, failure) or _unschedulable(pods) or _loading(pods)


def _stuck(pods: Sequence[Object]) -> tuple[str, str] | None:
    for pod in pods:
        for container in _containers(pod):
            waiting = (container.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") in _STUCK:
                return waiting["reason"], f"container {container['name']}: {waiting.get('message', '')}"[:512]
    return None


def _crashing(pods: Sequence[Object], failure: FailureStatus | None) -> tuple[str, str] | None:
    down = any(
        not container.get("ready") and container.get("restartCount") for pod in pods for container in _containers(pod)
    )
    ended = any((container.get("state") or {}).get("terminated") for pod in pods for container in _containers(pod))
    if failure is None or not (down or ended):
        return None
    return failure.reason, f"container {failure.container} of {failure.pod} ended with exit code {failure.exit_code}"


def _unschedulable(pods: Sequence[Object]) -> tuple[str, str] | None:
    for pod in pods:
        for condition in (pod.get("status") or {}).get("conditions") or []:
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return "Unschedulable", condition.get("message", "")[:512]
    return None


def _loading(pods: Sequence[Object]) -> tuple[str, str] | None:
    running = [pod for pod in pods if (pod.get("status") or {}).get("phase") == "Running"]
    return ("Loading", "the model is being loaded") if running else None


def _containers(pod: Object) -> list[Object]:
    status = pod.get("status") or {}
    containers: list[Object] = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return containers
