"""What nodes offer, read from a real API server."""

from pathlib import Path

from sojourn.operator.kube.access import from_kubeconfig, open_session
from sojourn.operator.kube.client import NODES, Kube
from sojourn.operator.nodes import Nodes

from tests.operator.operators import account_kubeconfig


async def node(kube: Kube, name: str, memory: str, **labels: str) -> None:
    """A node that no pod goes to."""
    metadata = {"name": name, "namespace": "", "labels": labels}
    await kube.create(NODES, {"metadata": metadata, "spec": {"unschedulable": True}})
    offer = {"status": {"allocatable": {"memory": memory}, "capacity": {"memory": memory}}}
    await kube.merge(NODES, "", name, offer, subresource="status")


async def test_the_largest_node_that_a_selector_allows(kube: Kube, namespace: str) -> None:
    nodes = Nodes(kube)
    small, large = f"{namespace}-small", f"{namespace}-large"
    await node(kube, small, "8Gi", pool=namespace, disk="fast")
    await node(kube, large, "64Gi", pool=namespace)
    try:
        await nodes.refresh()
        found = nodes.largest({"pool": namespace})
        assert found
        assert (found.name, found.memory) == (large, "64Gi")
        fast = nodes.largest({"pool": namespace, "disk": "fast"})
        assert fast
        assert fast.name == small
        assert nodes.largest({"pool": "another"}) is None, "one may still come into being"
        unasked = Nodes(kube, enabled=False)
        await unasked.refresh()
        assert unasked.largest({}) is None
    finally:
        for name in (small, large):
            await kube.delete(NODES, "", name)


async def test_who_may_not_look_at_nodes_knows_of_none(
    kube: Kube, namespace: str, kubeconfig: Path, tmp_path: Path
) -> None:
    access = from_kubeconfig(await account_kubeconfig(kubeconfig, namespace, tmp_path / "account"))
    async with open_session(access) as session:
        nodes = Nodes(Kube(session, access.server))
        await nodes.refresh()
    assert nodes.known is None
    assert nodes.largest({}) is None
