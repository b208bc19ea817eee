"""What streams through the window is bit-equal to what stays, and no order of events can make it otherwise."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn.inference.offload.courier import Courier
from sojourn.inference.offload.hosting import HostTier
from sojourn.inference.offload.observer import Fallback, Silent
from sojourn.inference.offload.settings import ResidentPolicy, streamed_layers
from sojourn.inference.offload.stack import find_layers, stack_layers
from sojourn.inference.offload.stores import mapped_store, pageable_store
from sojourn.inference.offload.streams import InlineStreams, RaceFound, RecordingStreams
from sojourn.inference.offload.window import LayerWindow, hook

from tests.inference.offload.toys import WIDTH, Reads, Stack, on_a_mapping, tied


class Counts(Silent):
    def __init__(self):
        self.fallbacks = []
        self.copied_bytes = 0

    def copied(self, *, component, size_bytes):
        self.copied_bytes += size_bytes

    def fell_back(self, *, reason):
        self.fallbacks.append(reason)


def windowed(model, streams, *, prefetch=1, resident=0, policy=ResidentPolicy.LEADING, tier=HostTier.PAGEABLE, **rest):
    stack = stack_layers(model, find_layers(model))
    originals = {name: parameter.data for name, parameter in stack.parameters.items()}
    stores = [mapped_store(unit.layout, originals) for unit in stack.units]
    if tier is HostTier.PAGEABLE:
        stores = [pageable_store(store) for store in stores]
    layers = len(stack.layers)
    window = LayerWindow(
        *("toy", stack, stores, streams),
        streamed=streamed_layers(layers, min(resident, layers), policy),
        prefetch=prefetch,
        **rest,
    )
    return window, hook(window)


def run(model, streams, x):
    with torch.inference_mode(), Reads(streams):
        return model(x)


def run_twice(model, streams, x):
    run(model, streams, x)
    run(model, streams, x)


MODELS = {
    "plain": lambda: Stack(6),
    "tied": tied,
    "reversed": lambda: Stack(5, order=(4, 3, 2, 1, 0)),
    "repeats": lambda: Stack(4, order=(0, 1, 0, 2, 3, 3, 1)),
    "two": lambda: Stack(2),
}


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(MODELS)),
    prefetch=st.integers(1, 7),
    resident=st.integers(0, 6),
    policy=st.sampled_from(ResidentPolicy),
    tier=st.sampled_from([HostTier.PAGEABLE, HostTier.MAPPED]),
    courier=st.booleans(),
    mapped=st.booleans(),
    passes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    seed=st.integers(0, 2**31),
)
def test_output_is_bit_identical_in_every_mode(kind, prefetch, resident, policy, tier, courier, mapped, passes, seed):
    torch.manual_seed(seed)
    model = MODELS[kind]().requires_grad_(False)
    model = on_a_mapping(model) if mapped and kind != "tied" else model
    x = torch.randn(3, WIDTH)
    expected = run(model, RecordingStreams(), x)
    streams = RecordingStreams()
    carrier = Courier([torch.empty(1 << 14, dtype=torch.uint8) for _ in range(2)], streams) if courier else None
    window, _ = windowed(
        model, streams, prefetch=prefetch, resident=resident, policy=policy, tier=tier, courier=carrier
    )
    for count in passes:
        window.prepare()
        for _ in range(count):
            assert torch.equal(run(model, streams, x), expected)
        window.release()
        assert window.device_bytes() == 0
    if carrier:
        assert not carrier.retired
        carrier.close()


class Forgetful(RecordingStreams):
    """Drops one of the calls that keep order."""

    def __init__(self, forgotten):
        super().__init__()
        self.forgotten = forgotten

    def copies_wait(self):
        if self.forgotten != "copies_wait":
            super().copies_wait()

    def mark(self):
        return 0 if self.forgotten == "mark" else super().mark()

    def compute_waits(self, mark):
        if self.forgotten != "compute_waits":
            super().compute_waits(mark)


@pytest.mark.parametrize("forgotten", ["copies_wait", "mark", "compute_waits"])
def test_a_forgotten_wait_or_mark_is_found(forgotten, seed):
    streams = Forgetful(forgotten)
    model = Stack(5).requires_grad_(False)
    window, _ = windowed(model, streams)
    x = torch.randn(3, WIDTH)
    window.prepare()
    with pytest.raises(RaceFound):
        run_twice(model, streams, x)


class HostRace(RecordingStreams):
    def host_waits_for(self, mark):
        pass


def test_a_forgotten_wait_for_a_pinned_slot_is_found(seed):
    model = Stack(5).requires_grad_(False)
    x = torch.randn(3, WIDTH)
    expected = run(model, RecordingStreams(), x)
    streams = HostRace()
    courier = Courier([torch.empty(1 << 14, dtype=torch.uint8)], streams)
    window, _ = windowed(model, streams, prefetch=3, tier=HostTier.MAPPED, courier=courier)
    window.prepare()
    assert not torch.equal(run(model, streams, x), expected)
    courier.close()


def test_the_device_holds_the_residents_and_the_window_and_no_more(seed):
    model = Stack(10).requires_grad_(False)
    streams = RecordingStreams()
    window, _ = windowed(model, streams, prefetch=2, resident=3)
    x = torch.randn(3, WIDTH)
    held = []
    for layer in model.blocks:
        layer.register_forward_pre_hook(lambda *_: held.append(window.held_layers()))
    window.prepare()
    for _ in range(2):
        run(model, streams, x)
    assert all({0, 1, 2} <= set(layers) for layers in held)
    assert max(map(len, held)) == 3 + 1 + 2


def test_prefetch_follows_the_order_of_calls_once_it_is_known(seed):
    model = Stack(6, order=(5, 4, 3, 2, 1, 0)).requires_grad_(False)
    streams = RecordingStreams()
    counts = Counts()
    window, _ = windowed(model, streams, observer=counts)
    x = torch.randn(3, WIDTH)
    window.prepare()
    run(model, streams, x)
    first = counts.copied_bytes
    run(model, streams, x)
    run(model, streams, x)
    # Once known, nothing is fetched that is not used: two passes copy twice the layers, the head being there already.
    assert counts.copied_bytes - first == 2 * sum(unit.layout.total_bytes for unit in window.stack.units)


def test_skipped_layers_give_their_early_fetch_back(seed):
    model = Stack(8).requires_grad_(False)
    x = torch.randn(3, WIDTH)
    streams = RecordingStreams()
    window, _ = windowed(model, streams, prefetch=2)
    window.prepare()
    for order in (range(8), (0, 1, 6, 7), (0,), (0, 7), (7, 2), range(8)):
        model.order = order
        held = []
        handles = [
            b.register_forward_pre_hook(lambda *_, held=held: held.append(window.held_layers())) for b in model.blocks
        ]
        assert torch.isfinite(run(model, streams, x)).all()
        assert max(map(len, held)) <= 3
        assert len(window.held_layers()) <= 2
        for handle in handles:
            handle.remove()


def test_a_pass_that_fails_half_way_leaves_nothing_behind(seed):
    model = Stack(5).requires_grad_(False)
    x = torch.randn(3, WIDTH)
    expected = run(model, RecordingStreams(), x)
    streams = RecordingStreams()
    window, _ = windowed(model, streams)
    window.prepare()

    def fail(*_):
        raise RuntimeError("on purpose")

    handle = model.blocks[2].inner.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        run(model, streams, x)
    handle.remove()
    assert torch.equal(run(model, streams, x), expected)
    assert len(window.held_layers()) <= 2
    window.release()
    assert window.held_layers() == ()


class NoRoom(RecordingStreams):
    """Has no memory for what nobody waits for yet."""

    def __init__(self, allowed):
        super().__init__()
        self.allowed = allowed

    def allocate(self, size_bytes):
        self.allowed -= 1
        if self.allowed == 0:
            raise MemoryError("the device is full")
        return super().allocate(size_bytes)


@pytest.mark.parametrize("allowed", [1, 2, 3, 4, 7])
def test_a_failed_prefetch_becomes_a_synchronous_copy_warned_of_once(allowed, seed):
    model = Stack(5).requires_grad_(False)
    x = torch.randn(3, WIDTH)
    expected = run(model, RecordingStreams(), x)
    streams, counts, warnings = NoRoom(allowed), Counts(), []
    window, _ = windowed(model, streams, observer=counts, warn=warnings.append)
    window.prepare()
    assert torch.equal(run(model, streams, x), expected)
    assert torch.equal(run(model, streams, x), expected)
    assert counts.fallbacks == [Fallback.PREFETCH]
    assert len(warnings) == 1


def test_a_broken_courier_is_retired_and_the_output_stays_right(seed):
    model = Stack(5).requires_grad_(False)
    x = torch.randn(3, WIDTH)
    expected = run(model, RecordingStreams(), x)
    streams, counts, warnings = RecordingStreams(), Counts(), []
    loads = []

    def populate(run):
        loads.append(run)
        if len(loads) == 9:
            raise OSError("the disk is gone")

    courier = Courier([torch.empty(1 << 14, dtype=torch.uint8) for _ in "ab"], streams, populate=populate)
    window, _ = windowed(
        model, streams, tier=HostTier.MAPPED, courier=courier, observer=counts, warn=warnings.append, prefetch=2
    )
    for _ in range(2):
        window.prepare()
        assert torch.equal(run(model, streams, x), expected)
        window.release()
    assert courier.retired
    assert set(counts.fallbacks) == {Fallback.PREFETCH}
    assert len(warnings) == 1
    courier.close()


def test_tied_weights_are_copied_once_and_stay_while_any_user_stays(seed):
    model = tied().requires_grad_(False)
    stack = stack_layers(model, find_layers(model))
    shared = [unit for unit in stack.units if len(unit.layers) > 1]
    assert sorted(sorted(unit.layers) for unit in shared) == [[0, 1], [2, 3]]
    assert "blocks.0.scale" not in stack.parameters, "it is the embedding's bias too, so it never leaves the device"
    streams = RecordingStreams()
    window, _ = windowed(model, streams, prefetch=1)
    x = torch.randn(3, WIDTH)
    pointers = []
    for i in (0, 1):
        model.blocks[i].register_forward_pre_hook(lambda module, _: pointers.append(module.inner.weight.data_ptr()))
    window.prepare()
    run(model, streams, x)
    assert pointers[0] == pointers[1]


def test_strides_and_alignment_survive_the_host_store(seed):
    model = Stack(3).requires_grad_(False)
    before = {name: (p.stride(), p.data.clone()) for name, p in model.named_parameters()}
    window, _ = windowed(model, InlineStreams(torch.device("cpu")), prefetch=3)
    window.prepare()
    for i in range(3):
        window.enter(i)
    for name, parameter in window.stack.parameters.items():
        assert parameter.stride() == before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert parameter.data_ptr() % 32 == 0


def test_streamed_parameters_are_placeholders_of_one_element_per_dtype(seed):
    model = Stack(3).requires_grad_(False)
    window, _ = windowed(model, RecordingStreams())
    streamed = list(window.stack.parameters.values())
    assert all(parameter.shape == (1,) for parameter in streamed)
    assert len({parameter.data_ptr() for parameter in streamed}) == len({parameter.dtype for parameter in streamed})
    assert model.blocks[0].shift.shape == (WIDTH,), "buffers do not stream"


def test_undoing_the_hooks_leaves_the_module_alone(seed):
    model = Stack(3).requires_grad_(False)
    window, undo = windowed(model, RecordingStreams())
    undo()
    assert not model._forward_pre_hooks
    assert not model.blocks[0]._forward_hooks
    assert window.held_layers() == ()
