"""What stays, what streams, and in which order the kernel is told."""

import itertools
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sojourn.inference.offload import pages as pages_module
from sojourn.inference.offload.adviser import Adviser, PageAdvice
from sojourn.inference.offload.observer import Fallback, Silent
from sojourn.inference.offload.pages import FIRST_PASS_BYTES, PageWindow, hook_pages
from sojourn.inference.offload.pass_plan import plan_pass
from sojourn.inference.offload.pieces import Piece
from sojourn.inference.offload.room import Room, RoomReader, room_of
from sojourn.inference.offload.settings import ResidentPolicy
from sojourn.inference.offload.spans import Span, size_of
from sojourn.residencyd.kernel.advice import Advice, Advised, page_out
from sojourn.residencyd.kernel.cgroups import Group
from torch import nn

from tests.inference.offload.test_cold_advice import MappedFile

PAGE = 4096


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Without slack every page of the room counts."""
    monkeypatch.setattr(pages_module, "SLACK_BYTES", 0)


def pieces_of(pages):
    """Spans of pieces of these sizes in pages, one behind the other with gaps."""
    spans, at = [], PAGE
    for count in pages:
        spans.append((Span(at, at + count * PAGE),))
        at += (count + 3) * PAGE
    return spans


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pages=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    room=st.integers(0, 1300),
    ahead=st.integers(0, 60),
    policy=st.sampled_from(ResidentPolicy),
    data=st.data(),
)
def test_a_pass_keeps_what_leaves_room_for_the_window_and_not_a_page_less(pages, room, ahead, policy, data):
    pieces = pieces_of(pages)
    order = data.draw(st.permutations(range(len(pieces))))
    plan = plan_pass(pieces, order, room_bytes=room * PAGE, read_ahead_bytes=ahead * PAGE, policy=policy)
    total = sum(map(size_of, pieces))
    assert plan.kept_bytes + plan.streamed_bytes == total
    if total <= room * PAGE:
        assert plan.streamed_bytes == 0
    else:
        assert plan.kept_bytes == max(0, min(total, room * PAGE - plan.window_bytes))
        largest = max(size_of(piece) for piece, spans in zip(pieces, plan.streamed, strict=True) if spans)
        assert largest <= plan.window_bytes - ahead * PAGE
        assert plan.window_bytes <= (ahead + max(pages)) * PAGE
    if policy is ResidentPolicy.LEADING and plan.streamed_bytes:
        streams = [bool(plan.streamed[i]) for i in order]
        assert streams == sorted(streams), "everything behind the prefix streams"


def test_strided_spreads_the_stream_over_the_pass():
    pieces = pieces_of([10] * 40)
    plan = plan_pass(pieces, range(40), room_bytes=310 * PAGE, read_ahead_bytes=0, policy=ResidentPolicy.STRIDED)
    streamed = [i for i in range(40) if plan.streamed[i]]
    assert len(streamed) == 10
    assert {b - a for a, b in itertools.pairwise(streamed)} == {4}


def test_pieces_that_no_pass_has_called_go_first():
    plan = plan_pass(pieces_of([1, 1, 1, 1]), [2, 0, 1], room_bytes=4 * PAGE - 1, read_ahead_bytes=0)
    assert [bool(spans) for spans in plan.streamed].index(True) == 3 or plan.streamed[3]


class Chain(nn.Module):
    """Modules in a row that say when they compute."""

    def __init__(self, count, log, order=None):
        super().__init__()
        self.parts = nn.ModuleList(nn.Identity() for _ in range(count))
        self.log = log
        self.order = range(count) if order is None else order

    def forward(self, x):
        for i in self.order:
            x = self.parts[i](x)
            self.log.append(("use", i))
        return x


class Memory:
    """A kernel that remembers what it was told, and a room that can be set."""

    def __init__(self, pieces, log, room_pages):
        self.pieces = pieces
        self.log = log
        self.room_pages = room_pages
        self.gone = set()
        self.fails = False
        self.resident_bytes = 1 << 40

    def say(self, word):
        def act(address, length):
            index = next(i for i, spans in enumerate(self.pieces) if spans[0].start <= address < spans[0].end)
            self.log.append((word, index))
            (self.gone.add if word == "out" else self.gone.discard)((address, length))
            return Advised(Advice.PAGEOUT, length, length)

        return act

    def room(self, spans):
        if self.fails:
            raise OSError("no such file")
        return Room(
            available_bytes=self.room_pages * PAGE, other_file_bytes=0, resident_bytes=self.resident_bytes, limited=True
        )

    def resident(self, spans):
        return sum(span.size_bytes for span in spans if (span.start, span.size_bytes) not in self.gone)


class Told(Silent):
    def __init__(self):
        self.page_outs, self.fallbacks = [], []

    def paged_out(self, *, component, requested_bytes, verified_bytes):
        self.page_outs.append((requested_bytes, verified_bytes))

    def fell_back(self, *, reason):
        self.fallbacks.append(reason)


def chain(count=6, *, room_pages, ahead_pages=10, order=None, **rest):
    log = []
    model = Chain(count, log, order)
    spans = pieces_of([10] * count)
    memory = Memory(spans, log, room_pages)
    adviser = Adviser()
    told = Told()
    window = PageWindow(
        "chain",
        [Piece(module=part, spans=own) for part, own in zip(model.parts, spans, strict=True)],
        room=memory.room,
        adviser=adviser,
        resident=memory.resident,
        policy=ResidentPolicy.LEADING,
        read_ahead_bytes=ahead_pages * PAGE,
        advice=PageAdvice(populate=memory.say("in"), page_out=memory.say("out")),
        observer=told,
        **rest,
    )
    window._passed = True  # but for the test of the first pass
    hook_pages(model, model.parts, window, check=lambda: None)

    def run():
        log.clear()
        model(torch.zeros(1))
        adviser.drain()
        return list(log)

    run.model = model
    return run, memory, told, window


def test_nothing_is_said_and_no_module_is_hooked_while_everything_fits():
    run, _, told, window = chain(room_pages=60)
    assert run() == [("use", i) for i in range(6)]
    assert not window.pieces[0].module._forward_hooks
    assert told.page_outs == []


def test_the_first_pass_leaves_room_for_what_it_may_allocate():
    run, _memory, _, window = chain(room_pages=FIRST_PASS_BYTES // PAGE + 40)
    window._passed = False
    run()
    assert window.plan.kept_bytes == 20 * PAGE
    run()
    assert window.plan.streamed_bytes == 0


def test_a_cold_start_reads_everything_ahead_and_gives_back_what_streams():
    run, memory, _, window = chain(room_pages=60)
    memory.resident_bytes = 0
    events = run()
    assert [index for word, index in events if word == "in"] == [0, 1, 2, 3, 4, 5, 0]
    assert not any(word == "out" for word, _ in events)
    memory.resident_bytes = 60 * PAGE
    run()
    assert not window.pieces[0].module._forward_hooks


def test_what_streams_from_now_on_goes_at_once():
    run, memory, _, _ = chain(room_pages=60)
    run()
    memory.room_pages = 40
    events = run()
    assert {index for word, index in events if word == "out"} >= {2, 3, 4, 5}


def test_what_streams_is_brought_in_before_and_given_back_behind_its_use():
    run, _, _, window = chain(room_pages=40)
    run()
    events = [event for _ in range(3) for event in run()]
    streamed = [i for i in range(6) if window.plan.streamed[i]]
    assert streamed == [2, 3, 4, 5]
    assert not any(word in ("in", "out") and index < 2 for word, index in events)
    for index in streamed:
        mine = [word for word, i in events if i == index]
        cycle = ["in", "use", "out"] * 4
        first = cycle.index(mine[0])
        assert mine == cycle[first : first + len(mine)]


def test_advice_follows_the_order_of_calls_once_it_is_known():
    run, _, _, window = chain(room_pages=40, order=(5, 4, 3, 2, 1, 0))
    for _ in range(4):
        events = run()
    assert [i for i in range(6) if window.plan.streamed[i]] == [0, 1, 2, 3]
    assert sum(word == "in" for word, _ in events) == 4


def test_a_shrinking_room_shrinks_what_is_kept_within_a_pass():
    run, memory, _, window = chain(room_pages=60)
    run()
    memory.room_pages = 40
    run()
    assert window.plan.kept_bytes == 20 * PAGE
    memory.room_pages = 5
    run()
    assert window.plan.kept_bytes == 0
    memory.room_pages = 60
    run()
    assert window.plan.streamed_bytes == 0
    run()  # the one before has brought in exactly what was missing
    assert not window.pieces[0].module._forward_hooks


def test_a_plan_that_fits_is_not_exchanged_for_one_that_keeps_little_more(monkeypatch):
    monkeypatch.setattr(pages_module, "SLACK_BYTES", 4 * PAGE)
    run, memory, _, window = chain(room_pages=44)
    run()
    run()
    plan = window.plan
    assert plan.kept_bytes == 20 * PAGE
    for within_the_slack in (42, 52):
        memory.room_pages = within_the_slack
        run()
        assert window.plan is plan
    memory.room_pages = 53
    run()
    assert window.plan.kept_bytes == 29 * PAGE
    memory.room_pages = 50
    run()
    assert window.plan.kept_bytes == 26 * PAGE


def test_what_is_given_back_is_verified():
    run, _memory, told, _ = chain(room_pages=40)
    for _ in range(3):
        run()
    assert told.page_outs
    assert all(requested == verified for requested, verified in told.page_outs)


def test_a_page_out_without_effect_is_told_of():
    run, _memory, told, window = chain(room_pages=40)
    window._resident = size_of
    for _ in range(3):
        run()
    assert all(verified == 0 for _, verified in told.page_outs)


def test_skipped_modules_give_their_pages_back():
    run, _, _, window = chain(room_pages=40)
    run()
    run()
    run.model.order = (0, 1, 4, 5)
    events = run()
    skipped = [event for event in events if event[1] == 2]
    assert skipped == [("out", 2), ("in", 2)], "on its way since the pass before, given back, then sent for again"
    assert set(window._ahead) == {2}


def test_an_unreadable_room_leaves_the_kernel_alone_is_warned_of_once_and_counted():
    warnings = []
    run, memory, told, _window = chain(room_pages=40, warn=warnings.append)
    memory.fails = True
    for _ in range(3):
        assert [event for event in run() if event[0] == "use"] == [("use", i) for i in range(6)]
    assert told.fallbacks == [Fallback.PREFETCH] * 3
    assert len(warnings) == 1


def test_what_a_pass_allocates_is_left_free_in_the_next():
    taken = []
    run, _, _, window = chain(room_pages=50, anonymous=lambda: 8 * PAGE if taken else 0)
    window.pieces[3].module.register_forward_hook(lambda *_: taken.append(True))
    run()
    assert window.plan.kept_bytes == 30 * PAGE
    taken.clear()
    run()
    assert window.plan.kept_bytes == 22 * PAGE


def group(*, limit, usage, reclaimable, mapped):
    return Group(Path("/x"), limit, usage, reclaimable, mapped)


def test_room_is_what_the_tightest_group_leaves_less_the_code_that_runs():
    room = room_of(10_000, [group(limit=2000, usage=1900, reclaimable=900, mapped=800)], 850, resident_bytes=600)
    assert room.available_bytes == 1000
    assert room.other_file_bytes == 200
    assert room.limited


def test_file_pages_that_another_group_pays_for_are_not_taken_off():
    room = room_of(10_000, [group(limit=2000, usage=1900, reclaimable=900, mapped=610)], 5000, resident_bytes=600)
    assert room.other_file_bytes == 10


def test_without_a_limit_the_machine_decides():
    room = room_of(700, [group(limit=None, usage=1900, reclaimable=900, mapped=800)], 850, resident_bytes=600)
    assert room.available_bytes == 700
    assert room.other_file_bytes == 250
    assert not room.limited


def test_page_tables_are_looked_at_again_only_when_file_pages_have_come_or_gone(tmp_path):
    class Counting(RoomReader):
        looks = 0

        def resident_bytes(self, spans):
            self.looks += 1
            return super().resident_bytes(spans)

    size = 16 << 20
    mapped, reader = MappedFile(tmp_path / "weights", size), Counting(os.getpid())
    weights = (mapped.span,)
    for _ in range(3):  # the code that this takes comes into memory
        assert reader.read(weights).resident_bytes == size
    reader.looks = 0
    for _ in range(3):
        assert reader.read(weights).resident_bytes == size
    assert reader.looks == 0
    page_out(mapped.address, PAGE)
    assert reader.read(weights).resident_bytes < size
    mapped.touch()
    assert reader.read(weights).resident_bytes == size
    assert reader.looks == 2
    reader.read((mapped.span,))
    assert reader.looks == 3, "other weights are another question"
