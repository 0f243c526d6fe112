"""The interface of placement policies, and the functions that they share: the slots for given homes, the budget check.

A policy decides on which tier every state of every chunk rests. `policies.py` has the built-in ones; a user's own is
any object with a `name` and a `place` method. Pure functions of numbers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from gemini.errors import BudgetError
from gemini.placement.demand import Demand, Kind, Placement, Tier
from gemini.placement.sizes import format_bytes


@runtime_checkable
class PlacementPolicy(Protocol):
    """What decides on which tier every state of every chunk rests. Any object with a `name` and this `place` is one.

    Example:
        >>> class OnHost:
        ...     name = "on host"
        ...     def place(self, demand, budget_bytes):
        ...         homes = [dict.fromkeys(chunk.home_bytes, Tier.HOST) for chunk in demand.chunks]
        ...         return slots_for(demand, tuple(homes))
        >>> model = ShardedModel(torch.nn.Linear(8, 8), device="emulated", tensor_placement_policy=OnHost())
    """

    @property
    def name(self) -> str:
        """A word for error messages, reports and the comparison of plans between ranks."""
        ...

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        """The homes of all states and the number of slots: a pure function, called at each change of the plan. Local.

        Args:
            demand: what the model needs, in bytes on this rank. The answer must be the same on all ranks.
            budget_bytes: model data that the device may hold. None: no bound, which is asked for also where the user
                gave one, to see what more would change.

        Raises BudgetError if the policy cannot keep to the budget; `check_fits` does that.
        """
        ...


def slots_for(demand: Demand, homes: tuple[dict[Kind, Tier], ...], kept: Iterable[int] = ()) -> Placement:
    """The placement with these `homes` and the fewest slots with which training works. Numbers only, so local.

    Args:
        demand: as given to `PlacementPolicy.place`.
        homes: for each chunk the tier of each kind that its `home_bytes` has.
        kept: indices of chunks with a slot of their own for good. Their `may_keep_slot` must be true.

    Raises nothing.

    Example:
        >>> demand = model.plan.demand
        >>> placement = slots_for(demand, tuple(dict.fromkeys(chunk.home_bytes, Tier.HOST) for chunk in demand.chunks))
        >>> {tier for homes in placement.homes for tier in homes.values()} == {Tier.HOST}
        True
    """
    # Homes and kept slots alone decide which chunks use the pools, so a placement without any slot is enough to count
    # them.
    without, least = Placement(homes, (0, 0), (0, 0), frozenset(kept)), []
    for kind, minimum in ((Kind.PARAM, demand.min_slots), (Kind.GRAD, demand.min_gradient_slots)):
        users = _num_users(demand, without, kind)
        # `demand` counts the fewest slots as if all chunks used the pools. Where fewer chunks do, some of these slots
        # would never be filled.
        least.append((min(minimum[0], users[0]), min(minimum[1], users[1])))
    return replace(without, num_slots=least[0], num_gradient_slots=least[1])


def _num_users(demand: Demand, placement: Placement, kind: Kind) -> tuple[int, int]:
    """The number of chunks that take slots of the regular and of the oversize pool."""
    users = [0, 0]
    for chunk, home, count in placement.alike(demand):
        # A home on the host is never a payload, because kernels run on the device: its chunk takes a slot even where
        # this rank holds it whole.
        if kind in chunk.home_bytes and (chunk.needs_slot_of(kind) or home[kind] is not Tier.DEVICE):
            users[chunk.oversize] += count
    if kind is Kind.PARAM:
        # A chunk with a slot of its own takes none of the pool. Its parameters rest on the device, so it was counted
        # above only if it needs a slot there.
        for index in placement.kept:
            users[demand.chunks[index].oversize] -= demand.chunks[index].needs_slot
    return users[0], users[1]


def spend_rest(demand: Demand, placement: Placement, budget_bytes: int | None) -> Placement:
    """`placement` with the slots that the rest of `budget_bytes` pays for: first kept slots, then slots for all chunks.

    More slots save fetches; there are never more than chunks that use them. A kept slot has its chunk's parameter home
    inside, which is cheaper than a home and a slot and saves as many fetches: first come chunks that are used first,
    which are longest away between forward and backward. It makes no home whole: after an update it is gathered when it
    is used. `demand` is as given to `PlacementPolicy.place`. Numbers only, so local; raises nothing.

    Example:
        >>> demand = model.plan.demand
        >>> homes = tuple(dict.fromkeys(chunk.home_bytes, Tier.HOST) for chunk in demand.chunks)
        >>> placement = spend_rest(demand, slots_for(demand, homes), budget_bytes=10**9)
    """
    return fill_slots(demand, keep_slots(demand, placement, budget_bytes), budget_bytes)


def keep_slots(demand: Demand, placement: Placement, budget_bytes: int | None) -> Placement:
    """`placement` with as many kept slots as fit: the first part of `spend_rest`."""
    wanted = [index for index in keepable(demand, placement) if index not in placement.kept]
    # The budget may keep some chunks out, so that slots of the pool stay which would have gone with their last users.
    # In models of several dtypes more elements may be live then, so the chunks that fit are tried again by themselves.
    while wanted := _live_prefix(demand, placement, wanted):
        fitting = _that_may_keep_slots(demand, placement, wanted, budget_bytes)
        if not fitting:
            break
        # `slots_for` computes the fewest slots again, because chunks that keep a slot do not use the pool. `more_slots`
        # saves the slots that were bought before.
        after = more_slots(demand, placement, slots_for(demand, placement.homes, placement.kept.union(fitting)))
        if demand.max_live_numel is None or after.live_numel(demand) <= demand.max_live_numel:
            return after
        wanted = fitting
    return placement


def _that_may_keep_slots(
    demand: Demand, placement: Placement, indices: Sequence[int], budget_bytes: int | None
) -> list[int]:
    """Those of these chunks whose slots fit the budget. None of them keeps a slot so far."""
    # Equal chunks get one `Addition`: `that_fit` tells by its identity that an equal one was refused already.
    each = {id(chunk): chunk for chunk in (demand.chunks[index] for index in indices)}
    # A kept slot contains the parameter home, which is counted already, so that only the rest of the payload is new.
    around_each = {
        key: Addition(chunk.payload_bytes - chunk.home_bytes[Kind.PARAM], chunk.oversize, chunk.needs_slot)
        for key, chunk in each.items()
    }
    around = [around_each[id(demand.chunks[index])] for index in indices]
    return [indices[number] for number in that_fit(demand, placement, around, budget_bytes)]


def more_slots(demand: Demand, before: Placement, after: Placement) -> Placement:
    """`after` with the slots that `before` had, as far as there are users. `after` has the fewest slots for its homes.

    Slots that an earlier purchase paid for must not be lost when a later one recomputes the fewest.
    """
    if all(had <= has for had, has in zip(before.num_slots, after.num_slots, strict=True)):
        return after
    users = _num_users(demand, after, Kind.PARAM)
    regular, oversize = (
        max(has, min(had, using)) for had, has, using in zip(before.num_slots, after.num_slots, users, strict=True)
    )
    return replace(after, num_slots=(regular, oversize))


def _live_prefix(demand: Demand, placement: Placement, indices: list[int]) -> list[int]:
    """The longest prefix of chunks that may keep their slots within `max_live_parameters`.

    What the fewest slots of the pool hold for the remaining chunks counts too, so a longer prefix may fit where a
    shorter one does not.
    """
    if demand.max_live_numel is None:
        return indices
    # Slots that are there already stay as long as they have users, see `more_slots`.
    counts = [max(least, has) for least, has in zip(demand.min_slots, placement.num_slots, strict=True)]
    users, kept = list(_num_users(demand, placement, Kind.PARAM)), sum(demand.chunks[i].numel for i in placement.kept)
    most = 0
    for number, index in enumerate(indices, 1):
        chunk = demand.chunks[index]
        users[chunk.oversize] -= chunk.needs_slot
        kept += chunk.numel
        pairs = zip(users, counts, demand.slot_numel, strict=True)
        if kept + sum(min(its, count) * numel for its, count, numel in pairs) <= demand.max_live_numel:
            most = number
    return indices[:most]


def keepable(demand: Demand, placement: Placement) -> list[int]:
    """Indices of the chunks that may keep a slot, in order of first use."""
    return [
        index
        for index, chunk in enumerate(demand.chunks)
        if chunk.may_keep_slot and placement.homes[index][Kind.PARAM] is Tier.DEVICE
    ]


def fill_slots(demand: Demand, placement: Placement, budget_bytes: int | None) -> Placement:
    """`placement` with as many more slots for all chunks as the bounds allow. Numbers only, so local."""
    users = _num_users(demand, placement, Kind.PARAM)
    # Oversize slots first: they are the scarcest.
    for oversize in (True, False):
        # A slot beyond the number of its users would stay empty.
        wanted = users[oversize] - placement.num_slots[oversize]
        # A size that no chunk has gets slots of 0 bytes, by which nothing can be divided.
        if budget_bytes is not None and demand.slot_bytes[oversize]:
            # Computed for each size again: the oversize slots of the first turn have taken a part of the budget.
            spare = budget_bytes - placement.device_bytes(demand)
            wanted = min(wanted, max(0, spare) // demand.slot_bytes[oversize])
        if demand.max_live_numel is not None and demand.slot_numel[oversize]:
            live = demand.max_live_numel - placement.live_numel(demand)
            wanted = min(wanted, max(0, live) // demand.slot_numel[oversize])
        counts = list(placement.num_slots)
        counts[oversize] += max(0, wanted)
        placement = replace(placement, num_slots=(counts[0], counts[1]))
    return placement


@dataclass(frozen=True)
class Addition:
    """The effect of one more chunk on the device, in the search for chunks that fit."""

    num_bytes: int
    oversize: bool = False
    frees_slot: bool = False  # its parameters no longer use slots of the pool
    frees_gradient_slot: bool = False  # likewise for its gradient


def that_fit(demand: Demand, start: Placement, additions: Sequence[Addition], budget_bytes: int | None) -> list[int]:
    """The indices of the `additions` that fit after `start`. What `start` has beyond the fewest slots stays.

    First the longest prefix that fits, then each later addition for which there is still room, so that one large chunk
    such as an embedding keeps no smaller one out. The prefix is tried to its end: more additions may fit where fewer do
    not, because a slot disappears with its last user. Linear, since models have many thousand chunks. Equal chunks
    share one `Addition`.
    """
    if not additions or budget_bytes is None:
        return list(range(len(additions)))
    params = list(_num_users(demand, start, Kind.PARAM))
    grads = list(_num_users(demand, start, Kind.GRAD))
    sizes, gradient_sizes = demand.slot_bytes, demand.gradient_slot_bytes
    most_needed, most_gradients = demand.min_slots, demand.min_gradient_slots

    def slots() -> int:
        """Bytes of the fewest slots for the remaining users."""
        return (
            min(most_needed[0], params[0]) * sizes[0]
            + min(most_needed[1], params[1]) * sizes[1]
            + min(most_gradients[0], grads[0]) * gradient_sizes[0]
            + min(most_gradients[1], grads[1]) * gradient_sizes[1]
        )

    # The longest prefix, with the state that it leaves.
    held = slots()
    # `rest` is all that `start` has except for the fewest slots: homes, scratch, kept slots, and slots beyond the
    # fewest. Only the fewest may become less when their last users leave the pool.
    most, rest = 0, start.device_bytes(demand) - held
    # The bytes and users at the end of the longest prefix so far, from which the second loop goes on.
    then = rest, *params, *grads
    for count, addition in enumerate(additions, 1):
        rest += addition.num_bytes
        if addition.frees_slot or addition.frees_gradient_slot:
            size = addition.oversize
            params[size] -= addition.frees_slot
            grads[size] -= addition.frees_gradient_slot
            if params[size] < most_needed[size] or grads[size] < most_gradients[size]:  # else as many slots as before
                held = slots()
        if rest + held <= budget_bytes:
            most, then = count, (rest, *params, *grads)
    # Single additions behind the prefix.
    fitting = list(range(most))
    rest, params[0], params[1], grads[0], grads[1] = then
    refused: set[int] = set()  # ids of additions that did not fit, until the state changes: no need to try an equal one
    for number in range(most, len(additions)):
        addition = additions[number]
        if id(addition) in refused:
            continue
        params[addition.oversize] -= addition.frees_slot
        grads[addition.oversize] -= addition.frees_gradient_slot
        if rest + addition.num_bytes + slots() <= budget_bytes:
            fitting.append(number)
            rest += addition.num_bytes
            # A chunk that joined may have freed a slot, so that an addition which was refused may fit.
            refused.clear()
        else:
            refused.add(id(addition))
            params[addition.oversize] += addition.frees_slot
            grads[addition.oversize] += addition.frees_gradient_slot
    return fitting


def check_fits(demand: Demand, placement: Placement, budget_bytes: int | None, policy: str) -> None:
    """Check that `placement` keeps to `budget_bytes` on the device. Numbers only, so local.

    `demand` is as given to `PlacementPolicy.place`; `policy` is the name that the message blames. Raises BudgetError
    with the bytes that are needed, the bytes that there are, and the argument to change.

    Example:
        >>> check_fits(model.plan.demand, model.plan.placement, 10**9, policy="mine")
        >>> check_fits(model.plan.demand, model.plan.placement, None, policy="mine")  # no bound: always
    """
    needed = placement.device_bytes(demand)
    if budget_bytes is not None and needed > budget_bytes:
        raise BudgetError(
            f"device: tensor_placement_policy={policy!r} needs {needed} bytes of model data ({format_bytes(needed)}): "
            f"{_slots_in_words(demand, placement)}; the budget is {budget_bytes} bytes ({format_bytes(budget_bytes)}). "
            f"Allow more with model_data_memory= or device_memory=",
            tier="device",
            needed_bytes=needed,
            budget_bytes=budget_bytes,
        )


def _slots_in_words(demand: Demand, placement: Placement) -> str:
    words = []
    for name, counts, sizes in (
        ("slots", placement.num_slots, demand.slot_bytes),
        ("gradient slots", placement.num_gradient_slots, demand.gradient_slot_bytes),
    ):
        words += [f"{n} {name} of {format_bytes(b)}" for n, b in zip(counts, sizes, strict=True) if n]
    if demand.scratch_bytes:
        words.append(f"{format_bytes(demand.scratch_bytes)} of receive buffers")
    return ", ".join(words)
