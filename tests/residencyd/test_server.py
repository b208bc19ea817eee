import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from sojourn.residencyd import server as server_module
from sojourn.residencyd.scanner import Scanner
from sojourn.residencyd.server import SERVICE, Server
from sojourn.residencyd.settings import Settings
from sojourn.v1 import residency_pb2 as pb
from sojourn.v1 import residency_pb2_grpc

from tests.residencyd.children import MIB, Child, child
from tests.residencyd.published import PAGEABLE, component, publish, storage


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    settings = Settings(map_pattern=str(tmp_path), floor_seconds=0.02, deep_share=1e9)
    made = Server(Scanner(settings), "127.0.0.1:0")
    made.start()
    yield made
    made.stop(grace_seconds=1)


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as made:
        yield made


@pytest.fixture
def stub(channel: grpc.Channel) -> residency_pb2_grpc.ResidencyServiceStub:
    return residency_pb2_grpc.ResidencyServiceStub(channel)


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Child]:
    with child("a = map_(4 << 20); write(a, 1 << 20); say(address=a)") as made:
        publish(tmp_path, made.pid, component("dit", storage(made["address"], 4 * MIB, PAGEABLE)))
        yield made


def resident(residency: pb.Residency) -> int:
    return sum(tier.resident_bytes for part in residency.processes[0].components for tier in part.tiers)


def test_one_look(stub: residency_pb2_grpc.ResidencyServiceStub, it: Child) -> None:
    it.do("child = os.fork()\nif not child: os.read(os.pipe()[0], 1)")
    found = stub.GetResidency(pb.GetResidencyRequest()).residency
    (process,) = found.processes
    assert (process.pid, process.blind_reason, process.generation) == (it.pid, "", 1)
    (part,) = process.components
    assert (part.name, part.class_name) == ("dit", "Dit")
    assert part.tiers[0] == pb.TierBytes(tier=PAGEABLE, mapped_bytes=4 * MIB, resident_bytes=MIB, claimed_bytes=4 * MIB)
    assert len(process.children) == 1
    assert process.children[0].resident_bytes > 0
    assert process.unattributed.anonymous_bytes > 0
    assert found.memory.available_bytes > 0
    assert {source.name for source in found.sources} >= {"map", "process", "meminfo"}
    it.do("os.kill(child, 9)")


def test_a_blind_look_is_an_answer_with_a_reason(stub: residency_pb2_grpc.ResidencyServiceStub) -> None:
    found = stub.GetResidency(pb.GetResidencyRequest()).residency
    assert found.processes[0].blind_reason == "no_map"
    assert found.processes[0].blind_message
    assert not found.HasField("headroom")


def test_a_watch_tells_of_changes_and_of_nothing_else(stub: residency_pb2_grpc.ResidencyServiceStub, it: Child) -> None:
    seen: list[pb.Residency] = []
    arrived = threading.Event()
    call = stub.WatchResidency(pb.WatchResidencyRequest(threshold_bytes=512 * 1024))

    def follow() -> None:
        try:
            for answer in call:
                seen.append(answer.residency)
                arrived.set()
        except grpc.RpcError:
            pass

    reader = threading.Thread(target=follow)
    reader.start()
    try:
        assert arrived.wait(10)
        assert resident(seen[0]) == MIB
        arrived.clear()
        it.do(f"write({it['address']}, (1 << 20) + 8192)")
        time.sleep(0.2)
        assert [resident(one) for one in seen] == [MIB], "two pages are below the threshold"
        it.do(f"write({it['address']}, 3 << 20)")
        assert arrived.wait(10)
        assert resident(seen[-1]) == 3 * MIB
    finally:
        call.cancel()
        reader.join(10)


def test_a_watch_outlives_its_process(stub: residency_pb2_grpc.ResidencyServiceStub, it: Child) -> None:
    call = stub.WatchResidency(pb.WatchResidencyRequest(threshold_bytes=1 << 40))
    assert resident(next(call).residency) == MIB
    it.process.kill()
    assert next(call).residency.processes[0].blind_reason == "gone"
    call.cancel()


@pytest.mark.parametrize("interval", [-1.0, float("nan"), float("inf")])
def test_a_senseless_interval_is_refused(stub: residency_pb2_grpc.ResidencyServiceStub, interval: float) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        next(stub.WatchResidency(pb.WatchResidencyRequest(interval_seconds=interval)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_too_many_watchers_are_refused_and_places_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "WATCHERS_LIMIT", 1)
    made = Server(Scanner(Settings(map_pattern=str(tmp_path), floor_seconds=0.02)), "127.0.0.1:0")
    made.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{made.port}") as channel:
            stub = residency_pb2_grpc.ResidencyServiceStub(channel)
            first = stub.WatchResidency(pb.WatchResidencyRequest())
            next(first)
            with pytest.raises(grpc.RpcError) as caught:
                next(stub.WatchResidency(pb.WatchResidencyRequest()))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            first.cancel()
            for _ in range(100):
                try:
                    next(stub.WatchResidency(pb.WatchResidencyRequest()))
                    break
                except grpc.RpcError:
                    time.sleep(0.05)
            else:
                pytest.fail("the place was not given back")
    finally:
        made.stop(grace_seconds=1)


def test_health_of_the_sidecar_and_of_its_sight(channel: grpc.Channel, tmp_path: Path) -> None:
    health = health_pb2_grpc.HealthStub(channel)

    def status(service: str) -> str:
        return health_pb2.HealthCheckResponse.ServingStatus.Name(
            health.Check(health_pb2.HealthCheckRequest(service=service)).status
        )

    assert status("") == "SERVING"
    assert status(SERVICE) == "NOT_SERVING"
    with child("say()") as it:
        publish(tmp_path, it.pid)
        time.sleep(0.03)
        assert status(SERVICE) == "SERVING"
    time.sleep(0.03)
    assert status(SERVICE) == "NOT_SERVING"
    assert status("") == "SERVING"
    with pytest.raises(grpc.RpcError) as caught:
        status("sojourn.v1.Nobody")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_lists_the_service(channel: grpc.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([request]))
    assert SERVICE in {service.name for service in answer.list_services_response.service}


def test_shutting_down_ends_watches_and_refuses_calls(tmp_path: Path) -> None:
    made = Server(Scanner(Settings(map_pattern=str(tmp_path), floor_seconds=0.02)), "127.0.0.1:0")
    made.start()
    with grpc.insecure_channel(f"127.0.0.1:{made.port}") as channel:
        stub = residency_pb2_grpc.ResidencyServiceStub(channel)
        call = stub.WatchResidency(pb.WatchResidencyRequest(interval_seconds=3600))
        next(call)
        begun = time.monotonic()
        made.stop(grace_seconds=20)
        assert time.monotonic() - begun < 10
        assert list(call) == []
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetResidency(pb.GetResidencyRequest(), timeout=5)
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
