"""One parameter's reduced gradient, whole: gathered to be read; and written, of which each rank keeps its own part.

The gradient rests in pieces, one per rank, times the loss scale. What users see and set is the gradient itself, as
`torch.nn.utils.clip_grad_norm_` and a norm in a log need it: without the loss scale, and clipped where
`optimizer.clip_grad_norm_()` was called. Gradients times a loss scale are shown in fp32, in which the unscaled values
do not underflow; the loss scale comes back when they are written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from gemini.chunks.chunk import ManagedParameter
from gemini.chunks.gradient import ChunkGradient, GradState
from gemini.errors import GeminiError, UnsupportedError
from gemini.memory.transfer import ready
from sharding import ALIGNMENT, ShardLayout, Unit, round_up

if TYPE_CHECKING:
    from gemini.model.link import Link


class GradientUser(Protocol):
    """The optimizer that a parameter's gradient is for."""

    def factors_to_come(self, managed: ManagedParameter) -> tuple[float, float]:
        """What the step will multiply stored gradients by, as far as it is known: 1 / loss scale, clip coefficient."""

    def before_gradient_write(self) -> None:
        """A gradient is about to change: what it was clipped by takes effect, and its norm is stale. Local."""


class WholeGradient:
    """The gradient that a parameter has now. It is gone with the step, and with `zero_grad()`."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._num_forgotten = link.executor.gradients.num_forgotten

    @property
    def managed(self) -> ManagedParameter:
        return self.link.managed

    def stamp(self) -> tuple[object, ...]:
        """Equal as long as `gather()` would return the same values; equal on all ranks."""
        gradients = self.link.executor.gradients
        gradient = gradients.find(self.managed.chunk)  # None: frozen meanwhile
        num_writes = 0 if gradient is None else gradient.num_writes
        return gradients.num_forgotten, gradients.num_backwards, num_writes, factors_of(self.link)

    def is_current(self) -> bool:
        """Neither used by a step nor discarded since."""
        return self._num_forgotten == self.link.executor.gradients.num_forgotten and has_gradient(self.link)

    def count_write(self) -> None:
        """Copies that were gathered before do not count any more."""
        gradient = self.link.executor.gradients.find(self.managed.chunk)
        if gradient is not None:
            gradient.num_writes += 1

    def gather(self) -> Tensor:
        """(numel,) A copy on the compute device, in the order of the payload. Collective where it is sharded."""
        managed, executor = self.managed, self.link.executor
        with executor.publishing(), torch.inference_mode(False), torch.no_grad():
            self._check()
            gradient = executor.gradients.of(managed.chunk)
            if gradient.state is not GradState.CLOSED or not gradient.is_reduced:
                raise GeminiError(f"the gradient of {managed.name!r} is not reduced yet: read it after backward()")
            whole = _on_device(_own_part(gradient, managed), self.link)
            if managed.chunk.optim_layout.world_size > 1:
                whole = _joined(whole, self.link)
            inv_scale, clip = factors_of(self.link)
            if inv_scale != 1.0:
                whole = (whole if whole.dtype is torch.float64 else whole.float()) * inv_scale
            return whole if clip == 1.0 else whole * clip

    def write(self, whole: Tensor) -> None:
        """The step uses `whole`, which is as `gather()` returns it: of it this rank's part. Collective at stage 0."""
        executor = self.link.executor
        executor.check_idle(f"a write to the gradient of {self.managed.name!r}")
        with executor.publishing(), torch.inference_mode(False), torch.no_grad():
            self._check()
            _write(self.link, whole)

    def _check(self) -> None:
        if not self.is_current():
            raise GeminiError(
                f"the gradient of {self.managed.name!r} was used by a step or discarded since this .grad was taken: "
                "keep a clone() of it"
            )


def has_gradient(link: Link) -> bool:
    """Whether any rank has one, since the last step; the same on all ranks.

    Local; collective if backwards under no_sync() have left their reduction for later.
    """
    managed, gradients = link.managed, link.executor.gradients
    if not gradients.in_backward:
        with link.executor.publishing():
            gradients.catch_up()
    elif gradients.accumulation.awaits_reduction:
        raise GeminiError(f"the gradient of {managed.name!r} is not reduced yet: read it after backward()")
    else:
        gradients.collect_all()
    gradient = gradients.find(managed.chunk)
    return gradient is not None and bool(gradient.agreed[managed.position])


def assign(link: Link, value: Tensor) -> None:
    """`parameter.grad = value`. Collective where no rank had a gradient of it. Raises before anything has changed."""
    managed, executor = link.managed, link.executor
    executor.check_idle(f"setting the gradient of {managed.name!r}")
    with executor.publishing(), torch.inference_mode(False), torch.no_grad():
        if not isinstance(value, Tensor):
            raise TypeError(f"the gradient of {managed.name!r} must be a tensor or None, found {type(value).__name__}")
        value = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        if value.shape != managed.shape or value.is_complex() != managed.dtype.is_complex:
            raise UnsupportedError(
                f"the gradient of {managed.name!r} must be {tuple(managed.shape)} {managed.dtype}, found "
                f"{tuple(value.shape)} {value.dtype}"
            )
        if not executor.gradients.num_backwards:
            link.freezing.settle_unfrozen()
        gradient = executor.gradients.find(managed.chunk)
        if gradient is None or not (managed.requires_grad and managed.parameter.requires_grad):
            raise UnsupportedError(
                f"{managed.name!r} is frozen: nothing would use its gradient. Call requires_grad_() on it first"
            )
        if not has_gradient(link):
            executor.communicator.agree(managed.name.encode(), "the parameter that is given a gradient", remedy=_ALIKE)
            executor.gradients.start_at_zero(gradient, managed)
        _write(link, managed.laid_out(value))


_ALIKE = "All ranks must set the gradients of the same parameters"


def factors_of(link: Link) -> tuple[float, float]:
    """Stored gradients times both are what users see: 1 / loss scale, and what they are to be clipped by."""
    return (1.0, 1.0) if link.optimizer is None else link.optimizer.factors_to_come(link.managed)


def scaled(gradient: Tensor, inv_scale: float) -> Tensor:
    """As it is stored. Scaled in fp32 (fp64 for fp64), so that 16-bit gradients are rounded once."""
    if inv_scale == 1.0:
        return gradient
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32)) / inv_scale


def _own_part(gradient: ChunkGradient, managed: ManagedParameter) -> Tensor:
    """A copy of the elements that this rank steps, 1-D, in the order in which they lie in memory."""
    flat = ready(gradient.reduced())
    return torch.cat([flat[:0], *managed.own_parts(flat)])


def _on_device(tensor: Tensor, link: Link) -> Tensor:
    return tensor.to(link.executor.fetcher.device.device)


def _joined(own: Tensor, link: Link) -> Tensor:
    """(numel,) The parts of all ranks, of which `own` is this one's, in the order of the payload. Collective."""
    managed, communicator = link.managed, link.executor.communicator
    ranks = communicator.world_size
    pieces = managed.chunk.layout.owner_pieces(managed.offset, managed.numel)
    taken = [0] * ranks
    for rank, piece in pieces:
        taken[rank] += piece.numel
    room = round_up(max(taken), ALIGNMENT)
    every, whole = own.new_zeros(ranks * room), own.new_empty(managed.numel)
    if room:
        shard = every[communicator.rank * room :][:room]
        shard[: own.numel()].copy_(own)
        layout = ShardLayout((Unit(0, ranks * room),), ranks)
        communicator.all_gather(every, shard, layout, managed.chunk.index)
    taken = [rank * room for rank in range(ranks)]
    for rank, piece in pieces:
        whole[piece.from_start(managed.offset).in_payload].copy_(every[taken[rank] :][: piece.numel])
        taken[rank] += piece.numel
    return whole


def _write(link: Link, flat: Tensor) -> None:
    """The shard <- its part of `flat`: (numel,), in the order of the payload."""
    managed, executor = link.managed, link.executor
    chunk = managed.chunk
    if link.optimizer is not None:
        link.optimizer.before_gradient_write()
    if chunk.layout.world_size > 1 and chunk.optim_layout.world_size == 1:
        # Ranks that write different values would otherwise step whole copies apart: each one's part counts, as at
        # the other stages.
        pieces = chunk.layout.pieces(chunk.rank, managed.offset, managed.numel)
        own = [flat[piece.from_start(managed.offset).in_payload] for piece in pieces]
        flat = _joined(_on_device(torch.cat([flat[:0], *own]), link), link)
    inv_scale, _ = factors_of(link)
    gradient = executor.gradients.of(chunk)
    for target, part in zip(managed.own_parts(ready(gradient.reduced())), managed.parts_of(flat), strict=True):
        target.copy_(scaled(part, inv_scale))
    gradient.num_writes += 1
