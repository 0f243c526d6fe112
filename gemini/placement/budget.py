"""Budgets, and refusals of what cannot fit in them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gemini.errors import BudgetError
from gemini.placement.demand import FLOAT32, Kind, ModelSpec, Tier
from gemini.settings import Settings

if TYPE_CHECKING:
    from gemini.placement.plan import Plan


# -- Budgets: the bytes that a model's chunks may take on each tier of one rank, given by the user or read live.


ACTIVATION_FRACTION = 0.3
"""Fraction of `device_memory` left to activations and workspace until a step has measured them."""

LESS_FOR_ACTIVATIONS = (0.24, 0.18, 0.12, 0.06)
"""Fractions that are left to them where there is no room to train otherwise; the first with which there is counts.

A batch may need less than any of these. If it needs more, the first forward makes room, or the first step runs out of
memory, says so, and is told what to change: a refusal before would be final, and might be wrong.
"""

MORE_ACTIVATIONS = 0.1
"""Margin added to the measured activations, because the next batch may be slightly larger."""

_SHARES_OF_ACTIVATIONS = (0.0, 0.06, 0.12, 0.18, 0.24, 0.3, 0.36)
"""Fractions of the device that activations may turn out to need; a chunk size is judged for each of them."""

RESERVE = 0.03
"""Fraction of the device that is never planned: fragmentation makes it unusable for the allocator."""


@dataclass(frozen=True)
class FreeBytes:
    """The free bytes of one rank's tiers, agreed on by all ranks.

    Args:
        device: free bytes, with those of parameters that wrapping frees. None: no bound, or settings name a budget.
        host: free bytes, likewise. None: likewise.
        activations: the peak of non-model bytes that a step has measured on the device. None: not measured yet.
        most_activations: an upper bound of them for the batch at hand, until a step has measured. None: unknown.
        fraction: of the device, which is left to activations until a step has measured them.
    """

    device: int | None = None
    host: int | None = None
    activations: int | None = None
    most_activations: int | None = None
    fraction: float = ACTIVATION_FRACTION

    @property
    def are_activations_unknown(self) -> bool:
        """Whether activations are unknown, so that `fraction` of the device is left to them."""
        return self.activations is None and self.most_activations is None


@dataclass(frozen=True)
class Budget:
    """Bytes of model data that a rank may hold. None: no bound."""

    device: int | None
    host: int | None
    disk: int | None = None

    @staticmethod
    def of(settings: Settings, free: FreeBytes) -> Budget:
        """The budgets that `settings` name; for a tier without one, what is free there."""
        # `model_data_memory` is for chunks alone. `device_memory` includes activations, which are left out of it below.
        device = settings.budget_bytes("model_data_memory")
        if device is None:
            whole = _whole(settings, free)
            device = None if whole is None else whole - _left_out(whole, free)
        host = settings.budget_bytes("host_memory")
        return Budget(device, free.host if host is None else host, settings.budget_bytes("disk_memory"))

    def wider(self, other: Budget) -> Budget:
        """The larger of the two budgets on each tier, so that data within either budget is within this one."""
        return Budget(_greater(self.device, other.device), _greater(self.host, other.host), self.disk)


def later_device_bytes(settings: Settings, free: FreeBytes) -> tuple[int, ...]:
    """Sample device budgets that may apply once a step has measured the activations, largest first, in bytes.

    Empty if the user fixed the budget, if there is no bound, or if the activations are already measured: the budget
    does not change then.
    """
    whole = _whole(settings, free)
    if settings.model_data_memory is not None or whole is None or free.activations is not None:
        return ()
    return tuple(int(whole * (1 - RESERVE - share)) for share in _SHARES_OF_ACTIVATIONS)


def _whole(settings: Settings, free: FreeBytes) -> int | None:
    """Device bytes for model data and activations: what the user allows, or less if other processes hold some of it."""
    return _smaller(settings.budget_bytes("device_memory"), free.device)


def _left_out(whole: int, free: FreeBytes) -> int:
    """The part of `whole` bytes that is withheld from model data."""
    if free.activations is not None:
        # At most all of it: other processes may by now have taken what the measured activations need.
        return min(whole, int(free.activations * (1 + MORE_ACTIVATIONS) + whole * RESERVE))
    by_default = whole - int(whole * (1 - free.fraction))
    # The bound may be twice the true peak or more. It may only take room from model data: granting room before a step
    # has measured the peak risks running out of memory in that very step.
    if free.most_activations is None or free.most_activations <= by_default:
        return by_default
    # An upper bound needs no margin for a larger batch, only the reserve.
    return min(whole, int(free.most_activations + whole * RESERVE))


def with_less_for_activations(settings: Settings, free: FreeBytes) -> Iterator[FreeBytes]:
    """`free` with each of `LESS_FOR_ACTIVATIONS`. None, where the budget of the device does not depend on it."""
    if later_device_bytes(settings, free) and free.are_activations_unknown:
        yield from (replace(free, fraction=fraction) for fraction in LESS_FOR_ACTIVATIONS)


def device_memory_for(model_data_bytes: int, fraction: float) -> int:
    """The least `device_memory` that leaves so many bytes to model data until a step has measured its activations.

    fraction: of it, which is left to them until then.
    """
    # The error message quotes this number as sufficient, so correct the rounding that `_left_out` applies.
    whole = int(model_data_bytes / (1 - fraction))
    while whole - _left_out(whole, FreeBytes(fraction=fraction)) < model_data_bytes:
        whole += 1
    return whole


def is_less(one: int | None, other: int | None) -> bool:
    """Whether budget `one` is smaller than `other`, in bytes. None is no bound, which nothing exceeds."""
    return one is not None and (other is None or one < other)


def _smaller(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)


def _greater(one: int | None, other: int | None) -> int | None:
    # None is no bound, which is more than any number.
    return None if one is None or other is None else max(one, other)


# -- Refusals of a plan: which one is raised if no chunk size fits, and what its message advises besides a budget.


def advised(error: BudgetError, spec: ModelSpec, settings: Settings, fraction: float | None) -> BudgetError:
    """The refusal, with what would help on the device besides `model_data_memory`.

    fraction: of the device, which the budget leaves to activations because they are not known. None: they are.
    """
    # All of the advice is about device memory.
    if error.tier != "device":
        return error
    enough_bytes = None
    if fraction is not None and settings.model_data_memory is None and error.needed_bytes is not None:
        enough_bytes = device_memory_for(error.needed_bytes, fraction)
    words = ". ".join([str(error), *_advice(error, spec, settings, enough_bytes, fraction)])
    return error.reworded(words, enough_bytes=enough_bytes)


def _advice(
    error: BudgetError, spec: ModelSpec, settings: Settings, enough_bytes: int | None, fraction: float | None
) -> Iterator[str]:
    if enough_bytes is not None and fraction is not None:
        yield (
            f"Model data gets {1 - fraction:.0%} of device_memory= at most until a step has shown its activations: "
            f"{enough_bytes} bytes of it are enough"
        )
    # The name of a static policy goes on with its fractions, hence the prefix.
    if settings.policy.name.startswith(("cuda", "static")):
        yield "tensor_placement_policy='auto' needs least"
    if settings.param_persistence_threshold:
        yield "Weights that param_persistence_threshold= keeps on the device are in these bytes"
    # A compiled module is one operator, whose chunks are in slots all at once. Its parts, compiled one by one, need
    # fewer slots.
    compiled = [operator for operator in spec.operators if operator.is_compiled]
    if compiled:
        largest = max(compiled, key=lambda operator: sum(spec.weights[place].numel for place in operator.weights))
        yield (
            f"{largest.name or 'The model'} is compiled, so that all of its chunks are needed at once: compile smaller "
            "modules inside it, such as its blocks, one by one"
        )


def least_of(refused: list[BudgetError], is_searched: bool) -> BudgetError:
    """The refusal of the chunk size that needs the least. Refusals by the host come before those by the device."""
    known = [(error.needed_bytes, error) for error in refused if error.needed_bytes is not None]
    live = [(error.needed_numel, error) for error in refused if error.needed_numel is not None]
    # Sizes within the budgets that exceed only `max_live_parameters`: more memory would not help.
    if live:
        return _smaller_chunks(min(live, key=lambda one: one[0])[1], len(refused), is_searched)
    # A user's policy that does not say what it needs: pass its own message on.
    if not known:
        return refused[0]
    # A refusal by the host means that this size fits the device, so more host memory is all that is missing.
    on_host = [(needed, error) for needed, error in known if error.tier == "host"]
    _, error = min(on_host or known, key=lambda one: one[0])
    return error if on_host else _smaller_chunks(error, len(refused), is_searched)


def _smaller_chunks(error: BudgetError, num_tried: int, is_searched: bool) -> BudgetError:
    """The refusal with a sentence about the chunk size."""
    tried = f". {num_tried} chunk sizes were tried: none needs less"
    advice = tried if is_searched else ", or make chunk_size= smaller"
    return error.reworded(f"{error}{advice}")


def has_host_room(plan: Plan, kinds: Collection[Kind]) -> bool:
    """Whether the plan's bytes of these states on the host fit into the host's budget. Local; raises nothing."""
    return plan.budget.host is None or plan.placement.host_bytes(plan.demand, kinds) <= plan.budget.host


def expects_unannounced(plan: Plan) -> bool:
    """Whether a step may have more backwards than the plan is for. See [Note: Unannounced backwards]. Local."""
    settings = plan.settings
    # Several micro-batches have their sums in the plan, and where backwards use gradients up a second one is refused.
    if plan.infers or plan.demand.micro_batches > 1 or settings.gradient_accumulation_steps is not None:
        return False
    if settings.frees_gradients(plan.world_size):
        return False
    return settings.host_memory is not None or settings.disk_path is not None


def refuses_unannounced(plan: Plan) -> bool:
    """Whether training is refused where the host has no room for a backward that nobody has announced. Local."""
    # What is read of free memory is no bound that a step is certain to meet.
    return plan.settings.host_memory is not None and expects_unannounced(plan)


def passing_host_bytes(plan: Plan, unannounced: bool = False) -> int:
    """The most bytes that a training step has on the host beside what rests there. Local; raises nothing.

    These are open gradients that find no gradient slot, and sums of micro-batches that find no room on the device.
    unannounced: also of a step with one more backward. A step is simulated only where all gradients at once might not
    fit: otherwise the answer is 0, and changes nothing.
    """
    # Inference has no gradients, and without a budget any number of bytes fits.
    if plan.infers or plan.budget.host is None:
        return 0
    trained = [chunk for chunk in plan.demand.chunks if Kind.GRAD in chunk.home_bytes]
    # A trained chunk may have a spilled payload there, a gradient home and an fp32 sum: at most 4 bytes per element for
    # each of the last two.
    most = sum(chunk.payload_bytes + 2 * FLOAT32.itemsize * chunk.numel for chunk in trained)
    if plan.host_bytes + most <= plan.budget.host:
        return 0
    # The peak of the prediction includes what rests there.
    peak = plan.predicted.host_peak
    if unannounced:
        peak = max(peak, plan.predicted_unannounced.host_peak)
    return peak - plan.host_bytes


def has_host_room_for_steps(plan: Plan, unannounced: bool = False) -> bool:
    """`has_host_room` of all states, and of what passes through the host in a step. Local; raises nothing.

    unannounced: see `passing_host_bytes`.
    """
    if not has_host_room(plan, tuple(Kind)):
        return False
    there = plan.budget.host
    if there is None:
        return True
    # A simulated step takes a tenth of a second for a large model, and a search asks for every chunk size. Where the
    # sums alone are too much no step is simulated.
    if unannounced and plan.host_bytes + _least_bytes_of_sums(plan) > there:
        return False
    return plan.host_bytes + passing_host_bytes(plan, unannounced) <= there


def _least_bytes_of_sums(plan: Plan) -> int:
    """What fp32 sums of a backward that nobody has announced put onto the host at least: what the device has not.

    Never more than `passing_host_bytes(plan, unannounced=True)`, which `tests/pure/test_room_for_sums.py` checks.
    """
    if plan.infers or plan.demand.holds_sums or plan.budget.device is None:
        return 0
    pairs = zip(plan.demand.chunks, plan.packing.chunks, strict=True)
    sums = sum(
        FLOAT32.itemsize * facts.optim_layout.shard_numel
        for chunk, facts in pairs
        if Kind.GRAD in chunk.home_bytes and facts.dtypes.widens
    )
    at_rest = plan.placement.bytes_by_kind(plan.demand, Tier.DEVICE)
    # Slots count as free here: they may be, at the moment that decides.
    return max(0, sums - (plan.budget.device - sum(at_rest.get(kind, 0) for kind in Kind)))


def check_host_room_for_steps(plan: Plan, held_bytes: int | None = None) -> None:
    """Raises BudgetError if a training step would find no room on the host for what passes through it.

    held_bytes: what rests there by now. None: as the plan has it.
    """
    unannounced = refuses_unannounced(plan)
    passing, there = passing_host_bytes(plan, unannounced), plan.budget.host
    held = plan.host_bytes if held_bytes is None else held_bytes
    # Without bytes that pass through, what rests there is checked by `check_host_room`.
    if there is not None and passing and held + passing > there:
        more = ""
        if unannounced and (known := passing_host_bytes(plan)) < passing:
            more = (
                f", of which a second backward in a step takes {passing - known}: gradient_accumulation_steps=1 says "
                "that there is none"
            )
        raise BudgetError(
            f"host: {held + passing} bytes of model data do not fit into the budget of {there} bytes: {held} at rest, "
            f"and {passing} of gradients that find no gradient slot on the device in a step{more}. Allow more with "
            "host_memory=, or more of the device with model_data_memory= or device_memory=",
            tier="host",
            needed_bytes=held + passing,
            budget_bytes=there,
        )


def check_room_at_rest(plan: Plan, resting: Mapping[int, int], held_bytes: int) -> None:
    """Raises BudgetError if gradients of which the plan has no home, and that no backward uses up, find no room.

    resting: their bytes by chunk index. held_bytes: what rests on the host by now.
    """
    if plan.budget.host is None:
        return
    spare, on_host = None if plan.budget.device is None else plan.budget.device - plan.device_bytes, 0
    for index, num_bytes in resting.items():
        # As in a run, the host takes what finds no room on the device.
        if plan.placement.homes[index][Kind.GRAD] is Tier.DEVICE and (spare is None or num_bytes <= spare):
            spare = None if spare is None else spare - num_bytes
        else:
            on_host += num_bytes
    needed = held_bytes + on_host
    if on_host and needed > plan.budget.host:
        raise BudgetError(
            f"host: {needed} bytes of model data do not fit into the budget of {plan.budget.host} bytes: {held_bytes} "
            f"at rest, and {on_host} of gradients of parameters in no param group, which update_in_backward=True does "
            "not use up. Allow more with host_memory=, or more of the device with model_data_memory= or "
            "device_memory=, or freeze these parameters until they join a group",
            tier="host",
            needed_bytes=needed,
            budget_bytes=plan.budget.host,
        )


def check_host_room(plan: Plan, kinds: Collection[Kind]) -> None:
    """Raises BudgetError if the plan's bytes of these states on the host do not fit into the host's budget."""
    if not has_host_room(plan, kinds):
        needed = plan.placement.host_bytes(plan.demand, kinds)
        # A host with room for so many bytes wraps the model, and may refuse its optimizer later. So the words name
        # both.
        in_all = "" if plan.infers else f", and training needs {plan.host_bytes} bytes there in all"
        held, more = ("model data", "") if set(kinds) == set(Kind) else ("parameters", in_all)
        raise BudgetError(
            f"host: {needed} bytes of {held} do not fit into the budget of "
            f"{plan.budget.host} bytes{more}. Allow more with host_memory=, or let more rest on the device or on other "
            "ranks",
            tier="host",
            needed_bytes=needed,
            budget_bytes=plan.budget.host,
        )
