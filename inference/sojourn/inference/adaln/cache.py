"""The plan cache of one component: the transaction over slab, host tier, store and projection.

Everything is checked before anything is touched; slots are reserved, filled, given their lengths and only then
published; what fails gives its slots back and publishes nothing. Whatever can fail without a slot (files, embedding)
comes before plans are evicted, so that it costs nobody theirs.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from sojourn.inference.adaln.counters import Observer, Result, Snapshot, Source, Tier
from sojourn.inference.adaln.cursor import Step
from sojourn.inference.adaln.family import Family, Inputs
from sojourn.inference.adaln.host import HostTier
from sojourn.inference.adaln.lease import Lease
from sojourn.inference.adaln.plans import Plan, PlanKey, distinct
from sojourn.inference.adaln.products import Job
from sojourn.inference.adaln.projection import Projector
from sojourn.inference.adaln.ranks import OneRank, Ranks, together
from sojourn.inference.adaln.refusals import PlanMissing, PlansRefused, RequestReason
from sojourn.inference.adaln.runs import copy_rows
from sojourn.inference.adaln.settings import PLANS_SETTING
from sojourn.inference.adaln.slab import Slab
from sojourn.inference.adaln.slots import Slots
from sojourn.inference.adaln.store import PlanStore, RejectedFile, StoredSchedule
from sojourn.inference.adaln.streams import OneStream, Streams
from sojourn.inference.adaln.weights import WeightSource

_log = logging.getLogger(__name__)

Reserved = dict[PlanKey, int]
Check = Callable[[], None]


def go_on() -> None:
    """The check of a request that nobody stops."""


@dataclass
class PlanCache:
    """Plans of one component. Every method may be called from any thread.

    Attributes:
        family: Whose transformer this is.
        slab: Rows on the device.
        projector: Computes rows.
        observer: Counts.
        host: Rows in host memory; a tier of capacity 0 holds nothing.
        store: Rows in files shared by the node; None for none.
        streams: Order between copies and compute.
        ranks: Processes that build together.
        clock: Seconds of a monotonic clock.
    """

    family: Family
    slab: Slab
    projector: Projector
    observer: Observer
    host: HostTier
    store: PlanStore | None = None
    streams: Streams = field(default_factory=OneStream)
    ranks: Ranks = field(default_factory=OneRank)
    clock: Callable[[], float] = time.perf_counter
    _generation: int = field(init=False, default=0)
    _lock: threading.RLock = field(init=False, default_factory=threading.RLock)
    _prepared: dict[tuple[int, ...], "_Prepared"] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = Slots(self.slab.plans)

    def __deepcopy__(self, memo: object) -> "PlanCache":
        """Pipelines copy their blocks with what they refer to; there is one cache all the same."""
        return self

    def admit(self, plans: int) -> None:
        """Refuses a request that has more different plans than the slab holds, before any of its stages runs.

        Raises:
            PlansRefused: Naming the setting and the value needed.
        """
        if plans > self.slab.plans:
            with self._counted():
                self._check_count(plans)

    def prepare(self, forwards: Sequence[Inputs], *, check: Check = go_on) -> Lease:
        """Makes the rows of a request's forwards available, and keeps them so until the lease is released.

        Args:
            forwards: The conditioning inputs of each forward, as the forward will receive them. The same tensors,
                handed to the forward, are recognised without a look at their values.
            check: Called before each layer of a build; raises what stops the request.

        Raises:
            PlansRefused: They cannot be held; nothing was touched.
            BuildFailedElsewhere: Another rank has failed.
        """
        with self._lock, self._counted() as ended:
            plans = [self.family.plans(inputs) for inputs in forwards]
            ended(self._transact(distinct(plan for calls in plans for plan in calls), check))
            return self._lease(forwards, plans)

    def find(self, inputs: Inputs) -> Sequence[Step]:
        """The steps of a forward that receives these inputs.

        Raises:
            PlanMissing: No request has prepared them.
        """
        given = self.family.given(inputs)
        values = list(given.values())
        prepared = self._prepared.get(tuple(map(id, values)))
        if prepared is not None and prepared.is_for(values):
            return prepared.steps
        with self._lock:
            plans = self.family.plans(inputs)
            if any(self.slots.slot_of(plan.key) is None for plan in plans):
                shown = {name: value.flatten()[:8].tolist() for name, value in given.items()}
                raise PlanMissing(f"no request has prepared the plan of {shown}; prepare it before the forward")
            steps, _ = self._steps([plans])
            return steps[0]

    def invalidate(self, source: WeightSource | None = None, *, store: PlanStore | None = None) -> None:
        """Forgets every row: the weights were replaced. Requests in flight fail with `PlanMissing`.

        Args:
            source: The new weights; None if they lie where the old ones did.
            store: The store bound to the new weights; None to go on without one.
        """
        with self._lock:
            self.streams.synchronize()
            self.slab.hide(range(self.slab.plans))
            self.slots.clear()
            self.host.clear()
            self.store = store
            self._generation += 1
            if source is not None:
                self.projector.retarget(source)

    def snapshot(self) -> Snapshot:
        """The gauges at this moment. Waits for nothing, a build in progress included."""
        published, reserved, free = self.slots.counts
        free_pages = self.host.free_pages
        return Snapshot(
            slots_published=published,
            slots_reserved=reserved,
            slots_free=free,
            pages_used=self.host.capacity - free_pages,
            pages_free=free_pages,
            device_bytes=self.slab.nbytes,
            host_bytes=self.host.nbytes,
            host_kind=self.host.kind,
            weight_bytes=self.slab.table.weight_bytes,
            store_bytes=self.store.nbytes if self.store else 0,
        )

    @contextmanager
    def _counted(self) -> Iterator[Callable[[Result], None]]:
        """Counts one transaction by how it ends."""
        results: list[Result] = []
        try:
            yield results.append
        except PlansRefused as error:
            self.observer.refused(error.reason)
            self.observer.request(Result.REFUSED)
            raise
        except BaseException:
            self.observer.request(Result.FAILED)
            raise
        self.observer.request(results[-1])

    def _transact(self, wanted: Sequence[Plan], check: Check) -> Result:
        keys = tuple(plan.key for plan in wanted)
        missing = [plan for plan in wanted if self.slots.slot_of(plan.key) is None]
        if not missing:
            self.slots.refresh(keys)
            self.observer.served(Source.GPU, len(wanted))
            self._store_in_host(wanted, is_new=False)
            return Result.HIT
        with together(self.ranks):
            self._check_capacity(wanted)
            self.slots.victims(len(missing), keep=keys)
        self.streams.begin()
        source = self._fetch(wanted, missing, check)
        self.slots.refresh(keys)
        self.observer.served(Source.GPU, len(wanted) - len(missing))
        self.observer.served(source, len(missing))
        if source is Source.HOST:
            self.host.refresh(keys)
        else:
            self._store_in_host(wanted, is_new=True)
        return Result(source.value)

    def _check_capacity(self, wanted: Sequence[Plan]) -> None:
        self._check_count(len(wanted))
        self.family.check_width(wanted, self.slab.width)

    def _check_count(self, plans: int) -> None:
        if plans > self.slab.plans:
            raise PlansRefused(
                RequestReason.TOO_MANY_PLANS,
                f"the request has {plans} different plans and {PLANS_SETTING} is {self.slab.plans}; set it to "
                f"{plans} or more, or ask for fewer steps",
            )

    def _fetch(self, wanted: Sequence[Plan], missing: Sequence[Plan], check: Check) -> Source:
        """Brings the missing plans in from the nearest tier that has all of them on all ranks."""
        if self._agreed(self.host.holds(plan.key for plan in missing)):
            self._swap_in(wanted, missing)
            return Source.HOST
        if self.store is None:
            self._build(wanted, missing, check)
            return Source.BUILT
        if self._load_from_store(self.store, wanted, missing):
            return Source.STORE
        return self._build_and_publish(self.store, wanted, missing, check)

    def _agreed(self, mine: bool) -> bool:
        """Whether it holds on every rank."""
        return self.ranks.minimum(int(mine)) == 1

    # Filling slots.

    def _fill(self, wanted: Sequence[Plan], missing: Sequence[Plan], fill: Callable[[Reserved], None]) -> None:
        """Reserve, fill, lengths, publish; on any exception the slots go back and nothing is published."""
        reserved: Reserved = {}
        try:
            with together(self.ranks):
                reserved.update(self._reserve(wanted, missing))
            fill(reserved)
            with together(self.ranks):
                self.slab.show({reserved[plan.key]: plan.length for plan in missing})
        except BaseException:
            try:
                self.slab.hide(list(reserved.values()))
            finally:
                self.slots.give_back(list(reserved.values()))
            raise
        self.slots.publish(reserved)

    def _reserve(self, wanted: Sequence[Plan], missing: Sequence[Plan]) -> Reserved:
        """Evicts the oldest plans that no request needs, hidden before their slots can be reused."""
        victims = self.slots.victims(len(missing), keep=[plan.key for plan in wanted])
        for key in victims:
            slot = self.slots.slot_of(key)
            if slot is not None:
                self.slab.hide([slot])
                self.slots.evict(key)
        if victims:
            self.observer.evicted(Tier.GPU, len(victims))
        return dict(zip([plan.key for plan in missing], self.slots.reserve(len(missing)), strict=True))

    def _build(self, wanted: Sequence[Plan], missing: Sequence[Plan], check: Check) -> None:
        """Projects the missing plans, reading every weight once."""
        started = self.clock()
        with together(self.ranks):
            self.projector.check_source()
            conditioning = {plan.key: self.projector.embed(plan, self.slab.device) for plan in missing}

        def project(reserved: Reserved) -> None:
            with together(self.ranks):
                jobs = [Job(plan, reserved[plan.key], conditioning[plan.key]) for plan in missing]
                self.projector.project_own(jobs, self.slab, check)
                buffers = self.projector.exchange_buffers(jobs, self.slab)
            with together(self.ranks):
                self.projector.share(jobs, self.slab, buffers)

        self._fill(wanted, missing, project)
        seconds = self.clock() - started
        self.observer.built(seconds)
        _log.debug("built %d of %d plans in %.3f s", len(missing), len(wanted), seconds)

    def _swap_in(self, wanted: Sequence[Plan], missing: Sequence[Plan]) -> None:
        """Copies the missing plans in from the host tier."""

        def copy(reserved: Reserved) -> None:
            with together(self.ranks):
                pairs = [
                    (row, page)
                    for key, slot in reserved.items()
                    for row, page in enumerate(self.host.pages(key), start=self.slab.first_row(slot))
                ]
                with self.streams.copying():
                    copy_rows(self.slab.flat(), self.host.rows, pairs)
                self.streams.compute_waits()

        self._fill(wanted, missing, copy)
        _log.debug("swapped %d of %d plans in from the host tier", len(missing), len(wanted))

    # The host tier.

    def _store_in_host(self, wanted: Sequence[Plan], *, is_new: bool) -> None:
        """Keeps the group in the host tier too; a failure costs a later build and never this request.

        Args:
            wanted: The plans of the request, all published.
            is_new: Whether rows have just been made, so that not storing them counts as a skip.
        """
        if self.host.capacity == 0:
            return
        lengths = {plan.key: plan.length for plan in wanted}
        self.streams.copies_wait()
        reason = self.host.store(lengths, self._copy_out, self.streams.synchronize)
        if reason is not None and is_new:
            self.observer.host_skipped(reason)
            _log.debug("the host tier skipped a group of %d plans: %s", len(wanted), reason)

    def _copy_out(self, pages: dict[PlanKey, list[int]]) -> None:
        """Copies published plans into pages of the host tier."""
        slots = self.slots.published
        pairs = [
            (page, row)
            for key, indices in pages.items()
            for row, page in enumerate(indices, start=self.slab.first_row(slots[key]))
        ]
        with self.streams.copying():
            copy_rows(self.host.rows, self.slab.flat(), pairs)

    # The store.

    def _build_and_publish(
        self, store: PlanStore, wanted: Sequence[Plan], missing: Sequence[Plan], check: Check
    ) -> Source:
        """Builds unless another process of the node has meanwhile, and shares what was built."""
        if self.ranks.size > 1:  # each rank would wait for locks in its own order
            self._build(wanted, missing, check)
            if self.ranks.rank == 0:
                self._publish(store, wanted)
            return Source.BUILT
        keys = [plan.key for plan in wanted]
        seen = store.version(keys)
        with store.building(keys):
            if store.version(keys) != seen and self._load_from_store(store, wanted, missing):
                return Source.STORE
            self._build(wanted, missing, check)
            self._publish(store, wanted)
        return Source.BUILT

    def _publish(self, store: PlanStore, wanted: Sequence[Plan]) -> None:
        """A failure costs another process a build and never this request."""
        try:
            store.publish(wanted, [self._rows_of(plan) for plan in wanted])
        except Exception:
            _log.debug("the plan store could not be written", exc_info=True)

    def _rows_of(self, plan: Plan) -> dict[torch.dtype, torch.Tensor]:
        slot = self.slots.published[plan.key]
        return {dtype: rows[slot, : plan.length] for dtype, rows in self.slab.rows.items()}

    def _load_from_store(self, store: PlanStore, wanted: Sequence[Plan], missing: Sequence[Plan]) -> bool:
        """Copies the missing plans in from a file of the store; False where there is none to be trusted."""
        stored = store.find(wanted)
        if not self._agreed(stored is not None) or stored is None:
            return False
        try:
            self._fill(wanted, missing, lambda reserved: self._copy_stored(stored, reserved))
        except RejectedFile as error:
            store.reject(error, store.path([plan.key for plan in wanted]))
            return False
        _log.debug("loaded %d of %d plans from the store", len(missing), len(wanted))
        return True

    def _copy_stored(self, stored: StoredSchedule, reserved: Reserved) -> None:
        with together(self.ranks):
            for key, slot in reserved.items():
                for dtype, rows in stored.plan_rows(key).items():
                    self.slab.rows[dtype][slot, : rows.shape[0]].copy_(rows)

    # Leases.

    def _lease(self, forwards: Sequence[Inputs], plans: Sequence[Sequence[Plan]]) -> Lease:
        keys = [plan.key for calls in plans for plan in calls]
        self.slots.pin(keys)
        prepared: dict[tuple[int, ...], _Prepared] = {}

        def release() -> None:
            with self._lock:
                self.slots.unpin(keys)
                for names, entry in prepared.items():
                    if self._prepared.get(names) is entry:
                        del self._prepared[names]

        try:
            steps, slots = self._steps(plans)
            for inputs, step in zip(forwards, steps, strict=True):
                values = list(self.family.given(inputs).values())
                prepared[tuple(map(id, values))] = _Prepared(values, step)
            self._prepared.update(prepared)
            return Lease(steps, slots, release)
        except BaseException:
            release()
            raise

    def _steps(self, plans: Sequence[Sequence[Plan]]) -> tuple[list[tuple[Step, ...]], torch.Tensor]:
        """The steps of each forward, and the slots of all plans: two copies to the device for a request."""
        flat = [plan for calls in plans for plan in calls]
        published = self.slots.published
        numbers = [published[plan.key] for plan in flat]
        slots = torch.tensor(numbers, device=self.slab.device)
        self._check_visible(slots, flat)
        generation = self._generation

        def is_valid() -> bool:
            return self._generation == generation

        rows = iter(self._rows_on_device(flat, numbers))
        return [tuple(Step(rows=next(rows), is_valid=is_valid) for _ in calls) for calls in plans], slots

    def _rows_on_device(self, plans: Sequence[Plan], slots: Sequence[int]) -> Sequence[torch.Tensor]:
        """For each plan [M]: where among all rows of the slab each of its rows lies."""
        numbers = [
            self.slab.first_row(slot) + row for plan, slot in zip(plans, slots, strict=True) for row in plan.row_index
        ]
        return torch.tensor(numbers, device=self.slab.device).split([plan.rows for plan in plans])

    def _check_visible(self, slots: torch.Tensor, plans: Sequence[Plan]) -> None:
        """The device's own word that each slot holds a whole plan of the expected length."""
        lengths = self.slab.lengths.index_select(0, slots).tolist()
        if lengths != [plan.length for plan in plans]:
            raise PlanMissing("a plan's slot is not visible; the plan cache is inconsistent, restart the process")


@dataclass(frozen=True, eq=False)
class _Prepared:
    """Tensors that a request will hand to its forwards, held so that their identities stay theirs."""

    values: list[torch.Tensor]
    steps: tuple[Step, ...]
    versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", [_version(value) for value in self.values])

    def is_for(self, values: Sequence[torch.Tensor]) -> bool:
        """Whether these are the tensors, not written to since."""
        return all(
            mine is theirs and version == _version(theirs)
            for mine, theirs, version in zip(self.values, values, self.versions, strict=True)
        )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
