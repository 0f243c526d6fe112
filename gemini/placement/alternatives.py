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
    placement: Placement


def all_on_device(demand: Demand, policy: PlacementPolicy) -> Alternative | None:
    """The least budget beyond which more changes nothing. None: the policy refuses to place without a budget."""
    placement = _place(demand, None, policy)
    return None if placement is None else Alternative(placement.device_bytes(demand), placement)


def all_at_rest_on_device(demand: Demand, policy: PlacementPolicy) -> int | None:
    """The least budget, in bytes, with which no state rests on the host. None: the policy never does that."""
    homes = tuple(dict.fromkeys(chunk.home_bytes, Tier.DEVICE) for chunk in demand.chunks)
    # The fewest slots beside all homes: with a smaller budget some state has to leave.
    budget_bytes = slots_for(demand, homes).device_bytes(demand)
    placement = _place(demand, budget_bytes, policy)
    # A policy such as "cpu" has other homes, whatever the budget.
    return budget_bytes if placement is not None and placement.homes == homes else None


def next_better(demand: Demand, now: Placement, budget_bytes: int, policy: PlacementPolicy) -> Alternative | None:
    """The placement at the smallest larger budget that changes the placement. None: no larger budget changes it.

    A budget at which the policy returns to `now` between two changes may hide the first of them.
    """
    everything = all_on_device(demand, policy)
    if everything is None or budget_bytes >= everything.budget_bytes:
        return None
    most = everything.budget_bytes
    # Invariant: the placement at `same` equals `now`, and the one at `other` differs, unless none below `most` does.
    same, other = budget_bytes, most
    # Start with the size of the smallest state, so that a step seldom passes two changes.
    step = min((size for chunk in demand.chunks for size in chunk.home_bytes.values() if size), default=1)
    # Gallop from the current budget: the next change is near, and each placement of a model of many chunks takes time.
    while same + step < most:
        if _place(demand, same + step, policy) != now:
            other = same + step
            break
        same, step = same + step, 2 * step
    # Bisect down to the byte.
    while other - same > 1:
        middle = (same + other) // 2
        if _place(demand, middle, policy) == now:
            same = middle
        else:
            other = middle
    # If no step found a change, `other` is `most`, whose placement was not compared with `now` so far.
    changed = _place(demand, other, policy)
    return None if changed is None or changed == now else Alternative(other, changed)


def next_worse(demand: Demand, now: Placement, policy: PlacementPolicy) -> Alternative | None:
    """The placement with one byte less than `now` takes. None: `now` is the least that the policy accepts."""
    budget_bytes = now.device_bytes(demand) - 1
    placement = _place(demand, budget_bytes, policy)
    return None if placement is None else Alternative(budget_bytes, placement)


def difference_in_words(demand: Demand, before: Placement, after: Placement) -> str:
    """The states that rest elsewhere and the change in the number of slots, in words. Bytes are of one rank."""
    found = []
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
    return ", ".join(found) or "nothing would change"


def _place(demand: Demand, budget_bytes: int | None, policy: PlacementPolicy) -> Placement | None:
    """The policy's placement. None: it refuses, or a user's policy returned one that exceeds the budget."""
    try:
        placement = place_unbounded(demand, policy) if budget_bytes is None else policy.place(demand, budget_bytes)
    except BudgetError:
        return None
    return None if budget_bytes is not None and placement.device_bytes(demand) > budget_bytes else placement


def _chunks(count: int) -> str:
    return _count(count, "chunk")


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count > 1)}"


def _direction(more: int) -> str:
    return "more" if more > 0 else "fewer"
