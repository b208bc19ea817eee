"""From the first second to the last: states, reflection, drain, failed loads, exit codes."""

import asyncio
import json
import os
import shutil
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from sojourn.inference.errors import ModelError
from sojourn.inference.pipeline import Pipeline
from sojourn.inference.server.config import Address, ConfigError, ServerConfig
from sojourn.inference.server.main import Server
from sojourn.v1 import inference_pb2 as pb

from tests.inference.server.serving import ANY_PORT, Client, Slowed, ready, request, serving

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = ("", "sojourn.v1.InferenceService")
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


async def health_of(client: Client) -> list[int]:
    stub = health_pb2_grpc.HealthStub(client.channel)
    return [(await stub.Check(health_pb2.HealthCheckRequest(service=service))).status for service in SERVICES]


async def test_port_answers_while_the_model_loads(pipeline: Pipeline) -> None:
    go = threading.Event()

    def load() -> Pipeline:
        assert go.wait(20)
        return pipeline

    async with serving(pipeline, load=load) as served:
        assert await health_of(served.client) == [NOT_SERVING] * 2
        watched = health_pb2_grpc.HealthStub(served.client.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watched.read()).status == NOT_SERVING
        info = await served.client.info()
        assert (info.state, info.model) == (pb.SERVICE_STATE_LOADING, "model")
        assert info.versions["python"] == ".".join(map(str, sys.version_info[:3]))
        assert info.memory.process_resident_bytes > 10**6
        error = await served.client.error(request())
        assert error.code() is UNAVAILABLE
        assert "being loaded" in str(error.details())
        assert served.sample("requests_refused_total", reason="not_ready") == 1
        assert served.sample("service_state", state="loading") == 1
        assert served.server.telemetry.registry.get_sample_value("sojourn_time_to_ready_seconds") is None
        go.set()
        assert await ready(served.server)
        assert (await watched.read()).status == SERVING
        assert await health_of(served.client) == [SERVING] * 2
        assert served.sample("service_state", state="serving") == 1
        assert served.sample("time_to_ready_seconds") > 0
        watched.cancel()


async def test_info_tells_what_is_served(pipeline: Pipeline) -> None:
    async with serving(pipeline, max_waiting=3) as served:
        await served.client.generate(request())
        info = await served.client.info()
    assert info.state == pb.SERVICE_STATE_SERVING
    assert (info.model, info.family) == (pipeline.model_name, "minimax-h3")
    assert list(info.workflows) == [pb.WORKFLOW_T2VA, pb.WORKFLOW_FL2VA, pb.WORKFLOW_REF2VA]
    assert list(info.quality_tiers) == [pb.QUALITY_TIER_LOSSLESS]
    assert info.limits.max_waiting == 3
    assert not info.limits.trained_sizes  # any size within the limits; of a model with such, see test_helios.py
    for field in pb.Limits.DESCRIPTOR.fields:
        assert field.name == "trained_sizes" or getattr(info.limits, field.name), f"limits.{field.name} is not told"
    for field in pb.Defaults.DESCRIPTOR.fields:
        assert getattr(info.defaults, field.name) == getattr(pipeline.defaults, field.name)
    assert {"torch", "diffusers", "transformers", "python"} <= set(info.versions)
    assert (info.device, info.dtype, info.frames_per_second) == ("cpu", "bfloat16", 24)
    assert info.model_fingerprint == pipeline.fingerprint()
    assert {part.name for part in info.components} == set(pipeline.components)
    transformer = next(part for part in info.components if part.name == "transformer")
    assert transformer.class_name == "MiniMaxH3Transformer3DModel"
    assert transformer.size_bytes >= transformer.parameters > 0
    assert info.memory.host_available_bytes > 0


async def test_reflection_is_enough_to_call(pipeline: Pipeline) -> None:
    def explore(target: str) -> tuple[list[str], Any, list[str]]:
        with grpc.insecure_channel(target) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            pool = DescriptorPool(database)
            service = pool.FindServiceByName("sojourn.v1.InferenceService")
            generate = service.methods_by_name["Generate"]
            ask = message_factory.GetMessageClass(generate.input_type)
            answer = message_factory.GetMessageClass(generate.output_type)
            call = channel.unary_stream(
                "/sojourn.v1.InferenceService/Generate", ask.SerializeToString, answer.FromString
            )
            message = ask.FromString(request().SerializeToString())
            return list(database.get_services()), service, [r.WhichOneof("event") for r in call(message)]

    async with serving(pipeline) as served:
        services, _, events = await asyncio.to_thread(explore, served.target)
    assert {"sojourn.v1.InferenceService", "grpc.health.v1.Health"} <= set(services)
    assert events[-1] == "completed"


async def test_failed_load_says_why(pipeline: Pipeline) -> None:
    def load() -> Pipeline:
        raise ModelError("WeightsTruncated", Path("vae/x.safetensors"), "expected 10 bytes, found 9")

    async with serving(pipeline, load=load) as served:
        assert not await ready(served.server)
        assert await health_of(served.client) == [NOT_SERVING] * 2
        info = await served.client.info()
        assert info.state == pb.SERVICE_STATE_FAILED
        assert info.state_reason == "WeightsTruncated: vae/x.safetensors: expected 10 bytes, found 9"
        error = await served.client.error(request())
        assert error.code() is UNAVAILABLE
        assert "WeightsTruncated" in str(error.details())
        assert served.sample("service_state", state="failed") == 1


async def test_drain_finishes_what_runs_and_dismisses_what_waits(pipeline: Pipeline) -> None:
    async with serving(Slowed(pipeline, 0.05)) as served:
        running = served.client.call(request(steps=12))
        responses = aiter(running)
        while (await anext(responses)).progress.step < 1:
            pass
        waiting = asyncio.create_task(served.client.error(request(seed=2)))
        await served.until(lambda: served.sample("requests_waiting") == 1)
        stopping = asyncio.create_task(served.server.stop(grace_seconds=10))
        assert (await waiting).code() is UNAVAILABLE
        assert await health_of(served.client) == [NOT_SERVING] * 2
        assert (await served.client.info()).state == pb.SERVICE_STATE_DRAINING
        assert (await served.client.error(request(seed=3))).code() is UNAVAILABLE
        assert [r.WhichOneof("event") async for r in responses][-1] == "completed"
        assert await stopping


async def test_drain_ends_what_outlasts_the_grace(pipeline: Pipeline) -> None:
    engine = Slowed(pipeline, 0.05)
    async with serving(engine) as served:
        running = asyncio.create_task(served.client.error(request(seed=1, steps=200)))
        await served.until(lambda: engine.steps_done.get(1, 0) > 1)
        began = time.monotonic()
        assert await served.server.stop(grace_seconds=0.3)
        assert time.monotonic() - began < 8
        error = await running
        assert error.code() is UNAVAILABLE
        assert "shut down before" in str(error.details())
        assert served.sample("requests_total", workflow="t2va", code="UNAVAILABLE") == 1


async def test_open_watch_does_not_hold_up_the_end(pipeline: Pipeline) -> None:
    async with serving(pipeline) as served:
        watched = health_pb2_grpc.HealthStub(served.client.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watched.read()).status == SERVING
        began = time.monotonic()
        assert await served.server.stop(grace_seconds=10)
        assert time.monotonic() - began < 8


async def test_stop_while_loading_waits_for_nothing(pipeline: Pipeline) -> None:
    go = threading.Event()

    def load() -> Pipeline:
        go.wait(20)
        return pipeline

    server = Server(ServerConfig(listen=ANY_PORT, metrics_listen=None), load)
    await server.start()
    began = time.monotonic()
    assert not await server.stop(grace_seconds=10), "the worker is not at rest, and the process has to be ended"
    assert time.monotonic() - began < 8
    go.set()


async def test_taken_port_is_a_start_error(pipeline: Pipeline) -> None:
    async with serving(pipeline) as served:
        taken = Address(host="127.0.0.1", port=served.server.port)
        with pytest.raises(ConfigError, match="is it in use"):
            await Server(ServerConfig(listen=taken, metrics_listen=None), lambda: pipeline).start()


async def test_importing_the_server_does_not_import_torch() -> None:
    code = "import sys, sojourn.inference.server.main; sys.exit('torch' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=environment())
    assert await process.wait() == 0


def environment() -> dict[str, str]:
    folders = [str(Path(folder).resolve()) for folder in ("proto", "inference", "residencyd", "operator", ".")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}


@dataclass
class Process:
    """A server process and its log so far."""

    process: asyncio.subprocess.Process
    client: Client
    metrics_port: int
    log: list[dict[str, Any]]

    async def end(self) -> int:
        async with asyncio.timeout(150):
            assert self.process.stderr is not None
            async for line in self.process.stderr:
                self.log.append(json.loads(line))
            return await self.process.wait()

    async def state(self, state: int) -> pb.GetInfoResponse:
        async with asyncio.timeout(150):
            while (info := await self.client.info()).state != state:
                await asyncio.sleep(0.05)
            return info


@asynccontextmanager
async def process(model: Path, **settings: Any) -> AsyncIterator[Process]:
    script = Path(__file__).with_name("process.py")
    running = await asyncio.create_subprocess_exec(
        sys.executable, script, model, json.dumps(settings), stderr=asyncio.subprocess.PIPE, env=environment()
    )
    assert running.stderr is not None
    try:
        line = json.loads(await asyncio.wait_for(running.stderr.readline(), 150))
        assert line["message"] == "listening"
        async with grpc.aio.insecure_channel(line["address"]) as channel:
            yield Process(running, Client(channel), line["metrics_port"], [line])
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()


async def test_what_a_server_prints_changes_by_signal(model: Path) -> None:
    async with process(model) as server:
        await server.state(pb.SERVICE_STATE_SERVING)
        await server.client.generate(request())
        server.process.send_signal(signal.SIGUSR1)
        assert server.process.stderr is not None
        async for line in server.process.stderr:
            server.log.append(json.loads(line))
            if server.log[-1]["message"] == "printing from level debug on":
                break
        assert "debug" not in {line["level"] for line in server.log}
        await server.client.generate(request())
        server.process.send_signal(signal.SIGTERM)
        assert await server.end() == 0
    assert [line["message"] for line in server.log].count("request ended") == 1


async def test_sigterm_lets_the_running_request_finish_and_exits_0(model: Path) -> None:
    async with process(model) as server:
        assert server.client.channel is not None
        await server.state(pb.SERVICE_STATE_SERVING)
        page = await asyncio.to_thread(
            lambda: urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics").read().decode()
        )
        assert 'sojourn_service_state{state="serving"} 1.0' in page
        responses = aiter(server.client.call(request(steps=60)))
        while (await anext(responses)).progress.step < 1:
            pass
        server.process.send_signal(signal.SIGTERM)
        assert [r.WhichOneof("event") async for r in responses][-1] == "completed"
        assert await server.end() == 0
        messages = [line["message"] for line in server.log]
        placement = [message for message in messages if message.startswith(("Loaded ", "Settled: "))]
        rest = [message for message in messages if message not in placement]
        assert rest == ["listening", "AdaLN plan cache off", "model loaded", "draining", "stopped"]
        assert [message.split()[1].rstrip(":") for message in placement[:-1]] == sorted(
            ["audio_vae", "text_encoder", "transformer", "transformer_ref", "vae"]
        )
        assert placement[-1].startswith("Settled: ")


async def test_sigint_beyond_the_grace_ends_the_request_and_exits_0(model: Path) -> None:
    async with process(model, grace_seconds=0.2) as server:
        await server.state(pb.SERVICE_STATE_SERVING)
        call = server.client.call(request(steps=1000, count=16))
        responses = aiter(call)
        while (await anext(responses)).progress.step < 1:
            pass
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [r async for r in responses]
        assert caught.value.code() is UNAVAILABLE
        assert await server.end() == 0


async def test_missing_model_is_told_then_exits_non_zero(tmp_path: Path) -> None:
    async with process(tmp_path / "absent", failed_grace_seconds=1.0) as server:
        info = await server.state(pb.SERVICE_STATE_FAILED)
        assert "absent" in info.state_reason
        assert await health_of(server.client) == [NOT_SERVING] * 2
        assert await server.end() == 1


async def test_truncated_weights_are_told_then_exit_non_zero(model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(model, tmp_path / "broken")
    weights = broken / "vae" / "diffusion_pytorch_model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    async with process(broken, failed_grace_seconds=0.5) as server:
        info = await server.state(pb.SERVICE_STATE_FAILED)
        assert info.state_reason.startswith("WeightsTruncated: ")
        assert str(weights) in info.state_reason
        assert await server.end() == 1
