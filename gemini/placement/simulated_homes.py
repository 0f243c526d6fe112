"""Reduced gradients of a simulated run: where they rest, and the bytes that cross a link when they move.

This is the arithmetic of `manager/grad_homes.py`, whose notes give the reasons.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gemini.placement.demand import Kind, Tier
from gemini.placement.dtypes import FLOAT32, Dtype
from gemini.placement.simulated_payloads import Payloads
from gemini.placement.traffic import Purpose, Traffic

if TYPE_CHECKING:
    from gemini.placement.plan import Plan


@dataclass
class Gradient:
    """The numbers of one trainable chunk's gradient on this rank: those of `ChunkGradient` in chunks/gradient.py."""

    home: Tier | None  # tier of its own home; None: it rests in the parameter home
    expected: int  # weights whose gradients complete the chunk
    state: str = "closed"  # or "at home", "in slot", "spilled", "reducing"
    fired: set[int] = field(default_factory=set)  # weights whose gradients are in the open payload
    got: set[int] = field(default_factory=set)  # weights with a gradient since the last step
    is_reduced: bool = False
    is_wide: bool = False  # the reduced gradient is in fp32 beside its home
    wide: Tier | None = None  # tier of the fp32 memory, once it was allocated
    first_backward: int = 0  # the backward of this step that was reduced first
    in_pieces: bool = False  # a gradient came more than once in a backward

    @property
    def is_open(self) -> bool:
        """There is a local gradient, and its reduction has not begun."""
        return self.state not in ("closed", "reducing")


class Homes:
    """The reduced gradients of all trainable chunks, by index."""

    def __init__(self, plan: Plan, gradients: Mapping[int, Gradient], payloads: Payloads, traffic: Traffic) -> None:
        self._facts = plan.packing.chunks
        self._tiers = plan.placement.homes
        self._gradients = gradients
        self._payloads = payloads
        self._traffic = traffic
        # Those whose plan has no memory for the gradient beside the parameters.
        self._lends_home = [
            facts.may_lend_home and not demand.home_bytes.get(Kind.GRAD)
            for facts, demand in zip(self._facts, plan.demand.chunks, strict=True)
        ]
        # Device bytes that the plan leaves of its budget. What a step allocates there beyond the plan has to fit into
        # them.
        self._free = None if plan.budget.device is None else plan.budget.device - plan.device_bytes
        self._held = {Tier.DEVICE: 0, Tier.HOST: 0}  # bytes in use that the plan has not counted
        self._peaks = dict(self._held)  # their peaks
        self.lent: set[int] = set()  # chunks whose parameter home holds the gradient
        self._gathers: dict[int, int] = {}  # gathers of chunks with kept slots at their last reduction
        self._used_after: set[int] = set()  # chunks that were gathered after their reduction in some step

    @property
    def state(self) -> Hashable:
        """The part of the state that lasts from step to step."""
        # `lent` is left out: an update restores all homes, so none is lent between steps.
        return frozenset(self._used_after), tuple(self._held.items())

    def hold(self, tier: Tier, num_bytes: int) -> None:
        """Count bytes that the plan does not have: allocated, or freed if negative."""
        self._held[tier] += num_bytes
        self._peaks[tier] = max(self._peaks[tier], self._held[tier])

    def take_peaks(self) -> dict[Tier, int]:
        """The peak of such bytes since the last call."""
        # What was allocated for good is held from the next step's start, so its peak begins there and not at 0.
        peaks, self._peaks = self._peaks, dict(self._held)
        return peaks

    def tier_of(self, chunk: int) -> Tier:
        """The tier on which the reduced gradient is."""
        gradient = self._gradients[chunk]
        if gradient.is_wide:
            assert gradient.wide is not None
            return gradient.wide
        return self._resting(chunk)

    def num_bytes(self, chunk: int) -> int:
        """Bytes of the part of the reduced gradient that this rank updates with."""
        facts = self._facts[chunk]
        itemsize = FLOAT32.itemsize if self._gradients[chunk].is_wide else facts.dtypes.rest.itemsize
        return facts.optim_layout.shard_numel * itemsize

    def merge(self, chunk: int, source: Dtype, numel: int, backward: int) -> None:
        """Set or add what backward number `backward` has reduced on the device.

        source: the dtype of those `numel` elements.
        """
        gradient = self._gradients[chunk]
        is_first = not gradient.is_reduced
        # Pieces of one backward are added in 16 bits, as autograd adds them. Another micro-batch is added in fp32.
        if not is_first and gradient.first_backward != backward:
            self._widen(chunk)
        # A wide sum has memory of its own, so the parameter home is free for the parameters again.
        if gradient.is_wide:
            self.restore(chunk)
        elif is_first:
            self._make_room(chunk)
            gradient.is_reduced, gradient.first_backward = True, backward
        # A sum on the host is added there, so only the new gradient crosses the link.
        self._traffic.copy(Tier.DEVICE, self.tier_of(chunk), numel * source.itemsize, Purpose.GRADIENT)

    def reclaim(self, chunk: int) -> None:
        """Move the gradient out of the parameter home, because the parameters are needed before the step."""
        if chunk in self.lent:
            # Asked before `_take_home`, which changes where the gradient rests.
            lent = self._resting(chunk)
            self._take_home(chunk)
            self._traffic.copy(lent, self._resting(chunk), self.num_bytes(chunk), Purpose.GRADIENT)
            self.restore(chunk)

    def restore(self, chunk: int) -> None:
        """Recreate the parameters from the master, in the home that held the gradient until now."""
        if chunk not in self.lent:
            return
        numel, tiers = self._facts[chunk].optim_layout.shard_numel, self._tiers[chunk]
        # Where the tiers differ the host rounds: the fp32 master crosses the link towards the host, and only the
        # rounded weights cross it towards the device.
        dtype = FLOAT32 if tiers[Kind.PARAM] is Tier.HOST else self._facts[chunk].dtypes.weight
        self._traffic.copy(tiers[Kind.MASTER], tiers[Kind.PARAM], numel * dtype.itemsize, Purpose.UPDATE)
        self.lent.discard(chunk)

    def before_reduction(self, chunk: int) -> None:
        """Release a kept slot whose home will be lent, unless the chunk is used after its reduction."""
        payloads = self._payloads
        # Whether a kept slot is released decides whether the next fetch is a collective. So all ranks decide here, in
        # one way, from history that they share.
        if not self._lends_home[chunk] or not payloads.is_kept(chunk):
            return
        self._note_gather(chunk)
        self._gathers[chunk] = payloads.num_gathers[chunk]
        # The parameters are in use or on their way, so a release would have them gathered once more.
        if payloads.pins[chunk] or payloads.is_coming(chunk):
            self._used_after.add(chunk)
        elif payloads.is_there(chunk) and chunk not in self.lent and chunk not in self._used_after:
            payloads.release(chunk)

    def end_step(self) -> None:
        """Begin another step: reductions from now on belong to it."""
        for chunk in self._gradients:
            if self._lends_home[chunk]:
                self._note_gather(chunk)
        self._gathers.clear()

    def _note_gather(self, chunk: int) -> None:
        num_gathers = self._payloads.num_gathers[chunk]
        # More gathers than at the last reduction: the parameters were needed between it and the step.
        if self._gathers.get(chunk, num_gathers) < num_gathers:
            self._used_after.add(chunk)

    def _resting(self, chunk: int) -> Tier:
        home = self._gradients[chunk].home
        return self._tiers[chunk][Kind.PARAM] if home is None else home

    def _widen(self, chunk: int) -> None:
        gradient, facts = self._gradients[chunk], self._facts[chunk]
        if gradient.is_wide or not facts.dtypes.widens:
            return
        # The fp32 memory is kept for later steps, so only the first one allocates it.
        if gradient.wide is None:
            gradient.wide = self._allocate(self._resting(chunk), facts.optim_layout.shard_numel * FLOAT32.itemsize)
        self._traffic.copy(self._resting(chunk), gradient.wide, self.num_bytes(chunk), Purpose.GRADIENT)
        gradient.is_wide = True

    def _make_room(self, chunk: int) -> None:
        if self._gradients[chunk].home is not None or chunk in self.lent:
            return
        if self._can_lend_now(chunk):
            self.lent.add(chunk)
        else:
            self._take_home(chunk)

    def _can_lend_now(self, chunk: int) -> bool:
        payloads = self._payloads
        # A gather on its way sends the home to the other ranks, so nothing may overwrite it.
        if not self._lends_home[chunk] or payloads.is_coming(chunk):
            return False
        if payloads.at_home[chunk]:
            return not payloads.pins[chunk]
        # A slot of the pool lies beside the home. A kept slot has the home inside, and the gradient would overwrite the
        # payload.
        return not payloads.is_there(chunk) or not payloads.is_kept(chunk)

    def _take_home(self, chunk: int) -> None:
        self._gradients[chunk].home = self._allocate(self._resting(chunk), self.num_bytes(chunk))

    def _allocate(self, tier: Tier, num_bytes: int) -> Tier:
        """Allocate bytes for good on this tier, or on the host if the device is full. Returns the tier."""
        if tier is Tier.DEVICE and self._free is not None:
            if self._free < num_bytes:
                tier = Tier.HOST
            else:
                self._free -= num_bytes
        self.hold(tier, num_bytes)
        return tier
