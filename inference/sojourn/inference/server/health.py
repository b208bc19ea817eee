"""State of the process, told in three ways: grpc.health.v1, `GetInfo` and a metric, which never disagree."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from enum import StrEnum

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio
from sojourn.inference.errors import NotServing
from sojourn.inference.server.engine import Engine
from sojourn.v1 import inference_pb2 as pb

_logger = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name


class State(StrEnum):
    """States of the process; the names are the values of the metric label `state`."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"


_WHY_NOT = {
    State.LOADING: "the model is being loaded; try again later",
    State.DRAINING: "the server is shutting down; try another one",
}


class Health:
    """The state, and who is told of its changes.

    Attributes:
        servicer: The health service, for the whole server ("") and for the inference service.
        state: Present state.
        reason: Why, where it is FAILED.
        engine: The model, from SERVING on.
        fingerprint: What its weights are, from SERVING on; hashing them may take a minute longer.
    """

    fingerprint: asyncio.Future[str]

    def __init__(self, *, changed: Callable[[str], None]) -> None:
        self.servicer = health_aio.HealthServicer()
        self.state = State.LOADING
        self.reason = ""
        self.engine: Engine | None = None
        self._changed = changed

    async def loading(self) -> None:
        """The port is open, the model is not there."""
        await self._enter(State.LOADING)

    async def serving(self, engine: Engine) -> None:
        """The model is there. A process that drains stays as it is."""
        self.engine = engine
        self.fingerprint = _in_daemon_thread(engine.fingerprint)
        if self.state is State.LOADING:
            await self._enter(State.SERVING)

    async def draining(self) -> None:
        """No more requests."""
        await self._enter(State.DRAINING)

    async def failed(self, reason: str) -> None:
        """The model cannot be loaded."""
        if self.state is State.LOADING:
            self.reason = reason
            await self._enter(State.FAILED)

    def require_engine(self) -> Engine:
        """The model.

        Raises:
            NotServing: In any state but SERVING.
        """
        if self.state is not State.SERVING or self.engine is None:
            raise NotServing(_WHY_NOT.get(self.state, f"the model cannot be served: {self.reason}"))
        return self.engine

    async def _enter(self, state: State) -> None:
        self.state = state
        self._changed(state)
        status = health_pb2.HealthCheckResponse
        told = status.SERVING if state is State.SERVING else status.NOT_SERVING
        for service in ("", SERVICE_NAME):
            await self.servicer.set(service, told)


def _in_daemon_thread(hash_weights: Callable[[], str]) -> asyncio.Future[str]:
    """Runs beside everything else, and does not hold up the end of the process as a thread of a pool would."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[str] = loop.create_future()

    def run() -> None:
        fingerprint = ""
        try:
            fingerprint = hash_weights()
        except Exception:
            _logger.exception("the weights cannot be hashed; the fingerprint stays empty")
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(future.set_result, fingerprint)

    threading.Thread(target=run, name="fingerprint", daemon=True).start()
    return future
