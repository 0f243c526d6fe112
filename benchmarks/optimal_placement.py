"""How far from the least traffic the policy `auto` is: bytes over the link in a step against every placement that fits.

    python -m benchmarks.optimal_placement                # the table
    python -m benchmarks.optimal_placement --worst 5      # and the worst cases of each row
    python -m benchmarks.optimal_placement --fewer-slots  # what a slot below the analytic minimum would save

Chains of up to 6 chunks: weights of one size or of several, some of them frozen, fp32 and bf16, on 1 and 2 ranks, with
one micro-batch or three. Every state of every chunk on the device or on the host (master and moments of a chunk
together), with every number of slots that works; budgets between the least one and that of everything. Bytes are those
that the plan predicts, which a run moves exactly. 1.00 is the least of all placements that fit into the budget.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated

import typer

from gemini.placement.demand import FLOAT32, Demand, Dtype, Kind, ModelSpec, OperatorSpec, Placement, Tier, WeightSpec
from gemini.placement.plan import Plan
from gemini.placement.policies import AutoPolicy
from gemini.placement.policy import PlacementPolicy, slots_for
from gemini.placement.predict import predict
from gemini.placement.search import plan_model
from gemini.placement.simulate import MoveReason
from gemini.settings import Settings

UNIT = 512  # elements: a shard of each of 2 ranks is a multiple of 256
MAX_CHUNKS = 6
NUM_BUDGETS = 24  # of each case, evenly between the least and everything
DTYPES = {"fp32": FLOAT32, "bf16": Dtype("bfloat16", 2)}
_TIERS = Tier.DEVICE, Tier.HOST  # the disk takes what the host has no room for
_GROUPS = ((Kind.PARAM,), (Kind.GRAD,), (Kind.MASTER, Kind.OPTIM))

Tiers = tuple[tuple[Tier, ...], ...]
"""For each chunk where parameters, gradients and optimizer state with the master rest."""


@dataclass(frozen=True)
class Case:
    """A chain of operators with one weight each, each a chunk of its own. sizes: in units of 512 elements."""

    sizes: tuple[int, ...]
    frozen: tuple[int, ...]
    dtype: str
    world_size: int
    micro_batches: int

    @property
    def kind(self) -> str:
        """The row of the table."""
        alike = "equal chunks" if len(set(self.sizes)) == 1 else "several sizes"
        trained = "some frozen" if self.frozen else "all trained"
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        return f"{self.dtype}, {ranks}, {self.micro_batches} micro-batch, {alike}, {trained}"

    @property
    def plan(self) -> Plan:
        """With everything on the device."""
        weights = tuple(
            WeightSpec(f"weight {i}", (UNIT * size,), DTYPES[self.dtype], i not in self.frozen)
            for i, size in enumerate(self.sizes)
        )
        operators = tuple(OperatorSpec(f"operator {i}", (i,), ()) for i in range(len(self.sizes)))
        settings = Settings(
            chunk_size=UNIT * max(self.sizes),
            shard_strategy="bucket",
            gradient_accumulation_steps=self.micro_batches,
        )
        return plan_model(ModelSpec(weights, operators), settings, self.world_size)


def cases(max_chunks: int = MAX_CHUNKS) -> Iterator[Case]:
    """All small ones. Sizes differ so little that no two weights share a chunk."""
    for count in range(2, max_chunks + 1):
        shapes = [(8,) * count, tuple(8 - i % 4 for i in range(count))]
        for sizes in dict.fromkeys(shapes):
            for frozen in dict.fromkeys([(), tuple(range(count // 2))]):
                for dtype, world_size, micro_batches in product(DTYPES, (1, 2), (1, 3)):
                    yield Case(sizes, frozen, dtype, world_size, micro_batches)


def link_bytes(plan: Plan, placement: Placement, micro_batches: int) -> tuple[int, int]:
    """Of payloads, and of all else, in both directions in a step."""
    copies = predict(replace(plan, placement=placement), micro_batches=micro_batches).copies
    payloads = sum(num_bytes for (_, purpose), num_bytes in copies.items() if purpose is MoveReason.PAYLOAD)
    return payloads, sum(copies.values()) - payloads


def _homes(demand: Demand, tiers: Tiers) -> tuple[dict[Kind, Tier], ...]:
    return tuple(
        {kind: tier for group, tier in zip(_GROUPS, its, strict=True) for kind in group if kind in chunk.home_bytes}
        for chunk, its in zip(demand.chunks, tiers, strict=True)
    )


class Search:
    """All placements of one case, as far as some budget would choose them."""

    def __init__(self, case: Case, plan: Plan, fewer_slots: int = 0) -> None:
        """fewer_slots: how many less than the analytic minimum there may be."""
        self._case, self._plan, self._demand = case, plan, plan.demand
        self._found: dict[tuple[Tier, ...], list[tuple[int, int, int]]] = {}
        found = sorted(self._all(fewer_slots))
        self._sizes: list[int] = []
        self._least: list[int] = []
        for device_bytes, moved in found:
            if not self._least or moved < self._least[-1]:
                self._sizes.append(device_bytes)
                self._least.append(moved)

    def best(self, budget_bytes: int) -> int:
        """The least link bytes of all placements that fit."""
        return self._least[bisect_right(self._sizes, budget_bytes) - 1]

    def _all(self, fewer_slots: int) -> Iterator[tuple[int, int]]:
        """Device and link bytes. Payloads depend on where parameters rest and on slots, all else on each chunk."""
        demand, count = self._demand, len(self._demand.chunks)
        others = [self._others(index) for index in range(count)]
        kinds = [(*_TIERS, None) if chunk.may_keep_slot else _TIERS for chunk in demand.chunks]  # None: in a kept slot
        for params in product(*kinds):
            kept = [index for index, tier in enumerate(params) if tier is None]
            tiers = [tier or Tier.DEVICE for tier in params]
            start = slots_for(demand, _homes(demand, tuple((tier, Tier.HOST, Tier.HOST) for tier in tiers)), kept)
            users = sum(
                index not in kept and (chunk.needs_slot or tiers[index] is Tier.HOST)
                for index, chunk in enumerate(demand.chunks)
            )
            rests = self._rests(tuple(tiers), others)
            for num_slots in range(max(min(1, users), start.num_slots[0] - fewer_slots), users + 1):
                placement = replace(start, num_slots=(num_slots, 0))
                payloads, _ = link_bytes(self._plan, placement, self._case.micro_batches)
                param_bytes = replace(placement, num_gradient_slots=(0, 0)).device_bytes(demand)
                for device_bytes, moved, gradient_users in rests:
                    gradient_slots = min(gradient_users, demand.min_gradient_slots[0]) * demand.gradient_slot_bytes[0]
                    yield param_bytes + device_bytes + gradient_slots, payloads + moved

    def _others(self, index: int) -> dict[tuple[Tier, ...], tuple[int, int, int]]:
        """By where the chunk's states rest: bytes on the device beside parameters, link bytes, gradient slots."""
        demand, found = self._demand, {}
        chunk = demand.chunks[index]
        host = [(Tier.HOST,) * 3] * len(demand.chunks)
        _, before = link_bytes(self._plan, slots_for(demand, _homes(demand, tuple(host))), self._case.micro_batches)
        all_host = before
        for its in product(_TIERS, repeat=3):
            if Kind.GRAD not in chunk.home_bytes and its[1:] != (Tier.HOST, Tier.HOST):
                continue
            homes = _homes(demand, (*host[:index], its, *host[index + 1 :]))
            _, moved = link_bytes(self._plan, slots_for(demand, homes), self._case.micro_batches)
            held = sum(
                chunk.home_bytes[k] for k, tier in homes[index].items() if tier is Tier.DEVICE and k is not Kind.PARAM
            )
            needs = Kind.GRAD in homes[index] and (chunk.needs_gradient_slot or homes[index][Kind.GRAD] is Tier.HOST)
            found[its] = held, moved - all_host, int(needs)
        self._base = all_host
        return found

    def _rests(
        self, tiers: tuple[Tier, ...], others: list[dict[tuple[Tier, ...], tuple[int, int, int]]]
    ) -> list[tuple[int, int, int]]:
        """Sums over chunks that no other sum beats: device bytes, link bytes, gradient slots up to two."""
        if tiers in self._found:
            return self._found[tiers]
        options = [{k: v for k, v in its.items() if k[0] is tier} for its, tier in zip(others, tiers, strict=True)]
        sums = {(0, self._base, 0)}
        for its in options:
            grown = {(a + b, c + d, min(2, e + f)) for (a, c, e), (b, d, f) in product(sums, its.values())}
            sums = {
                one
                for one in grown
                if not any(o != one and all(x <= y for x, y in zip(o, one, strict=True)) for o in grown)
            }
        self._found[tiers] = sorted(sums)
        return self._found[tiers]


@dataclass
class Row:
    """Ratios of one kind."""

    count: int = 0
    optimal: int = 0
    total: float = 0.0
    worst: float = 1.0

    def add(self, ratio: float) -> None:
        self.count += 1
        self.optimal += ratio == 1
        self.total += ratio
        self.worst = max(self.worst, ratio)


def budgets_of(plan: Plan, policy: PlacementPolicy) -> list[int]:
    """Between the least one and one byte less than everything takes."""
    least, most = plan.packed_minimum_bytes, policy.place(plan.demand, None).device_bytes(plan.demand) - 1
    assert least is not None
    if most < least:
        return []
    return [least + (most - least) * number // (NUM_BUDGETS - 1) for number in range(NUM_BUDGETS)]


def ratios(case: Case, policy: PlacementPolicy) -> Iterator[tuple[int, float]]:
    """For each budget: link bytes of the policy's placement, over the least of all that fit."""
    plan = case.plan
    search = Search(case, plan)
    for budget in budgets_of(plan, policy):
        moved = sum(link_bytes(plan, policy.place(plan.demand, budget), case.micro_batches))
        best = search.best(budget)
        assert moved >= best, (case, budget, moved, best)
        yield budget, moved / best if best else 1.0 + bool(moved)


def table(max_chunks: int = MAX_CHUNKS, only: str = "") -> dict[str, list[tuple[float, int, Case]]]:
    """By kind of case: ratio, budget and case of each."""
    found: dict[str, list[tuple[float, int, Case]]] = {}
    for case in cases(max_chunks):
        if only in case.kind:
            its = found.setdefault(case.kind, [])
            its += [(ratio, budget, case) for budget, ratio in ratios(case, AutoPolicy())]
    return found


def saved_by_a_slot_less(max_chunks: int = MAX_CHUNKS) -> dict[int, Row]:
    """By the number of chunks: least link bytes with the analytic minimum of slots, over those with one slot fewer."""
    rows: dict[int, Row] = {}
    for case in cases(max_chunks):
        plan = case.plan
        enough, fewer = Search(case, plan), Search(case, plan, fewer_slots=1)
        for budget in budgets_of(plan, AutoPolicy()):
            best = fewer.best(budget)
            rows.setdefault(len(case.sizes), Row()).add(enough.best(budget) / best if best else 1.0)
    return rows


def main(
    worst: Annotated[int, typer.Option(help="Cases to name of each row.")] = 0,
    max_chunks: Annotated[int, typer.Option(help="The most chunks of a chain.")] = MAX_CHUNKS,
    only: Annotated[str, typer.Option(help="Rows with this in their names.")] = "",
    fewer_slots: Annotated[
        bool, typer.Option("--fewer-slots", help="What one slot fewer would save, instead.")
    ] = False,
) -> None:
    """Print the table."""
    if fewer_slots:
        print(
            f"{'least link bytes with the slots of the plan / with one fewer':64}{'budgets':>8}{'mean':>9}{'worst':>7}"
        )
        for count, row in saved_by_a_slot_less(max_chunks).items():
            print(f"{f'{count} chunks':64}{row.count:>8}{row.total / row.count:>9.3f}{row.worst:>7.3f}")
        return
    print(f"{'link bytes of auto / least':64}{'budgets':>8}{'optimal':>9}{'mean':>7}{'worst':>7}")
    for kind, its in sorted(table(max_chunks, only).items()):
        row = Row()
        for ratio, _, _ in its:
            row.add(ratio)
        print(f"{kind:64}{row.count:>8}{row.optimal / row.count:>9.0%}{row.total / row.count:>7.3f}{row.worst:>7.3f}")
        for ratio, budget, case in sorted(its, key=lambda one: -one[0])[:worst]:
            print(f"    {ratio:.3f} with {budget} bytes: {case}")


if __name__ == "__main__":
    typer.run(main)
