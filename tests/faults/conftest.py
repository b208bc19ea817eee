"""The cluster of the operator's tests, for the operator's fault."""

from tests.operator.conftest import control_plane, kube, kubeconfig, model, namespace, operator

__all__ = ["control_plane", "kube", "kubeconfig", "model", "namespace", "operator"]
