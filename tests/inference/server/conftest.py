from pathlib import Path

import pytest
import torch
from sojourn.inference.pipeline import Pipeline, load_pipeline


@pytest.fixture(scope="session")
def model(tiny_folder: Path) -> Path:
    """Folder of a tiny random MiniMax-H3."""
    return tiny_folder


@pytest.fixture(scope="session")
def pipeline(tiny: Pipeline) -> Pipeline:
    """The real engine on it. Shared: a request leaves nothing behind, which is one of the things tested."""
    return tiny


@pytest.fixture(scope="session")
def poisoned(model: Path) -> Pipeline:
    """The same, with one weight of the transformer not a number."""
    pipeline = load_pipeline(model, model_name="poisoned")
    transformer = pipeline.components["transformer"].value
    name, weight = next((name, p) for name, p in transformer.named_parameters() if "blocks.1" in name and p.ndim == 2)
    bad = weight.detach().clone()
    bad[0, 0] = float("nan")
    owner, _, leaf = name.rpartition(".")
    setattr(transformer.get_submodule(owner), leaf, torch.nn.Parameter(bad, requires_grad=False))
    return pipeline
