"""What the nodes of the cluster offer, as far as the operator may see them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sojourn.operator.errors import Forbidden
from sojourn.operator.kube.client import NODES, Kube, Object
from sojourn.operator.resources.base import quantity_value


@dataclass(frozen=True)
class Node:
    """One node.

    Attributes:
        name: its name.
        labels: its labels.
        memory: allocatable memory, a quantity.
    """

    name: str
    labels: Mapping[str, str]
    memory: str


@dataclass
class Nodes:
    """The nodes at the last look; None where the operator may not look (it serves named namespaces only)."""

    kube: Kube
    known: tuple[Node, ...] | None = None
    enabled: bool = field(default=True)

    async def refresh(self) -> None:
        """Reads all nodes."""
        if not self.enabled:
            return
        try:
            self.known = tuple(parse(await self.kube.list(NODES)))
        except Forbidden:
            self.known = None

    def largest(self, selector: Mapping[str, str]) -> Node | None:
        """The node with most allocatable memory of those that a selector allows; None where none is known.

        None too where no node matches: a cluster that grows by need may still make one.
        """
        fitting = [node for node in self.known or () if selector.items() <= node.labels.items()]
        return max(fitting, key=lambda node: quantity_value(node.memory), default=None)


def parse(items: Iterable[Object]) -> Iterable[Node]:
    """Nodes that say what they offer."""
    for item in items:
        memory = (item.get("status") or {}).get("allocatable", {}).get("memory")
        if memory:
            yield Node(item["metadata"]["name"], item["metadata"].get("labels") or {}, memory)
