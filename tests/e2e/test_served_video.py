"""kubectl apply to a served video: the demo, its life and its end."""

import json

import pytest

from tests.e2e.client import Client
from tests.e2e.node import (
    DEMO,
    PORT,
    STUDIO,
    Object,
    condition,
    demo_as_written,
    get,
    has,
    kubectl,
    patch,
    pods,
    ready,
    shell,
    until,
)
from tests.e2e.watching import Watch

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("demo")]
ENDPOINT = f"dsvc-demo.{STUDIO}.svc.cluster.local:{PORT}"
BYTES = r"[0-9.]+(Ki|Mi|Gi)?"


def test_the_demo_is_ready_with_its_figures() -> None:
    until(
        lambda: get(STUDIO, "dsvc", "demo")["status"].get("residency", {}).get("components"), 60, "figures of the demo"
    )
    service = get(STUDIO, "dsvc", "demo")
    assert service["status"]["model"] == "h3-digits"
    assert condition(service, "ResidencyVisible")["status"] == "True", service["status"]
    assert condition(service, "PageOutEffective")["status"] == "True", service["status"]
    header, row = kubectl("-n", STUDIO, "get", "dsvc").splitlines()
    assert header.split() == ["NAME", "READY", "REASON", "MODEL", "REPLICAS", "VRAM", "HOST", "SAVED", "HIT%", "AGE"]
    cells = dict(
        zip(("NAME", "READY", "REASON", "MODEL", "REPLICAS", "VRAM", "HOST", "SAVED"), row.split(), strict=False)
    )
    assert (cells["READY"], cells["REASON"], cells["REPLICAS"]) == ("True", "Serving", "1/1")
    for column in ("VRAM", "HOST"):
        assert cells[column][0].isdigit(), row
    assert cells["HOST"] != "0", row
    # 64 plans of 4 rows are more than the projections of a model in miniature: what `sojourn inspect` says.
    assert cells["SAVED"] == "-7.53Mi", row


def test_a_client_gets_a_video_through_the_service(neighbour: Client) -> None:
    made = json.loads(neighbour.generate(ENDPOINT, "--steps", "12", "--seed", "7"))
    assert made["files"] == ["/tmp/out.mp4"]
    again = json.loads(neighbour.generate(ENDPOINT, "--steps", "12", "--seed", "7"))
    clips = [answer["completed"]["clips"] for answer in (made, again)]
    assert clips[0] == clips[1], "the same seed is the same clip, built plans or not"

    def hits() -> bool:
        return bool(get(STUDIO, "dsvc", "demo")["status"].get("adaLN", {}).get("hitRatio") == "50")

    until(hits, 90, "HIT% of one build and one hit")


def test_shared_memory_has_the_size_that_was_asked_for() -> None:
    code = "import os; found = os.statvfs('/dev/shm'); print(found.f_frsize * found.f_blocks)"
    assert int(shell(STUDIO, "deploy/dsvc-demo", "inference", "python3", "-c", code)) == 64 << 20


def test_an_edit_is_not_ready_until_its_pods_serve() -> None:
    """Of the service itself: nothing is said about a generation that was not looked at."""
    old = {pod["metadata"]["uid"] for pod in pods()}
    with Watch(STUDIO, "dsvc", "demo") as watch:
        patch(STUDIO, "dsvc", "demo", podAnnotations={"edited": "yes"})
        generation = get(STUDIO, "dsvc", "demo")["metadata"]["generation"]
        until(lambda: has(STUDIO, "demo", "Ready", "True"), 180, "Ready after the edit")
        serving = [pod for pod in pods() if condition(pod, "Ready")["status"] == "True"]
    assert serving
    assert all(
        pod["metadata"]["annotations"].get("edited") == "yes" for pod in serving if pod["metadata"]["uid"] not in old
    )
    assert any(pod["metadata"]["uid"] not in old for pod in serving)
    said = [condition(event, "Ready") for event in watch.events if event["metadata"]["generation"] == generation]
    told = [found["status"] for found in said if found["observedGeneration"] == generation]
    assert told[0] != "True", told
    assert told[-1] == "True", told
    assert told == sorted(told, key=lambda status: status == "True"), f"Ready and then not: {told}"


def test_an_edit_of_a_policy_rolls_the_pods() -> None:
    old = {pod["metadata"]["uid"] for pod in pods()}
    patch(STUDIO, "adaln", "demo", plans=60)
    until(lambda: not has(STUDIO, "demo", "Ready", "True"), 30, "not Ready after the edit")
    ready()
    new = [pod for pod in pods() if pod["metadata"]["uid"] not in old]
    assert any("--adaln-plans=60" in pod["spec"]["containers"][0]["args"] for pod in new)


def last_failure() -> Object:
    """The last end of a container that was none of its own; it stays when the service is well again."""
    found: Object = get(STUDIO, "dsvc", "demo")["status"].get("lastFailure", {})
    return found


def test_an_oom_kill_is_told_with_its_code() -> None:
    """A pod with too small a limit: the model does not fit."""
    patch(STUDIO, "dsvc", "demo", resources={"limits": {"memory": "180Mi"}, "requests": {"memory": "100Mi"}})

    try:
        until(lambda: last_failure().get("reason") == "OOMKilled", 180, "OOMKilled in lastFailure")
        service = get(STUDIO, "dsvc", "demo")
        assert service["status"]["lastFailure"]["exitCode"] == 137
        found = condition(service, "Ready")
        assert (found["status"], found["reason"]) == ("False", "OOMKilled"), found
        assert "exit code 137" in found["message"]
        assert get(STUDIO, "deploy", "dsvc-demo")["status"]["availableReplicas"] == 1, "the old pod serves on"
    finally:
        demo_as_written()


def test_a_model_process_that_dies_is_told_and_started_again() -> None:
    before = last_failure()
    with Watch(STUDIO, "dsvc", "demo") as watch:
        kill = "kill -9 $(grep -lx sojourn /proc/[0-9]*/comm | cut -d/ -f3)"
        shell(STUDIO, "deploy/dsvc-demo", "residencyd", "sh", "-c", kill)
        until(lambda: last_failure() != before, 90, "lastFailure")
        ready()
    failure = last_failure()
    assert (failure["reason"], failure["exitCode"], failure["container"]) == ("Killed", 137, "inference")
    told = [condition(event, "Ready") for event in watch.events]
    assert any(found["status"] == "False" and "exit code 137" in found["message"] for found in told), told


def test_deleting_leaves_nothing() -> None:
    kubectl("-n", STUDIO, "delete", "-f", DEMO, "--timeout=120s")
    kinds = "deploy,svc,sa,networkpolicy,hpa,pdb,cm,secret"
    assert get(STUDIO, kinds, "-l", "app.kubernetes.io/instance=dsvc-demo")["items"] == []
    assert get(STUDIO, "cm,secret", "-l", "owner=helm")["items"] == []
    labels = ("-l", "app.kubernetes.io/instance=dsvc-demo")
    until(lambda: not get(STUDIO, "pods,rs,endpointslices", *labels)["items"], 60, "pods gone")
