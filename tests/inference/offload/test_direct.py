"""Weights that stream around the page cache are the same bytes, and the way back through it is always open."""

import mmap
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sojourn.inference.errors import ModelError
from sojourn.inference.offload.assemble import own_mappings, paged
from sojourn.inference.offload.direct import DirectFiles, DirectReader, place
from sojourn.inference.offload.observer import Fallback, Silent
from sojourn.inference.offload.pages import FIRST_PASS_BYTES
from sojourn.inference.offload.pieces import find_pieces
from sojourn.inference.offload.room import Room
from sojourn.inference.offload.settings import OffloadSettings, ResidentPolicy
from sojourn.inference.offload.spans import Span, size_of, whole_pages
from torch import nn

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGESIZE")


@given(sizes=st.lists(st.integers(1, 5 * PAGE), min_size=1, max_size=6), start=st.integers(0, PAGE), data=st.data())
def test_every_byte_of_a_weight_that_streams_lands_once_where_it_belongs(sizes, start, data):
    weights, at = [], 8 * PAGE + start
    for size in sizes:
        weights.append(Span(at, at + size))
        at += size + data.draw(st.integers(0, 2 * PAGE))
    pages = [page for span in whole_pages(weights) for page in range(span.start, span.end, PAGE)]
    streamed = [Span(page, page + PAGE) for page in pages if data.draw(st.booleans())]
    placement = place(weights, streamed)
    landed = bytearray(placement.size_bytes)
    for address, offset, length in (*placement.reads, *placement.copies):
        assert (address - offset) % PAGE == 0
        landed[offset : offset + length] = bytes(a + 1 for a in landed[offset : offset + length])
    assert all(address % PAGE == 0 == length % PAGE for address, _, length in placement.reads), "as O_DIRECT wants it"
    assert sum(length for _, _, length in placement.reads) == size_of(streamed)
    for weight, offset in placement.offsets.items():
        assert set(landed[offset : offset + weight.size_bytes]) == {1}
    touched = [w for w in weights if any(s.start < w.end and s.end > w.start for s in streamed)]
    assert list(placement.offsets) == touched, "a weight of which nothing streams is left where it is"


class Net(nn.Module):
    """Layers of a megabyte and a bit, at odd addresses of a file."""

    def __init__(self, view: memoryview, layers: int = 6, width: int = 724) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers))
        size = 2 * width * width
        for i, layer in enumerate(self.layers):
            data = torch.frombuffer(view[24 + i * size : 24 + (i + 1) * size], dtype=torch.bfloat16)
            layer.weight = nn.Parameter(data.view(width, width), requires_grad=False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "weights"
    torch.manual_seed(0)
    data = torch.randn(724 * 724 * 6 + 4096).bfloat16() / 16
    path.write_bytes(data.view(torch.uint8).numpy().tobytes())
    return path


@pytest.fixture
def net(path):
    with path.open("rb") as file:
        return Net(memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)))


class Told(Silent):
    def __init__(self):
        self.direct, self.fallbacks = 0, []

    def read_directly(self, *, component, size_bytes):
        self.direct += size_bytes

    def fell_back(self, *, reason):
        self.fallbacks.append(reason)


class Rooms:
    """Room that can be set; the rest is as this process is."""

    def __init__(self, available_bytes):
        self.available_bytes = available_bytes

    def read(self, spans):
        return Room(available_bytes=self.available_bytes, other_file_bytes=0, resident_bytes=0, limited=True)

    def resident_bytes(self, spans):
        return 0

    def anonymous_bytes(self):
        return 0


def under_pressure(net, policy=ResidentPolicy.STRIDED, mib=8):
    told, warnings, rooms = Told(), [], Rooms(mib * MIB)
    strategy = paged(
        "net", net, settings=OffloadSettings(policy=policy), layerwise=True, reader=rooms, observer=told,
        warn=warnings.append,
    )  # fmt: skip
    return strategy, told, warnings, rooms


X = torch.linspace(-1, 1, 724, dtype=torch.bfloat16)[None]


@pytest.mark.parametrize("policy", ResidentPolicy)
@pytest.mark.parametrize("mib", [7, 10, 11])
def test_output_is_bit_identical_while_weights_stream_around_the_cache(net, policy, mib):
    expected = net(X)
    strategy, told, warnings, rooms = under_pressure(net, policy, mib)
    where = [layer.weight.data_ptr() for layer in net.layers]
    with torch.inference_mode():
        for _ in range(4):
            assert torch.equal(net(X), expected)
        assert told.direct > 0
        rooms.available_bytes = 7 * MIB
        for _ in range(3):
            assert torch.equal(net(X), expected)
        rooms.available_bytes = 1 << 40
        for _ in range(2):
            assert torch.equal(net(X), expected)
    assert strategy.window.plan.streamed_bytes == 0
    assert [layer.weight.data_ptr() for layer in net.layers] == where, "between passes weights lie in the mapping"
    assert warnings == []
    strategy.close()
    assert torch.equal(net(X), expected)


def test_what_streams_is_computed_on_in_buffers_and_they_go_when_the_use_ends(net):
    strategy, _, _, _ = under_pressure(net)
    mapped, seen = {layer.weight.data_ptr() for layer in net.layers}, set()
    for layer in net.layers:
        layer.register_forward_hook(lambda module, *_: seen.add(module.weight.data_ptr()))
    for _ in range(2):
        seen.clear()
        net(X)
    held = strategy.window.buffers()
    assert all(any(b.data_ptr() <= address < b.data_ptr() + b.numel() for b in held) for address in seen - mapped), (
        "they are reported"
    )
    assert seen - mapped
    strategy.finish(room_bytes=None, in_use=(), needed_again=False)
    assert strategy.window.buffers() == []
    net(X)
    assert strategy.window.buffers()
    strategy.close()


def test_a_pass_that_fails_half_way_leaves_every_weight_in_the_mapping(net):
    expected = net(X)
    strategy, _, _, _ = under_pressure(net)
    where = [layer.weight.data_ptr() for layer in net.layers]
    net(X)

    def fail(*_):
        raise RuntimeError("half way")

    handle = net.layers[3].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="half way"):
        net(X)
    handle.remove()
    assert [layer.weight.data_ptr() for layer in net.layers] == where
    assert torch.equal(net(X), expected)
    strategy.close()


def test_a_file_that_cannot_be_opened_so_is_streamed_through_the_cache_warned_of_once_and_counted(net, path):
    expected = net(X)
    path.unlink()
    strategy, told, warnings, _ = under_pressure(net)
    for _ in range(3):
        assert torch.equal(net(X), expected)
    assert strategy.window.plan.streamed_bytes > 0
    assert told.direct == 0
    assert told.fallbacks == [Fallback.DIRECT]
    assert len(warnings) == 1
    assert "go through the page cache" in warnings[0]
    strategy.close()


def test_a_read_that_fails_falls_back_within_the_pass(net):
    expected = net(X)
    strategy, told, warnings, _ = under_pressure(net)
    assert torch.equal(net(X), expected)
    folder = os.open("/", os.O_RDONLY)
    for file in strategy.window._direct._files._files:
        os.dup2(folder, file.descriptor)  # whatever is read of it now fails
    os.close(folder)
    for _ in range(2):
        assert torch.equal(net(X), expected)
    assert told.fallbacks == [Fallback.DIRECT]
    assert len(warnings) == 1
    strategy.close()


def test_a_file_put_in_its_place_is_not_read(net, path, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)
    spans = [span for piece in find_pieces(net.layers, own_mappings()) for span in piece.spans]
    with pytest.raises(OSError, match="no longer the file"):
        DirectFiles(spans, own_mappings())


def test_a_cut_file_is_named_instead_of_read(net, path):
    pieces = find_pieces(net.layers, own_mappings())
    reader = DirectReader(DirectFiles([span for piece in pieces for span in piece.spans], own_mappings()))
    last = pieces[-1]
    streamed = last.spans
    placement = place(list(last.weights), streamed)
    reader.open(1, placement.size_bytes)
    os.truncate(path, 5 * MIB)
    whole = place([Span(*streamed[0])], streamed)  # whole pages alone: nothing is copied from what is cut
    landing = reader.fetch(0, {Span(*streamed[0]): last.module.weight}, _without_bindings(whole))
    with pytest.raises(ModelError, match=f"cut to {5 * MIB} bytes") as caught:
        landing.bind()
    assert caught.value.reason == "WeightsTruncated"
    assert caught.value.path == path
    reader.close()


def _without_bindings(placement):
    return type(placement)(size_bytes=placement.size_bytes, offsets={}, reads=placement.reads, copies=placement.copies)


def test_room_is_left_for_the_first_pass_too(net):
    strategy, _, _, _ = under_pressure(net, mib=FIRST_PASS_BYTES // MIB + 5)
    net(X)
    assert strategy.window.plan.streamed_bytes > 0
    strategy.close()
