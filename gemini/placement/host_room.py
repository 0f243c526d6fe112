"""Whether the host has room for a plan: for what rests there, and for what passes through it in a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gemini.errors import BudgetError
from gemini.placement.demand import FLOAT32, Kind, Tier
from gemini.placement.plan import Plan


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
        FLOAT32.itemsize * facts.rest_numel
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
        raise _no_room(
            held + passing,
            there,
            f": {held} at rest, and {passing} of gradients that find no gradient slot on the device in a step{more}. "
            "Allow more with host_memory=, or more of the device with model_data_memory= or device_memory=",
        )


def check_room_at_rest(plan: Plan, resting: Mapping[int, int], held_bytes: int) -> None:
    """Raises BudgetError if gradients of which the plan has no home, and that no backward uses up, find no room.

    resting: their bytes by chunk index. held_bytes: what rests on the host by now.
    """
    if plan.budget.host is None:
        return
    spare, on_host = plan.spare_device_bytes, 0
    for index, num_bytes in resting.items():
        # As in a run, the host takes what finds no room on the device.
        if plan.placement.homes[index][Kind.GRAD] is Tier.DEVICE and (spare is None or num_bytes <= spare):
            spare = None if spare is None else spare - num_bytes
        else:
            on_host += num_bytes
    needed = held_bytes + on_host
    if on_host and needed > plan.budget.host:
        raise _no_room(
            needed,
            plan.budget.host,
            f": {held_bytes} at rest, and {on_host} of gradients of parameters in no param group, which "
            "update_in_backward=True does not use up. Allow more with host_memory=, or more of the device with "
            "model_data_memory= or device_memory=, or freeze these parameters until they join a group",
        )


def check_host_room(plan: Plan, kinds: Collection[Kind]) -> None:
    """Raises BudgetError if the plan's bytes of these states on the host do not fit into the host's budget."""
    if not has_host_room(plan, kinds):
        needed = plan.placement.host_bytes(plan.demand, kinds)
        # A host with room for so many bytes wraps the model, and may refuse its optimizer later. So the words name
        # both.
        in_all = "" if plan.infers else f", and training needs {plan.host_bytes} bytes there in all"
        held, more = ("model data", "") if set(kinds) == set(Kind) else ("parameters", in_all)
        words = f"{more}. Allow more with host_memory=, or let more rest on the device or on other ranks"
        raise _no_room(needed, plan.budget.host, words, of=held)


def _no_room(needed: int, there: int | None, words: str, of: str = "model data") -> BudgetError:
    """The error of a host on which `needed` bytes find no room. words: what follows in its sentence, and what to do."""
    return BudgetError(
        f"host: {needed} bytes of {of} do not fit into the budget of {there} bytes{words}",
        tier="host",
        needed_bytes=needed,
        budget_bytes=there,
    )
