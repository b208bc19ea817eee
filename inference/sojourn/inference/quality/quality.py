"""The quality tiers of one loaded model: what is offered, and a request's run at the tier that it asks for."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from sojourn.inference.errors import TierUnavailable
from sojourn.inference.quality import measured, speed
from sojourn.inference.quality.mounts import Mounts, Wanted, wanted_fusion, wanted_step_cache
from sojourn.inference.quality.observer import Observer, Part, silent
from sojourn.inference.quality.settings import TABLE_SETTING, QualitySettings
from sojourn.inference.quality.sites import SITES, FusionSites, TransformerSites
from sojourn.inference.quality.turns import Turns
from sojourn.inference.requests import GenerationRequest, QualityTier
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One tier as GetInfo tells of it.

    Attributes:
        tier: Which.
        obstacle: Why requests for it are refused, and what to change; None where it is offered.
        error: What was measured of it; None where nothing differs, or the difference is bounded by admission alone.
    """

    tier: QualityTier
    obstacle: str | None = None
    error: measured.Measured | None = None


@dataclass
class Used:
    """The tier that a run is at.

    Attributes:
        tier: Which.
        reason: What could not be mounted, and why; "" where all of it was.
    """

    tier: QualityTier
    reason: str = ""


class Quality:
    """The tiers of one model.

    Args:
        model_name: For messages.
        transformers: Its transformers as they are now, by the component's name; None for one that is not loaded.
        device: Where they run.
        dtype: What they compute in.
        fingerprint: SHA-256 over the checkpoint's tensors, or "" while it is not known.
        settings: Of the process.
        observer: Told of everything that is mounted.
        clock: Seconds of a monotonic clock.

    Raises:
        TableUnreadable: The table of measured errors that the settings name is not one.
    """

    def __init__(
        self,
        *,
        model_name: str,
        transformers: Callable[[], Mapping[str, nn.Module | None]],
        device: torch.device,
        dtype: torch.dtype,
        fingerprint: Callable[[], str],
        settings: QualitySettings | None = None,
        observer: Observer = silent,
        clock: speed.Clock = time.perf_counter,
    ) -> None:
        self._model_name = model_name
        self._transformers = transformers
        self._device, self._dtype = device, dtype
        self._fingerprint = fingerprint
        self._settings = settings or QualitySettings()
        self._observer = observer
        self._clock = clock
        self._verdicts: dict[tuple[Part, int], speed.Verdict] = {}
        self._table = measured.read_table(measured.SHIPPED)
        if self._settings.table is not None:
            self._table += measured.read_table(self._settings.table)
        self._turns, self._mounts = Turns(), Mounts(observer)
        for transformer in self._loaded():
            self._offered_fusions(transformer)  # measured now, and not while a request waits

    def __deepcopy__(self, memo: object) -> "Quality":
        """Pipelines copy what they hold; what is on a transformer is there once."""
        return self

    @property
    def offers(self) -> Sequence[Offer]:
        """Every tier, offered or not."""
        error = self._error()
        return (
            Offer(tier=QualityTier.LOSSLESS),
            Offer(tier=QualityTier.EXTRA_HIGH, obstacle=self._fusions_obstacle()),
            Offer(tier=QualityTier.HIGH, obstacle=self._step_cache_obstacle(error), error=error),
        )

    def require(self, tier: QualityTier) -> None:
        """Refuses a tier that is not offered.

        Raises:
            TierUnavailable: Saying why, and what to change.
        """
        obstacle = next(offer.obstacle for offer in self.offers if offer.tier is tier)
        if obstacle is not None:
            raise TierUnavailable(tier.value, self._model_name, obstacle)

    def check(self, request: GenerationRequest) -> None:
        """Refuses a request that its tier is not offered for.

        Raises:
            TierUnavailable: Saying why, and what to change.
        """
        self.require(request.quality)
        error = self._error()
        if request.quality is QualityTier.HIGH and error is not None:
            outside = error.obstacle(workflow=request.workflow.value, steps=request.steps)
            if outside is not None:
                raise TierUnavailable(request.quality.value, self._model_name, outside)

    @contextmanager
    def at(self, tier: QualityTier, names: Sequence[str], check: Callable[[], None]) -> Iterator[Used]:
        """Has the transformers at a tier while the context lasts.

        Requests of one tier run side by side, those of `high`, which remember steps, one by one.

        Args:
            tier: As asked for.
            names: Components that the request uses.
            check: Called while waiting for requests of other tiers; what it raises ends the wait.

        Raises:
            UnmountFailed: A transformer cannot be brought back to the stock forward.
        """
        with self._turns.take(tier, alone=tier is QualityTier.HIGH, check=check):
            used = [module for name, module in self._transformers().items() if name in names and module is not None]
            wanted = {module: self._wanted(module, tier) for module in used}
            failed = {module: self._mounts.bring(module, parts) for module, parts in wanted.items()}
            for module in used:
                self._mounts.fresh(module)
            try:
                yield self._used(tier, [self._mounts.parts(module) for module in used], list(failed.values()))
            finally:
                for module in used:
                    self._mounts.fresh(module)

    def _used(self, asked: QualityTier, on: Sequence[Sequence[Part]], failed: Sequence[Mapping[Part, str]]) -> Used:
        if not on and asked is not QualityTier.LOSSLESS:
            return Used(QualityTier.LOSSLESS, "no transformer of the request is loaded")
        reasons = [f"{part.value} could not be mounted: {reason}" for of in failed for part, reason in of.items()]
        return Used(
            min((tier_of(parts) for parts in on), key=list(QualityTier).index, default=QualityTier.LOSSLESS),
            "; ".join(reasons),
        )

    def _wanted(self, transformer: nn.Module, tier: QualityTier) -> list[Wanted]:
        """The parts of a tier, in the order of their mounting."""
        sites = sites_of(transformer)
        if tier is QualityTier.LOSSLESS or sites is None:
            return []
        parts = [wanted_fusion(place) for place in self._offered_fusions(transformer)]
        if tier is QualityTier.HIGH and (error := self._error()) is not None:
            parts.append(wanted_step_cache(sites, error.threshold, self._observer))
        return parts

    def _offered_fusions(self, transformer: nn.Module) -> list[FusionSites]:
        sites = sites_of(transformer)
        if sites is None:
            return []
        return [place for place in sites.fusions if self._verdict(place, transformer, sites).obstacle is None]

    def _verdict(self, place: FusionSites, transformer: nn.Module, sites: TransformerSites) -> speed.Verdict:
        key = place.fusion.part, sites.width(transformer.config)
        if key not in self._verdicts:
            self._verdicts[key] = speed.judge(
                place.fusion, setting=self._settings.fusions, device=self._device, dtype=self._dtype, width=key[1],
                clock=self._clock,
            )  # fmt: skip
        return self._verdicts[key]

    def _loaded(self) -> list[nn.Module]:
        return [module for module in self._transformers().values() if module is not None]

    def _error(self) -> measured.Measured | None:
        return measured.find(self._table, fingerprint=self._fingerprint(), dtype=_name(self._dtype))

    def _fusions_obstacle(self) -> str | None:
        """Says why no fusion is offered on any transformer; None where one is."""
        reasons = []
        for transformer in self._loaded():
            if (sites := sites_of(transformer)) is None:
                continue
            for place in sites.fusions:
                obstacle = self._verdict(place, transformer, sites).obstacle
                if obstacle is None:
                    return None
                reasons.append(f"{place.fusion.part.value}: {obstacle}")
        known = ", ".join(sorted(SITES))
        return reasons[0] if reasons else f"none of its components has fusions; those that have are {known}"

    def _step_cache_obstacle(self, error: measured.Measured | None) -> str | None:
        if error is not None:
            return None
        if not self._fingerprint():
            return "its checkpoint is still being hashed, and the tier is bound to its fingerprint; try again shortly"
        return (
            f"the error of the step cache was not measured for this checkpoint in {_name(self._dtype)}; measure it "
            f"with bench/step_cache.py and start with {TABLE_SETTING}"
        )


def sites_of(transformer: nn.Module) -> TransformerSites | None:
    """What is known of a transformer's class; None where nothing is."""
    return SITES.get(type(transformer).__name__)


def tier_of(parts: Sequence[Part]) -> QualityTier:
    """The tier that a transformer is at with these parts on it."""
    if Part.STEP_CACHE in parts:
        return QualityTier.HIGH
    return QualityTier.EXTRA_HIGH if parts else QualityTier.LOSSLESS


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
