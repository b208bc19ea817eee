"""Pods by their labels, as a NetworkPolicy selects them."""

from pydantic import Field
from sojourn.operator.resources.base import Labels, Model


class Peer(Model):
    """Pods on the other end of a connection. Both selectors must match."""

    namespace_labels: Labels = Field(default_factory=dict, description="Labels of their namespace. Empty: this one.")
    pod_labels: Labels = Field(default_factory=dict, description="Labels of the pods. Empty: all.")
