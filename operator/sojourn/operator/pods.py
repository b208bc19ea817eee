"""Asks the pods of a service over gRPC: the model for its health and GetInfo, residencyd for GetResidency.

Whoever does not answer in time is left out; that the operator cannot see is a condition, never zeros.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sojourn.operator.certificate import ClientCertificate
from sojourn.operator.credentials import Caller
from sojourn.operator.kube.client import Object
from sojourn.v1 import inference_pb2, inference_pb2_grpc, residency_pb2, residency_pb2_grpc

# A step of a large model may hold the process up for a moment; the kubelet's probe gives it as long.
TIMEOUT_SECONDS = 5.0
# More pods than this are summed up from the first ones: status is a summary, the metrics are the whole.
MAX_PODS = 32
# As the chart of a service sets it.
RESIDENCYD_PORT = 50052

_MODEL = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
# The pods' network is asked directly, whatever proxy the environment names; certificates are large enough at 1 MiB.
_OPTIONS = (("grpc.enable_http_proxy", 0),)

Answer = TypeVar("Answer")


class Health(StrEnum):
    """What a model says of itself."""

    SERVING = "serving"
    NOT_SERVING = "not serving"
    SILENT = "silent"
    # The operator may not ask: the kubelet's probe, which asks the same, has to do.
    UNASKED = "unasked"


@dataclass(frozen=True)
class PodView:
    """The answers of one pod; None for what was not answered."""

    name: str
    health: Health
    info: inference_pb2.GetInfoResponse | None = None
    residency: residency_pb2.Residency | None = None


async def look(pods: Sequence[Object], caller: Caller) -> list[PodView]:
    """Asks these pods, all at once."""
    alive = sorted((pod for pod in pods if "deletionTimestamp" not in pod["metadata"]), key=_name)
    return list(await asyncio.gather(*(_pod(pod, caller) for pod in alive[:MAX_PODS])))


async def _pod(pod: Object, caller: Caller) -> PodView:
    address = (pod.get("status") or {}).get("podIP")
    if not address:
        return PodView(_name(pod), Health.SILENT)
    (health, info), residency = await asyncio.gather(_model(address, caller), _residency(address))
    return PodView(_name(pod), health, info, residency)


async def _model(address: str, caller: Caller) -> tuple[Health, inference_pb2.GetInfoResponse | None]:
    if caller.shut:
        return Health.UNASKED, None
    try:
        async with _channel(address, caller.port, caller.roots, caller.certificate) as channel:
            health = await _health(channel)
            return health, None if caller.unnamed else await _info(channel, caller.token)
    except (OSError, TimeoutError, ssl.SSLError):
        return Health.SILENT, None


async def _health(channel: grpc.aio.Channel) -> Health:
    request = health_pb2.HealthCheckRequest(service=_MODEL)
    answer = await _answered(health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_SECONDS))
    if answer is None:
        return Health.SILENT
    return Health.SERVING if answer.status == health_pb2.HealthCheckResponse.SERVING else Health.NOT_SERVING


async def _info(channel: grpc.aio.Channel, token: str | None) -> inference_pb2.GetInfoResponse | None:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    request = inference_pb2.GetInfoRequest()
    return await _answered(stub.GetInfo(request, timeout=TIMEOUT_SECONDS, metadata=metadata))


async def _residency(address: str) -> residency_pb2.Residency | None:
    async with _channel(address, RESIDENCYD_PORT, None) as channel:
        stub = residency_pb2_grpc.ResidencyServiceStub(channel)
        answer = await _answered(stub.GetResidency(residency_pb2.GetResidencyRequest(), timeout=TIMEOUT_SECONDS))
    return None if answer is None else answer.residency


async def _answered(call: Awaitable[Answer]) -> Answer | None:
    try:
        return await call
    except grpc.aio.AioRpcError:
        return None


@asynccontextmanager
async def _channel(
    address: str, port: int, roots: bytes | None, own: ClientCertificate | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    host = f"[{address}]" if ":" in address else address
    if roots is None:
        async with grpc.aio.insecure_channel(f"{host}:{port}", options=_OPTIONS) as channel:
            yield channel
        return
    # Certificates name the address that clients call, never that of a pod.
    named = (("grpc.ssl_target_name_override", await _certified_name(address, port, roots, own)),)
    pair = (own.key.read_bytes(), own.chain.read_bytes()) if own else (None, None)
    credentials = grpc.ssl_channel_credentials(roots, *pair)
    async with grpc.aio.secure_channel(f"{host}:{port}", credentials, options=(*_OPTIONS, *named)) as channel:
        yield channel


async def _certified_name(address: str, port: int, roots: bytes, own: ClientCertificate | None) -> str:
    """A name that the certificate of a server is for, once it is known to be signed by what is trusted.

    Raises:
        OSError: nobody answers, or the certificate is another's.
    """
    context = ssl.create_default_context(cadata=roots.decode())
    context.check_hostname = False
    # A certificate may be trusted itself, without the authority that has signed it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.set_alpn_protocols(["h2"])
    if own:
        context.load_cert_chain(own.chain, own.key)
    async with asyncio.timeout(TIMEOUT_SECONDS):
        _, writer = await asyncio.open_connection(address, port, ssl=context, server_hostname="")
    certificate = writer.get_extra_info("peercert") or {}
    writer.close()
    names = [value for _, value in certificate.get("subjectAltName", ())]
    return str(names[0]) if names else address


def _name(pod: Object) -> str:
    return str(pod["metadata"]["name"])
