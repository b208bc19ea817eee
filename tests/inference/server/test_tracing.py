"""Traces as a collector receives them, over both protocols of OTLP."""

import asyncio
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from prometheus_client.openmetrics.exposition import generate_latest
from sojourn.inference.pipeline import Pipeline
from sojourn.inference.tracing import METHOD, NoTraces, TracingUnavailable, from_environment
from sojourn.inference.watch import Event, StepDone
from sojourn.v1 import inference_pb2 as pb

from tests.inference.server.serving import PROMPT, Gated, request, serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Received:
    """What a collector got."""

    def __init__(self) -> None:
        self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []

    def spans(self) -> list[trace_pb2.Span]:
        return [
            span
            for message in self.requests
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def named(self, name: str) -> trace_pb2.Span:
        (found,) = [span for span in self.spans() if span.name == name]
        return found

    def resource(self) -> dict[str, Any]:
        return attributes(self.requests[0].resource_spans[0].resource)


def attributes(of: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in of.attributes}


@pytest.fixture(params=["grpc", "http/protobuf"])
def received(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Received]:
    """A collector that the environment names."""
    got = Received()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", request.param)
    start = over_grpc if request.param == "grpc" else over_http
    port, stop = start(got)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    yield got
    stop()


def over_grpc(got: Received) -> tuple[int, Any]:
    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            got.requests.append(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return port, lambda: server.stop(0).wait()


def over_http(got: Received) -> tuple[int, Any]:
    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            content = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                content = gzip.decompress(content)
            got.requests.append(trace_service_pb2.ExportTraceServiceRequest.FromString(content))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop


async def test_a_call_is_a_span_with_its_stages_and_steps(received: Received, pipeline: Pipeline) -> None:
    async with serving(pipeline, traces=from_environment(os.environ)) as served:
        metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
        await served.client.generate(request(steps=5, outputs=[pb.OUTPUT_FORMAT_MP4]), metadata=metadata)
        page = generate_latest(served.server.telemetry.registry).decode()
    call = received.named(METHOD)
    assert (call.trace_id.hex(), call.parent_span_id.hex()) == (TRACE, PARENT)
    told = attributes(call)
    assert told["rpc.response.status_code"] == "OK"
    assert (told["sojourn.workflow"], told["sojourn.steps"], told["sojourn.clips"]) == ("t2va", 5, 1)
    below = sorted((span for span in received.spans() if span.name != METHOD), key=lambda s: s.start_time_unix_nano)
    assert [span.name for span in below] == ["queued", "text_encode", "denoise", "decode", "encode_output"]
    assert {span.parent_span_id for span in below} == {call.span_id}
    assert all(before.end_time_unix_nano <= after.start_time_unix_nano for before, after in itertools.pairwise(below))
    assert all(call.start_time_unix_nano <= s.start_time_unix_nano <= s.end_time_unix_nano for s in below)
    steps = received.named("denoise").events
    assert [attributes(step)["sojourn.step"] for step in steps] == [1, 2, 3, 4]
    assert all(attributes(step)["sojourn.step_seconds"] > 0 for step in steps)
    assert received.resource()["service.name"] == "sojourn"
    assert PROMPT not in str(received.requests)
    assert f'trace_id="{TRACE}"' in page


async def test_ends_other_than_ok_are_told(received: Received, poisoned: Pipeline) -> None:
    async with serving(poisoned, traces=from_environment(os.environ)) as served:
        await served.client.error(request())
        await served.client.error(request(steps=0))
    by_code = {attributes(span)["rpc.response.status_code"]: span for span in received.spans() if span.name == METHOD}
    assert set(by_code) == {"INTERNAL", "INVALID_ARGUMENT"}
    assert by_code["INTERNAL"].status.code == trace_pb2.Status.STATUS_CODE_ERROR
    assert "denoise" in by_code["INTERNAL"].status.message
    assert by_code["INVALID_ARGUMENT"].status.code == trace_pb2.Status.STATUS_CODE_UNSET
    assert received.named("denoise").parent_span_id == by_code["INTERNAL"].span_id


async def test_a_cancelled_call_leaves_no_span_open(received: Received, pipeline: Pipeline) -> None:
    def first_step(event: Event) -> bool:
        return isinstance(event, StepDone)

    engine = Gated(pipeline, first_step)
    async with serving(engine, traces=from_environment(os.environ)) as served:
        call = served.client.call(request())
        await call.read()
        await asyncio.to_thread(engine.reached.wait, 30)
        call.cancel()
        await served.until(lambda: served.server._servicer._calls == 0)
        engine.open.set()
        await served.until_idle()
    assert attributes(received.named(METHOD))["rpc.response.status_code"] == "CANCELLED"
    assert {span.name for span in received.spans()} == {METHOD, "queued", "text_encode", "denoise"}


def test_the_environment_names_the_service(received: Received, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "digits")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment=test")
    traces = from_environment(os.environ)
    traces.call(()).ended("OK", message="")
    traces.close()
    assert received.resource()["service.name"] == "digits"
    assert received.resource()["deployment"] == "test"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_SERVICE_NAME": "x"},
    ],
    ids=str,
)
def test_off_unless_asked_for(environment: dict[str, str]) -> None:
    assert isinstance(from_environment(environment), NoTraces)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "takes otlp or none"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "takes grpc or http/protobuf"),
    ],
)
def test_what_cannot_be_had_is_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(TracingUnavailable, match=said):
        from_environment(environment)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(TracingUnavailable, match=r"sojourn\[tracing\]"):
        from_environment({"OTEL_TRACES_EXPORTER": "otlp"})
