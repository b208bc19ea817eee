import pytest
from sojourn.residencyd import specimen
from sojourn.residencyd.family import Child
from sojourn.residencyd.messages import differ
from sojourn.residencyd.messages import residency as as_message
from sojourn.v1 import residency_pb2 as pb


def residency(resident: int = 0, *, reason: str = "", **more: object) -> pb.Residency:
    tier = pb.TierBytes(tier=pb.TIER_HOST_MAPPED, resident_bytes=resident)
    part = pb.ComponentResidency(name="dit", tiers=[tier])
    process = pb.ProcessResidency(pid=1, blind_reason=reason, components=[part], major_faults=resident)
    return pb.Residency(processes=[process], **more)


@pytest.mark.parametrize(
    ("after", "threshold", "different"),
    [
        (residency(100), 0, False),
        (residency(100, scanned_seconds=5.0, scan_duration_seconds=1.0), 0, False),
        (residency(101), 0, True),
        (residency(101), 2, False),
        (residency(102), 2, True),
        (residency(98), 2, True),
        (residency(100, reason="gone"), 1000, True),
        (residency(100, headroom=pb.Headroom()), 1000, True),
        (residency(100, memory=pb.HostMemory(available_bytes=1 << 40)), 0, False),
        (residency(100, devices=[pb.DeviceMemory(used_bytes=1 << 40)]), 0, False),
        (pb.Residency(), 1000, True),
    ],
)
def test_what_is_a_change(after: pb.Residency, threshold: int, different: bool) -> None:
    assert differ(residency(100), after, threshold_bytes=threshold) is different


def test_all_of_a_snapshot_arrives() -> None:
    message = as_message(specimen.snapshot(), children=lambda pid: [Child(2, "worker", 3)])
    (process,) = message.processes
    assert [part.name for part in process.components] == ["transformer", "vae"]
    assert [part.page_cache.estimate for part in process.components] == [False, True]
    assert process.children == [pb.ChildProcess(pid=2, name="worker", resident_bytes=3)]
    assert message.memory.HasField("tightest"), "a limit of 0 is a limit"
    assert set(message.memory.pressure) == {"cpu", "io", "memory"}
    assert [(device.device, device.absent_reason) for device in message.devices] == [("0", ""), ("1", "not_supported")]
    assert all(source.usable for source in message.sources)
    assert message.HasField("headroom")


def test_room_moves_by_itself_and_cold_bytes_do_not() -> None:
    def headroom(**parts: int) -> pb.Residency:
        return pb.Residency(headroom=pb.Headroom(**parts))

    assert not differ(headroom(room_bytes=1), headroom(room_bytes=1 << 40))
    assert differ(headroom(cold_bytes=1), headroom(cold_bytes=2))
