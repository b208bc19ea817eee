"""The webhook on a real API server: what no pass could follow is refused, and nobody is ever locked out."""

import asyncio
import base64
import ipaddress
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from sojourn.operator.admission import Admission, _load, _renew, _stamp
from sojourn.operator.cache import Cache
from sojourn.operator.errors import ApiError, BadConfiguration
from sojourn.operator.kube.client import (
    ADALN_CACHES,
    DEPLOYMENTS,
    DIFFUSION_SERVICES,
    LAYERWISE_OFFLOADS,
    Kube,
    Resource,
)
from sojourn.operator.nodes import Node, Nodes
from sojourn.operator.telemetry import Telemetry

from tests.operator.certificates import Certificate, issue
from tests.operator.cluster import custom, exists, service, until, until_condition
from tests.operator.operators import OperatorProcess, free_port, rendered

WEBHOOKS = Resource(
    "admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations"
)


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return issue(tmp_path / "webhook", x509.IPAddress(ipaddress.ip_address("127.0.0.1")))


def configuration(namespace: str, port: int, certificate: Certificate) -> dict[str, Any]:
    """The chart's, for one namespace; the API server finds the operator at an address of this machine."""
    sets = ("webhook.enabled=true", f"operator.namespaces={{{namespace}}}")
    (item,) = (found for found in rendered(namespace, *sets) if found["kind"] == WEBHOOKS.kind)
    bundle = base64.b64encode(certificate.ca.read_bytes()).decode()
    item["webhooks"][0]["clientConfig"] = {"url": f"https://127.0.0.1:{port}/validate", "caBundle": bundle}
    item["metadata"] |= {"name": f"test-{namespace}", "namespace": ""}
    return item


@pytest.fixture
async def guarded(
    kube: Kube, namespace: str, operator: OperatorProcess, certificate: Certificate
) -> AsyncIterator[OperatorProcess]:
    """An operator that the API server asks, and that has been asked."""
    port = free_port()
    item = configuration(namespace, port, certificate)
    operator.start(f"--webhook-listen=127.0.0.1:{port}", f"--webhook-certificates={certificate.folder}").wait_healthy()
    await kube.create(WEBHOOKS, item)

    async def asked() -> bool:
        try:
            await kube.create(DIFFUSION_SERVICES, service(namespace, "probe", adaLNCacheRef={"name": "none"}))
        except ApiError:
            return True
        await kube.delete(DIFFUSION_SERVICES, namespace, "probe")
        return False

    await until(asked, pause=0.5)
    yield operator
    await kube.delete(WEBHOOKS, "", item["metadata"]["name"])


async def refused(kube: Kube, body: dict[str, Any]) -> str:
    with pytest.raises(ApiError) as error:
        await kube.create(DIFFUSION_SERVICES, body)
    return str(error.value)


async def test_what_no_pass_could_follow_is_refused_with_the_message_of_the_pass(
    kube: Kube, namespace: str, guarded: OperatorProcess
) -> None:
    said = await refused(kube, service(namespace, adaLNCacheRef={"name": "small"}))
    assert "PolicyNotFound: not found: AdaLNCache small" in said
    # Applied a moment before, perhaps not yet seen by the operator.
    await kube.create(ADALN_CACHES, custom("AdaLNCache", namespace, "small", hostTierSize="8Gi"))
    await kube.create(DIFFUSION_SERVICES, service(namespace, "fits", adaLNCacheRef={"name": "small"}))
    limits = {"limits": {"memory": "4Gi"}}
    said = await refused(kube, service(namespace, adaLNCacheRef={"name": "small"}, resources=limits))
    assert "PlanDoesNotFit" in said
    assert "9Gi in all) do not fit the memory limit of 4Gi" in said
    with pytest.raises(ApiError, match="PlanDoesNotFit"):
        await kube.merge(DIFFUSION_SERVICES, namespace, "fits", {"spec": {"resources": limits}})
    await until_condition(kube, namespace, "Released", "True", name="fits")
    assert guarded.metrics()['sojourn_operator_admission_reviews_total{result="refused"}'] >= 3


async def test_a_followed_policy_may_be_deleted_and_who_does_it_is_told(
    kube: Kube, namespace: str, guarded: OperatorProcess
) -> None:
    await kube.create(LAYERWISE_OFFLOADS, custom("LayerwiseOffload", namespace, "stream"))
    await kube.create(DIFFUSION_SERVICES, service(namespace, layerwiseOffloadRef={"name": "stream"}))
    await until_condition(kube, namespace, "Released", "True")
    address = kube._server + LAYERWISE_OFFLOADS.path(namespace, "stream")
    async with kube._session.delete(address) as answer:
        assert answer.status == 200
        assert "LayerwiseOffload stream is followed by demo" in answer.headers["Warning"]
    # The service is worse now than anything that would be let in; it can be labelled, suspended no more, and deleted.
    await kube.merge(DIFFUSION_SERVICES, namespace, "demo", {"metadata": {"labels": {"a": "b"}}})
    await kube.delete(DIFFUSION_SERVICES, namespace, "demo")

    async def gone() -> bool:
        return not await exists(kube, DIFFUSION_SERVICES, namespace, "demo")

    await until(gone)
    assert not await exists(kube, DEPLOYMENTS, namespace, "dsvc-demo")


async def test_without_the_operator_nobody_is_kept_from_anything(
    kube: Kube, namespace: str, guarded: OperatorProcess
) -> None:
    guarded.kill()
    await kube.create(DIFFUSION_SERVICES, service(namespace, adaLNCacheRef={"name": "none"}))
    guarded.start()
    await until_condition(kube, namespace, "PolicyResolved", "False", reason="PolicyNotFound")


def admission(kube: Kube, *nodes: Node) -> Admission:
    return Admission(kube, Cache(), Nodes(kube, known=nodes), Telemetry(version="test"))


def asked(item: dict[str, Any], old: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"operation": "UPDATE" if old else "CREATE", "object": item, "oldObject": old}


async def test_what_is_larger_than_any_node_is_refused(kube: Kube) -> None:
    body = service("studio", sharedHostMemory={"size": "100Gi"})
    assert "allocatable on small" in (await admission(kube, Node("small", {}, "8Gi")).review(asked(body))).refused
    assert not (await admission(kube).review(asked(body))).refused
    elsewhere = service("studio", sharedHostMemory={"size": "100Gi"}, scheduling={"nodeSelector": {"pool": "big"}})
    ruling = await admission(kube, Node("small", {}, "8Gi")).review(asked(elsewhere))
    assert not ruling.refused, "a node that matches may still come into being"


async def test_a_limit_below_what_the_model_took_is_warned_of(kube: Kube) -> None:
    body = service("studio", resources={"limits": {"memory": "4Gi"}})
    body["status"] = {"memoryPlan": [{"name": "hostPeak", "size": "6.5Gi", "budget": "8Gi"}]}
    ruling = await admission(kube).review(asked(body, service("studio")))
    assert not ruling.refused
    assert ruling.warnings == ("the model took up to 6.5Gi of host memory, and resources.limits.memory is 4Gi",)


async def test_a_renewed_certificate_is_shown_without_a_restart(tmp_path: Path, certificate: Certificate) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    renewing = asyncio.create_task(
        _renew(context, certificate.folder, _load(context, certificate.folder), pause_seconds=0.05)
    )
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)

    async def shown() -> bytes:
        blind = ssl._create_unverified_context()
        _, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1], ssl=blind)
        certified: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return certified

    before = await shown()
    issue(certificate.folder, x509.DNSName("renewed"))

    async def changed() -> bool:
        return await shown() != before

    await until(changed)
    renewing.cancel()
    server.close()


def test_a_missing_or_broken_certificate_is_said(tmp_path: Path, certificate: Certificate) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    before = _load(context, certificate.folder)
    certificate.certificate.write_text("no certificate")
    assert _stamp(certificate.folder) != before
    for folder in (certificate.folder, tmp_path / "nowhere"):
        with pytest.raises(BadConfiguration, match="cannot be read"):
            _load(context, folder)
