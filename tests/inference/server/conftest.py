from pathlib import Path

import pytest
from sojourn.inference.pipeline import Pipeline, load_pipeline
from sojourn.inference.tiny import tiny_random


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random MiniMax-H3."""
    return tiny_random("minimax-h3", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def pipeline(model: Path) -> Pipeline:
    """The real engine on it. Shared: a request leaves nothing behind, which is one of the things tested."""
    return load_pipeline(model)


@pytest.fixture(scope="session")
def poisoned(model: Path) -> Pipeline:
    """The same, with one weight of the transformer not a number."""
    import torch

    pipeline = load_pipeline(model, model_name="poisoned")
    transformer = pipeline.components["transformer"].value
    name, weight = next((name, p) for name, p in transformer.named_parameters() if "blocks.1" in name and p.ndim == 2)
    bad = weight.detach().clone()
    bad[0, 0] = float("nan")
    owner, _, leaf = name.rpartition(".")
    setattr(transformer.get_submodule(owner), leaf, torch.nn.Parameter(bad, requires_grad=False))
    return pipeline
