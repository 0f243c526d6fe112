"""How far from the least traffic the rule of eviction is: bytes fetched in a step against a search over all choices.

    python -m benchmarks.optimal_traffic

Every chain of up to 6 chunks with every number of slots: weights of one size or of two, some of them frozen, a module
around the others that has weights of its own, a weight that the last operator shares with the first, one micro-batch or
two, and forwards without gradients. Then small models as they are packed into 3 to 7 chunks. 1.00 is the least that any
choice fetches, with whatever foresight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated

import typer

from benchmarks.least_traffic import least_bytes
from gemini import estimate_memory
from gemini.placement.demand import FLOAT32, Demand, ModelSpec, OperatorSpec, Placement, Tier, WeightSpec
from gemini.placement.next_use import PassSchedule
from gemini.placement.plan import Plan
from gemini.placement.policy import slots_for
from gemini.placement.predict import predict_forwards, predict_steps
from gemini.placement.search import plan_model
from gemini.placement.simulate import MoveReason
from gemini.settings import Settings

UNIT = 256  # elements: every weight is a multiple of it, and a chunk of its own
MAX_CHUNKS = 6
WARM, PERIOD = 4, {True: 6, False: 60}
"""Steps that are left out, and those that are averaged, by whether they train.

What one forward without gradients leaves in the slots comes again after up to 5 others.
"""


@dataclass(frozen=True)
class HostWithSlots:
    """All states rest on the host, and there are so many slots."""

    num_slots: int

    @property
    def name(self) -> str:
        return f"host with {self.num_slots} slots"

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        homes = tuple(dict.fromkeys(chunk.home_bytes, Tier.HOST) for chunk in demand.chunks)
        return replace(slots_for(demand, homes), num_slots=(self.num_slots, 0))


@dataclass(frozen=True)
class Chain:
    """A model of operators with one weight each. sizes: in units of 256 elements."""

    sizes: tuple[int, ...]
    num_slots: int
    frozen: tuple[int, ...] = ()
    has_root: bool = False  # the first operator is around the others
    is_tied: bool = False  # one more operator at the end uses the first weight

    @property
    def plan(self) -> Plan:
        weights = tuple(
            WeightSpec(f"weight {i}", (UNIT * size,), FLOAT32, i not in self.frozen)
            for i, size in enumerate(self.sizes)
        )
        used = [*range(len(self.sizes)), *([0] if self.is_tied else [])]
        operators = tuple(
            OperatorSpec(
                "" if self.has_root and not at else f"operator {at}", (i,), (0,) if self.has_root and at else ()
            )
            for at, i in enumerate(used)
        )
        policy = HostWithSlots(self.num_slots)
        settings = Settings(tensor_placement_policy=policy, chunk_size=UNIT * max(self.sizes), shard_strategy="bucket")
        return plan_model(ModelSpec(weights, operators), settings, world_size=1)


def chains() -> Iterator[Chain]:
    """All small cases. Sizes differ so little that no two weights share a chunk."""
    for count in range(2, MAX_CHUNKS + 1):
        alike = (8,) * count
        shapes = [alike, tuple(8 - i % 4 for i in range(count)), tuple(5 + 3 * (i % 2) for i in range(count))]
        for sizes in dict.fromkeys(shapes):
            for frozen in dict.fromkeys([(), tuple(range(count // 2)), tuple(range(count // 2, count))]):
                for has_root in (False, True):
                    for is_tied in (False, True):
                        for num_slots in range(2 + has_root, count + 1):
                            yield Chain(sizes, num_slots, frozen, has_root, is_tied)


PACKED = ("gpt2", "llama", "bert", "vit", "neox", "t5", "chain", "layer_norm", "transformer_encoder", "frozen_body")


def packed() -> Iterator[Plan]:
    """Models of the test zoo, cut into few chunks, with every number of slots that works."""
    from tests.zoo.models import MODELS  # which imports transformers: not for who wants chains only

    for name in PACKED:
        module = MODELS[name].build()
        numel = sum(parameter.numel() for parameter in module.parameters())
        for parts in range(3, MAX_CHUNKS + 1):
            least = estimate_memory(module, tensor_placement_policy="cpu", chunk_size=numel // parts).plan
            count = len(least.packing.chunks)
            if count <= MAX_CHUNKS + 1 and not least.demand.slot_bytes[1]:
                for num_slots in range(least.demand.min_slots[0], count + 1):
                    policy = HostWithSlots(num_slots)
                    yield estimate_memory(module, tensor_placement_policy=policy, chunk_size=numel // parts).plan


def ratio(plan: Plan, micro_batches: int = 1, trains: bool = True) -> Fraction:
    """Payload bytes that a step fetches, over the least that any choice of evictions fetches."""
    if trains:
        steps = predict_steps(plan, WARM + PERIOD[trains], micro_batches=micro_batches)
    else:
        steps = predict_forwards(plan, WARM + PERIOD[trains])
    its_bytes = [step.copies.get(("host->device", MoveReason.PAYLOAD), 0) for step in steps[WARM:]]
    fetched = Fraction(sum(its_bytes), len(its_bytes))
    least = least_bytes(plan, PassSchedule.expected(plan.spec), micro_batches, trains)
    if not least:
        return Fraction(1 if not fetched else MAX_CHUNKS)
    return fetched / least


@dataclass
class Row:
    """Cases of one kind."""

    count: int = 0
    optimal: int = 0
    total: Fraction = Fraction(0)
    worst: Fraction = Fraction(1)

    def add(self, found: Fraction) -> None:
        self.count += 1
        self.optimal += found == 1
        self.total += found
        self.worst = max(self.worst, found)


def kind_of(chain: Chain, micro_batches: int, trains: bool) -> str:
    """The row of the table."""
    sizes = "equal chunks" if len(set(chain.sizes)) == 1 else "chunks of several sizes"
    if not trains:
        return f"{sizes}, forwards without gradients"
    return f"{sizes}, {'some frozen' if chain.frozen else 'all trained'}, {micro_batches} micro-batch"


def table() -> dict[str, Row]:
    """By kind of case."""
    rows: dict[str, Row] = {}
    for chain in chains():
        for micro_batches, trains in ((1, True), (2, True), (1, False)):
            if trains or not (chain.frozen or chain.is_tied):
                found = ratio(chain.plan, micro_batches, trains)
                rows.setdefault(kind_of(chain, micro_batches, trains), Row()).add(found)
    return rows


def of_packed() -> dict[str, Row]:
    """The same of packed models, whose operators are taken to run in order."""
    rows: dict[str, Row] = {}
    for plan in packed():
        for micro_batches in (1, 2):
            rows.setdefault(f"packed models, {micro_batches} micro-batch", Row()).add(ratio(plan, micro_batches))
    return rows


def main(only: Annotated[str, typer.Option(help="Rows with this in their names.")] = "") -> None:
    """Print the table."""
    print(f"{'bytes fetched / least':56}{'cases':>6}{'optimal':>9}{'mean':>7}{'worst':>7}")
    for kind, row in sorted((table() | of_packed()).items()):
        if only in kind:
            mean = float(row.total / row.count)
            print(f"{kind:56}{row.count:>6}{row.optimal:>9}{mean:>7.3f}{float(row.worst):>7.3f}")


if __name__ == "__main__":
    typer.run(main)
