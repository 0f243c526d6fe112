"""The policies there are, bought step by step within budgets, and what other budgets would give."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

from gemini.errors import BudgetError
from gemini.placement.demand import OF_OPTIMIZER, ChunkDemand, Demand, Kind, Placement, Tier, identities
from gemini.placement.policy import (
    Addition,
    PlacementPolicy,
    at_rest_bytes,
    check_fits,
    fill_slots,
    keep_slots,
    keepable,
    more_slots,
    moved_and_updated,
    place,
    place_unbounded,
    slots_for,
    spend_rest,
    that_fit,
)

# -- Spends a device budget step by step: states move onto the device, chunks keep their slots, slots are added.
#
# The order of steps decides how many bytes cross the link. An update reads and writes parameters, gradient, master and
# moments. A chunk with all of them on the device moves nothing; one with only its parameters there moves them to the
# update and back, which is as much as two fetches. Numbers only.


class Purchase(Enum):
    """One kind of purchase. It is made for chunks in order of first use, for each one that still fits."""

    FROZEN = "parameters of chunks that are not trained, which no update takes to the host"
    PARAMS = "parameters"
    GRADS = "gradients"
    STATE = "master and moments"
    UPDATED = "gradients, master and moments"
    WHOLE = "all that a chunk has"
    KEPT = "slots that chunks keep around their parameters on the device"
    AHEAD = "one slot more of each size, into which the next payload is prefetched"
    SLOTS = "slots for all chunks"


_KINDS = {
    Purchase.FROZEN: (Kind.PARAM,),
    Purchase.PARAMS: (Kind.PARAM,),
    Purchase.GRADS: (Kind.GRAD,),
    Purchase.STATE: OF_OPTIMIZER,
    Purchase.UPDATED: (Kind.GRAD, *OF_OPTIMIZER),
    Purchase.WHOLE: (Kind.PARAM, Kind.GRAD, *OF_OPTIMIZER),
}


def spend(demand: Demand, placement: Placement, budget_bytes: int | None, steps: Sequence[Purchase]) -> Placement:
    """`placement` with more on the device: these steps in order, each as far as the budget lasts."""
    for step in steps:
        if step in (Purchase.SLOTS, Purchase.AHEAD):
            placement = fill_slots(demand, placement, budget_bytes, most=1 if step is Purchase.AHEAD else None)
        elif step is Purchase.KEPT:
            placement = keep_slots(demand, placement, budget_bytes)
        else:
            placement = _move_in(demand, placement, step, budget_bytes)
    # Last, because the best tier for an update depends on where the other states have come to rest.
    return _updated_where_least_moves(demand, placement)


def _updated_where_least_moves(demand: Demand, placement: Placement) -> Placement:
    """`placement`, with the updates of chunks without optimizer state on the tier where they move the fewest bytes.

    SGD without momentum keeps no state, so that either tier costs no memory.
    """
    if all(chunk.optim_states for chunk in demand.chunks):
        return placement
    found: dict[tuple[int, int], dict[Kind, Tier]] = {}  # by chunk and homes, which thousands of chunks share
    keys = identities(demand.chunks, placement.homes)
    for key, chunk, homes in zip(keys, demand.chunks, placement.homes, strict=True):
        if key not in found:
            found[key] = homes
            if not chunk.optim_states and Kind.OPTIM in homes and Kind.GRAD in homes:
                # The homes as they are come first, so that a chunk stays where it is at equal bytes.
                ways = [homes, *({**homes, Kind.OPTIM: tier} for tier in (Tier.DEVICE, Tier.HOST))]
                found[key] = min(ways, key=partial(at_rest_bytes, chunk))  # the first of equal ones
    return replace(placement, homes=tuple(found[key] for key in keys))


def _move_in(demand: Demand, placement: Placement, step: Purchase, budget_bytes: int | None) -> Placement:
    """Move this step's kinds of states onto the device, all of a chunk together, for the chunks that fit."""
    kinds = frozenset(_KINDS[step])
    # The result depends on the pair (chunk, homes) alone: compute it once per distinct pair of objects.
    found: dict[tuple[int, int], Addition | None] = {}  # by chunk and homes, which thousands of chunks share
    then: dict[tuple[int, int], dict[Kind, Tier]] = {}
    for chunk, homes, _ in placement.alike(demand):
        # Earlier steps may have moved some of the kinds: only what is still on the host costs anything.
        moving = [kind for kind, tier in homes.items() if kind in kinds and tier is Tier.HOST]
        if chunk.is_frozen:  # no step reads what it has of a master and optimizer state
            moving = [kind for kind in moving if kind not in OF_OPTIMIZER]
        # This step is for frozen chunks only: an update on the host would take the parameters of trained ones there and
        # back.
        elif step is Purchase.FROZEN:
            moving = []
        key = id(chunk), id(homes)
        found[key] = _addition(chunk, moving) if moving else None
        then[key] = {kind: Tier.DEVICE if kind in moving else tier for kind, tier in homes.items()}
    if not any(found.values()):
        return placement
    # Every chunk is tried by itself, in order of first use, though equal ones share what was found above.
    keys = identities(demand.chunks, placement.homes)
    owners = [(index, addition) for index, key in enumerate(keys) if (addition := found[key]) is not None]
    fitting = that_fit(demand, placement, [addition for _, addition in owners], budget_bytes)
    if not fitting:
        return placement
    # Write only to the copies in `then`: `placement` shares its homes among chunks.
    after = list(placement.homes)
    for number in fitting:
        index, _ = owners[number]
        after[index] = then[keys[index]]
    # A chunk that moved in may have been the last user of a slot, so the fewest slots are computed again.
    return more_slots(demand, placement, slots_for(demand, tuple(after), placement.kept))


def _addition(chunk: ChunkDemand, kinds: Sequence[Kind]) -> Addition:
    # A shard at home on the device is gathered into a slot all the same, so it frees none. Likewise a gradient that
    # cannot be accumulated at home.
    return Addition(
        sum(chunk.home_bytes[kind] for kind in kinds),
        chunk.oversize,
        frees_slot=Kind.PARAM in kinds and not chunk.needs_slot,
        frees_gradient_slot=Kind.GRAD in kinds and not chunk.needs_gradient_slot,
    )


# -- The built-in placement policies: from a model's demand and a budget to every state's home. Pure functions of
# numbers.
#
# `cpu`     all states rest on the host; the device holds only slots.
# `disk`    like `cpu`, with masters and optimizer state on the disk.
# `cuda`    all states rest on the device, with as many slots as the budget allows.
# `auto`    spends the budget on chunks, parts of them and slots in several orders, and takes the result that moves the
#           fewest bytes over the link in a step. With an accelerator an element that the host updates counts like
#           bytes that move, see `Costs`.
# `static`  the user chooses the fractions of bytes that rest on the host.
#
# Masters and optimizer state of frozen chunks, which no step reads, stay on the device only if everything fits there.


_WAYS = (
    (Purchase.WHOLE, Purchase.KEPT, Purchase.WHOLE, Purchase.SLOTS, Purchase.GRADS),
    (Purchase.SLOTS, Purchase.GRADS, Purchase.WHOLE, Purchase.KEPT),
    (Purchase.GRADS, Purchase.WHOLE, Purchase.KEPT, Purchase.WHOLE, Purchase.SLOTS),
    (Purchase.PARAMS, Purchase.UPDATED, Purchase.KEPT, Purchase.UPDATED, Purchase.SLOTS, Purchase.GRADS),
    (Purchase.PARAMS, Purchase.GRADS, Purchase.STATE, Purchase.KEPT, Purchase.STATE, Purchase.SLOTS),
)
"""Orders in which `auto` tries to spend what frozen parameters leave of the budget. It takes the one with fewest bytes.

A whole chunk on the device moves nothing. On one rank another slot saves more per byte, until each chunk on the host
has one: it saves a fetch at every turn of a pass. Gradients alone pay off with several micro-batches. Parameters alone
pay off where updates do not read them (whole masters), or with many micro-batches. With all parameters and gradients on
the device no slot is needed, which matters if one chunk is larger than all others together.
"""
_THEN = (Purchase.GRADS, Purchase.PARAMS, Purchase.KEPT, Purchase.SLOTS)
"""How to spend what the best order leaves, unless it makes more bytes travel."""
_AT_LAST = (Purchase.WHOLE, Purchase.KEPT, Purchase.SLOTS)
"""Likewise, after `_THEN`: when the last user of a slot moves in, the slot's bytes become free."""


def _all_on(demand: Demand, tier: Tier) -> tuple[dict[Kind, Tier], ...]:
    """Homes of all states on one tier, except for persistent parameters, which rest on the device."""
    # Equal chunks share one homes dict, so nobody may write to it. `Placement.alike` groups chunks by this identity.
    each = {id(chunk): chunk for chunk in demand.chunks}
    homes = {
        key: {kind: Tier.DEVICE if chunk.persists and kind is Kind.PARAM else tier for kind in chunk.home_bytes}
        for key, chunk in each.items()
    }
    return tuple(homes[id(chunk)] for chunk in demand.chunks)


def _frozen_state_on_host(demand: Demand, homes: tuple[dict[Kind, Tier], ...]) -> tuple[dict[Kind, Tier], ...]:
    """`homes` with masters and optimizer state of frozen chunks on the host."""
    on_host = dict.fromkeys((Kind.MASTER, Kind.OPTIM), Tier.HOST)
    return tuple(
        {kind: on_host.get(kind, tier) if chunk.is_frozen else tier for kind, tier in home.items()}
        for chunk, home in zip(demand.chunks, homes, strict=True)
    )


class CpuPolicy:
    """All states rest on the host. Slots fill the budget; without one a model that only infers has the fewest."""

    name = "cpu"

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        """See `PlacementPolicy.place`. Raises BudgetError if the least slots do not fit."""
        placement = slots_for(demand, _all_on(demand, Tier.HOST))
        check_fits(demand, placement, budget_bytes, self.name)
        infers = all(chunk.is_frozen for chunk in demand.chunks)
        if infers and budget_bytes is None:
            # A slot for every chunk would be a second copy of all weights, in the same memory where ranks are CPUs.
            return placement
        return spend_rest(demand, placement, budget_bytes)


class DiskPolicy(CpuPolicy):
    """`CpuPolicy`, with masters and optimizer state on the disk: see `to_disk`."""

    name = "disk"


class CudaPolicy:
    """All states rest on the device. If they do not fit, masters and moments of frozen chunks rest on the host."""

    name = "cuda"

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        """See `PlacementPolicy.place`. Raises BudgetError if even that does not fit."""
        placement = slots_for(demand, _all_on(demand, Tier.DEVICE))
        if budget_bytes is not None and placement.device_bytes(demand) > budget_bytes:
            placement = slots_for(demand, _frozen_state_on_host(demand, placement.homes))
        check_fits(demand, placement, budget_bytes, self.name)
        return spend_rest(demand, placement, budget_bytes)


FRACTIONS = ("shard_param_frac", "offload_optim_frac", "offload_param_frac")
"""The arguments of `StaticPolicy`."""
MARGIN = "gpu_margin_mem_ratio"
"""The argument of `AutoPolicy`."""


def check_fraction(name: str, value: object) -> float:
    """`value` as a float. Raises TypeError or ValueError unless it is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number from 0 to 1, found {value!r}")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, found {value}")
    return float(value)


def _cost(demand: Demand, placement: Placement) -> tuple[int, int]:
    """The cost by which placements are compared: bytes beyond the host's budget, then the time of link and updates.

    Bytes beyond the host's budget come first, because with any of them training is refused.
    """
    max_host_bytes = demand.max_host_bytes
    beyond = 0 if max_host_bytes is None else max(0, placement.host_bytes(demand) - max_host_bytes)
    return beyond, moved_and_updated(demand, placement)


@dataclass(frozen=True)
class AutoPolicy:
    """Moves states onto the device while the budget lasts, so that the fewest bytes cross the link in a step.

    Placements that fit the host's budget come before those that do not.

    Args:
        gpu_margin_mem_ratio: the fraction that masters and optimizer state may take of what parameters, gradients and
            the least slots leave of the budget, as in Colossal-AI. Parameters then move in first, gradients second.
            Without a budget any ratio above 0 is all. None: no such bound.
    """

    gpu_margin_mem_ratio: float | None = None

    @property
    def name(self) -> str:
        """The name with the ratio, so that ranks with different ratios have different plan hashes."""
        ratio = self.gpu_margin_mem_ratio
        return "auto" if ratio is None else f"auto({MARGIN}={ratio})"

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        """See `PlacementPolicy.place`. Raises BudgetError if the least slots do not fit."""
        # This placement has all homes on the device and every slot that can be of use.
        everything = CudaPolicy().place(demand, None)
        is_bounded = self.gpu_margin_mem_ratio is not None
        # With everything on the device no byte crosses the link, so there is no better placement to find.
        if not is_bounded and (budget_bytes is None or everything.device_bytes(demand) <= budget_bytes):
            return everything
        placement = slots_for(demand, _all_on(demand, Tier.HOST))
        # The slots of a tiny model may take more than all of its states. Refuse only if neither fits.
        least = min(placement, everything, key=lambda each: each.device_bytes(demand))
        check_fits(demand, least, budget_bytes, self.name)
        if is_bounded:
            # The ratio is one of what parameters and gradients leave, so these move in first. Slots are bought from
            # what optimizer state leaves.
            placement = spend(demand, placement, budget_bytes, (Purchase.PARAMS, Purchase.GRADS))
            placement = spend(demand, placement, self._margin(demand, placement, budget_bytes), (Purchase.STATE,))
            return spend(demand, placement, budget_bytes, (Purchase.KEPT, Purchase.SLOTS))
        # Frozen parameters first: no update ever takes them to the host, so each of their bytes saves fetches only.
        placement = spend(demand, placement, budget_bytes, (Purchase.FROZEN,))
        # No order of spending is the best for all models, see `_WAYS`, so all of them are tried and compared.
        firsts: tuple[tuple[Purchase, ...], ...] = ((), (Purchase.AHEAD,)) if demand.costs.waits_for_fetch else ((),)
        ways = [spend(demand, placement, budget_bytes, (*first, *steps)) for steps in _WAYS for first in firsts]
        costs = [_cost(demand, each) for each in ways]
        cost = min(costs)
        best = ways[costs.index(cost)]  # of equal ones the first
        # Fill what the best order has left.
        for steps in (_THEN, _AT_LAST):
            fuller = spend(demand, best, budget_bytes, steps)
            # At equal cost the fuller placement is better: it leaves more of the host free.
            if (fuller_cost := _cost(demand, fuller)) <= cost:
                best, cost = fuller, fuller_cost
        return best

    def _margin(self, demand: Demand, placement: Placement, budget_bytes: int | None) -> int | None:
        """The bytes that the device may hold once masters and optimizer state have joined. None: no bound."""
        ratio = self.gpu_margin_mem_ratio
        if ratio is None:
            return budget_bytes
        taken = placement.device_bytes(demand)
        if budget_bytes is None:
            # A ratio of 0 leaves no room to optimizer state, with or without a budget.
            return None if ratio else taken
        return taken + int(ratio * (budget_bytes - taken))


@dataclass(frozen=True)
class StaticPolicy:
    """Places fractions of the bytes where the user says, like Colossal-AI's `placement_policy="static"`.

    Whole chunks are offloaded, or sharded between uses: the fewest that make up the fraction, counted from the chunk
    whose first use is last. There are as many slots as the budget has room for; without a budget the fewest that work.
    A pure function of numbers: local.

    Args:
        shard_param_frac: the fraction of the parameters that is resharded after use, on several ranks at stage 3. The
            rest stays whole on every device: 1.0 is ZeRO-3, 0.0 keeps everything whole, as ZeRO-2.
        offload_optim_frac: the fraction of the optimizer state that rests, with its masters and gradients, on the host.
            Its update runs there.
        offload_param_frac: the fraction of the parameters that rests on the host. Those kept whole are not offloaded.

    Raises TypeError or ValueError for what is not a number from 0 to 1.

    Example:
        >>> StaticPolicy(offload_optim_frac=0.5).name
        'static(shard_param_frac=1.0, offload_optim_frac=0.5, offload_param_frac=0.0)'
    """

    shard_param_frac: float = 1.0
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0

    def __post_init__(self) -> None:
        # The dataclass is frozen, hence `object.__setattr__`. An int becomes a float, because the name, which ranks
        # compare, would otherwise differ between 1 and 1.0.
        for name in FRACTIONS:
            object.__setattr__(self, name, check_fraction(name, getattr(self, name)))

    @property
    def name(self) -> str:
        """The name with the fractions, so that ranks with different fractions have different plan hashes."""
        return f"static({', '.join(f'{name}={getattr(self, name)}' for name in FRACTIONS)})"

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        """See `PlacementPolicy.place`. Local. Raises BudgetError if the fractions do not fit into the budget."""
        # Choose what is resharded, then what is offloaded of the rest.
        # The fraction is one of the chunks that can be kept whole. A sharded chunk of several units cannot: its shard
        # is no single part of a payload, so it is resharded after every use.
        whole = [chunk.payload_bytes if chunk.may_keep_slot else 0 for chunk in demand.chunks]
        given_up = _last_of(whole, self.shard_param_frac)
        kept_whole = [chunk.persists or bool(whole[i] and i not in given_up) for i, chunk in _counted(demand)]
        params = [0 if kept_whole[i] else _bytes(chunk, Kind.PARAM) for i, chunk in _counted(demand)]
        states = [sum(_bytes(chunk, kind) for kind in OF_OPTIMIZER) for chunk in demand.chunks]
        # Without optimizer state, as with SGD, the fraction is one of the gradients, which would leave with it.
        if not any(states):
            states = [_bytes(chunk, Kind.GRAD) for chunk in demand.chunks]
        on_host = {Kind.PARAM: _last_of(params, self.offload_param_frac)}
        on_host |= dict.fromkeys((Kind.GRAD, *OF_OPTIMIZER), _last_of(states, self.offload_optim_frac))
        homes = tuple(
            {kind: Tier.HOST if i in on_host[kind] else Tier.DEVICE for kind in chunk.home_bytes}
            for i, chunk in _counted(demand)
        )
        # A chunk that stays whole keeps its slot.
        placement = slots_for(demand, homes)
        # `keepable` reads the homes from a placement, so the fewest slots are computed once before and once after it.
        kept = [index for index in keepable(demand, placement) if index not in given_up]
        placement = slots_for(demand, homes, kept)
        check_fits(demand, placement, budget_bytes, self.name)
        return placement if budget_bytes is None else fill_slots(demand, placement, budget_bytes)


def _counted(demand: Demand) -> list[tuple[int, ChunkDemand]]:
    return list(enumerate(demand.chunks))


def _bytes(chunk: ChunkDemand, kind: Kind) -> int:
    return chunk.home_bytes.get(kind, 0)


def _last_of(num_bytes: Sequence[int], fraction: float) -> frozenset[int]:
    """The fewest indices, counted from the end, whose bytes make up at least this fraction of the sum."""
    wanted, chosen = fraction * sum(num_bytes), set[int]()
    for index in reversed(range(len(num_bytes))):
        if wanted <= 0:
            break
        # A chunk of 0 bytes brings the sum no nearer to the fraction, so it stays where it is.
        if num_bytes[index]:
            chosen.add(index)
            wanted -= num_bytes[index]
    return frozenset(chosen)


_POLICIES: dict[str, Callable[..., PlacementPolicy]] = {
    "auto": AutoPolicy,
    "cpu": CpuPolicy,
    "cuda": CudaPolicy,
    "disk": DiskPolicy,
    "static": StaticPolicy,
}


def resolve_policy(policy: str | PlacementPolicy, **arguments: float) -> PlacementPolicy:
    """A policy by name, made with these arguments, or a user's own object.

    Raises ValueError for an unknown name and TypeError for what is no policy.
    """
    if isinstance(policy, str):
        if policy not in _POLICIES:
            raise ValueError(f"tensor_placement_policy={policy!r} is unknown: choose one of {sorted(_POLICIES)}")
        return _POLICIES[policy](**arguments)
    # `isinstance` with a protocol only looks for the attributes, which a class such as `AutoPolicy` has as well as its
    # instances.
    if isinstance(policy, type) or not isinstance(policy, PlacementPolicy):
        raise TypeError(
            f"tensor_placement_policy must be a name ({', '.join(sorted(_POLICIES))}) or an object with a name and a "
            f"place(demand, budget_bytes) method, found {policy!r}"
        )
    return policy


# -- How well a policy uses a budget: the least that it needs, and whether it leaves much of a short budget empty.
#
# A budget is *short* if states rest on the host and a larger budget would change the placement. Functions of numbers.


IN_USE = 0.95
"""If the budget cannot hold all states, prefer chunk sizes that use at least this fraction of it."""


def least_device_bytes(demand: Demand, policy: PlacementPolicy) -> int | None:
    """The smallest device budget, in bytes, with which the policy places these chunks.

    None if there is none to name: a user's policy refuses without a number, or the fewest slots hold more elements
    than `max_live_parameters` allows, whatever the budget.
    """
    # A plan that does not fit otherwise is made with reductions in tiles.
    demand = demand.in_tiles()
    # A budget of 0 bytes makes the policy refuse. Its error carries the number of bytes that it needs.
    try:
        return policy.place(demand, 0).device_bytes(demand)
    except BudgetError as error:
        needed = error.needed_bytes
    # Policies need not look at `max_live_parameters`, which `place` checks. Its refusal has no number of bytes, because
    # no budget would help.
    if demand.max_live_numel is not None:
        try:
            place(demand, needed, policy)
        except BudgetError:
            return None
    return needed


def is_short(demand: Demand, placement: Placement, policy: PlacementPolicy, budget_bytes: int | None) -> bool:
    """Whether a larger budget would change `placement`, which the policy made for `budget_bytes`."""
    # More slots alone do not make a budget short: with all states on the device no chunk size is worth looking for.
    if budget_bytes is None or not placement.host_bytes(demand):
        return False
    try:
        return place_unbounded(demand, policy) != placement
    except BudgetError:  # of a policy of the user's that refuses without a number
        return True


def would_leave_much(demand: Demand, policy: PlacementPolicy, budget_bytes: int) -> bool:
    """Whether the policy would leave much of this budget empty, or would refuse it."""
    try:
        placement = policy.place(demand, budget_bytes)
    except BudgetError:
        return True
    return leaves_much(demand, placement, policy, budget_bytes)


def leaves_much(demand: Demand, placement: Placement, policy: PlacementPolicy, budget_bytes: int) -> bool:
    """Whether `placement`, made for a short budget, uses less than `IN_USE` of it."""
    # Only another placement tells whether the budget is short, so that is asked last.
    is_used = placement.device_bytes(demand) >= IN_USE * budget_bytes
    return not is_used and is_short(demand, placement, policy, budget_bytes)


# -- How another device budget would change a placement: the next larger and the next smaller one that do, and no bound.
#
# The policy is treated as a black box that is deterministic in the budget. Each reported budget is exact: the policy's
# answer for one byte less differs.


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


_EXACT_BELOW = 2**20  # bytes of a whole plan: those of examples and tests, which one can check by hand


@dataclass(frozen=True)
class Sizes:
    """Sizes in words, all of one page in one unit: amounts in several units cannot be compared at a glance.

    total_bytes: the largest amount on the page, which chooses the unit.
    """

    total_bytes: int

    def __call__(self, num_bytes: int) -> str:
        if self.total_bytes < _EXACT_BELOW:
            return f"{num_bytes} bytes"
        return f"{_four_digits(num_bytes / 2**20)} MiB"

    def at_least(self, num_bytes: int) -> str:
        """A size to paste as a budget, which is rounded up: one byte less would be refused, or plan otherwise."""
        if self.total_bytes < _EXACT_BELOW:
            return self(num_bytes)
        mebibytes = num_bytes / 2**20
        step = 10.0 ** -_decimals(mebibytes)
        return f"{_four_digits(math.ceil(mebibytes / step) * step)} MiB"


def _four_digits(number: float) -> str:
    text = f"{number:.{_decimals(number)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _decimals(number: float) -> int:
    return max(0, 3 - math.floor(math.log10(number))) if number else 0


def difference_in_words(demand: Demand, before: Placement, other: Alternative, size: Sizes) -> str:
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
                moves.append(f"{words} of {_chunks(len(moved))} ({size(sum(moved))})")
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


# -- Where states rest if a config asks for the optimizer's on the host (DeepSpeed's `offload_optimizer`).


def offloads_params(policy: object) -> bool:
    """A config's policy puts all parameters onto the host."""
    return policy == "cpu" or (isinstance(policy, OptimizerOnHostPolicy) and policy.offloads_params)


@dataclass(frozen=True)
class OptimizerOnHostPolicy:
    """Optimizer state, masters and gradients rest on the host, where the update runs; parameters on the device.

    Where the device has no room for the rest, the placement is that of "auto", or of "cpu" with parameters on the host.

    Args:
        ratio: of the bytes of masters and moments, from the last chunk on. The rest is updated on the device.
        offloads_params: parameters rest on the host, too.
    """

    ratio: float = 1.0
    offloads_params: bool = False

    @property
    def name(self) -> str:
        """The name with the ratio, so that ranks with different ratios have different plan hashes."""
        words = [f"ratio={self.ratio}"] if self.ratio < 1 else []
        words += ["offloads_params"] if self.offloads_params else []
        return f"optimizer_on_host({', '.join(words)})" if words else "optimizer_on_host"

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        """Raises BudgetError where "auto" or "cpu" does."""
        policy = StaticPolicy(offload_optim_frac=self.ratio, offload_param_frac=float(self.offloads_params))
        # No budget is given: a placement that does not fit is no error yet, since another policy follows.
        placement = policy.place(demand, None)
        if budget_bytes is not None and placement.device_bytes(demand) > budget_bytes:
            return resolve_policy("cpu" if self.offloads_params else "auto").place(demand, budget_bytes)
        # What the budget leaves becomes slots, which save fetches.
        return spend_rest(demand, placement, budget_bytes)
