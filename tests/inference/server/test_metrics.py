"""The counters move by exactly what happened, and the series keep the rules."""

import asyncio
import logging
import urllib.request
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from sojourn.inference.pipeline import Pipeline
from sojourn.inference.server.config import Address
from sojourn.inference.telemetry import CODES, LEVELS, REFUSALS, STATES, Telemetry
from sojourn.inference.watch import Stage
from sojourn.v1 import inference_pb2 as pb

from tests.inference.server.serving import Served, request, serving

FORBIDDEN_LABELS = {
    "namespace",
    "pod",
    "container",
    "node",
    "instance",
    "job",
    "endpoint",
    "pid",
    "request_id",
    "prompt",
}


def series(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for metric in registry.collect()
        for sample in metric.samples
    }


def moved(served: Served, before: dict[Any, float]) -> dict[str, float]:
    """Counters and histogram counts that differ from `before`, as name{values} → by how much."""
    after = series(served.server.telemetry.registry)
    return {
        f"{name.removeprefix('sojourn_')}{{{','.join(value for _, value in labels)}}}": value
        - before.get((name, labels), 0)
        for (name, labels), value in after.items()
        if name.startswith("sojourn_")
        and name.endswith(("_total", "_count"))
        and value != before.get((name, labels), 0)
    }


def test_known_combinations_start_at_zero() -> None:
    registry = Telemetry().registry
    for workflow in ("t2va", "fl2va", "ref2va", "unknown"):
        for code in CODES:
            labels = {"workflow": workflow, "code": code}
            assert registry.get_sample_value("sojourn_requests_total", labels) == 0
    for reason in REFUSALS:
        assert registry.get_sample_value("sojourn_requests_refused_total", {"reason": reason}) == 0
    for level in LEVELS:
        assert registry.get_sample_value("sojourn_log_lines_total", {"level": level}) == 0
    for stage in Stage:
        assert registry.get_sample_value("sojourn_stage_duration_seconds_count", {"stage": stage}) == 0
        assert registry.get_sample_value("sojourn_nonfinite_outputs_total", {"stage": stage}) == 0
    states = [registry.get_sample_value("sojourn_service_state", {"state": state}) for state in STATES]
    assert states == [1, 0, 0, 0]
    for name in ("requests_running", "requests_waiting", "step_duration_seconds_count", "cancel_latency_seconds_count"):
        assert registry.get_sample_value(f"sojourn_{name}") == 0


def test_series_keep_the_rules() -> None:
    telemetry = Telemetry(model_name="m", max_waiting=3)
    telemetry.ready(seconds=1, family="f", dtype="d", device="cpu", model_name="m")
    telemetry.progressed(at=1.0)
    for metric in telemetry.registry.collect():
        assert metric.documentation, metric.name
        for sample in metric.samples:
            assert not sample.name.endswith("_created")
            assert not FORBIDDEN_LABELS & set(sample.labels)
            assert sample.timestamp is None
    names = {metric.name for metric in telemetry.registry.collect()}
    assert {"sojourn_build", "sojourn_model_info", "process_resident_memory_bytes", "process_open_fds"} <= names
    assert len(generate_latest(telemetry.registry)) < 40_000


def test_what_can_be_absent_is_absent() -> None:
    registry = Telemetry(model_name="m").registry
    names = {metric.name for metric in registry.collect()}
    assert not {"sojourn_time_to_ready_seconds", "sojourn_last_progress_timestamp_seconds"} & names
    labels = {"model": "m", "family": "", "dtype": "", "device": "", "fingerprint": ""}
    assert registry.get_sample_value("sojourn_model_info", labels) == 1


async def test_counters_move_by_exactly_what_happened(pipeline: Pipeline) -> None:
    async with serving(pipeline) as served:
        before = series(served.server.telemetry.registry)
        await served.client.generate(request(steps=5, outputs=[pb.OUTPUT_FORMAT_MP4]))
        assert moved(served, before) == {
            "requests_total{OK,t2va}": 1,
            "quality_requests_total{lossless,lossless}": 1,
            "request_queue_seconds_count{}": 1,
            "request_duration_seconds_count{t2va}": 1,
            "stage_duration_seconds_count{queued}": 1,
            "stage_duration_seconds_count{text_encode}": 1,
            "stage_duration_seconds_count{denoise}": 1,
            "stage_duration_seconds_count{decode}": 1,
            "stage_duration_seconds_count{encode_output}": 1,
            "step_duration_seconds_count{}": 4,
        }
        before = series(served.server.telemetry.registry)
        await served.client.error(request(steps=0))
        assert moved(served, before) == {
            "requests_total{INVALID_ARGUMENT,t2va}": 1,
            "requests_refused_total{invalid}": 1,
        }
        before = series(served.server.telemetry.registry)
        await served.client.error(request(quality=pb.QUALITY_TIER_HIGH, workflow=0))
        assert moved(served, before) == {
            "requests_total{FAILED_PRECONDITION,t2va}": 1,
            "requests_refused_total{invalid}": 1,
        }
        before = series(served.server.telemetry.registry)
        await served.client.error(request(workflow=99))
        assert moved(served, before) == {
            "requests_total{INVALID_ARGUMENT,unknown}": 1,
            "requests_refused_total{invalid}": 1,
        }


async def test_too_large_media_are_counted_apart(pipeline: Pipeline) -> None:
    async with serving(pipeline) as served:
        big = pb.Keyframe(image=b"x" * (pipeline.limits.max_media_bytes + 1), position=pb.KEYFRAME_POSITION_FIRST)
        before = series(served.server.telemetry.registry)
        await served.client.error(request(keyframes=[big]))
        assert moved(served, before) == {
            "requests_total{INVALID_ARGUMENT,fl2va}": 1,
            "requests_refused_total{too_large}": 1,
        }


async def test_progress_moves_the_timestamp(pipeline: Pipeline) -> None:
    async with serving(pipeline) as served:
        await served.client.generate(request())
        first = served.sample("last_progress_timestamp_seconds")
        await served.client.generate(request())
        assert served.sample("last_progress_timestamp_seconds") > first > 1.7e9


async def test_model_info_follows_the_model(pipeline: Pipeline) -> None:
    async with serving(pipeline, max_waiting=5) as served:
        await served.client.generate(request())
        labels = {"model": pipeline.model_name, "family": "minimax-h3", "dtype": "bfloat16", "device": "cpu"}
        assert served.sample("model_info", **labels, fingerprint=pipeline.fingerprint()) == 1
        assert served.sample("requests_waiting_limit") == 5


async def test_exporter_has_a_port_of_its_own(pipeline: Pipeline) -> None:
    async with serving(pipeline, metrics_listen=Address(host="127.0.0.1", port=0)) as served:
        url = f"http://127.0.0.1:{served.server.metrics_port}/metrics"
        page = (await asyncio.to_thread(lambda: urllib.request.urlopen(url).read())).decode()
    assert "sojourn_requests_total" in page
    assert "_created" not in page
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(lambda: urllib.request.urlopen(url))


async def test_requests_add_no_line_at_info(pipeline: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(pipeline) as served:
        await served.client.generate(request())
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger="sojourn"):
            for _ in range(5):
                await served.client.generate(request(outputs=[pb.OUTPUT_FORMAT_MP4]))
            await served.client.error(request(steps=0))
            call = served.client.call(request(steps=900))
            await call.read()
            call.cancel()
            await served.until_idle()
        noticed = [record for record in caplog.records if record.levelno >= logging.INFO]
        assert noticed == []
        assert len([r for r in caplog.records if r.message == "request ended"]) == 7
