"""What the operator adds to every service: settings of the installation, from one file of the chart."""

from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, ValidationError
from sojourn.operator.errors import BadConfiguration
from sojourn.operator.resources.base import Labels, Model


class Defaults(Model):
    """Settings of the installation.

    Attributes:
        inference_image: image of the inference container, where a service names none.
        residencyd_image: image of the sidecar, likewise.
        pull_policy: when both are pulled, likewise.
        pull_secrets: Secrets in the services' namespaces to pull them with.
        operator_namespace_labels: labels of the operator's namespace, which the services' NetworkPolicies let in.
        operator_pod_labels: labels of the operator's pods, likewise.
        monitoring_namespace_labels: labels of namespaces that may read metrics; empty for all.
        pod_monitor: whether to make a PodMonitor for each service.
        check_nodes: whether what a service asks for must fit a node that is there.
    """

    inference_image: str = Field(min_length=1)
    residencyd_image: str = Field(min_length=1)
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    operator_namespace_labels: Labels = Field(default_factory=dict)
    operator_pod_labels: Labels = Field(default_factory=dict)
    monitoring_namespace_labels: Labels = Field(default_factory=dict)
    pod_monitor: bool = False
    check_nodes: bool = True


def load(path: Path) -> Defaults:
    """Reads the file that the chart mounts.

    Raises:
        BadConfiguration: it is missing or says something wrong.
    """
    try:
        return Defaults.model_validate(yaml.safe_load(path.read_text()))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise BadConfiguration(f"{path}: {error}") from error
