"""ResidencyService, health and reflection on one gRPC server.

Health knows two names. The empty one is the sidecar itself: serving while it runs, for probes. That of the service
says whether it sees a model process: not serving while every one of them is blind, and a watch of it tells when that
changes.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from sojourn.residencyd import messages
from sojourn.residencyd.family import Child, read_children
from sojourn.residencyd.scanner import Scanner
from sojourn.residencyd.snapshots import Snapshot
from sojourn.v1 import residency_pb2 as pb
from sojourn.v1 import residency_pb2_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["ResidencyService"].full_name

# Each watcher holds a thread; beyond, watchers are refused.
WATCHERS_LIMIT = 16
# For calls that are no watch: GetResidency, health, reflection.
_OTHER_THREADS = 8


class ResidencyServicer(residency_pb2_grpc.ResidencyServiceServicer):
    """Answers from the scanner's snapshots.

    Args:
        scanner: Makes them.
        stopping: Set when the server shuts down.
        clock: Unix time.
    """

    def __init__(self, scanner: Scanner, stopping: threading.Event, *, clock: Callable[[], float] = time.time) -> None:
        self._scanner = scanner
        self._stopping = stopping
        self._clock = clock
        self._places = threading.BoundedSemaphore(WATCHERS_LIMIT)

    def GetResidency(  # noqa: N802
        self, request: pb.GetResidencyRequest, context: grpc.ServicerContext
    ) -> pb.GetResidencyResponse:
        """One look."""
        self._refuse_when_stopping(context)
        return pb.GetResidencyResponse(residency=self._look())

    def WatchResidency(  # noqa: N802
        self, request: pb.WatchResidencyRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchResidencyResponse]:
        """Looks that differ, until the client or the server has enough."""
        self._refuse_when_stopping(context)
        if not 0 <= request.interval_seconds < float("inf"):
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"interval_seconds is {request.interval_seconds}: give 0 or a positive number",
            )
        if not self._places.acquire(blocking=False):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{WATCHERS_LIMIT} watchers are connected, no more are taken"
            )
        try:
            yield from self._watch(request, context)
        finally:
            self._places.release()

    def _watch(
        self, request: pb.WatchResidencyRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchResidencyResponse]:
        ended = threading.Event()
        context.add_callback(ended.set)
        interval = max(request.interval_seconds, self._scanner.settings.floor_seconds)
        last: pb.Residency | None = None
        while not ended.is_set() and not self._stopping.is_set():
            now = self._look()
            if last is None or messages.differ(last, now, threshold_bytes=request.threshold_bytes):
                last = now
                yield pb.WatchResidencyResponse(residency=now)
            self._wait(ended, interval)

    def _wait(self, ended: threading.Event, seconds: float) -> None:
        """Until the time is over, the client has gone or the server stops, to within a fifth of a second."""
        end = time.monotonic() + seconds
        while not self._stopping.is_set() and (left := end - time.monotonic()) > 0:
            if ended.wait(min(left, 0.2)):
                return

    def _look(self) -> pb.Residency:
        return messages.residency(self._scanner.snapshot(self._clock()), children=self._children)

    def _children(self, pid: int) -> tuple[Child, ...]:
        return read_children(pid, proc=Path(self._scanner.settings.proc))

    def _refuse_when_stopping(self, context: grpc.ServicerContext) -> None:
        if self._stopping.is_set():
            context.abort(grpc.StatusCode.UNAVAILABLE, "shutting down")


class SightedHealth(health.HealthServicer):
    """Health that looks before it answers, so that it is never older than the interval floor.

    Args:
        look: Makes a snapshot if the last is old; must report it to `saw`.
    """

    def __init__(self, look: Callable[[], object]) -> None:
        super().__init__()
        self._look = look
        self.set("", health_pb2.HealthCheckResponse.SERVING)
        self.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)

    def saw(self, snapshot: Snapshot) -> None:
        """Takes note of a snapshot."""
        status = health_pb2.HealthCheckResponse
        self.set(SERVICE, status.SERVING if snapshot.seen else status.NOT_SERVING)

    def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """One answer."""
        if request.service == SERVICE:
            self._look()
        return super().Check(request, context)


class Server:
    """The gRPC server, made and not yet started.

    Args:
        scanner: Makes the snapshots; its `on_scan` is added to.
        address: Where to listen, such as "0.0.0.0:50052"; port 0 takes a free one.
        clock: Unix time.

    Attributes:
        port: That was taken.

    Raises:
        RuntimeError: The address cannot be listened on.
    """

    def __init__(self, scanner: Scanner, address: str, *, clock: Callable[[], float] = time.time) -> None:
        self._stopping = threading.Event()
        self._health = SightedHealth(lambda: scanner.snapshot(clock()))
        before = scanner.on_scan

        def on_scan(snapshot: Snapshot) -> None:
            before(snapshot)
            self._health.saw(snapshot)

        scanner.on_scan = on_scan
        pool = futures.ThreadPoolExecutor(WATCHERS_LIMIT + _OTHER_THREADS, thread_name_prefix="grpc")
        self._server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        residency_pb2_grpc.add_ResidencyServiceServicer_to_server(
            ResidencyServicer(scanner, self._stopping, clock=clock), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        self.port = self._server.add_insecure_port(address)

    def start(self) -> None:
        """Begins to answer."""
        self._server.start()

    def stop(self, *, grace_seconds: float) -> None:
        """Refuses new calls, lets running ones end, and returns when all have."""
        self._health.enter_graceful_shutdown()
        self._stopping.set()
        self._server.stop(grace_seconds).wait()
