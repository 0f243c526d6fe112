"""The built-in placement policies: from a model's demand and a budget to every state's home. Pure functions of numbers.

`cpu`     all states rest on the host; the device holds only slots.
`cuda`    all states rest on the device, as many slots as the budget allows.
`auto`    of some orders in which chunks, parts of them and slots may take the budget, the one that moves fewest bytes
          over the link in a step.
`static`  fractions of the bytes, which the user chooses.

Masters and optimizer state of frozen chunks, which no step reads, stay on the device only where everything fits there.
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
"""Orders in which `auto` may spend what frozen parameters leave of a budget; it takes the one that moves least.

A whole chunk on the device moves nothing. On one rank a slot more is worth more for its bytes, until each chunk on the
host has one: it saves a fetch for every turn of a pass. Gradients alone are worth their bytes where micro-batches are
added up, parameters alone where updates do not read them (whole masters) or micro-batches are many. With all parameters
and gradients on the device no slot is needed, which counts where one chunk is larger than all others together.
"""
_THEN = (Step.GRADS, Step.PARAMS, Step.KEPT, Step.SLOTS)
"""Of what is left after the best one: moved in unless it makes more bytes travel."""
_AT_LAST = (Step.WHOLE, Step.KEPT, Step.SLOTS)
"""Likewise, after what has moved in then: the last to need slots may have freed more than they take."""


def _all_on(demand: Demand, tier: Tier) -> tuple[dict[Kind, Tier], ...]:
    """All homes there, but for parameters that persist on the device."""
    each = {id(chunk): chunk for chunk in demand.chunks}
    homes = {  # which nobody writes to, so that thousands of equal chunks share a few
        key: {kind: Tier.DEVICE if chunk.persists and kind is Kind.PARAM else tier for kind in chunk.home_bytes}
        for key, chunk in each.items()
    }
    return tuple(homes[id(chunk)] for chunk in demand.chunks)


def _frozen_state_on_host(demand: Demand, homes: tuple[dict[Kind, Tier], ...]) -> tuple[dict[Kind, Tier], ...]:
    """`homes`, but for masters and optimizer state of frozen chunks: they rest on the host."""
    on_host = dict.fromkeys((Kind.MASTER, Kind.OPTIM), Tier.HOST)
    return tuple(
        {kind: on_host.get(kind, tier) if chunk.is_frozen else tier for kind, tier in home.items()}
        for chunk, home in zip(demand.chunks, homes, strict=True)
    )


class CpuPolicy:
    """Everything rests on the host."""

    name = "cpu"

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        """Raises BudgetError where that does not fit."""
        placement = slots_for(demand, _all_on(demand, Tier.HOST))
        check_fits(demand, placement, budget_bytes, self.name)
        return spend_rest(demand, placement, budget_bytes)


class CudaPolicy:
    """Everything rests on the device; where that is full, the state of frozen chunks rests on the host."""

    name = "cuda"

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        """Raises BudgetError where that does not fit."""
        placement = slots_for(demand, _all_on(demand, Tier.DEVICE))
        if budget_bytes is not None and placement.device_bytes(demand) > budget_bytes:
            placement = slots_for(demand, _frozen_state_on_host(demand, placement.homes))
        check_fits(demand, placement, budget_bytes, self.name)
        return spend_rest(demand, placement, budget_bytes)


FRACTIONS = ("shard_param_frac", "offload_optim_frac", "offload_param_frac")
"""Arguments of `StaticPolicy`."""
MARGIN = "gpu_margin_mem_ratio"
"""An argument of `AutoPolicy`."""


def check_fraction(name: str, value: object) -> float:
    """`value` as a float. Raises TypeError or ValueError unless it is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number from 0 to 1, found {value!r}")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, found {value}")
    return float(value)


def _cost(demand: Demand, placement: Placement) -> tuple[int, int]:
    """Bytes that the host has no room for, which would have training refused, and then bytes over the link."""
    most = demand.max_host_bytes
    beyond = 0 if most is None else max(0, placement.host_bytes(demand) - most)
    return beyond, link_bytes(demand, placement)


@dataclass(frozen=True)
class AutoPolicy:
    """Moves states onto the device while the budget lasts, so that the fewest bytes cross the link in a step.

    A placement that the host has room for comes before one that it has not.

    Args:
        gpu_margin_mem_ratio: of what parameters, gradients and the least slots leave of the budget: the fraction that
            masters and optimizer state may take, as Colossal-AI's; parameters come first then, gradients second.
            Without a budget any ratio above 0 is all. None: no such bound.
    """

    gpu_margin_mem_ratio: float | None = None

    @property
    def name(self) -> str:
        """With the ratio, so that plans of ranks that chose others differ."""
        ratio = self.gpu_margin_mem_ratio
        return "auto" if ratio is None else f"auto({MARGIN}={ratio})"

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        """Raises BudgetError where the least slots do not fit."""
        everything = CudaPolicy().place(demand, None)
        is_bounded = self.gpu_margin_mem_ratio is not None
        if not is_bounded and (budget_bytes is None or everything.device_bytes(demand) <= budget_bytes):
            return everything
        placement = slots_for(demand, _all_on(demand, Tier.HOST))
        least = min(placement, everything, key=lambda each: each.device_bytes(demand))  # a tiny model needs no slots
        check_fits(demand, least, budget_bytes, self.name)
        if is_bounded:
            placement = spend(demand, placement, budget_bytes, (Step.PARAMS, Step.GRADS))
            placement = spend(demand, placement, self._margin(demand, placement, budget_bytes), (Step.STATE,))
            return spend(demand, placement, budget_bytes, (Step.KEPT, Step.SLOTS))
        placement = spend(demand, placement, budget_bytes, (Step.FROZEN,))
        ways = [spend(demand, placement, budget_bytes, steps) for steps in _WAYS]
        costs = [_cost(demand, each) for each in ways]
        cost = min(costs)
        best = ways[costs.index(cost)]  # of equal ones the first
        for steps in (_THEN, _AT_LAST):
            fuller = spend(demand, best, budget_bytes, steps)
            if (its := _cost(demand, fuller)) <= cost:
                best, cost = fuller, its
        return best

    def _margin(self, demand: Demand, placement: Placement, budget_bytes: int | None) -> int | None:
        """What the device may hold once masters and optimizer state have joined `placement`. None: no bound."""
        ratio = self.gpu_margin_mem_ratio
        if ratio is None:
            return budget_bytes
        taken = placement.device_bytes(demand)
        if budget_bytes is None:
            return None if ratio else taken
        return taken + int(ratio * (budget_bytes - taken))


@dataclass(frozen=True)
class StaticPolicy:
    """Fractions of the bytes rest where the user says, as Colossal-AI's `placement_policy="static"`.

    What leaves, or is sharded between uses, are whole chunks, from the last one in order of first use on: the fewest
    that make up the fraction. Slots are as many as the budget leaves room for, and as few as work without a budget. A
    pure function of numbers: local.

    Args:
        shard_param_frac: of the parameters, given up between uses on several ranks at stage 3. The rest is kept whole
            on every device: 1.0 is ZeRO-3, 0.0 keeps all, as ZeRO-2.
        offload_optim_frac: of the optimizer state, with masters and gradients, on the host, where the update runs then.
        offload_param_frac: of the parameters, on the host. What is kept whole is not offloaded.

    Raises TypeError or ValueError for what is not a number from 0 to 1.

    Example:
        >>> StaticPolicy(offload_optim_frac=0.5).name
        'static(shard_param_frac=1.0, offload_optim_frac=0.5, offload_param_frac=0.0)'
    """

    shard_param_frac: float = 1.0
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0

    def __post_init__(self) -> None:
        for name in FRACTIONS:
            object.__setattr__(self, name, check_fraction(name, getattr(self, name)))

    @property
    def name(self) -> str:
        """With the fractions, so that plans of ranks that chose others differ."""
        return f"static({', '.join(f'{name}={getattr(self, name)}' for name in FRACTIONS)})"

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        """Raises BudgetError where the fractions do not fit into the budget."""
        whole = [chunk.payload_bytes if chunk.may_keep_slot else 0 for chunk in demand.chunks]
        given_up = _last_of(whole, self.shard_param_frac)
        kept_whole = [chunk.persists or bool(whole[i] and i not in given_up) for i, chunk in _counted(demand)]
        params = [0 if kept_whole[i] else _bytes(chunk, Kind.PARAM) for i, chunk in _counted(demand)]
        states = [sum(_bytes(chunk, kind) for kind in OF_OPTIMIZER) for chunk in demand.chunks]
        on_host = {Kind.PARAM: _last_of(params, self.offload_param_frac)}
        on_host |= dict.fromkeys((Kind.GRAD, *OF_OPTIMIZER), _last_of(states, self.offload_optim_frac))
        homes = tuple(
            {kind: Tier.HOST if i in on_host[kind] else Tier.DEVICE for kind in chunk.home_bytes}
            for i, chunk in _counted(demand)
        )
        placement = slots_for(demand, homes)
        kept = [index for index in keepable(demand, placement) if index not in given_up]
        placement = slots_for(demand, homes, kept)
        check_fits(demand, placement, budget_bytes, self.name)
        return placement if budget_bytes is None else fill_slots(demand, placement, budget_bytes)


def _counted(demand: Demand) -> list[tuple[int, ChunkDemand]]:
    return list(enumerate(demand.chunks))


def _bytes(chunk: ChunkDemand, kind: Kind) -> int:
    return chunk.home_bytes.get(kind, 0)


def _last_of(num_bytes: Sequence[int], fraction: float) -> frozenset[int]:
    """The fewest indices from the end on whose bytes are at least this fraction of all."""
    wanted, chosen = fraction * sum(num_bytes), set[int]()
    for index in reversed(range(len(num_bytes))):
        if wanted <= 0:
            break
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
    if isinstance(policy, type) or not isinstance(policy, PlacementPolicy):
        raise TypeError(
            f"tensor_placement_policy must be a name ({', '.join(sorted(_POLICIES))}) or an object with a name and a "
            f"place(demand, budget_bytes) method, found {policy!r}"
        )
    return policy
