"""A placement policy, and the placing of states by the bytes that a link carries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol, runtime_checkable

from gemini.errors import BudgetError
from gemini.placement.demand import (
    OF_OPTIMIZER,
    ChunkDemand,
    Demand,
    Kind,
    Placement,
    Tier,
    format_bytes,
    in_units,
    optimizer_tier,
    update_tier,
)

# -- Bytes over the link between the tiers in a step, in closed form: fast enough to compare placements.
#
# `predict.py` counts the same bytes exactly, by following every fetch. Here each pass fetches all payloads whose
# parameters rest on the host, except those still in a slot at a turn: a backward begins with the last users of the pool
# in their slots, and the next micro-batch with the first ones. Every backward is assumed to read all weights.


def link_bytes(demand: Demand, placement: Placement) -> int:
    """Bytes in both directions together, on one rank. A pure function: local."""
    num_bytes = sum(
        count * at_rest_bytes(chunk, homes) for chunk, homes, count in placement.alike(demand) if Kind.GRAD in homes
    )
    return num_bytes + sum(_fetched_bytes(demand, placement))


def moved_and_updated(demand: Demand, placement: Placement) -> int:
    """`link_bytes`, and what else takes time with this device, in bytes that the link could carry meanwhile. Local."""
    costs, num_bytes = demand.costs, link_bytes(demand, placement)
    if costs.host_update:
        alike = placement.alike(demand)
        on_host = (count * chunk.updated_numel for chunk, its, count in alike if its.get(Kind.OPTIM) is Tier.HOST)
        num_bytes += costs.host_update * sum(on_host)
    if costs.waits_for_fetch:
        pools = zip(_fetched_bytes(demand, placement), placement.num_slots, demand.min_slots, strict=True)
        num_bytes += sum(fetched for fetched, count, least in pools if count <= least)
    return num_bytes


def _fetched_bytes(demand: Demand, placement: Placement) -> list[int]:
    """The bytes that fetches bring to the device in a step, by size of slots."""
    # A chunk that is gathered from device shards moves no byte over the link, but occupies a slot: count it as 0.
    fetched: tuple[list[int], list[int]] = [], []  # by size of slots: what a fetch of each user of the pool moves
    for index, (chunk, homes) in enumerate(zip(demand.chunks, placement.homes, strict=True)):
        if homes[Kind.PARAM] is Tier.HOST:
            fetched[chunk.oversize].append(chunk.home_bytes[Kind.PARAM])
        elif chunk.needs_slot and index not in placement.kept:
            fetched[chunk.oversize].append(0)
    passes, found = 2 * demand.micro_batches, []
    for users, count in zip(fetched, placement.num_slots, strict=True):
        held_for_backward = sum(users[max(0, len(users) - count) :])
        held_for_forward = sum(users[:count])
        # Every backward finds the last users of its forward in the slots. The first forward of a step finds none,
        # because the update before it has outdated all payloads.
        turns = demand.micro_batches
        found.append(passes * sum(users) - turns * held_for_backward - (turns - 1) * held_for_forward)
    return found


def at_rest_bytes(chunk: ChunkDemand, homes: dict[Kind, Tier]) -> int:
    """The bytes that gradients and the update move for a trained chunk."""
    link, param, at = chunk.link, homes[Kind.PARAM], optimizer_tier(homes)
    grad = homes[Kind.GRAD] if chunk.home_bytes[Kind.GRAD] else param  # without a home it rests in the parameters'
    if chunk.frees_gradient:
        grad = Tier.DEVICE
    num_bytes = 0
    if param is not at:
        num_bytes += link.read + link.written
    if grad is not at:
        num_bytes += link.summed
    if grad is Tier.HOST:
        num_bytes += link.reduced
    # Every rank updates its part of weights that it holds whole, and copies the parts of the others to the host.
    if param is Tier.HOST:
        num_bytes += link.made_whole
    # The update reads and writes the master, so it travels both ways.
    if homes.get(Kind.MASTER, at) is not at:
        num_bytes += 2 * chunk.home_bytes[Kind.MASTER]
    return num_bytes


# -- The interface of placement policies, and the functions that they share: the slots for given homes, the budget
# check.
#
# A policy decides on which tier every state of every chunk rests. `policies.py` has the built-in ones; a user's own is
# any object with a `name` and a `place` method. Pure functions of numbers.


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
    around_each = {key: Addition(chunk.around_bytes, chunk.oversize, chunk.needs_slot) for key, chunk in each.items()}
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


def fill_slots(demand: Demand, placement: Placement, budget_bytes: int | None, most: int | None = None) -> Placement:
    """`placement` with as many more slots as the bounds allow, for all chunks or `most` of a size. Numbers only."""
    users = _num_users(demand, placement, Kind.PARAM)
    # Oversize slots first: they are the scarcest.
    for oversize in (True, False):
        # A slot beyond the number of its users would stay empty.
        wanted = users[oversize] - placement.num_slots[oversize]
        wanted = wanted if most is None else min(wanted, most)
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
            f"device: tensor_placement_policy={policy!r} needs {needed} bytes of model data{in_units(needed)}: "
            f"{_slots_in_words(demand, placement)}; the budget is {budget_bytes} bytes{in_units(budget_bytes)}"
            f"{', as a number without a unit is bytes' * (budget_bytes < 2**10)}. "
            "Allow more with model_data_memory= or device_memory=",
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


# -- Checks of a policy's answer, so that a mistake in a user's policy raises before any state moves.
#
# The checks look at numbers only and run in the same order on all ranks. A policy whose answers differ between ranks is
# detected when ranks compare the hashes of their plans.


PLACE_ALIKE = (
    "All ranks must build the same model with the same arguments, and a policy's place(demand, budget_bytes) must "
    "follow from its arguments alone"
)
_MAX_RUNS = 20
"""At most this many runs of chunks are listed per kind, because every rank sends the text to all others."""


def place(demand: Demand, budget_bytes: int | None, policy: PlacementPolicy, *, has_disk: bool = True) -> Placement:
    """The policy's placement, checked to be one that training can use. has_disk: the settings name a folder.

    Raises TypeError or ValueError if the answer is not a placement of these chunks, and BudgetError if it exceeds the
    device budget or `max_live_parameters`.
    """
    placement = policy.place(demand, budget_bytes)
    if not isinstance(placement, Placement):
        raise TypeError(f"{_named(policy)} must return a Placement, found {type(placement).__name__}")
    # The first problem is raised and the others are not looked for: later checks rely on what the earlier ones have
    # shown.
    for problem in _problems(demand, placement, has_disk):
        raise ValueError(f"{_named(policy)} {problem}")
    # A user's policy may return a placement beyond the budget instead of raising.
    check_fits(demand, placement, budget_bytes, policy.name)
    _check_live(demand, placement, policy.name)
    return placement


def place_in_budget(
    demand: Demand, budget_bytes: int | None, policy: PlacementPolicy, has_disk: bool
) -> tuple[Demand, Placement]:
    """The policy's placement, and the demand that it meets: with exchanges at once, or in tiles if only that fits.

    Raises what `place` does.
    """
    whole = demand.at_once()
    try:
        return whole, place(whole, budget_bytes, policy, has_disk=has_disk)
    except BudgetError:
        tiled = whole.in_tiles()
        if tiled is whole:
            raise
        return tiled, place(tiled, budget_bytes, policy, has_disk=has_disk)


RING = 3
"""Chunks whose states are in staging buffers on the host at once: one is read, one updated, one written."""


def to_disk(
    demand: Demand, placement: Placement, room: int | None, most: int | None, fraction: float, spare: int = 0
) -> Placement:
    """`placement` with states on the disk for which the host has no room. Local.

    room: bytes that chunks may take on the host. most: the same of the disk. None: no bound. fraction: of the masters
    and optimizer states that would rest on the host, what leaves at least. spare: bytes that a step needs on the host
    beside what rests there. Masters and optimizer state leave first, of chunks that no step reads, then of the last
    chunks: the next forward needs the updates of the first ones first. Where that is not enough the weights of the last
    chunks follow.

    Raises BudgetError if the disk's budget is too small.
    """
    homes = list(placement.homes)

    def on(tier: Tier, index: int, kinds: Sequence[Kind]) -> int:
        its = demand.chunks[index].home_bytes
        return sum(its.get(kind, 0) for kind in kinds if homes[index].get(kind) is tier)

    sizes = [on(Tier.HOST, index, OF_OPTIMIZER) for index in range(len(homes))]
    held = placement.host_bytes(demand) + spare
    least_held = held - fraction * sum(sizes)  # where as much has left as was asked for
    is_used = placement.disk_bytes(demand) > 0  # a user's policy has put something there itself
    if not fraction and not is_used and (room is None or held <= room):
        return placement
    if room is not None:
        staged = (size + on(Tier.DISK, index, OF_OPTIMIZER) for index, size in enumerate(sizes))
        room -= RING * max(staged, default=0)
    for kinds in (OF_OPTIMIZER, (Kind.PARAM,)):
        leaving = [index for index, chunk in enumerate(demand.chunks) if kinds is OF_OPTIMIZER or chunk.may_be_on_disk]
        leaving.sort(key=lambda index: (kinds is not OF_OPTIMIZER or not demand.chunks[index].is_frozen, -index))
        for index in leaving:
            num_bytes = on(Tier.HOST, index, kinds)
            if held <= least_held and (room is None or held <= room):
                break
            if num_bytes:
                homes[index] = {
                    kind: Tier.DISK if kind in kinds and tier is Tier.HOST else tier
                    for kind, tier in homes[index].items()
                }
                held -= num_bytes
    # Equal homes stay one object: `Placement.alike` groups chunks by identity.
    shared: dict[tuple[int, tuple[Tier, ...]], dict[Kind, Tier]] = {}
    for index, its in enumerate(homes):
        homes[index] = shared.setdefault((id(demand.chunks[index]), tuple(its.values())), its)
    found = replace(placement, homes=tuple(homes))
    needed = found.disk_bytes(demand)
    if most is not None and needed > most:
        raise BudgetError(
            f"disk: {needed} bytes of states do not fit into the budget of {most} bytes. "
            "Allow more with disk_memory=, or more of the host with host_memory=",
            tier="disk",
            needed_bytes=needed,
            budget_bytes=most,
        )
    return found


def before_disk(placement: Placement) -> Placement:
    """The placement that `to_disk` was given: what is on the disk rests on the host. Local; raises nothing."""
    if not any(Tier.DISK in homes.values() for homes in placement.homes):
        return placement
    moved = {id(each): {kind: update_tier(tier) for kind, tier in each.items()} for each in placement.homes}
    return replace(placement, homes=tuple(moved[id(homes)] for homes in placement.homes))


def place_unbounded(demand: Demand, policy: PlacementPolicy) -> Placement:
    """Return the policy's placement without a bound, which shows what more memory would change.

    Raises what the policy raises, with a note where that is no BudgetError: the user may have given a budget, and be
    surprised that the policy is asked without one.
    """
    try:
        return policy.place(demand, None)
    # Callers take a refusal for an answer, so it needs no note.
    except BudgetError:
        raise
    except Exception as error:
        error.add_note(
            f"{_named(policy)} was asked with budget_bytes=None, which means that there is no bound: gemini asks so to "
            "see what more memory would change. A policy that needs a bound may raise BudgetError there"
        )
        raise


def placement_in_words(placement: Placement, budget_bytes: int | None) -> str:
    """Budget, slots and homes, one line per kind. Ranks compare this text to show how their placements differ."""
    lines = [
        f"model data budget of {budget_bytes} bytes",
        f"{placement.num_slots} slots, {placement.num_gradient_slots} gradient slots",
    ]
    for kind in Kind:
        # Chunks are many and placements regular: list runs of chunks on one tier.
        runs, end = [], 0
        # A chunk without this kind has no tier: it ends a run and begins none.
        for tier, its in groupby(homes.get(kind) for homes in placement.homes):
            start, end = end, end + len(list(its))
            if tier is not None:
                runs.append(f"chunks {start} to {end - 1} on the {tier}")
        lines.append(f"{kind}: {', '.join(runs[:_MAX_RUNS])}{' and more' if len(runs) > _MAX_RUNS else ''}")
    kept = sorted(placement.kept)
    lines.append(f"{len(kept)} chunks keep their slots, the last one is {max(kept, default='none')}")
    return "\n".join(lines)


def _named(policy: PlacementPolicy) -> str:
    return f"tensor_placement_policy={policy.name!r}: place(demand, budget_bytes)"


def _problems(demand: Demand, placement: Placement, has_disk: bool) -> Iterator[str]:
    """Everything that is wrong with the placement, as ends of sentences whose subject is the policy."""
    homes, num_chunks = placement.homes, len(demand.chunks)
    if len(homes) != num_chunks:
        yield f"gave homes of {len(homes)} chunks, and the model has {num_chunks}: one for each of demand.chunks"
        return  # the checks below pair homes with chunks
    for index, (chunk, chunk_homes) in enumerate(zip(demand.chunks, homes, strict=True)):
        yield from _problems_of(index, chunk, chunk_homes, has_disk)
    for index in sorted(placement.kept):
        # A negative index would name a chunk from the end.
        if not 0 <= index < num_chunks:
            yield f"keeps a slot for chunk {index}, and there are {num_chunks}"
        elif not demand.chunks[index].may_keep_slot:
            yield f"keeps a slot for chunk {index}, whose may_keep_slot is False"
        elif homes[index][Kind.PARAM] is not Tier.DEVICE:
            yield f"keeps a slot for chunk {index}, whose parameters are not at home on the device"
    # `place` raises at the first problem, so homes and kept slots are valid from here on.
    least = slots_for(demand, homes, placement.kept)
    for name, counts, wanted in (
        ("num_slots", placement.num_slots, least.num_slots),
        ("num_gradient_slots", placement.num_gradient_slots, least.num_gradient_slots),
    ):
        if len(counts) != 2 or any(has < needs for has, needs in zip(counts, wanted, strict=True)):
            yield f"gave {name}={counts}, and training needs {wanted}: slots_for() has the fewest that work"


def _problems_of(index: int, chunk: ChunkDemand, homes: dict[Kind, Tier], has_disk: bool) -> Iterator[str]:
    if homes.keys() != chunk.home_bytes.keys():
        found, wanted = (", ".join(sorted(map(str, keys))) or "nothing" for keys in (homes, chunk.home_bytes))
        yield f"gave chunk {index} homes for {found}, and it has {wanted}"
        return
    # The text "device" equals `Tier.DEVICE`, but plans compare tiers by identity: it would count as neither tier.
    other = next((tier for tier in homes.values() if not isinstance(tier, Tier)), None)
    if other is not None:
        yield f"gave chunk {index} the home {other!r}, which is no Tier: choose one of {', '.join(map(str, Tier))}"
    elif chunk.persists and homes[Kind.PARAM] is not Tier.DEVICE:
        yield (
            f"puts the parameters of chunk {index} onto the {homes[Kind.PARAM]}, and they persist on the device: see "
            "param_persistence_threshold="
        )
    on_disk = [kind for kind, tier in homes.items() if tier is Tier.DISK]
    if Kind.GRAD in on_disk:
        yield f"puts the gradient of chunk {index} onto the disk, where no gradient rests: choose device or host"
    elif Kind.PARAM in on_disk and not chunk.may_be_on_disk:
        words = "and its may_be_on_disk is False: choose device or host"
        yield f"puts the parameters of chunk {index} onto the disk, {words}"
    elif on_disk and not has_disk:
        words = "and the model has none: name its folder with disk_path="
        yield f"puts the {on_disk[0]} of chunk {index} onto the disk, {words}"


def _check_live(demand: Demand, placement: Placement, policy: str) -> None:
    most, needed = demand.max_live_numel, placement.live_numel(demand)
    if most is not None and needed > most:
        # No `needed_bytes`: more memory would not help, only a larger bound or smaller chunks.
        raise BudgetError(
            f"max_live_parameters={most} is less than the {needed} elements, paddings included, that the fewest slots "
            f"of tensor_placement_policy={policy!r} hold: allow {needed}",
            needed_numel=needed,
        )
