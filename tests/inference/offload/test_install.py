"""A whole pipeline under every placement makes the same clip, reports where it is, and tells residencyd."""

import copy
import logging
import zlib

import pytest
import torch
from sojourn.inference.adaln.caches import PlanCaches
from sojourn.inference.adaln.settings import PlanCacheSettings
from sojourn.inference.errors import DoesNotFit
from sojourn.inference.families.table import family_of
from sojourn.inference.loading.components import build_component
from sojourn.inference.loading.folder import read_folder
from sojourn.inference.offload import assemble
from sojourn.inference.offload.activations import Workload, headroom_bytes
from sojourn.inference.offload.install import Devices, install
from sojourn.inference.offload.memory_plan import Machine
from sojourn.inference.offload.observer import Silent
from sojourn.inference.offload.options import OffloadOptions
from sojourn.inference.offload.pinning import RecordingPinDriver
from sojourn.inference.offload.planning import plan_model
from sojourn.inference.offload.settings import Mode, OffloadSettings, ResidentPolicy, Selection
from sojourn.inference.offload.streams import RecordingStreams
from sojourn.inference.pipeline import DeviceChoice, load_pipeline
from sojourn.inference.pipeline.pipeline import Pipeline
from sojourn.inference.pipeline.workflow import served_stages
from sojourn.inference.telemetry import Telemetry
from sojourn.inference.tiny import tiny_random
from sojourn.v1 import inference_pb2, residency_pb2

from tests.inference.offload.capped import MIB, Child, capped
from tests.inference.offload.toys import Reads

GIB = 1 << 30


def stages_of(folder):
    return served_stages(family_of(folder), folder.components)


ALL = ("text_encoder", "transformer", "transformer_ref", "vae", "audio_vae")


def options(mode, **rest):
    settings = OffloadSettings(
        mode=mode, **{key: rest.pop(key) for key in ("prefetch", "resident", "policy") if key in rest}
    )
    return OffloadOptions(settings=Selection(default=settings), **rest)


@pytest.fixture
def expected(tiny, make_request, make_watch, digest):
    return digest(tiny.run_clip(make_request(), 0, make_watch()))


@pytest.mark.parametrize("cache", ["off", "on"])
@pytest.mark.parametrize("mode", [Mode.RESIDENT, Mode.COMPONENT, Mode.LAYERWISE])
def test_on_mapped_weights_every_mode_makes_the_same_clip(
    mode, cache, tiny_folder, make_request, make_watch, digest, expected, monkeypatch
):
    monkeypatch.setattr(assemble, "find_pieces", lambda layers, mappings: find_small(layers, mappings))
    pipeline = load_pipeline(
        tiny_folder, device=DeviceChoice.CPU, offload=options(mode), plan_settings=PlanCacheSettings(mode=cache)
    )
    assert bool(pipeline.plans.transformers) is (cache == "on")
    for _ in range(2):
        assert digest(pipeline.run_clip(make_request(), 0, make_watch())) == expected
    pipeline.offload.close()


find_pieces = assemble.find_pieces


def find_small(layers, mappings):
    return find_pieces(layers, mappings, min_bytes=1)


@pytest.mark.parametrize("cache", ["off", "on"])
@pytest.mark.parametrize("policy", ResidentPolicy)
@pytest.mark.parametrize(
    ("mode", "prefetch", "resident"),
    [(Mode.COMPONENT, 0, 0), (Mode.LAYERWISE, 0, 0), (Mode.LAYERWISE, 2, 1), (Mode.LAYERWISE, 0.99, 0.3)],
)
def test_on_a_device_of_its_own_memory_every_mode_makes_the_same_clip(
    mode, prefetch, resident, policy, cache, tiny_folder, make_request, make_watch, digest, expected, tiny
):
    pipeline, streams, driver = on_a_device(
        tiny_folder, mode, tiny, prefetch=prefetch, resident=resident, policy=policy, cache=cache
    )
    for _ in range(2):
        with Reads(streams):
            clip = pipeline.run_clip(make_request(), 0, make_watch())
        assert digest(clip) == expected
        window = pipeline.life.strategies["transformer"].window
        assert window.device_bytes() == 0, "between requests nothing is on the device"
    assert driver.locked
    pipeline.offload.close()


@pytest.mark.parametrize("name", ["helios-base", "helios-mid", "helios-distilled"])
def test_a_chunked_family_makes_the_same_clip_under_every_placement(name, tmp_path, make_request, make_watch, digest):
    folder = tiny_random(name, tmp_path / name)
    resident = load_pipeline(folder, device=DeviceChoice.CPU)
    request = make_request(width=64, height=64, frames=34, steps=2, flow_shift=0.0, audio_flow_shift=0.0)
    expected = digest(resident.run_clip(request, 0, make_watch()))
    for mode, rest in ((Mode.COMPONENT, {}), (Mode.LAYERWISE, {"prefetch": 1, "resident": 0.5})):
        pipeline, streams, _ = on_a_device(folder, mode, resident, **rest)
        with Reads(streams):
            assert digest(pipeline.run_clip(request, 0, make_watch())) == expected
        assert pipeline.life.strategies["transformer"].window.device_bytes() == 0
        pipeline.offload.close()
    paged = load_pipeline(folder, device=DeviceChoice.CPU, offload=options(Mode.LAYERWISE))
    assert digest(paged.run_clip(request, 0, make_watch())) == expected
    paged.offload.close()


def on_a_device(folder_path, mode, tiny, *, cache="off", observer=None, component_map=None, **rest):
    """A pipeline whose device is a recording one in host memory."""
    folder = read_folder(folder_path)
    asked = options(mode, component_map=component_map, **rest)
    plan = plan_model(
        folder, stages_of(folder), Machine(device_bytes=8 * GIB, host_bytes=64 * GIB), asked, dtype=torch.bfloat16
    )
    cpu = torch.device("cpu")
    plans = PlanCaches(PlanCacheSettings(mode=cache), cpu)
    components = {
        name: build_component(part, dtype=torch.bfloat16, device=cpu, leave_out=plans.leave_out(part))
        for name, part in folder.components.items()
    }
    plans.open(components)
    streams, driver = RecordingStreams(), RecordingPinDriver()
    installed = install(
        components, plan, asked, device=cpu, observer=observer or Silent(),
        devices=Devices(streams=streams, driver=driver, empty_cache=lambda: None),
        reader=Roomy(),
    )  # fmt: skip
    stock = copy.copy(tiny._stock)
    for name, component in components.items():
        setattr(stock, name, component.value)
    pipeline = Pipeline(
        model_name="tiny", family=tiny.family, stock=stock, components=components, device=cpu, dtype=torch.bfloat16,
        fingerprint=tiny._fingerprint, plans=plans,
    )  # fmt: skip
    pipeline.offload, pipeline.life = installed, installed.life
    return pipeline, streams, driver


class Roomy:
    """A host with room."""

    def read(self, spans):
        from sojourn.inference.offload.room import Room

        return Room(available_bytes=64 * GIB, other_file_bytes=0, resident_bytes=0, limited=False)

    def resident_bytes(self, spans):
        return 0

    def anonymous_bytes(self):
        return 0


def test_a_model_that_cannot_fit_is_refused_before_anything_is_loaded(tiny_folder, monkeypatch):
    monkeypatch.setattr(
        "sojourn.inference.pipeline.load.build_component", lambda *_, **__: pytest.fail("it was loaded")
    )
    with pytest.raises(DoesNotFit, match="bytes of host memory and there are 1048576"):
        load_pipeline(tiny_folder, device=DeviceChoice.CPU, offload=OffloadOptions(host_memory_bytes=1 << 20))


def test_without_pinning_nothing_is_locked_and_the_clip_is_the_same(
    tiny_folder, make_request, make_watch, digest, expected, tiny
):
    pipeline, streams, driver = on_a_device(tiny_folder, Mode.LAYERWISE, tiny, resident=0, pinning=False)
    with Reads(streams):
        assert digest(pipeline.run_clip(make_request(), 0, make_watch())) == expected
    assert not driver.locked
    pipeline.offload.close()


@pytest.mark.parametrize("advised", [True, False])
def test_cold_page_advice_is_given_unless_it_is_turned_off(advised, tiny_folder, make_request, make_watch):
    telemetry = Telemetry()
    pipeline = load_pipeline(
        tiny_folder, device=DeviceChoice.CPU, offload_observer=telemetry.offload,
        offload=options(Mode.COMPONENT, cold_advice=advised, next_stage_headroom_bytes=1 << 60),
    )  # fmt: skip
    pipeline.run_clip(make_request(), 0, make_watch())
    requested = telemetry.registry.get_sample_value(
        "sojourn_pageout_requested_bytes_total", {"component": "text_encoder"}
    )
    assert (requested > 0) is advised
    pipeline.offload.close()


@pytest.mark.parametrize(("headroom", "paged_out"), [(0, False), (1 << 60, True)])
def test_what_goes_at_the_end_of_a_use_is_what_the_next_stages_headroom_needs(
    headroom, paged_out, tiny_folder, make_request, make_watch, tmp_path
):
    telemetry, needs = Telemetry(), []
    path = tmp_path / "map"
    pipeline = load_pipeline(
        tiny_folder, device=DeviceChoice.CPU, offload_observer=telemetry.offload,
        offload=options(Mode.COMPONENT, next_stage_headroom_bytes=headroom, component_map=str(path)),
    )  # fmt: skip
    watch = make_watch(listener=lambda event: needs.append(read_map(path).next_stage_need_bytes))
    pipeline.run_clip(make_request(), 0, watch)
    requested = telemetry.registry.get_sample_value(
        "sojourn_pageout_requested_bytes_total", {"component": "text_encoder"}
    )
    assert (requested > 0) is paged_out
    assert (max(needs) >= 1 << 60) is paged_out, "what is published for residencyd says the same"
    pipeline.offload.close()


def test_one_page_too_little_is_refused_with_the_number_and_that_number_is_enough(tiny_folder):
    folder = read_folder(tiny_folder)

    def plan(host_bytes):
        machine = Machine(device_bytes=None, host_bytes=host_bytes)
        return plan_model(folder, stages_of(folder), machine, options(Mode.LAYERWISE), dtype=torch.bfloat16)

    needed = plan(64 * GIB).host_peak_bytes
    plan(needed).check(tiny_folder)
    with pytest.raises(DoesNotFit, match=f"needs {needed} bytes of host memory and there are {needed - 4096}"):
        plan(needed - 4096).check(tiny_folder)


LOAD = """
import json, sys, warnings
warnings.simplefilter('ignore')
from pathlib import Path
from sojourn.inference.errors import DoesNotFit
from sojourn.inference.pipeline import DeviceChoice, load_pipeline
try:
    load_pipeline(Path(sys.argv[1]), device=DeviceChoice.CPU)
    print('{}', flush=True)
except DoesNotFit as error:
    print(json.dumps({'said': str(error)}), flush=True)
"""


def test_under_a_cap_that_is_too_small_loading_is_refused_with_the_number_and_nothing_is_killed(tiny_folder):
    with capped(600 * MIB) as cap, Child(LOAD, cap, str(tiny_folder)) as child:
        assert "bytes of host memory and there are" in child.hear()["said"]
        assert cap.oom_kills() == 0


def test_both_lines_say_where_the_weights_are(tiny_folder, caplog):
    with caplog.at_level(logging.INFO, logger="sojourn"):
        pipeline = load_pipeline(tiny_folder, device=DeviceChoice.CPU)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("sojourn.inference.residency")]
    assert len(lines) == len(ALL) + 1
    assert lines[-1].startswith("Settled: ")
    assert any(line.startswith("Loaded transformer: MiniMaxH3Transformer3DModel. size 0.00 GB, ") for line in lines)
    pipeline.offload.close()


def test_requests_move_the_counters_and_log_nothing_above_debug(tiny_folder, make_request, make_watch, tiny, caplog):
    telemetry = Telemetry()
    pipeline, streams, _ = on_a_device(tiny_folder, Mode.LAYERWISE, tiny, observer=telemetry.offload, resident=0)
    window = pipeline.life.strategies["transformer"].window
    value = telemetry.registry.get_sample_value
    before = value("sojourn_offload_copied_bytes_total", {"component": "transformer"})
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="sojourn"), Reads(streams):
        pipeline.run_clip(make_request(), 0, make_watch())
    assert not [record for record in caplog.records if record.name.startswith("sojourn")]
    copied = value("sojourn_offload_copied_bytes_total", {"component": "transformer"}) - before
    per_pass = sum(unit.layout.total_bytes for unit in window.stack.units)
    assert copied >= 2 * per_pass, "two evaluations"
    assert value("sojourn_offload_pinned_bytes") > 0
    assert value("sojourn_offload_layers", {"component": "transformer", "tier": "host_pinned"}) == 2
    assert value("sojourn_offload_wait_seconds_total", {"component": "transformer"}) > 0
    assert value("sojourn_stage_read_bytes_total", {"stage": "denoise"}) is not None


def read_map(path):
    file = residency_pb2.ComponentMapFile.FromString(path.read_bytes())
    assert file.crc32 == zlib.crc32(file.component_map)
    return residency_pb2.ComponentMap.FromString(file.component_map)


def test_the_component_map_is_published_at_load_and_at_every_stage(tiny_folder, make_request, make_watch, tmp_path):
    path = tmp_path / "map"
    pipeline = load_pipeline(
        tiny_folder, device=DeviceChoice.CPU, offload=options(Mode.LAYERWISE, component_map=str(path))
    )
    loaded = read_map(path)
    assert {component.name for component in loaded.components} == set(ALL)
    assert loaded.stage == inference_pb2.STAGE_UNSPECIFIED
    seen = []

    def look(event):
        seen.append(read_map(path))

    pipeline.run_clip(make_request(), 0, make_watch(listener=look))
    assert [m.generation for m in seen] == sorted(m.generation for m in seen)
    denoise = next(m for m in seen if m.stage == inference_pb2.STAGE_DENOISE)
    by_name = {component.name: component for component in denoise.components}
    assert by_name["transformer"].needed_now
    assert by_name["vae"].needed_next
    assert not by_name["text_encoder"].needed_now
    assert all(storage.in_use for storage in by_name["transformer"].storages)
    assert denoise.next_stage == inference_pb2.STAGE_DECODE
    assert denoise.next_stage_need_bytes > 0
    ended = read_map(path)
    assert ended.stage == inference_pb2.STAGE_UNSPECIFIED
    assert ended.generation > denoise.generation
    pipeline.offload.close()
    assert not path.exists()


def test_a_stage_whose_components_tell_no_width_needs_by_the_measure_of_the_model(
    tiny_folder, make_request, make_watch, tmp_path
):
    """The decoder of a model 32 wide does not take the 12 GiB of one that is 5376 wide."""
    path = tmp_path / "map"
    asked = options(Mode.COMPONENT, component_map=str(path), workload=Workload(), host_memory_bytes=64 << 30)
    pipeline = load_pipeline(tiny_folder, device=DeviceChoice.CPU, offload=asked)
    needs = []
    pipeline.run_clip(
        make_request(), 0, make_watch(listener=lambda event: needs.append(read_map(path).next_stage_need_bytes))
    )
    pipeline.offload.close()
    assert 0 < max(needs) < headroom_bytes(Workload(), hidden_size=64)


def test_the_map_of_a_device_tells_of_both_representations(tiny_folder, make_request, make_watch, tmp_path, tiny):
    path = tmp_path / "map"
    pipeline, streams, driver = on_a_device(tiny_folder, Mode.COMPONENT, tiny, component_map=str(path))
    tiers = {storage.tier for component in read_map(path).components for storage in component.storages}
    assert residency_pb2.TIER_HOST_PINNED in tiers
    pinned = sum(
        storage.length_bytes for component in read_map(path).components for storage in component.storages
        if storage.tier == residency_pb2.TIER_HOST_PINNED
    )  # fmt: skip
    assert pinned == sum(driver.locked.values()), "booked, locked and published are one number"
    report = pipeline.offload.residencies()
    assert sum(residency.host_pinned for residency in report.values()) == pinned
    del streams, make_request, make_watch
