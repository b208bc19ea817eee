"""What will be where is known from headers alone, fits or is refused with the number, and is what then happens."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from sojourn.inference.errors import DoesNotFit, Unsupported
from sojourn.inference.families.table import family_of
from sojourn.inference.loading.components import build_component
from sojourn.inference.loading.folder import read_folder
from sojourn.inference.offload import install, planning
from sojourn.inference.offload.activations import MEASURED_BYTES, RUNTIME_BYTES, Workload, activation_bytes
from sojourn.inference.offload.headers import Bytes, ComponentWeights, model_weights, width_of
from sojourn.inference.offload.hosting import HostTier
from sojourn.inference.offload.memory_plan import CacheSize, Demand, Machine, plan_memory
from sojourn.inference.offload.options import OffloadOptions, parse_size
from sojourn.inference.offload.plan_report import as_json, as_table, tell
from sojourn.inference.offload.planning import plan_model, with_usual_request
from sojourn.inference.offload.settings import Mode, OffloadSettings, ResidentPolicy, Selection
from sojourn.inference.pipeline.workflow import served_stages
from sojourn.inference.telemetry import Telemetry
from sojourn.inference.tiny import tiny_random

GIB = 1 << 30


def stages_of(folder):
    return served_stages(family_of(folder), folder.components)


SMALL = Workload(pixels=1, frames=1)
MODEL = Path("model")


def part(name, layers=0, layer_gib=1.0, rest_gib=0.0, projections_gib=0.0):
    size = Bytes(mapped=int(layer_gib * GIB))
    projection = Bytes(mapped=int(projections_gib * GIB))
    return ComponentWeights(
        name=name, class_name=name.title(), layers=(size,) * layers, rest=Bytes(mapped=int(rest_gib * GIB)),
        layer_projections=(projection,) * layers, projection_outputs=1000, hidden_size=16,
    )  # fmt: skip


TRANSFORMER = part("transformer", layers=50, layer_gib=1.2, rest_gib=1.7, projections_gib=0.5)
ENCODER = part("text_encoder", layers=64, layer_gib=0.5, rest_gib=3)
VAE = part("vae", rest_gib=1)
STAGES = [
    ("text_encode", frozenset({"text_encoder"})),
    ("denoise", frozenset({"transformer"})),
    ("decode", frozenset({"vae"})),
]


def plan(*, device=None, host=200, parts=(TRANSFORMER, ENCODER, VAE), workload=SMALL, **rest):
    demand = Demand(weights=parts, stages=STAGES, workload=workload, uses={"transformer": 49}, **rest)
    machine = Machine(device_bytes=None if device is None else int(device * GIB), host_bytes=int(host * GIB))
    return plan_memory(demand, machine)


def only(name, **setting):
    return Selection(named={name: OffloadSettings(**setting)})


def modes(result):
    return {part.name: part.mode for part in result.components}


def test_everything_stays_where_everything_fits():
    assert set(modes(plan(device=100)).values()) == {Mode.RESIDENT}
    assert set(modes(plan(host=120)).values()) == {Mode.RESIDENT}


def test_components_come_and_go_as_a_whole_before_layers_stream():
    assert modes(plan(device=70)) == {
        "transformer": Mode.RESIDENT, "text_encoder": Mode.COMPONENT, "vae": Mode.COMPONENT,
    } or modes(plan(device=70))["text_encoder"] is Mode.COMPONENT  # fmt: skip
    assert plan(device=70).fits


def test_as_many_layers_stream_as_it_takes_and_no_more():
    result = plan(device=40)
    transformer = next(p for p in result.components if p.name == "transformer")
    assert transformer.mode is Mode.LAYERWISE
    assert result.fits
    assert 0 < transformer.streamed < 50
    room = 40 * GIB - result.device_peak_bytes
    assert room < 1.2 * GIB * 1.01, "one layer more would not have fitted"


def test_a_device_too_small_for_the_window_is_refused_with_the_number_needed():
    result = plan(device=3)
    assert not result.fits
    with pytest.raises(DoesNotFit, match=f"needs {result.device_peak_bytes} bytes of device memory") as caught:
        result.check(MODEL)
    assert caught.value.needed_bytes == result.device_peak_bytes
    assert caught.value.available_bytes == 3 * GIB
    assert "more" in str(caught.value)


def test_what_is_needed_is_enough():
    needed = plan(device=3).device_peak_bytes
    plan(device=needed / GIB).check(MODEL)


def test_a_host_too_small_by_one_page_is_refused_up_front():
    needed = plan(host=5).host_peak_bytes
    enough = Machine(device_bytes=None, host_bytes=needed)
    demand = Demand(weights=(TRANSFORMER, ENCODER, VAE), stages=STAGES, workload=SMALL)
    plan_memory(demand, enough).check(MODEL)
    with pytest.raises(DoesNotFit):
        plan_memory(demand, Machine(device_bytes=None, host_bytes=needed - 4096)).check(MODEL)


def test_shared_memory_streams_what_cannot_stay_and_needs_only_what_cannot_be_dropped():
    result = plan(host=20)
    assert modes(result) == {
        "transformer": Mode.LAYERWISE, "text_encoder": Mode.LAYERWISE, "vae": Mode.COMPONENT,
    }  # fmt: skip
    assert result.fits
    assert result.resident_bytes > 90 * GIB
    assert result.host_peak_bytes < 8 * GIB


def test_the_plan_cache_takes_the_projections_out_and_its_slab_in():
    caches = {"transformer": CacheSize(slots=64, width=4)}
    result = plan(host=20, caches=caches)
    transformer = next(p for p in result.components if p.name == "transformer")
    assert transformer.cached
    assert transformer.projection_bytes == 25 * GIB
    assert transformer.size_bytes == plan(host=20).components[0].size_bytes - 25 * GIB
    assert transformer.slab_bytes == 64 * 4 * 1000 * 2


def test_what_does_not_fit_says_that_the_cache_would_help():
    result = plan(device=3, settings=only("transformer", mode=Mode.RESIDENT))
    assert any("plan cache" in change for change in result.changes)
    assert any("let transformer leave" in change for change in result.changes)


@pytest.mark.parametrize("mode", [Mode.RESIDENT, Mode.COMPONENT, Mode.LAYERWISE])
@pytest.mark.parametrize("device", [None, 100])
def test_a_mode_that_is_asked_for_is_taken(mode, device):
    assert modes(plan(device=device, settings=only("transformer", mode=mode)))["transformer"] is mode


def test_residents_prefetch_and_policy_have_their_effect():
    asked = {"mode": Mode.LAYERWISE, "resident": 35, "prefetch": 3, "policy": ResidentPolicy.STRIDED}
    result = plan(device=100, settings=only("transformer", **asked))
    transformer = next(p for p in result.components if p.name == "transformer")
    assert (transformer.streamed, transformer.prefetch) == (15, 3)
    assert transformer.device_bytes == 35 * int(1.2 * GIB) + 4 * int(1.2 * GIB) + int(1.7 * GIB)


def test_residents_that_nobody_asks_for_are_as_many_as_fit():
    for device, mode in ((40, Mode.LAYERWISE), (40, Mode.AUTO), (200, Mode.LAYERWISE)):
        result = plan(device=device, settings=only("transformer", mode=mode))
        transformer = next(p for p in result.components if p.name == "transformer")
        kept = transformer.layers - transformer.streamed
        assert result.fits
        assert transformer.streamed == 0 or result.headroom_bytes()["device"] < int(1.2 * GIB)
        one_more = plan(device=device, settings=only("transformer", mode=Mode.LAYERWISE, resident=kept + 1))
        assert transformer.streamed == 0 or not one_more.fits


def test_residents_that_are_asked_for_stay_as_they_are_when_the_plan_chooses_the_mode():
    result = plan(device=40, settings=only("transformer", resident=7, prefetch=2))
    transformer = next(p for p in result.components if p.name == "transformer")
    assert (transformer.mode, transformer.streamed, transformer.prefetch) == (Mode.LAYERWISE, 43, 2)


def test_without_pinning_nothing_is_planned_to_be_locked():
    def pinned(**rest):
        return sum(p.bytes_by_tier()[HostTier.PINNED] for p in plan(device=20, **rest).components)

    assert pinned() > 0
    assert pinned(pinning=False) == 0


def test_pins_go_to_the_component_that_a_request_copies_most():
    result = plan(device=20, host=40)
    pinned = {p.name: p.bytes_by_tier()[HostTier.PINNED] for p in result.components}
    assert pinned["transformer"] > pinned["text_encoder"]
    assert sum(pinned.values()) <= 40 * GIB - RUNTIME_BYTES - 2 * GIB


def test_activations_scale_from_the_measured_point():
    assert activation_bytes(Workload(), hidden_size=5376) == MEASURED_BYTES
    assert activation_bytes(Workload(frames=62), hidden_size=5376) == MEASURED_BYTES // 2
    assert activation_bytes(Workload(), hidden_size=0) == MEASURED_BYTES
    assert plan(device=100, workload=Workload()).device_peak_bytes > plan(device=100).device_peak_bytes


def test_a_stage_whose_components_tell_no_width_is_planned_by_the_measure_of_the_model():
    """A decoder of a model 16 wide is not planned as that of the measured one, 5376 wide."""
    silent = replace(VAE, hidden_size=0)
    known, unknown = (plan(host=200, parts=(TRANSFORMER, ENCODER, vae), workload=Workload()) for vae in (VAE, silent))
    assert known == unknown
    nobody = plan(
        parts=tuple(replace(part, hidden_size=0) for part in (TRANSFORMER, ENCODER, VAE)), workload=Workload()
    )
    assert nobody.host_peak_bytes - known.host_peak_bytes > 9 * GIB


@pytest.mark.parametrize(
    ("config", "width"),
    [
        ({"hidden_size": 96, "num_attention_heads": 2, "attention_head_dim": 16}, 96),
        ({"num_attention_heads": 2, "attention_head_dim": 16}, 32),
        ({"d_model": 64}, 64),
        ({"text_config": {"hidden_size": 48}, "vision_config": {"hidden_size": 16}}, 48),
        ({"block_out_channels": [8, 16]}, 0),
        ({"hidden_size": "wide"}, 0),
    ],
)
def test_the_width_is_what_the_configuration_tells(config, width):
    assert width_of(config) == width


def test_the_width_of_each_loaded_component_is_that_of_its_folder(tiny, tiny_folder):
    folder = read_folder(tiny_folder)
    planned = {part.name: part.hidden_size for part in model_weights(folder, precision="BF16")}
    assert {name: install._width(tiny.components[name].value) for name in planned} == planned
    assert planned["text_encoder"] > 0


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(0, 12), layer=st.floats(0.01, 3), rest=st.floats(0, 3),
    device=st.one_of(st.none(), st.floats(1, 60)), host=st.floats(1, 80), cache=st.booleans(),
)  # fmt: skip
def test_every_plan_accounts_for_every_byte(layers, layer, rest, device, host, cache):
    parts = (part("transformer", layers, layer, rest, layer / 3), ENCODER, VAE)
    caches = {"transformer": CacheSize()} if cache else {}
    result = plan(device=device, host=host, parts=parts, caches=caches)
    for component in result.components:
        assert sum(component.bytes_by_tier().values()) == component.size_bytes
        assert sum(place.size_bytes for place in component.ranges) == component.size_bytes
        assert component.mode is not Mode.AUTO
    assert result.fits == all(left >= 0 for left in result.headroom_bytes().values())
    assert bool(result.changes) is not result.fits or result.fits


@pytest.mark.parametrize(
    ("text", "size"), [("24Gi", 24 << 30), ("500M", 500_000_000), ("1.5Ki", 1536), ("4096", 4096), ("2Ti", 2 << 40)]
)
def test_sizes_are_read_as_kubernetes_writes_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "24GB", "-1", "Gi", "1e9", "24 Gi x"])
def test_what_is_no_size_is_refused_with_what_is(text):
    with pytest.raises(ValueError, match="write bytes"):
        parse_size(text)


# On a real folder


@pytest.mark.parametrize("family", ["minimax-h3", "helios-mid"])
def test_headers_tell_what_loading_then_makes(family, tmp_path):
    folder = read_folder(tiny_random(family, tmp_path))
    for weights in model_weights(folder, precision="BF16"):
        component = build_component(folder.components[weights.name], dtype=torch.bfloat16, device=torch.device("cpu"))
        loaded = {t.data_ptr(): t.numel() * t.element_size() for t in component.value.state_dict().values()}
        assert weights.total.total == sum(loaded.values())


def test_a_folder_is_planned_without_loading_it(tiny_folder):
    folder = read_folder(tiny_folder)
    machine = Machine(device_bytes=None, host_bytes=8 * GIB)
    options = with_usual_request(OffloadOptions(), folder, family_of(folder).usual)
    result = plan_model(folder, stages_of(folder), machine, options, dtype=torch.bfloat16)
    assert result.fits
    assert {p.name for p in result.components} == {"text_encoder", "transformer", "transformer_ref", "vae", "audio_vae"}
    transformer = next(p for p in result.components if p.name == "transformer")
    assert transformer.layers == 2, "the refiner has one block, which repeats nothing"
    assert transformer.projection_bytes > 0


@pytest.mark.parametrize("option", ["settings", "caches"])
def test_an_option_for_a_component_that_is_not_there_is_refused_by_name(tiny_folder, option):
    value = only("transfromer") if option == "settings" else {"transfromer": CacheSize()}
    options = OffloadOptions(**{option: value})
    machine = Machine(device_bytes=None, host_bytes=8 * GIB)
    folder = read_folder(tiny_folder)
    with pytest.raises(Unsupported, match="no component 'transfromer'"):
        plan_model(folder, stages_of(folder), machine, options, dtype=torch.bfloat16)


def with_a_whole_vae(weights):
    """The same, with a VAE in which nothing repeats."""
    return tuple(replace(w, layers=(), layer_projections=()) if w.name == "vae" else w for w in weights)


def test_a_component_without_layers_comes_and_goes_as_a_whole_where_all_are_to_stream(tiny_folder, monkeypatch):
    monkeypatch.setattr(planning, "model_weights", lambda *a, **k: with_a_whole_vae(model_weights(*a, **k)))
    folder, machine = read_folder(tiny_folder), Machine(device_bytes=None, host_bytes=8 * GIB)
    layerwise = OffloadSettings(mode=Mode.LAYERWISE)
    options = OffloadOptions(settings=Selection(default=layerwise))
    result = plan_model(folder, stages_of(folder), machine, options, dtype=torch.bfloat16)
    assert modes(result)["transformer"] is Mode.LAYERWISE
    assert modes(result)["vae"] is Mode.COMPONENT
    options = OffloadOptions(settings=Selection(named={"vae": layerwise}))
    with pytest.raises(Unsupported, match=r"vae has no repeated layers.*layerwise is for .*transformer"):
        plan_model(folder, stages_of(folder), machine, options, dtype=torch.bfloat16)


def test_memory_is_planned_for_the_usual_request_of_the_family_unless_the_installation_says(tmp_path):
    folders = {family: read_folder(tiny_random(family, tmp_path / family)) for family in ("minimax-h3", "helios-base")}
    usual = {name: with_usual_request(OffloadOptions(), f, family_of(f).usual) for name, f in folders.items()}
    assert (usual["minimax-h3"].workload, usual["minimax-h3"].passes) == (Workload(pixels=2048, frames=124), 49)
    # A chunk at a time, guidance doubles the passes.
    assert usual["helios-base"].workload == Workload(pixels=128 * 64, frames=33, density=5)
    assert usual["helios-base"].passes == 4 * 50 * 2
    asked = OffloadOptions(workload=Workload(pixels=1), passes=7)
    assert with_usual_request(asked, folders["helios-base"], family_of(folders["helios-base"]).usual) == asked


def test_the_table_and_the_json_say_the_same():
    result = plan(device=40, caches={"transformer": CacheSize()})
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(as_table(result))
    text = console.export_text()
    fields = json.loads(as_json(result))
    assert fields["fits"] is True
    assert fields["components"][0]["name"] == result.components[0].name
    for component in result.components:
        assert component.name in text
        assert component.mode.value in text
    assert "layers 0-" in text
    assert "plan cache: " in text
    assert "peak" in text
    assert "headroom" in text


def test_the_plan_is_in_the_metrics():
    telemetry = Telemetry()
    result = plan(device=40)
    tell(result, telemetry.offload)
    value = telemetry.registry.get_sample_value
    assert value("sojourn_memory_plan_peak_bytes", {"space": "device"}) == result.device_peak_bytes
    assert value("sojourn_memory_plan_budget_bytes", {"space": "device"}) == 40 * GIB
    for component in result.components:
        labels = {"component": component.name}
        for tier, size in component.bytes_by_tier().items():
            assert value("sojourn_memory_plan_bytes", labels | {"tier": tier}) == size
        assert value("sojourn_pageout_requested_bytes_total", labels) == 0
    assert value("sojourn_memory_plan_bytes", {"component": "vae", "tier": "host_mapped"}) is not None
