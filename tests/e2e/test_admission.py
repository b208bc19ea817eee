"""The webhook on a node: through its Service, the certificate that helm made, and the operator's NetworkPolicy."""

import json
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import install
from tests.e2e.node import STUDIO, Object, kubectl, until

pytestmark = pytest.mark.timeout(600)
SERVICE: Object = {
    "apiVersion": "sojourn.dev/v1alpha1",
    "kind": "DiffusionService",
    "metadata": {"name": "unheard"},
    "spec": {"model": {"builtIn": {}}, "adaLNCacheRef": {"name": "nowhere"}},
}


def said() -> str:
    """What kubectl says of a service that follows a policy which is not there; nothing is stored."""
    given = json.dumps(SERVICE)
    return kubectl("-n", STUDIO, "apply", "--dry-run=server", "-f", "-", given=given, check=False)


@pytest.fixture
def webhook(installed: None) -> Iterator[None]:
    install("charts/sojourn", "--set", "webhook.enabled=true")
    yield
    install()


def test_without_it_the_service_is_taken(installed: None) -> None:
    assert "created" in said()


def test_with_it_kubectl_is_told_at_once_what_a_pass_would_say(webhook: None) -> None:
    # Until the API server reaches it nobody is kept from anything.
    until(lambda: "denied the request" in said(), 60, "refused")
    assert "AdaLNCache nowhere" in said()
