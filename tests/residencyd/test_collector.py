import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from sojourn.residencyd import specimen
from sojourn.residencyd.attribution import DISAGREEMENTS
from sojourn.residencyd.collector import ResidencyCollector
from sojourn.residencyd.devices import DeviceMemory
from sojourn.residencyd.headroom import STUCK_REASONS
from sojourn.residencyd.scanner import Scanner
from sojourn.residencyd.settings import Settings
from sojourn.residencyd.snapshots import BLIND_REASONS
from sojourn.residencyd.sources import NAMES

from tests.residencyd.children import MIB, Child, child, filled
from tests.residencyd.published import MAPPED, PAGEABLE, VRAM, component, publish, storage

# One name each: no label of the model process, and none that a scrape sets itself.
FORBIDDEN_LABELS = {"pid", "namespace", "pod", "container", "node", "job", "instance", "endpoint"}

SOURCE = """
f = os.open(path, os.O_RDONLY); a = map_(4 << 20, R, PRIVATE, f); read(a, 3 << 20)
b = map_(2 << 20); write(b, 1 << 20)
say(file=a, memory=b)
"""


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return filled(tmp_path / "weights", 4 * MIB)


@pytest.fixture
def it(weights: Path) -> Iterator[Child]:
    with child(SOURCE, path=str(weights)) as made:
        yield made


def registry(folder: Path, **more: object) -> CollectorRegistry:
    made = CollectorRegistry()
    scanner = Scanner(Settings(map_pattern=str(folder), floor_seconds=0, deep_share=1e9))
    made.register(ResidencyCollector(scanner, **more))
    return made


def model(folder: Path, it: Child, weights: Path, name: str = "dit", **more: object) -> None:
    parts = (
        storage(it["file"], 4 * MIB, MAPPED, file=weights),
        storage(it["memory"], 2 * MIB, PAGEABLE),
        storage(0x7000, 123, VRAM),
    )
    publish(folder, it.pid, component(name, *parts), **more)


def names(found: CollectorRegistry) -> set[str]:
    return {sample.name for metric in found.collect() for sample in metric.samples}


def components(found: CollectorRegistry) -> set[str]:
    return {sample.labels.get("component", "") for metric in found.collect() for sample in metric.samples} - {""}


def test_bytes_by_component_and_tier(tmp_path: Path, it: Child, weights: Path) -> None:
    model(tmp_path, it, weights, next_stage_need_bytes=77, generation=5)
    found = registry(tmp_path)

    def value(name: str, **labels: str) -> float | None:
        return found.get_sample_value(f"sojourn_{name}", labels)

    assert value("residency_mapped_bytes", component="dit", tier="host_mapped") == 4 * MIB
    assert value("residency_resident_bytes", component="dit", tier="host_mapped") == 3 * MIB
    assert value("residency_mapped_bytes", component="dit", tier="host_pageable") == 2 * MIB
    assert value("residency_resident_bytes", component="dit", tier="host_pageable") == MIB
    assert value("residency_mapped_bytes", component="dit", tier="host_pinned") == 0
    assert value("residency_resident_bytes", component="dit", tier="vram") == 123
    assert value("residency_swapped_bytes", component="dit") == 0
    assert value("residency_disagreement_bytes", component="dit", kind="other_tier") == 0
    assert value("residency_unattributed_bytes", kind="anonymous") > 0
    assert value("headroom_cold_bytes", component="dit") == 3 * MIB
    assert value("headroom_need_bytes") == 77
    assert value("headroom_room_bytes") > 0
    assert value("checkpoint_cached_bytes", component="dit") >= 3 * MIB
    assert value("component_map_generation") == 5
    assert value("component_map_timestamp_seconds") == 1000
    assert value("target_major_faults_total") >= 0
    assert value("scan_mappings") >= 2
    assert value("scan_duration_seconds") > 0
    assert value("memory_available_bytes") > 0


def test_a_lie_is_exported(tmp_path: Path, it: Child, weights: Path) -> None:
    lie = (storage(it["file"], 4 * MIB, PAGEABLE), storage(0x1000_0000_0000, MIB, MAPPED))
    publish(tmp_path, it.pid, component("dit", *lie))
    found = registry(tmp_path)
    wrong = {
        kind: found.get_sample_value("sojourn_residency_disagreement_bytes", {"component": "dit", "kind": kind})
        for kind in DISAGREEMENTS
    }
    assert wrong == {"not_mapped": MIB, "other_tier": 4 * MIB, "other_file": 0}


def test_whatever_is_known_beforehand_is_there_at_zero(tmp_path: Path, it: Child, weights: Path) -> None:
    model(tmp_path, it, weights)
    found = registry(tmp_path, lines=lambda: [("info", 0)])
    for reason in BLIND_REASONS:
        assert found.get_sample_value("sojourn_residency_blind", {"reason": reason}) == 0
    for source in NAMES:
        assert found.get_sample_value("sojourn_scan_errors_total", {"source": source}) is not None
    for reason in STUCK_REASONS:
        assert found.get_sample_value("sojourn_headroom_stuck_bytes", {"component": "dit", "reason": reason}) == 0
    assert found.get_sample_value("sojourn_log_lines_total", {"level": "info"}) == 0


def test_nothing_outlives_its_model(tmp_path: Path, it: Child, weights: Path) -> None:
    found = registry(tmp_path)
    model(tmp_path, it, weights, name="first")
    assert components(found) == {"first"}
    model(tmp_path, it, weights, name="second", generation=2)
    assert components(found) == {"second"}
    it.process.kill()
    os.waitid(os.P_PID, it.pid, os.WEXITED | os.WNOWAIT)
    assert components(found) == set()


def test_a_blind_scrape_has_the_reason_and_not_a_byte_of_a_weight(tmp_path: Path) -> None:
    found = registry(tmp_path)
    assert found.get_sample_value("sojourn_residency_blind", {"reason": "no_map"}) == 1
    blind = {"sojourn_residency_blind", "sojourn_scan_duration_seconds", "sojourn_memory_available_bytes"}
    assert blind <= names(found)
    assert not [name for name in names(found) if name.startswith(("sojourn_residency_m", "sojourn_residency_r"))]
    assert not [name for name in names(found) if name.startswith(("sojourn_headroom", "sojourn_residency_un"))]
    assert "sojourn_scan_timestamp_seconds" not in names(found)


def test_ranks_that_hold_the_same_component_add_up(tmp_path: Path, it: Child, weights: Path) -> None:
    with child(SOURCE, path=str(weights)) as second:
        model(tmp_path, it, weights)
        publish(tmp_path, second.pid, component("dit", storage(second["memory"], 2 * MIB, PAGEABLE)), name="2.pb")
        labels = {"component": "dit", "tier": "host_pageable"}
        assert registry(tmp_path).get_sample_value("sojourn_residency_resident_bytes", labels) == 2 * MIB


def test_no_label_names_a_process_or_a_target_and_no_sample_has_a_time(
    tmp_path: Path, it: Child, weights: Path
) -> None:
    model(tmp_path, it, weights)
    for metric in registry(tmp_path).collect():
        assert metric.documentation
        for sample in metric.samples:
            assert not FORBIDDEN_LABELS & sample.labels.keys(), sample
            assert sample.timestamp is None
            assert str(it.pid) not in sample.labels.values()


def test_both_text_formats_and_no_series_twice(tmp_path: Path, it: Child, weights: Path) -> None:
    model(tmp_path, it, weights)
    text = generate_latest(registry(tmp_path)).decode()
    series = [line.rsplit(" ", 1)[0] for line in text.splitlines() if line and not line.startswith("#")]
    assert len(series) == len(set(series))
    assert not any("_created" in name for name in series)
    assert generate_openmetrics(registry(tmp_path)).endswith(b"# EOF\n")


def test_registering_does_not_scan(tmp_path: Path) -> None:
    made = Scanner(Settings(map_pattern=str(tmp_path)))
    made.on_scan = lambda snapshot: pytest.fail("scanned")
    CollectorRegistry(auto_describe=True).register(ResidencyCollector(made))


def test_devices_and_uncapped_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = (DeviceMemory("0", used_bytes=5, free_bytes=7), DeviceMemory("1", absent_reason="mig"))
    monkeypatch.setattr("sojourn.residencyd.scanner.read_devices", lambda *_: devices)
    found = registry(tmp_path)
    assert found.get_sample_value("sojourn_device_memory_bytes", {"device": "0", "state": "free"}) == 7
    assert found.get_sample_value("sojourn_device_memory_bytes", {"device": "1", "state": "free"}) is None
    assert found.get_sample_value("sojourn_device_memory_absent", {"device": "1", "reason": "mig"}) == 1


@pytest.mark.parametrize(("tree", "limit"), [("v2-container", 16 << 30), ("uncapped", None), ("full", 4 << 30)])
def test_uncapped_is_not_zero(
    tmp_path: Path, captures: Path, it: Child, weights: Path, tree: str, limit: int | None
) -> None:
    model(tmp_path, it, weights)
    settings = Settings(map_pattern=str(tmp_path), cgroup_root=captures / "cgroup" / tree)
    found = CollectorRegistry()
    found.register(ResidencyCollector(Scanner(settings)))
    assert found.get_sample_value("sojourn_cgroup_limit_bytes") == limit
    assert found.get_sample_value("sojourn_cgroup_usage_bytes") >= 4 << 30
    if tree == "full":
        assert found.get_sample_value("sojourn_headroom_room_bytes") == 0
    else:
        assert found.get_sample_value("sojourn_headroom_room_bytes") > 0


def test_the_specimen_has_a_series_of_every_metric() -> None:
    families = list(specimen.registry().collect())
    assert len(families) == len({family.name for family in families}) >= 29
    assert [family.name for family in families if not family.samples] == []
    assert [family.name for family in families if not family.documentation.endswith(".")] == []


def test_every_metric_is_declared_also_while_blind(tmp_path: Path) -> None:
    declared = [family.name for family in specimen.registry().collect()]
    assert [family.name for family in registry(tmp_path).collect()] == declared
