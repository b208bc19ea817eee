"""Products are taken together, in pieces and on lanes only where that changes no bit, whatever the kernels are."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable

import pytest
import torch
from sojourn.inference.adaln import lanes as lanes_module
from sojourn.inference.adaln import layers as layers_module
from sojourn.inference.adaln import trial
from sojourn.inference.adaln.lanes import Lanes
from sojourn.inference.adaln.layers import Product, Span
from sojourn.inference.adaln.trial import Trials, Verdict
from sojourn.inference.adaln.weights import Part
from torch.nn import functional

from tests.inference.adaln.toys import CPU, Injected, fresh_rows, make_rig

Linear = Callable[..., torch.Tensor]
STOCK: Linear = functional.linear
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HALVES = (Span(0, 64), Span(64, 128))


def product(inputs: int, dtype: torch.dtype, outputs: int = 128) -> Product:
    return Product(outputs=outputs, inputs=inputs, dtype=dtype, weight_at=0, bias_at=0)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A product of one order of additions, whatever the shape."""
    return in_order(x, weight, bias, range(x.shape[1]))


def another(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same product, added up in another order: a pair of terms comes last."""
    order = list(range(x.shape[1]))
    return in_order(x, weight, bias, order[2:] + order[:2])


def in_order(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, order: object) -> torch.Tensor:
    total = torch.zeros(x.shape[0], weight.shape[0])
    for index in order:  # type: ignore[attr-defined]
        total = total + x[:, index, None].float() * weight[:, index].float()
    return (total if bias is None else total + bias.float()).to(x.dtype)


def kernel(monkeypatch: pytest.MonkeyPatch, is_other: Callable[[torch.Tensor, torch.Tensor], bool]) -> list[int]:
    """Kernels that add up in another order for some products; returns the row counts that they are called with."""
    rows = []

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows.append(x.shape[0])
        return (another if is_other(x, weight) else exact)(x, weight, bias)

    monkeypatch.setattr(functional, "linear", linear)
    return rows


def verdict(dtype: torch.dtype, inputs: int = 64, *, count: int = 2) -> Verdict:
    return Trials().verdict(product(inputs, dtype), HALVES, [1, 2, 2, 3], Lanes(count), CPU)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [64, 65, 320])
def test_a_pair_of_terms_in_another_place_is_noticed(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, inputs: int
) -> None:
    kernel(monkeypatch, lambda x, weight: False)
    assert verdict(dtype, inputs) == Verdict(in_pieces=True, together=frozenset({1, 2, 3}))
    kernel(monkeypatch, lambda x, weight: x.shape[0] > 3)
    assert verdict(dtype, inputs) == Verdict(in_pieces=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_single_rows_that_have_a_kernel_of_their_own_stay_alone(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    kernel(monkeypatch, lambda x, weight: x.shape[0] == 1)
    assert verdict(dtype) == Verdict(in_pieces=True, together=frozenset({2, 3}))


def test_kernels_that_look_at_the_weights_extent_get_the_whole_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel(monkeypatch, lambda x, weight: weight.shape[0] < 128)
    assert verdict(torch.bfloat16) == Verdict(in_pieces=False)


def test_kernels_that_look_at_the_threads_compute_in_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel(monkeypatch, lambda x, weight: threading.current_thread() is not threading.main_thread())
    assert verdict(torch.bfloat16) == Verdict(in_pieces=False)


def test_one_row_at_one_place_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """As kernels do whose last block of rows is not full."""

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = exact(x, weight, bias)
        if x.shape[0] > 5:
            rows[-1] = another(x[-1:], weight, bias)
        return rows

    monkeypatch.setattr(functional, "linear", linear)
    assert verdict(torch.bfloat16) == Verdict(in_pieces=True, together=frozenset({1, 2}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [64, 320, 2688])
def test_most_outputs_show_another_order(dtype: torch.dtype, inputs: int) -> None:
    x, weight, bias = trial._numbers(product(inputs, dtype), 4, CPU)
    differs = exact(x, weight, bias) != another(x, weight, bias)
    assert differs.float().mean() > 0.4


def test_sums_of_few_terms_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = kernel(monkeypatch, lambda x, weight: False)
    assert verdict(torch.bfloat16, 63) == Verdict(in_pieces=False)
    assert rows == []


def test_a_shape_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = kernel(monkeypatch, lambda x, weight: False)
    trials = Trials()
    for counts, is_new in ([1, 2], True), ([2, 1], False), ([1, 2, 2], True), ([1], False):
        rows.clear()
        trials.verdict(product(64, torch.bfloat16), (Span(0, 128),), counts, Lanes(0), CPU)
        assert bool(rows) is is_new, counts


@pytest.mark.parametrize("is_by_count", [False, True])
def test_rows_are_the_stock_ones_whichever_way_they_are_made(
    monkeypatch: pytest.MonkeyPatch, is_by_count: bool
) -> None:
    """With kernels that take any rows alike, and with those that have an order for each row count."""
    rows = kernel(monkeypatch, lambda x, weight: is_by_count and x.shape[0] % 2 == 1)
    rig = make_rig()
    plans = [0.1], [0.2, 0.3], [0.4, 0.5], [0.6, 0.7, 0.8]
    rig.build(*plans)
    rows.clear()
    rig.cache.invalidate()
    rig.build(*plans)
    layers = len(rig.cache.slab.table.entries)
    # The embedder has a product for each plan too.
    assert len(rows) == len(plans) + layers * (3 if is_by_count else 1)
    for values in plans:
        for name, fresh in fresh_rows(rig.transformer, *values).items():
            assert torch.equal(rig.rows(name, *values), fresh), (name, values)


# Lanes, on torch's own kernels.


@pytest.fixture
def two_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers so small as those of a toy are divided too."""
    monkeypatch.setattr(layers_module, "PIECE_BYTES", 64)
    monkeypatch.setattr(lanes_module, "PIECE_BYTES", 64)
    monkeypatch.setattr(layers_module, "_OUTPUTS", 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def test_lanes_make_the_stock_rows_and_read_each_byte_once(two_lanes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    def spy(*args: torch.Tensor) -> torch.Tensor:
        threads.add(threading.current_thread().name)
        return STOCK(*args)

    monkeypatch.setattr(functional, "linear", spy)
    rig = make_rig()
    rig.source.cached = True
    plans = [0.1], [0.2, 0.3], [0.4, 0.5]
    rig.build(*plans)
    assert any(name.startswith("adaln-lane") for name in threads)
    assert len(rig.source.reads) > 2 * len(rig.cache.slab.table.entries)
    assert rig.counters.read_bytes == rig.cache.slab.table.weight_bytes
    for values in plans:
        for name, fresh in fresh_rows(rig.transformer, *values).items():
            assert torch.equal(rig.rows(name, *values), fresh), (name, values)


@pytest.mark.parametrize("is_cached", [True, False])
def test_an_error_on_a_lane_ends_the_build_on_all(two_lanes: None, is_cached: bool) -> None:
    rig = make_rig()
    rig.source.cached = is_cached
    rig.source.fail_at = "blocks.1.modulation.weight"
    with pytest.raises(Injected, match=r"blocks\.1"):
        rig.build([0.1], [0.2, 0.3])
    rig.check()
    rig.source.fail_at = None
    rig.build([0.1], [0.2, 0.3])
    assert rig.holds(0.1)


def test_of_what_is_not_in_memory_one_lane_reads_at_a_time_and_in_order(two_lanes: None) -> None:
    rig = make_rig()
    busy, order = threading.Lock(), []
    read = rig.source.read

    def alone(part: Part, into: memoryview) -> None:
        if part.name.endswith("bias"):  # read where a piece is taken
            return read(part, into)
        with contextlib.ExitStack() as reading:
            assert busy.acquire(blocking=False), "two lanes read at a time"
            reading.callback(busy.release)
            order.append((list(rig.source.tensors).index(part.name), part.first))
            time.sleep(0.002)
            return read(part, into)

    rig.source.read = alone  # type: ignore[method-assign]
    rig.build([0.3], [0.4])
    # But for a piece that a lane had taken when the other found the first one missing.
    assert sum(later < earlier for earlier, later in itertools.pairwise(order)) <= 1, order
    assert len(order) > len(rig.cache.slab.table.entries)
    assert sorted(rig.source.forgotten) == sorted(rig.source.reads)
    assert rig.counters.read_bytes == rig.cache.slab.table.weight_bytes
    for name, fresh in fresh_rows(rig.transformer, 0.3).items():
        assert torch.equal(rig.rows(name, 0.3), fresh), name


def test_a_lane_computes_with_one_thread_and_the_caller_with_as_many_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert Lanes(2).run(torch.get_num_threads) == 1
        assert torch.get_num_threads() == 2
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [2]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("inference", [True, False])
def test_a_lane_has_the_callers_mode(inference: bool) -> None:
    with torch.inference_mode(inference):
        assert Lanes(1).run(torch.is_inference_mode_enabled) is inference
        assert not Lanes(1).run(torch.is_grad_enabled)
