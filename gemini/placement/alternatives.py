"""How another device budget would change a placement: the next larger and the next smaller one that do, and no bound.

The policy is treated as a black box that is deterministic in the budget. Each reported budget is exact: the policy's
answer for one byte less differs.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemini.errors import BudgetError
from gemini.placement.demand import Demand, Kind, Placement, Tier
from gemini.placement.placing import place_unbounded
from gemini.placement.policy import PlacementPolicy, slots_for

KINDS_IN_WORDS = {
    Kind.PARAM: "weights",
    Kind.GRAD: "gradients",
    Kind.MASTER: "fp32 masters",
    Kind.OPTIM: "optimizer state",
}


@dataclass(frozen=True)
class Alternative:
    """Another device budget, in bytes, and the placement that the policy makes for it."""

    budget_bytes: int
    demand: Demand
    placement: Placement


def all_on_device(demand: Demand, policy: PlacementPolicy) -> Alternative | None:
    """The least budget beyond which more changes nothing. None: the policy refuses to place without a budget."""
    demand = demand.at_once()
    try:
        placement = place_unbounded(demand, policy)
    except BudgetError:
        return None
    return Alternative(placement.device_bytes(demand), demand, placement)


def all_at_rest_on_device(demand: Demand, policy: PlacementPolicy) -> int | None:
    """The least budget, in bytes, with which no state rests on the host. None: the policy never does that."""
    demand = demand.at_once()
    homes = tuple(dict.fromkeys(chunk.home_bytes, Tier.DEVICE) for chunk in demand.chunks)
    # The fewest slots beside all homes: with a smaller budget some state has to leave.
    budget_bytes = slots_for(demand, homes).device_bytes(demand)
    there = _at(budget_bytes, demand, policy)
    # A policy such as "cpu" has other homes, whatever the budget.
    return budget_bytes if there is not None and there.placement.homes == homes else None


def next_better(demand: Demand, now: Placement, budget_bytes: int, policy: PlacementPolicy) -> Alternative | None:
    """The placement at the smallest larger budget that changes the placement. None: no larger budget changes it.

    A budget at which the policy returns to `now` between two changes may hide the first of them.
    """
    everything = all_on_device(demand, policy)
    if everything is None or budget_bytes >= everything.budget_bytes:
        return None
    most = everything.budget_bytes

    def is_same(budget_bytes: int) -> bool:
        there = _at(budget_bytes, demand, policy)
        return there is not None and _is_as(there, demand, now)

    # Invariant: the placement at `same` equals `now`, and the one at `other` differs, unless none below `most` does.
    same, other = budget_bytes, most
    # Start with the size of the smallest state, so that a step seldom passes two changes.
    step = min((size for chunk in demand.chunks for size in chunk.home_bytes.values() if size), default=1)
    # Gallop from the current budget: the next change is near, and each placement of a model of many chunks takes time.
    while same + step < most:
        if not is_same(same + step):
            other = same + step
            break
        same, step = same + step, 2 * step
    # Bisect down to the byte.
    while other - same > 1:
        middle = (same + other) // 2
        if is_same(middle):
            same = middle
        else:
            other = middle
    # If no step found a change, `other` is `most`, whose placement was not compared with `now` so far.
    changed = _at(other, demand, policy)
    return None if changed is None or _is_as(changed, demand, now) else changed


def next_worse(demand: Demand, now: Placement, policy: PlacementPolicy) -> Alternative | None:
    """The placement with one byte less than `now` takes. None: `now` is the least that the policy accepts."""
    return _at(now.device_bytes(demand) - 1, demand, policy)


def difference_in_words(demand: Demand, before: Placement, other: Alternative) -> str:
    """The states that rest elsewhere and the change in the number of slots, in words. Bytes are of one rank.

    demand: the one that `before` meets.
    """
    after, found = other.placement, []
    for tier in Tier:
        moves = []
        for kind, words in KINDS_IN_WORDS.items():
            moved = [
                chunk.home_bytes[kind]
                for chunk, had, has in zip(demand.chunks, before.homes, after.homes, strict=True)
                if kind in chunk.home_bytes and has[kind] is tier and had[kind] is not tier
            ]
            # A chunk without optimizer state has a tier for its update nevertheless, and no bytes there.
            if any(moved):
                moves.append(f"{words} of {_chunks(len(moved))} ({sum(moved)} bytes)")
        if moves:
            found.append(f"{' and '.join(moves)} would rest on the {tier}")
    kept = len(after.kept) - len(before.kept)
    if kept:
        found.append(f"{_chunks(abs(kept))} {_direction(kept)} would keep a slot")
    for name, had, has in (
        ("slot", before.num_slots, after.num_slots),
        ("gradient slot", before.num_gradient_slots, after.num_gradient_slots),
    ):
        more = sum(has) - sum(had)
        if more:
            found.append(f"there would be {_count(abs(more), name)} {_direction(more)}")
    if other.demand.scratch_bytes != demand.scratch_bytes:
        how = "in tiles" if other.demand.scratch_bytes < demand.scratch_bytes else "at once"
        found.append(f"gradients of the largest weights would be exchanged {how}")
    return ", ".join(found) or "nothing would change"


def _at(budget_bytes: int, demand: Demand, policy: PlacementPolicy) -> Alternative | None:
    """What is planned for this budget. None: the policy refuses, or a user's policy gave more than the budget."""
    whole = demand.at_once()
    tiled = whole.in_tiles()
    # In the order of `place_in_budget`, whose checks would take too long here: many budgets are tried.
    for its in (whole,) if tiled is whole else (whole, tiled):
        try:
            placement = policy.place(its, budget_bytes)
        except BudgetError:
            continue
        if placement.device_bytes(its) <= budget_bytes:
            return Alternative(budget_bytes, its, placement)
    return None


def _is_as(other: Alternative, demand: Demand, placement: Placement) -> bool:
    return other.placement == placement and other.demand.scratch_bytes == demand.scratch_bytes


def _chunks(count: int) -> str:
    return _count(count, "chunk")


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count > 1)}"


def _direction(more: int) -> str:
    return "more" if more > 0 else "fewer"
