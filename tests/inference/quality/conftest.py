"""A tiny random MiniMax-H3 with every tier offered."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sojourn.inference.pipeline import DeviceChoice, Pipeline, load_pipeline
from sojourn.inference.quality.measured import Measured, write_table
from sojourn.inference.quality.settings import Fusions, QualitySettings

from tests.inference.quality.toys import Remembering

# At which some of the seven evaluations of eight points are skipped on the tiny model, and some are not.
THRESHOLD = 0.3


def entry(fingerprint: str, **changes: Any) -> Measured:
    fields: dict[str, Any] = {
        "fingerprint": fingerprint, "model": "tiny", "transformer": "MiniMaxH3Transformer3DModel", "dtype": "bfloat16",
        "threshold": THRESHOLD, "workflows": ("t2va",), "min_steps": 3, "max_steps": 20, "clips": 2,
        "lowest_psnr_db": 30.0, "mean_psnr_db": 31.0, "lowest_ssim": 0.9, "largest_latents_error": 0.1,
        "skipped_share": 0.5, "provenance": "made up by a test",
    }  # fmt: skip
    return Measured(**(fields | changes))


@pytest.fixture(scope="session")
def table(tiny: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("measured") / "table.json"
    write_table(path, [entry(tiny.fingerprint())])
    return path


@pytest.fixture(scope="session")
def load_tiered(tiny_folder: Path, table: Path) -> Callable[..., Pipeline]:
    """Loads it anew; keyword arguments are those of `load_pipeline`."""

    def load(**options: Any) -> Pipeline:
        settings = QualitySettings(fusions=Fusions.ON, table=table)
        pipeline = load_pipeline(tiny_folder, **{"device": DeviceChoice.CPU, "quality_settings": settings, **options})
        pipeline.fingerprint()
        return pipeline

    return load


@pytest.fixture(scope="session")
def observer() -> Remembering:
    return Remembering()


@pytest.fixture(scope="session")
def tiered(load_tiered: Callable[..., Pipeline], observer: Remembering) -> Pipeline:
    return load_tiered(quality_observer=observer)
