"""Each wait between copies and compute is needed: without it the detector finds the race that it prevents."""

import pytest
import torch

from tests.inference.adaln.fake_streams import COMPUTE, COPY, HOST, FakeStreams, RaceDetector, Recording
from tests.inference.adaln.toys import Injected, Rig, make_rig, plan


def forward(rig: Rig, *values: float) -> None:
    """Reads a plan's rows on the compute stream, as a transformer does."""
    for name in rig.cache.slab.table:
        rig.rows(name, *values)


def scenario(without: str | None, monkeypatch: pytest.MonkeyPatch) -> RaceDetector:
    """Builds, forwards, swaps in over slots that a forward has just read, after a swap-in that failed half way."""
    detector = RaceDetector()
    rig = make_rig(plans=1, pages=4, streams=FakeStreams(detector, frozenset({without} if without else ())))
    slab, host = rig.cache.slab, rig.cache.host
    detector.watch(slab.lengths, *slab.rows.values(), *host.rows.values())
    with Recording(detector):
        rig.build([0.1])
        forward(rig, 0.1)
        look_at_pages(rig, detector, 0.1)
        rig.build([0.2])
        forward(rig, 0.2)
        rig.build([0.1])
        forward(rig, 0.1)
        fail_after_the_copies(rig, monkeypatch)
        rig.build([0.3])
        forward(rig, 0.3)
        rig.cache.invalidate()
        rig.build([0.4])
        forward(rig, 0.4)
    return detector


def look_at_pages(rig: Rig, detector: RaceDetector, value: float) -> None:
    """The host believes that a stored plan's pages hold its rows."""
    detector.current = HOST
    for page in rig.cache.host.pages(plan(value).key):
        for rows in rig.cache.host.rows.values():
            rows[page].clone()
    detector.current = COMPUTE


def fail_after_the_copies(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap-in whose copies are under way when something else fails: nobody waits for them."""

    def fail() -> None:
        raise Injected("after the copies")

    with monkeypatch.context() as patched:
        patched.setattr(rig.cache.streams, "compute_waits", fail)
        with pytest.raises(Injected):
            rig.build([0.2])


def test_with_all_waits_there_is_no_race(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scenario(None, monkeypatch).races == []


@pytest.mark.parametrize("wait", ["begin_copy", "begin_compute", "compute_waits", "copies_wait", "synchronize"])
def test_without_a_wait_there_is_a_race(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scenario(wait, monkeypatch).races


def test_the_detector_sees_a_race_and_its_absence() -> None:
    detector = RaceDetector()
    streams = FakeStreams(detector)
    page, row = torch.zeros(8), torch.zeros(8)
    detector.watch(page, row)
    with Recording(detector):
        page.fill_(1)
        with streams.copying():
            row.copy_(page)
        assert detector.races
        detector.races.clear()
        streams.compute_waits()
        row.add_(1)
    assert detector.races == []
    assert {access.stream for access in detector.accesses} == {COMPUTE, COPY}


def test_rows_of_other_slots_are_no_race() -> None:
    detector = RaceDetector()
    streams = FakeStreams(detector)
    slab = torch.zeros(2, 8)
    detector.watch(slab)
    with Recording(detector):
        slab[0].fill_(1)
        with streams.copying():
            slab[1].fill_(2)
    assert detector.races == []
