"""The built-in placement policies: from a model's demand and a budget to every state's home. Pure functions of numbers.

`cpu`     all states rest on the host; the device holds only slots.
`cuda`    all states rest on the device, with as many slots as the budget allows.
`auto`    spends the budget on chunks, parts of them and slots in several orders, and takes the result that moves the
          fewest bytes over the link in a step.
`static`  the user chooses the fractions of bytes that rest on the host.

Masters and optimizer state of frozen chunks, which no step reads, stay on the device only if everything fits there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gemini.placement.demand import ChunkDemand, Demand, Kind, Placement, Tier
from gemini.placement.link_bytes import link_bytes
from gemini.placement.policy import PlacementPolicy, check_fits, fill_slots, keepable, slots_for, spend_rest
from gemini.placement.spending import OF_OPTIMIZER, Step, spend

_WAYS = (
    (Step.WHOLE, Step.KEPT, Step.WHOLE, Step.SLOTS, Step.GRADS),
    (Step.SLOTS, Step.GRADS, Step.WHOLE, Step.KEPT),
    (Step.GRADS, Step.WHOLE, Step.KEPT, Step.WHOLE, Step.SLOTS),
    (Step.PARAMS, Step.UPDATED, Step.KEPT, Step.UPDATED, Step.SLOTS, Step.GRADS),
    (Step.PARAMS, Step.GRADS, Step.STATE, Step.KEPT, Step.STATE, Step.SLOTS),
)
"""Orders in which `auto` tries to spend what frozen parameters leave of the budget. It takes the one with fewest bytes.

A whole chunk on the device moves nothing. On one rank another slot saves more per byte, until each chunk on the host
has one: it saves a fetch at every turn of a pass. Gradients alone pay off with several micro-batches. Parameters alone
pay off where updates do not read them (whole masters), or with many micro-batches. With all parameters and gradients on
the device no slot is needed, which matters if one chunk is larger than all others together.
"""
_THEN = (Step.GRADS, Step.PARAMS, Step.KEPT, Step.SLOTS)
"""How to spend what the best order leaves, unless it makes more bytes travel."""
_AT_LAST = (Step.WHOLE, Step.KEPT, Step.SLOTS)
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
    """The cost by which placements are compared: bytes beyond the host's budget, then bytes over the link.

    Bytes beyond the host's budget come first, because with any of them training is refused.
    """
    max_host_bytes = demand.max_host_bytes
    beyond = 0 if max_host_bytes is None else max(0, placement.host_bytes(demand) - max_host_bytes)
    return beyond, link_bytes(demand, placement)


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
            placement = spend(demand, placement, budget_bytes, (Step.PARAMS, Step.GRADS))
            placement = spend(demand, placement, self._margin(demand, placement, budget_bytes), (Step.STATE,))
            return spend(demand, placement, budget_bytes, (Step.KEPT, Step.SLOTS))
        # Frozen parameters first: no update ever takes them to the host, so each of their bytes saves fetches only.
        placement = spend(demand, placement, budget_bytes, (Step.FROZEN,))
        # No order of spending is the best for all models, see `_WAYS`, so all of them are tried and compared.
        ways = [spend(demand, placement, budget_bytes, steps) for steps in _WAYS]
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
