"""What a Deployment and its pods say about a service."""

from typing import Any

import pytest
from sojourn.operator.workload import judge, last_failure


def deployment(*, wanted: int = 1, generation: int = 3, observed: int = 3, **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"generation": generation},
        "spec": {"replicas": wanted},
        "status": {"observedGeneration": observed, **status},
    }


def pod(
    name: str = "p", *, ready: bool = False, restarts: int = 0, phase: str = "Running", **states: Any
) -> dict[str, Any]:
    container = {"name": "inference", "ready": ready, "restartCount": restarts, **states}
    return {"metadata": {"name": name}, "status": {"phase": phase, "containerStatuses": [container]}}


def ended(code: int, reason: str = "Error", at: str = "2026-09-01T12:00:00Z") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "finishedAt": at}}


SERVING = {"replicas": 1, "updatedReplicas": 1, "readyReplicas": 1, "availableReplicas": 1}


def test_ready_means_that_every_pod_of_the_newest_spec_serves() -> None:
    assert judge(deployment(**SERVING)).ready == "True"


def test_old_pods_that_serve_do_not_make_it_ready() -> None:
    """The commonest lie of control planes: 'ready' right after an edit, since the old pods are."""
    verdict = judge(deployment(generation=4, **SERVING))
    assert (verdict.ready, verdict.reason) == ("Unknown", "RolloutPending")
    half = {"replicas": 2, "updatedReplicas": 1, "readyReplicas": 1, "availableReplicas": 1}
    assert judge(deployment(**half)).ready == "False"


def test_an_oom_kill_is_named_with_its_code() -> None:
    down = deployment(replicas=1, updatedReplicas=1, readyReplicas=0, availableReplicas=0)
    looping = pod(restarts=3, state={"waiting": {"reason": "CrashLoopBackOff"}}, lastState=ended(137, "OOMKilled"))
    verdict = judge(down, [looping])
    assert (verdict.ready, verdict.reason) == ("False", "OOMKilled")
    assert verdict.failure
    assert verdict.failure.exit_code == 137
    assert "exit code 137" in verdict.message


@pytest.mark.parametrize(
    ("code", "said", "reason"),
    [
        (135, "Error", "BusError"),
        (137, "OOMKilled", "OOMKilled"),
        (137, "Error", "Killed"),
        (139, "Error", "SegmentationFault"),
        (134, "Error", "Aborted"),
        (1, "Error", "Error"),
        (1, "StartError", "StartError"),
    ],
)
def test_exit_codes_map_to_distinct_reasons(code: int, said: str, reason: str) -> None:
    failure = last_failure([pod(state=ended(code, said))])
    assert failure
    assert failure.reason == reason


def test_the_last_failure_is_the_newest_over_all_pods() -> None:
    early, late = "2026-09-01T11:00:00Z", "2026-09-01T12:00:00Z"
    failure = last_failure([pod("a", lastState=ended(1, at=late)), pod("b", lastState=ended(137, "OOMKilled", early))])
    assert failure
    assert (failure.pod, failure.container, failure.finished_at) == ("a", "inference", late)
    assert last_failure([pod(state=ended(0, "Completed"))]) is None


def test_a_failure_whose_time_nobody_knows_is_older_than_any_other() -> None:
    """A node that was lost: the kubelet says ContainerStatusUnknown and no time."""
    lost = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown", "finishedAt": None}}
    found = last_failure([pod("a", lastState=ended(1)), pod("b", state=lost)])
    assert found
    assert found.pod == "a"
    alone = last_failure([pod("b", state=lost)])
    assert alone
    assert (alone.reason, alone.finished_at) == ("ContainerStatusUnknown", None)


def test_a_container_that_recovered_keeps_its_failure_but_not_the_reason() -> None:
    verdict = judge(deployment(**SERVING), [pod(ready=True, restarts=1, lastState=ended(137, "OOMKilled"))])
    assert verdict.ready == "True"
    assert verdict.failure
    assert verdict.failure.reason == "OOMKilled"


@pytest.mark.parametrize("reason", ["ImagePullBackOff", "ErrImagePull", "CreateContainerConfigError"])
def test_a_container_that_cannot_start_says_why(reason: str) -> None:
    down = deployment(replicas=1, updatedReplicas=1)
    verdict = judge(down, [pod(phase="Pending", state={"waiting": {"reason": reason, "message": "no such image"}})])
    assert verdict.reason == reason
    assert "no such image" in verdict.message


def test_a_pod_without_a_node_says_so() -> None:
    waiting = {
        "metadata": {"name": "p"},
        "status": {
            "phase": "Pending",
            "conditions": [{"type": "PodScheduled", "status": "False", "message": "Insufficient nvidia.com/gpu"}],
        },
    }
    verdict = judge(deployment(replicas=1, updatedReplicas=1), [waiting])
    assert verdict.reason == "Unschedulable"
    assert "nvidia.com/gpu" in verdict.message


def test_a_rollout_out_of_time_has_failed() -> None:
    late = [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]
    verdict = judge(deployment(replicas=2, updatedReplicas=1, readyReplicas=1, conditions=late))
    assert (verdict.reason, verdict.failed, verdict.progressing) == ("RolloutFailed", True, False)


def test_zero_replicas_are_not_ready_and_not_on_their_way() -> None:
    verdict = judge(deployment(wanted=0))
    assert (verdict.ready, verdict.reason, verdict.progressing) == ("False", "ScaledToZero", False)


def test_a_missing_deployment_is_not_ready() -> None:
    assert judge(None).reason == "DeploymentMissing"


def test_pods_that_the_api_server_refuses_are_told_in_its_words() -> None:
    """Pod Security, a quota: there is no pod to look at, only the Deployment's own condition."""
    words = 'pods "dsvc-demo-1" is forbidden: violates PodSecurity "restricted:latest"'
    refused = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": words}
    verdict = judge(deployment(replicas=0, conditions=[refused]))
    assert (verdict.ready, verdict.reason) == ("False", "FailedCreate")
    assert words in verdict.message
    over = {**refused, "status": "False"}
    assert judge(deployment(replicas=0, conditions=[over])).reason == "RollingOut"
