"""The custom resources: one module per kind, and the machinery that turns them into CustomResourceDefinitions.

The models are the single source: the CRDs in the chart and docs/custom-resources.md are generated from them
(`python -m tools.crds`), and the operator parses every object with them.
"""

from sojourn.operator.resources.adaln_cache import AdaLNCacheSpec
from sojourn.operator.resources.diffusion_service import DiffusionServiceSpec
from sojourn.operator.resources.layerwise_offload import LayerwiseOffloadSpec

GROUP = "sojourn.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

__all__ = ["API_VERSION", "GROUP", "VERSION", "AdaLNCacheSpec", "DiffusionServiceSpec", "LayerwiseOffloadSpec"]
