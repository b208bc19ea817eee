"""Random walks over build, hit, evict, fail, invalidate and pin against a model of the contract.

The model is a few lines: which plans are held, in which order they were used, which are pinned. After each step the
invariants hold and the cache holds exactly what the model says.
"""

import os
import random
from collections import Counter, OrderedDict

import pytest
import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sojourn.inference.adaln.lease import Lease
from sojourn.inference.adaln.refusals import PlanMissing, PlansRefused, RequestReason

from tests.inference.adaln.toys import Injected, MemorySource, Rig, fresh_rows, make_rig, plan, step

LEAST_STEPS = 10_000
EXAMPLES, STEPS = 50, 60  # of one round; hypothesis ends some walks early
PLANS = 5
WIDTH = 2
MODULES = ("blocks.0", "blocks.1", "blocks.2", "norm_out")
TENSORS = [f"{module}.modulation.{leaf}" for module in MODULES for leaf in ("weight", "bias")]

# 8 plans for 5 slots: hits, overflow and over-many requests all come up. By name, since 0.0 == -0.0 in Python.
VALUES = {
    "+0": (0.0,),
    "-0": (-0.0,),
    "a": (0.25,),
    "b": (0.5,),
    "c": (0.75,),
    "ab": (0.25, 0.5),
    "bc": (0.5, 0.75),
    "de": (0.1, 0.2),
}
TOO_WIDE = (0.1, 0.2, 0.3)
KEYS = {name: plan(*values).key for name, values in VALUES.items()}
schedules = st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=6)

_steps = Counter[str]()
_fresh: dict[tuple[int, str], dict[torch.dtype, torch.Tensor]] = {}
_weights = [make_rig(seed=seed_of_weights) for seed_of_weights in range(3)]


class CacheMachine(RuleBasedStateMachine):
    @initialize(pages=st.sampled_from([0, 3, 12]))
    def start(self, pages: int) -> None:
        self.generation = 0
        self.rig: Rig = make_rig(plans=PLANS, width=WIDTH, pages=pages)
        self.held: OrderedDict[str, None] = OrderedDict()
        self.leases: list[tuple[Lease, list[str]]] = []

    # The model.

    def pinned(self) -> set[str]:
        return {name for _, schedule in self.leases for name in schedule}

    def expect(self, schedule: list[str]) -> tuple[list[str], RequestReason | None]:
        """What a request evicts, or why it is refused."""
        wanted = list(dict.fromkeys(schedule))
        missing = [name for name in wanted if name not in self.held]
        if not missing:
            return [], None
        if len(wanted) > PLANS:
            return [], RequestReason.TOO_MANY_PLANS
        candidates = [name for name in self.held if name not in wanted and name not in self.pinned()]
        short = len(missing) - (PLANS - len(self.held))
        if short > len(candidates):
            return [], RequestReason.TOO_MANY_PLANS
        return candidates[: max(0, short)], None

    def use(self, schedule: list[str], evicted: list[str]) -> None:
        for name in evicted:
            del self.held[name]
        for name in dict.fromkeys(schedule):
            self.held[name] = None
            self.held.move_to_end(name)

    # The rules.

    def request(self, schedule: list[str]) -> Lease | None:
        """Runs a request; None where it is refused as the model says."""
        evicted, refusal = self.expect(schedule)
        forwards = [step(*VALUES[name]) for name in schedule]
        if refusal is not None:
            with pytest.raises(PlansRefused) as caught:
                self.rig.cache.prepare(forwards)
            assert caught.value.reason is refusal
            return None
        lease = self.rig.cache.prepare(forwards)
        self.use(schedule, evicted)
        return lease

    @rule(schedule=schedules)
    def build_or_hit(self, schedule: list[str]) -> None:
        _steps["build_or_hit"] += 1
        lease = self.request(schedule)
        if lease is not None:
            lease.release()

    @rule(schedule=schedules)
    def build_and_keep(self, schedule: list[str]) -> None:
        _steps["build_and_keep"] += 1
        lease = self.request(schedule)
        if lease is not None:
            self.leases.append((lease, schedule))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end_a_request(self, data: st.DataObject) -> None:
        _steps["end_a_request"] += 1
        lease, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        lease.release()

    @rule(name=st.sampled_from(list(VALUES)))
    def too_wide(self, name: str) -> None:
        _steps["too_wide"] += 1
        with pytest.raises(PlansRefused):
            self.rig.cache.prepare([step(*VALUES[name]), step(*TOO_WIDE)])

    @rule(schedule=schedules, tensor=st.sampled_from(TENSORS))
    def fail(self, schedule: list[str], tensor: str) -> None:
        """A build that fails publishes nothing; what it had evicted before is gone, and no more than that."""
        _steps["fail"] += 1
        evicted, refusal = self.expect(schedule)
        missing = [KEYS[name] for name in schedule if name not in self.held]
        self.rig.source.fail_at = tensor
        if refusal is not None or not missing or self.rig.cache.host.holds(missing):
            lease = self.request(schedule)
            if lease is not None:
                lease.release()
        else:
            with pytest.raises(Injected):
                self.rig.cache.prepare([step(*VALUES[name]) for name in schedule])
            for name in evicted:
                del self.held[name]
        self.rig.source.fail_at = None

    @rule()
    def invalidate(self) -> None:
        _steps["invalidate"] += 1
        self.generation += 1
        other = _weights[self.generation % 3]
        self.rig.transformer.load_state_dict(other.transformer.state_dict())
        self.rig.source = MemorySource(other.source.tensors)
        self.rig.cache.invalidate(self.rig.source)
        self.held.clear()
        for lease, _ in self.leases:
            assert not lease.steps[0][0].is_valid()
            lease.release()
        self.leases.clear()

    # The invariants.

    @invariant()
    def slots_are_free_or_published_and_lengths_say_which(self) -> None:
        self.rig.check()
        assert not self.rig.cache.slots.reserved

    @invariant()
    def the_cache_holds_what_the_model_holds_in_its_order(self) -> None:
        assert self.rig.keys == [KEYS[name] for name in self.held]

    @invariant()
    def plans_in_flight_are_held(self) -> None:
        assert self.pinned() <= self.held.keys()
        assert {KEYS[name] for name in self.pinned()} == self.rig.cache.slots.pinned

    @invariant()
    def published_rows_are_those_of_a_fresh_projection(self) -> None:
        slab = self.rig.cache.slab
        for name in self.held:
            slot = self.rig.cache.slots.published[KEYS[name]]
            for dtype, rows in fresh(self.rig, self.generation % 3, name).items():
                assert torch.equal(slab.rows[dtype][slot, : rows.shape[0]], rows)

    @invariant()
    def unknown_plans_are_not_found(self) -> None:
        missing = [name for name in VALUES if name not in self.held]
        with pytest.raises(PlanMissing):
            self.rig.cache.find(step(*VALUES[missing[0]]))

    @invariant()
    def host_pages_add_up(self) -> None:
        host = self.rig.cache.host
        used = {index for stored in host._plans.values() for index in stored.pages}
        assert len(used) + host.free_pages == host.capacity
        users = Counter(key for group in host.groups for key in group)
        assert {key: stored.users for key, stored in host._plans.items()} == users


def fresh(rig: Rig, weights: int, name: str) -> dict[torch.dtype, torch.Tensor]:
    """Flat rows of resident projections by dtype, made once for each weights and plan."""
    if (weights, name) not in _fresh:
        rows = fresh_rows(rig.transformer, *VALUES[name])
        _fresh[weights, name] = {
            dtype: torch.cat([rows[module] for module in rig.cache.slab.table if rows[module].dtype == dtype], dim=1)
            for dtype in rig.cache.slab.rows
        }
    return _fresh[weights, name]


def test_random_walks_keep_the_contract() -> None:
    chosen = int(os.environ.get("SOJOURN_SEED", random.randrange(2**32)))
    print(f"seed {chosen}: run again with SOJOURN_SEED={chosen}")
    _steps.clear()
    _fresh.clear()
    rounds = 0
    while _steps.total() < LEAST_STEPS:
        run_state_machine_as_test(
            seed(chosen + rounds)(CacheMachine),
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        rounds += 1
    print(f"{_steps.total()} steps: {dict(_steps)}")
