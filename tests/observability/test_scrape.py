"""A page stays small, whatever the model, and has as many series after a thousand requests as after the first ones."""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from sojourn.inference.pipeline import DeviceChoice, Pipeline, load_pipeline
from sojourn.inference.requests import Clip, GenerationRequest
from sojourn.inference.tiny import tiny_random
from sojourn.inference.watch import Event, Watch
from sojourn.residencyd.scanner import Scanner
from sojourn.residencyd.serving import registry_of
from sojourn.residencyd.settings import Settings
from sojourn.v1 import inference_pb2 as pb

from tests.inference.server.serving import Around, Served, request, serving
from tests.residencyd.children import PAGE, child
from tests.residencyd.published import PAGEABLE, component, publish, storage
from tools import metrics_table

RANGES = 200
COMPONENTS = ("text_encoder", "vae", "audio_vae", "transformer", "transformer_ref", "vocoder", "scheduler", "other")
PAGE_BYTES_LIMIT = 64 << 10
SERIES_LIMIT = 600


def series(registry: CollectorRegistry) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {(s.name, tuple(sorted(s.labels.items()))) for family in registry.collect() for s in family.samples}


def test_the_page_of_residencyd_is_small_with_200_ranges_of_weights(tmp_path: Path) -> None:
    source = f"a = map_({2 * RANGES * PAGE}); say(address=a)"
    with child(source) as it:
        starts = [it["address"] + 2 * number * PAGE for number in range(RANGES)]
        share = RANGES // len(COMPONENTS)
        parts = [
            component(name, *(storage(start, PAGE, PAGEABLE) for start in starts[at * share : (at + 1) * share]))
            for at, name in enumerate(COMPONENTS)
        ]
        publish(tmp_path, it.pid, *parts)
        registry = registry_of(Scanner(Settings(map_pattern=str(tmp_path), floor_seconds=0.0)), ())
        named = {labels for name, labels in series(registry) if name == "sojourn_residency_mapped_bytes"}
        assert len(named) == 4 * len(COMPONENTS)
        assert len(generate_latest(registry)) < PAGE_BYTES_LIMIT


@pytest.mark.parametrize("process", metrics_table.PROCESSES)
def test_every_page_is_small(process: str) -> None:
    registry = metrics_table.PROCESSES[process]()
    assert len(generate_latest(registry)) < PAGE_BYTES_LIMIT
    assert len(series(registry)) < SERIES_LIMIT


class Repeating(Around):
    """Makes one clip, and gives it out again with the same events: a thousand requests in seconds."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._events: list[Event] = []
        self._clip: Clip | None = None

    def run_clip(self, request: GenerationRequest, clip_index: int, watch: Watch) -> Clip:
        if self._clip is None:
            listener = watch.listener
            watch.listener = lambda event: (self._events.append(event), listener(event))[1]
            self._clip = self.engine.run_clip(request, clip_index, watch)
        else:
            for event in self._events:
                watch.listener(event)
        return self._clip


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    return load_pipeline(tiny_random("minimax-h3", tmp_path_factory.mktemp("m") / "tiny"), device=DeviceChoice.CPU)


def requests() -> Iterator[tuple[pb.GenerateRequest, bool]]:
    """No two alike, and one in ten not valid."""
    for number in itertools.count():
        valid = number % 10 != 0
        yield request(prompt=f"a moving seven {number}", seed=number, steps=2 + number % 7 if valid else 0), valid


async def run(served: Served, asked: Iterator[tuple[pb.GenerateRequest, bool]], number: int) -> None:
    for message, valid in itertools.islice(asked, number):
        await (served.client.generate(message) if valid else served.client.error(message))


async def test_series_do_not_grow_over_a_thousand_requests(pipeline: Pipeline) -> None:
    async with serving(Repeating(pipeline), max_waiting=4) as served:
        registry = served.server.telemetry.registry
        asked = requests()
        await run(served, asked, 20)
        before = series(registry)
        await asyncio.gather(*(run(served, asked, 245) for _ in range(4)))
        assert series(registry) == before
        assert served.sample("request_queue_seconds_count") == 900
        assert len(generate_latest(registry)) < PAGE_BYTES_LIMIT
        assert len(before) < SERIES_LIMIT
