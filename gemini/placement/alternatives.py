"""What another budget would change of a placement: the next better one, the next worse one, and all that there is.

A policy is asked with other budgets, for the same chunks. Nothing is assumed of how it answers but that it answers
alike for alike budgets: a figure here is a budget at which the answer differs from that of one byte before.
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
    """Model data that the device might hold instead, in bytes, and the placement that the policy has for it."""

    budget_bytes: int
    placement: Placement


def all_on_device(demand: Demand, policy: PlacementPolicy) -> Alternative | None:
    """The least budget that changes nothing any more. None: the policy refuses to place without a budget."""
    placement = _place(demand, None, policy)
    return None if placement is None else Alternative(placement.device_bytes(demand), placement)


def all_at_rest_on_device(demand: Demand, policy: PlacementPolicy) -> int | None:
    """Bytes with which no state rests on the host, with the fewest slots. None: the policy never does that."""
    homes = tuple(dict.fromkeys(chunk.home_bytes, Tier.DEVICE) for chunk in demand.chunks)
    budget_bytes = slots_for(demand, homes).device_bytes(demand)
    placement = _place(demand, budget_bytes, policy)
    return budget_bytes if placement is not None and placement.homes == homes else None


def next_better(demand: Demand, now: Placement, budget_bytes: int, policy: PlacementPolicy) -> Alternative | None:
    """With the fewest bytes more that change something. None: no budget does."""
    everything = all_on_device(demand, policy)
    if everything is None or budget_bytes >= everything.budget_bytes:
        return None
    most = everything.budget_bytes
    same, other = budget_bytes, most
    step = min((size for chunk in demand.chunks for size in chunk.home_bytes.values() if size), default=1)
    while same + step < most:  # what changes next is near, and models have many chunks
        if _place(demand, same + step, policy) != now:
            other = same + step
            break
        same, step = same + step, 2 * step
    while other - same > 1:
        middle = (same + other) // 2
        if _place(demand, middle, policy) == now:
            same = middle
        else:
            other = middle
    changed = _place(demand, other, policy)
    return None if changed is None or changed == now else Alternative(other, changed)


def next_worse(demand: Demand, now: Placement, policy: PlacementPolicy) -> Alternative | None:
    """With one byte less than it takes. None: there is none, because it is the least."""
    budget_bytes = now.device_bytes(demand) - 1
    placement = _place(demand, budget_bytes, policy)
    return None if placement is None else Alternative(budget_bytes, placement)


def difference_in_words(demand: Demand, before: Placement, after: Placement) -> str:
    """What rests elsewhere, and how many slots there are more or fewer. Bytes are of one rank."""
    found = []
    for tier in Tier:
        moves = []
        for kind, words in KINDS_IN_WORDS.items():
            moved = [
                chunk.home_bytes[kind]
                for chunk, had, has in zip(demand.chunks, before.homes, after.homes, strict=True)
                if kind in chunk.home_bytes and has[kind] is tier and had[kind] is not tier
            ]
            if moved:
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
    """None: there is none that keeps to the budget, even if a policy of the user's says so."""
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
