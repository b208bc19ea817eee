"""The operator's metrics as a real Prometheus with the shipped rules sees them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sojourn.operator.kube.client import ADALN_CACHES, DIFFUSION_SERVICES, Kube

from tests.faults.prometheus import Prometheus
from tests.operator.cluster import custom, serve, service, until_condition
from tests.operator.operators import OperatorProcess
from tests.operator.served import Model
from tools import prometheus


@pytest.fixture
def watching(operator: OperatorProcess, tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the operator, which runs."""
    program = prometheus.program("prometheus")
    if program is None:
        pytest.skip(prometheus.MISSING)
    operator.start().wait_healthy()
    seen = Prometheus(program, tmp_path, [{"targets": [f"127.0.0.1:{operator.port}"]}])
    yield seen
    seen.close()


@pytest.mark.timeout(600)
async def test_a_value_that_cannot_be_rendered_is_seen_and_gone_after_the_cure(
    kube: Kube, namespace: str, watching: Prometheus, model: Model
) -> None:
    """A host tier larger than the memory limit: the chart's values make no sense together, and people must choose."""
    await kube.create(ADALN_CACHES, custom("AdaLNCache", namespace, "rows", hostTierSize="1Gi"))
    limits = {"limits": {"memory": "8Gi"}}
    await kube.create(DIFFUSION_SERVICES, service(namespace, adaLNCacheRef={"name": "rows"}, resources=limits))
    await until_condition(kube, namespace, "Released", "True")
    await serve(kube, namespace, model)
    await until_condition(kube, namespace, "Ready", "True")
    await watching.until_quiet("demo")
    watching.fired.clear()
    await kube.merge(ADALN_CACHES, namespace, "rows", {"spec": {"hostTierSize": "64Gi"}})
    await watching.until_firing("demo", "SojournOperatorStalled")
    assert f"DiffusionService {namespace}/demo" in watching.texts["demo", "SojournOperatorStalled"]["description"]
    await kube.merge(ADALN_CACHES, namespace, "rows", {"spec": {"hostTierSize": "1Gi"}})
    await watching.until_quiet("demo")
    assert {pod: alerts for pod, alerts in watching.fired.items() if alerts} == {"demo": {"SojournOperatorStalled"}}
