"""Components come and go as the stages of requests say, whoever else uses them."""

import pytest
from sojourn.inference.offload.lifecycle import LifeCycle, Situation, declare
from sojourn.inference.offload.observer import Silent
from sojourn.inference.offload.spans import Span
from sojourn.inference.watch import Stage

STAGES = [
    (Stage.TEXT_ENCODE, ["text_encoder"]),
    (Stage.VAE_ENCODE, ["vae"]),
    (Stage.DENOISE, ["transformer"]),
    (Stage.DECODE, ["vae", "audio_vae"]),
]


class Log:
    def __init__(self, name, events, fails=False):
        self.name, self.events, self.fails = name, events, fails

    def prepare(self):
        if self.fails:
            raise RuntimeError("cut")
        self.events.append(("prepare", self.name))

    def prefetch(self):
        self.events.append(("prefetch", self.name))

    def finish(self, *, room_bytes, in_use, needed_again):
        self.events.append(("pause" if needed_again else "finish", self.name, room_bytes, [*in_use]))

    def host_spans(self):
        return [Span(len(self.name), len(self.name) + 1)]

    def close(self):
        self.events.append(("close", self.name))


@pytest.fixture
def events():
    return []


def life(events, **rest):
    names = ("text_encoder", "vae", "transformer", "audio_vae")
    return LifeCycle({name: Log(name, events) for name in names}, **rest)


def words(events, *kinds):
    return [event[:2] for event in events if event[0] in kinds]


def run(life, uses=None):
    with life.open(declare(STAGES) if uses is None else uses) as request:
        for stage, _ in STAGES:
            request.begin(stage)


def test_each_component_comes_with_its_stage_and_goes_with_the_next(events):
    run(life(events))
    assert words(events, "prepare", "finish") == [
        ("prepare", "text_encoder"),
        ("finish", "text_encoder"),
        ("prepare", "vae"),
        ("prepare", "transformer"),
        ("finish", "transformer"),
        ("prepare", "audio_vae"),
        ("prepare", "vae"),
        ("finish", "audio_vae"),
        ("finish", "vae"),
    ]


def test_what_was_kept_for_a_later_stage_goes_if_the_request_breaks_off_before(events):
    with life(events).open(declare(STAGES)) as request:
        request.begin(Stage.VAE_ENCODE)
        request.begin(Stage.DENOISE)
    assert words(events, "finish") == [("finish", "transformer"), ("finish", "vae")]


def test_what_the_same_request_needs_again_is_not_given_back_in_between(events):
    uses = declare(STAGES)
    assert {use.component for use in uses if use.needed_again} == {"vae"}
    run(life(events))
    assert words(events, "pause") == [("pause", "vae")]
    finished = [event[1] for event in events if event[0] == "finish"]
    assert finished.count("vae") == 1
    assert finished.index("transformer") < finished.index("vae")


def test_neighbouring_stages_of_one_component_are_one_interval(events):
    uses = declare([(Stage.VAE_ENCODE, ["vae"]), (Stage.DENOISE, ["vae", "transformer"]), (Stage.DECODE, ["vae"])])
    cycle = life(events)
    with cycle.open(uses) as request:
        for stage in (Stage.VAE_ENCODE, Stage.DENOISE, Stage.DECODE):
            request.begin(stage)
    assert words(events, "prepare", "finish").count(("prepare", "vae")) == 1
    assert events[-1][:2] == ("finish", "vae")


def test_the_next_stage_is_prefetched_while_this_one_runs(events):
    run(life(events))
    assert events.index(("prefetch", "transformer")) < events.index(("prepare", "transformer"))


def test_a_component_goes_when_the_last_request_is_done_with_it(events):
    cycle = life(events)
    first, second = cycle.open(declare(STAGES)), cycle.open(declare(STAGES))
    first.begin(Stage.DENOISE)
    second.begin(Stage.DENOISE)
    first.close()
    assert ("finish", "transformer") not in words(events, "finish")
    second.close()
    assert words(events, "prepare").count(("prepare", "transformer")) == 1
    assert words(events, "finish")[-1] == ("finish", "transformer")


def break_off(cycle):
    with cycle.open(declare(STAGES)) as request:
        request.begin(Stage.VAE_ENCODE)
        raise RuntimeError("on purpose")


def test_a_request_that_breaks_off_gives_everything_back(events):
    cycle = life(events)
    with pytest.raises(RuntimeError, match="on purpose"):
        break_off(cycle)
    assert cycle.in_use() == frozenset()
    assert ("finish", "vae") in words(events, "finish"), "needed again, but by a request that is gone"


def test_a_component_whose_weights_are_gone_fails_the_request_and_holds_nothing(events):
    cycle = life(events)
    cycle.strategies["transformer"].fails = True
    with pytest.raises(RuntimeError, match="cut"):
        run(cycle)
    assert cycle.in_use() == frozenset()


def test_what_goes_is_told_what_may_stay_and_what_others_need(events):
    asked = []

    def room(situation):
        asked.append(situation)
        return 7

    cycle = life(events, room=room)
    with cycle.open(declare([(Stage.DENOISE, ["transformer", "vae"]), (Stage.DECODE, ["vae"])])) as request:
        request.begin(Stage.DENOISE)
        request.begin(Stage.DECODE)
    finish = next(event for event in events if event[:2] == ("finish", "transformer"))
    assert finish[2:] == (7, [Span(3, 4)])
    assert asked[0].stage is Stage.DECODE


def test_every_change_of_the_situation_is_told(events):
    situations = []
    run(life(events, changed=situations.append))
    assert [s.stage for s in situations] == [*(stage for stage, _ in STAGES), None]
    assert situations[0].needed_now == {"text_encoder"}
    assert situations[0].needed_next == {"vae"}
    assert situations[2].next_stage is Stage.DECODE
    assert situations[-1] == Situation()


def test_reads_are_told_by_stage(events):
    told = {}

    class Reads(Silent):
        def stage_read(self, *, stage, size_bytes):
            told[stage] = size_bytes

    readings = iter([0, 10, 30, 60, 100])
    run(life(events, read_bytes=lambda: next(readings), observer=Reads()))
    assert told == {"text_encode": 10, "vae_encode": 20, "denoise": 30, "decode": 40}
