"""One parameter's gradient: reduced and whole, or, inside the user's hooks, the one that autograd has just made.

The reduced gradient is gathered to be read; each rank keeps its own part of what is written to it. It rests in pieces,
one per rank, times the loss scale. Users see and set the gradient itself, as `torch.nn.utils.clip_grad_norm_` and a
norm in a log need it: without the loss scale, and clipped where `optimizer.clip_grad_norm_()` was called. Gradients
times a loss scale are shown in fp32, where the unscaled values do not underflow; a write multiplies by the loss scale
again.

Inside a user's post-accumulate hook the gradient is this rank's own, as in plain PyTorch. The model's own hook takes
whatever a hook leaves of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gemini.chunks.chunk import ManagedParameter
from gemini.chunks.grad_state import GradState
from gemini.chunks.own_grad import grad_of, set_grad_of
from gemini.errors import GeminiError, UnsupportedError

if TYPE_CHECKING:
    from gemini.access.link import Link


class WholeGradient:
    """The gradient that a parameter has now. It is stale after the step and after `zero_grad()`."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.managed: ManagedParameter = link.managed
        self._grads = link.step.grads
        # Users may keep this object beyond a step or zero_grad(): the count then shows that it is stale.
        self._num_forgotten = self._grads.num_forgotten

    def stamp(self) -> tuple[object, ...]:
        """A value that is equal as long as `gather()` would return the same values; equal on all ranks."""
        grads, gradient = self._grads, self._grads.find(self.managed.chunk)  # None: frozen meanwhile
        num_writes = 0 if gradient is None else gradient.num_writes
        # In this order: a step or zero_grad(), another micro-batch, a write of the user's, another loss scale or clip.
        return grads.num_forgotten, grads.num_backwards, num_writes, self.link.states.factors_of(self.managed)

    def is_current(self) -> bool:
        """The gradient was neither used by a step nor discarded."""
        return self._num_forgotten == self._grads.num_forgotten and has_gradient(self.link)

    def count_write(self) -> None:
        """Make copies that were gathered before stale."""
        gradient = self._grads.find(self.managed.chunk)
        if gradient is not None:
            gradient.count_write()

    def gather(self) -> Tensor:
        """(numel,) A copy on the compute device, in the order of the payload. Collective where it is sharded.

        Raises GeminiError where it is not reduced yet, or was used by a step or discarded.
        """
        managed, link = self.managed, self.link
        # Views may keep the copy beyond a torch.inference_mode(), outside of which a copy made in it is read-only.
        with link.step.publishing(), torch.inference_mode(False), torch.no_grad():
            self._check()
            reduced = link.states.gradients(managed.chunk)
            # Inside a backward the chunk's gradient may still be open, or on its way to the other ranks.
            if reduced is None or self._grads.of(managed.chunk).state is not GradState.CLOSED:
                raise _not_reduced(managed)
            return reduced.whole(managed)

    def dtype(self) -> torch.dtype:
        """That of what `gather()` returns: 16-bit gradients of several micro-batches add up in fp32. Local."""
        reduced = self.link.states.gradients(self.managed.chunk)
        return self.managed.dtype if reduced is None else reduced.dtype_of(self.managed)

    def write(self, whole: Tensor) -> None:
        """Set the gradient to `whole`, laid out as by `gather()`; each rank keeps its part. Collective at stage 0."""
        step = self.link.step
        step.check_idle(f"a write to the gradient of {self.managed.name!r}")
        with step.publishing(), torch.inference_mode(False), torch.no_grad():
            self._check()
            _write(self.link, whole)

    def _check(self) -> None:
        if not self.is_current():
            raise GeminiError(
                f"the gradient of {self.managed.name!r} was used by a step or discarded since this .grad was taken: "
                "keep a clone() of it"
            )


def has_gradient(link: Link) -> bool:
    """Whether any rank has had a gradient since the last step; equal on all ranks.

    Local; collective if backwards under no_sync() have left their reduction for later. Raises GeminiError inside
    a backward whose gradients await their reduction.
    """
    managed, gradients = link.managed, link.step.grads
    # The backward may have ended with an exception, which the script has caught.
    if gradients.in_backward:
        link.step.failures.find()
    if not gradients.in_backward:
        with link.step.publishing():
            gradients.catch_up()
    elif gradients.accumulation.awaits_reduction:
        raise _not_reduced(managed)
    else:
        # Inside a backward: gradients that wait in `.grad` set their flags first.
        gradients.collect_all()
    gradient = gradients.find(managed.chunk)
    return gradient is not None and bool(gradient.agreed[managed.position])


def assign(link: Link, value: Tensor) -> None:
    """Carry out `parameter.grad = value`. Collective if no rank had a gradient of it. Raises before any change."""
    managed, step = link.managed, link.step
    step.check_idle(f"setting the gradient of {managed.name!r}")
    with step.publishing(), torch.inference_mode(False), torch.no_grad():
        # Checked inside `publishing`, because other ranks may wait for this one in the agreement below.
        if not isinstance(value, Tensor):
            raise TypeError(f"the gradient of {managed.name!r} must be a tensor or None, found {type(value).__name__}")
        value = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        if value.shape != managed.shape or value.is_complex() != managed.dtype.is_complex:
            raise UnsupportedError(
                f"the gradient of {managed.name!r} must be {tuple(managed.shape)} {managed.dtype}, found "
                f"{tuple(value.shape)} {value.dtype}"
            )
        # No backward ran since the step: the gradient needs memory, which a plan for inference does not have.
        if not step.grads.num_backwards:
            # A model that has only inferred gets its plan for training first. Flags that were raised come next.
            link.trainability.before_graph()
            link.trainability.apply_unfrozen()
        gradient = step.grads.find(managed.chunk)
        # A frozen parameter may share a chunk, and with it the memory for gradients, with a trained one.
        if gradient is None or not (managed.requires_grad and managed.parameter.requires_grad):
            raise UnsupportedError(
                f"{managed.name!r} is frozen: nothing would use its gradient. Call requires_grad_() on it first"
            )
        if not has_gradient(link):
            # All ranks must set it: one that did not would skip the parameter in the step.
            step.communicator.agree(managed.name.encode(), "the parameter that is given a gradient", remedy=_ALIKE)
            step.grads.start_at_zero(gradient, managed)
        _write(link, managed.laid_out(value))


_ALIKE = "All ranks must set the gradients of the same parameters"


def _write(link: Link, flat: Tensor) -> None:
    """Set the shard to its part of `flat`, (numel,), in payload order."""
    # A clip that was asked for counts for the old gradients: here it takes effect, before one of them changes.
    link.states.before_gradient_write()
    reduced = link.states.gradients(link.managed.chunk)
    assert reduced is not None
    reduced.set_of_each_rank(link.managed, flat)


def _not_reduced(managed: ManagedParameter) -> GeminiError:
    return GeminiError(f"the gradient of {managed.name!r} is not reduced yet: read it after backward()")


def own_grad(parameter: Tensor) -> Tensor | None:
    """torch's own `.grad`, past the wrapped class."""
    with torch._C.DisableTorchFunctionSubclass():
        grad: Tensor | None = grad_of(parameter)
    return grad


def set_own_grad(parameter: Tensor, value: Tensor | None) -> None:
    """Set torch's own `.grad`, past the wrapped class. Local; raises what torch raises for another shape or dtype."""
    with torch._C.DisableTorchFunctionSubclass():
        set_grad_of(parameter, value)


def of_one_rank(link: Link, what: str) -> UnsupportedError:
    """The error for a hook that does something which ranks cannot do apart from one another."""
    ranks = link.step.communicator.world_size
    return UnsupportedError(
        f"a post-accumulate hook {what} of {link.managed.name!r}, and there are {ranks} ranks: "
        "inside a hook each rank has its own gradient, before the mean over ranks, so ranks would be trained "
        "apart. Update with a ShardedOptimizer; a hook may read and change .grad"
    )
