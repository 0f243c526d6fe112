"""Placement policies: from a model's demand and a budget to every state's home. Pure functions of numbers.

`cpu`   all states rest on the host; the device holds only slots.
`cuda`  all states rest on the device, as many slots as the budget allows.
`auto`  the smallest slots that work, then parameters, gradients and optimizer state move in, in this order and
        in order of first use, for as long as the budget lasts; what is left becomes more slots.
A user's own policy is any object with a `name` and a `place` method.
"""

from dataclasses import replace
from typing import Protocol, runtime_checkable

from gemini.errors import BudgetError
from gemini.placement.demand import Demand, Kind, Placement, Tier
from gemini.placement.sizes import format_bytes

_MOVING_IN = (Kind.PARAM, Kind.GRAD, Kind.MASTER, Kind.OPTIM)


@runtime_checkable
class PlacementPolicy(Protocol):
    """Decides homes; `budget_bytes` is the model data that the device may hold, None without a bound."""

    @property
    def name(self) -> str: ...

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement: ...


def slots_for(demand: Demand, homes: tuple[dict[Kind, Tier], ...]) -> Placement:
    """`homes` with the fewest slots that work: chunks that live on the device whole need none."""
    counts = []
    for kind, minimum in ((Kind.PARAM, demand.min_slots), (Kind.GRAD, demand.min_gradient_slots)):
        for oversize in (False, True):
            users = sum(_takes_slot(demand, homes, i, kind, oversize) for i in range(len(demand.chunks)))
            counts.append(min(minimum[oversize], users))
    return Placement(homes, (counts[0], counts[1]), (counts[2], counts[3]))


def _takes_slot(demand: Demand, homes: tuple[dict[Kind, Tier], ...], index: int, kind: Kind, oversize: bool) -> bool:
    chunk = demand.chunks[index]
    if chunk.oversize != oversize or kind not in chunk.home_bytes:
        return False
    needs = chunk.needs_slot if kind is Kind.PARAM else chunk.needs_gradient_slot
    return needs or homes[index][kind] is not Tier.DEVICE


def add_slots(demand: Demand, placement: Placement, budget_bytes: int | None) -> Placement:
    """More slots out of what the budget leaves, oversize ones first: they are the scarcest. Never more than users."""
    for oversize in (True, False):
        users = sum(_takes_slot(demand, placement.homes, i, Kind.PARAM, oversize) for i in range(len(demand.chunks)))
        wanted = users - placement.num_slots[oversize]
        if budget_bytes is not None and demand.slot_bytes[oversize]:
            spare = budget_bytes - placement.device_bytes(demand)
            wanted = min(wanted, max(0, spare) // demand.slot_bytes[oversize])
        counts = list(placement.num_slots)
        counts[oversize] += max(0, wanted)
        placement = replace(placement, num_slots=(counts[0], counts[1]))
    return placement


def check_fits(demand: Demand, placement: Placement, budget_bytes: int | None, policy: str) -> None:
    """Raises BudgetError with what is needed, what is there, and the knob."""
    needed = placement.device_bytes(demand)
    if budget_bytes is not None and needed > budget_bytes:
        raise BudgetError(
            f"device: tensor_placement_policy={policy!r} needs {needed} bytes of model data ({format_bytes(needed)}): "
            f"{_slots_in_words(demand, placement)}; the budget is {budget_bytes} bytes ({format_bytes(budget_bytes)}). "
            f"Raise model_data_memory= or device_memory=, or make chunk_size= smaller"
        )


def _slots_in_words(demand: Demand, placement: Placement) -> str:
    words = []
    for name, counts, sizes in (
        ("slots", placement.num_slots, demand.slot_bytes),
        ("gradient slots", placement.num_gradient_slots, demand.gradient_slot_bytes),
    ):
        words += [f"{n} {name} of {format_bytes(b)}" for n, b in zip(counts, sizes, strict=True) if n]
    words.append(f"{format_bytes(demand.scratch_bytes)} of receive buffers")
    return ", ".join(words)


def _all_on(demand: Demand, tier: Tier) -> tuple[dict[Kind, Tier], ...]:
    return tuple(dict.fromkeys(chunk.home_bytes, tier) for chunk in demand.chunks)


class CpuPolicy:
    """Everything rests on the host."""

    name = "cpu"

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        placement = slots_for(demand, _all_on(demand, Tier.HOST))
        check_fits(demand, placement, budget_bytes, self.name)
        return add_slots(demand, placement, budget_bytes)


class CudaPolicy:
    """Everything rests on the device."""

    name = "cuda"

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        placement = slots_for(demand, _all_on(demand, Tier.DEVICE))
        check_fits(demand, placement, budget_bytes, self.name)
        return add_slots(demand, placement, budget_bytes)


class AutoPolicy:
    """Moves states onto the device while the budget lasts."""

    name = "auto"

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        if budget_bytes is None:
            return CudaPolicy().place(demand, None)
        placement = slots_for(demand, _all_on(demand, Tier.HOST))
        check_fits(demand, placement, budget_bytes, self.name)
        for kind in _MOVING_IN:
            placement = self._move_in(demand, placement, kind, budget_bytes)
        return add_slots(demand, placement, budget_bytes)

    def _move_in(self, demand: Demand, placement: Placement, kind: Kind, budget_bytes: int) -> Placement:
        """The longest prefix of chunks whose `kind` fits: by bisection, as bytes grow with the prefix but for slots."""
        owners = [i for i, chunk in enumerate(demand.chunks) if kind in chunk.home_bytes]
        best = placement
        low, high = 0, len(owners)
        while low < high:
            middle = (low + high + 1) // 2
            moved = set(owners[:middle])
            homes = tuple({**home, kind: Tier.DEVICE} if i in moved else home for i, home in enumerate(placement.homes))
            candidate = slots_for(demand, homes)
            if candidate.device_bytes(demand) <= budget_bytes:
                best, low = candidate, middle
            else:
                high = middle - 1
        if low < len(owners):  # all of them may fit although fewer do not: then no slots are needed
            homes = tuple({**h, kind: Tier.DEVICE} if kind in h else h for h in placement.homes)
            candidate = slots_for(demand, homes)
            if candidate.device_bytes(demand) <= budget_bytes:
                best = candidate
        return best


_POLICIES: dict[str, type[CpuPolicy] | type[CudaPolicy] | type[AutoPolicy]] = {
    policy.name: policy for policy in (AutoPolicy, CpuPolicy, CudaPolicy)
}


def resolve_policy(policy: str | PlacementPolicy) -> PlacementPolicy:
    """A policy by name, or a user's own object."""
    if isinstance(policy, str):
        if policy not in _POLICIES:
            raise ValueError(f"tensor_placement_policy={policy!r} is unknown: choose one of {sorted(_POLICIES)}")
        return _POLICIES[policy]()
    if isinstance(policy, type) or not isinstance(policy, PlacementPolicy):
        raise TypeError(
            f"tensor_placement_policy must be a name ({', '.join(sorted(_POLICIES))}) or an object with a name and a "
            f"place(demand, budget_bytes) method, found {policy!r}"
        )
    return policy
