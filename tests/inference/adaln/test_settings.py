"""Every setting: refused clearly when wrong, and with an effect when right."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from sojourn.inference.adaln.caches import PlanCaches
from sojourn.inference.adaln.counters import Counters, Result
from sojourn.inference.adaln.families import MINIMAX_H3
from sojourn.inference.adaln.refusals import ModelReason, ModelRefused, SettingRefused
from sojourn.inference.adaln.replace import projections_of, stand_ins
from sojourn.inference.adaln.settings import Mode, PlanCacheSettings, Precision
from sojourn.inference.adaln.table import Projection, Table
from sojourn.inference.adaln.worth import check_worth, slab_bytes
from sojourn.inference.offload.options import OffloadOptions
from sojourn.inference.pipeline import DeviceChoice, Pipeline, load_pipeline
from sojourn.inference.requests import OutputFormat

ON = PlanCacheSettings(mode=Mode.ON, host_bytes=10_000_000)
LATENTS = (OutputFormat.LATENTS,)


def load(folder: Path, settings: PlanCacheSettings, counters: Counters | None = None) -> Pipeline:
    return load_pipeline(folder, device=DeviceChoice.CPU, plan_settings=settings, plan_observer=counters)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("mode", "maybe", "--adaln-cache is 'maybe': must be one of on, off, auto"),
        ("precision", "fp64", "--adaln-precision is 'fp64': must be one of match, fp32"),
        ("plans", 0, "--adaln-plans is 0: must be a whole number of at least 1"),
        ("plans", 1.5, "--adaln-plans is 1.5"),
        ("plans", True, "--adaln-plans is True"),
        ("width", -1, "--adaln-plan-width is -1"),
        ("host_bytes", -1, "--adaln-host-bytes is -1: must be a whole number of at least 0"),
        ("host_bytes", float("nan"), "--adaln-host-bytes is nan"),
        ("store_bytes", 0, "--adaln-store-bytes is 0"),
        ("store", Path(__file__), "--adaln-store is .*is a file; name a directory"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_setting(field: str, value: Any, message: str) -> None:
    with pytest.raises(SettingRefused, match=message):
        PlanCacheSettings(**{field: value})


def test_words_from_a_command_line_are_taken() -> None:
    settings = PlanCacheSettings(mode="on", precision="fp32")  # type: ignore[arg-type]
    assert (settings.mode, settings.precision) == (Mode.ON, Precision.FP32)


def test_off_loads_everything_and_says_so(tiny_folder: Path) -> None:
    counters = Counters()
    pipeline = load(tiny_folder, PlanCacheSettings(mode=Mode.OFF), counters)
    assert not pipeline.plans.transformers
    assert not stand_ins(pipeline.components["transformer"].value)
    assert counters.description is not None
    assert (counters.description.mode, counters.description.off_reason) == ("off", "setting")


def test_auto_is_off_where_rows_cost_more_than_weights_and_on_where_they_cost_less(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    counters = Counters()
    pipeline = load(tiny_folder, PlanCacheSettings(), counters)
    assert not pipeline.plans.transformers
    assert pipeline.plans.off_reason is ModelReason.COSTS_MORE
    (said,) = [record for record in caplog.records if record.message == "AdaLN plan cache off"]
    assert said.reason == "costs_more"  # type: ignore[attr-defined]
    assert "64 plans of 4 rows take" in said.detail  # type: ignore[attr-defined]
    small = load(tiny_folder, PlanCacheSettings(plans=4, width=2), counters)
    assert set(small.plans.transformers) == {"transformer", "transformer_ref"}
    assert counters.description is not None
    assert counters.description.off_reason == ""
    assert caplog.messages.count("AdaLN plan cache on") == 1


def test_on_is_on_though_rows_cost_more(tiny_folder: Path) -> None:
    assert set(load(tiny_folder, ON).plans.transformers) == {"transformer", "transformer_ref"}


def test_the_break_even_of_minimax_h3_is_at_2689_rows() -> None:
    with torch.device("meta"):
        transformer = MiniMaxH3Transformer3DModel(num_layers=2).to(torch.bfloat16)
    table = Table.of(projections_of(transformer, MINIMAX_H3))
    auto = PlanCacheSettings()
    check_worth(auto, MINIMAX_H3, table)
    check_worth(replace(auto, plans=2688, width=1), MINIMAX_H3, table)
    with pytest.raises(ModelRefused, match="lower --adaln-plans or --adaln-plan-width") as caught:
        check_worth(replace(auto, plans=2689, width=1), MINIMAX_H3, table)
    assert caught.value.reason is ModelReason.COSTS_MORE


def test_what_minimax_h3_saves_at_its_released_size() -> None:
    with torch.device("meta"):
        transformer = MiniMaxH3Transformer3DModel().to(torch.bfloat16)
    table = Table.of(projections_of(transformer, MINIMAX_H3))
    assert table.weight_bytes == 26_078_739_456
    assert table.row_bytes == 9_698_304
    assert slab_bytes(table, plans=64, width=4) == 64 * (4 * 9_698_304 + 8)


def test_auto_is_off_where_each_prompt_has_rows_of_its_own() -> None:
    table = Table.of({"p": Projection(width=64, inputs=4096, dtype=torch.bfloat16, bias=True)})
    with pytest.raises(ModelRefused, match="depend on the prompt") as caught:
        check_worth(PlanCacheSettings(plans=1), replace(MINIMAX_H3, reusable=False), table)
    assert caught.value.reason is ModelReason.ROWS_NOT_REUSED


def test_plans_and_width_are_those_of_the_slab(tiny_folder: Path) -> None:
    slab = load(tiny_folder, replace(ON, plans=7, width=3)).plans.transformers["transformer"].cache.slab
    assert slab.lengths.shape == (7,)
    assert {rows.shape[:2] for rows in slab.rows.values()} == {(7, 3)}


def test_host_bytes_are_shared_by_the_transformers(tiny_folder: Path) -> None:
    page = load(tiny_folder, ON).plans.transformers["transformer"].cache.slab.table.row_bytes
    for host_bytes, pages in ((0, 0), (2 * page, 1), (10 * page + 1, 5)):
        pipeline = load(tiny_folder, replace(ON, host_bytes=host_bytes))
        assert {part.cache.host.capacity for part in pipeline.plans.transformers.values()} == {pages}


def test_the_host_tier_takes_no_more_than_the_memory_plan_leaves(tiny_folder: Path) -> None:
    for memory, has_pages in ((8 << 30, True), (2 << 30, False)):
        asked = OffloadOptions(host_memory_bytes=memory)
        pipeline = load_pipeline(tiny_folder, device=DeviceChoice.CPU, plan_settings=ON, offload=asked)
        assert {part.cache.host.capacity > 0 for part in pipeline.plans.transformers.values()} == {has_pages}


def test_precision_changes_the_rows(
    tiny_folder: Path, make_request: Callable[..., Any], make_watch: Callable[..., Any]
) -> None:
    rows = {}
    for precision in Precision:
        pipeline = load(tiny_folder, replace(ON, precision=precision))
        pipeline.run_clip(make_request(outputs=LATENTS), 0, make_watch())
        rows[precision] = pipeline.plans.transformers["transformer"].cache.slab.rows[torch.bfloat16][0, 0]
    assert not torch.equal(rows[Precision.MATCH], rows[Precision.FP32])
    torch.testing.assert_close(rows[Precision.MATCH], rows[Precision.FP32], rtol=0.05, atol=0.05)


def test_the_store_and_its_cap_have_an_effect(
    tiny_folder: Path, tmp_path: Path, make_request: Callable[..., Any], make_watch: Callable[..., Any]
) -> None:
    load(tiny_folder, replace(ON, store=tmp_path / "a")).run_clip(make_request(outputs=LATENTS), 0, make_watch())
    load(tiny_folder, replace(ON, store=tmp_path / "b", store_bytes=1)).run_clip(
        make_request(outputs=LATENTS), 0, make_watch()
    )
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == 1
    assert not list((tmp_path / "b").glob("*.safetensors"))
    other = load(tiny_folder, replace(ON, store=tmp_path / "a", precision=Precision.FP32))
    other.run_clip(make_request(outputs=LATENTS), 0, make_watch())
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == 2


def test_a_compiled_transformer_is_refused_at_the_request_under_match_alone(
    tiny_folder: Path, make_request: Callable[..., Any], make_watch: Callable[..., Any]
) -> None:
    for precision in Precision:
        counters = Counters()
        pipeline = load(tiny_folder, replace(ON, precision=precision), counters)
        block = pipeline.components["transformer"].value.transformer_blocks[0]
        block._compiled_call_impl = block._call_impl
        if precision is Precision.MATCH:
            with pytest.raises(ModelRefused, match="is compiled"):
                pipeline.run_clip(make_request(outputs=LATENTS), 0, make_watch())
            assert counters.requests[Result.BUILT] == 0
        else:
            pipeline.run_clip(make_request(outputs=LATENTS), 0, make_watch())


def test_on_without_anything_to_cache_does_not_load() -> None:
    with pytest.raises(ModelRefused, match="no component with modulation projections"):
        PlanCaches(PlanCacheSettings(mode=Mode.ON), torch.device("cpu")).open({})
    caches = PlanCaches(PlanCacheSettings(mode=Mode.AUTO), torch.device("cpu"))
    caches.open({})
    assert caches.off_reason is ModelReason.NO_PROJECTION


def test_on_names_the_class_that_has_no_projection() -> None:
    from sojourn.inference.loading.components import Component

    helios = Component(name="transformer", class_name="HeliosTransformer3DModel", value=None)
    text = Component(name="text_encoder", class_name="UMT5EncoderModel", value=None)
    with pytest.raises(ModelRefused, match="HeliosTransformer3DModel has no modulation projection per block"):
        PlanCaches(PlanCacheSettings(mode=Mode.ON), torch.device("cpu")).open(
            {"text_encoder": text, "transformer": helios}
        )
