"""`Link`: how a parameter of a `ShardedModel` reaches its memory, its states and its gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from gemini.access.gradient import WholeGradient, assign, has_gradient, of_one_rank, own_grad, set_own_grad
from gemini.access.parameter_link import ParameterLink, any_link_of
from gemini.access.reduced_gradient import ReducedGradient
from gemini.access.saved_tensors import SavedTensors
from gemini.access.states import States
from gemini.access.trainability import Trainability
from gemini.chunks.chunk import ManagedParameter
from gemini.errors import ReleasedParameterError
from gemini.memory.modes import unseen, untracked
from optim import HALF_DTYPES


class Link(ParameterLink):
    """The link of a `ShardedModel`'s parameter."""

    def __init__(
        self, managed: ManagedParameter, states: States, trainability: Trainability, saved_tensors: SavedTensors
    ) -> None:
        super().__init__(managed, states.step)
        self.states = states
        self.step = states.step
        self.trainability = trainability
        self.saved_tensors = saved_tensors
        self.in_user_hook = False  # a post-accumulate hook of the user's runs on this parameter

    def note_user_hook(self, runs: bool) -> None:
        """A post-accumulate hook of the user's runs on this parameter from now on, or has ended, also by an error."""
        self.in_user_hook = runs

    @contextmanager
    def fetched(self, links: Sequence[Link], overwrites: bool, detached: bool) -> Iterator[None]:
        with ExitStack() as stack:
            self._touch(links, stack, detached)
            # On top of all other hooks: what the function saves of the parameters must become handles.
            stack.enter_context(self.saved_tensors.pushed(link.managed.chunk for link in links))
            yield

    def _touch(self, links: Sequence[Link], stack: ExitStack, detached: bool) -> None:
        """Fetch the parameters. An error of the user's inside `fetched` is no failure of ours, and is not published."""
        with self.step.publishing(), unseen():
            raised = self.trainability.flags_raised
            # A graph is about to be built on a parameter that was just unfrozen: its gradient needs memory.
            if raised and not detached and any(link.managed.index in raised for link in links):
                self.trainability.apply_outside()
            touched = [link.managed for link in links]
            stack.enter_context(self.step.touching(touched, self.managed.operator))

    def part_of_master(self) -> Tensor:
        access = self.states.full_precision(self.managed.chunk)
        return access.local(self.managed).to("cpu", copy=True)

    @contextmanager
    def gathered(self, links: Sequence[Link]) -> Iterator[None]:
        step = self.step
        step.check_idle("GatheredParameters")
        self.trainability.before_use()
        with ExitStack() as stack:
            self._touch(links, stack, detached=False)
            chunks = {link.managed.chunk.index: link.managed.chunk for link in links}.values()
            # What a script computes inside may be used after it, as a penalty on weights is.
            stack.enter_context(self.saved_tensors.pushed(link.managed.chunk for link in links))
            # Edits so far go home, so that the snapshots below show only what the block writes.
            step.binding.write_back_all(chunks)
            for chunk in chunks:
                # This is done for all parameters of the chunk: `touching` may have made all of them plain, and writes
                # to plain ones show only afterwards.
                for managed in chunk.parameters:
                    step.binding.before_write(managed)
            yield

    def before_write(self) -> None:
        """Raises UnsupportedError in a hook of the user's, where several ranks have parts or copies of the weights."""
        # Other ranks run other hooks: weights would differ by rank.
        if self.in_user_hook and self.owner.communicator.world_size > 1:
            raise of_one_rank(self, "writes to the weights")
        super().before_write()

    def data(self, writes: bool = True) -> Tensor:
        return self.binding.show_data(self.managed, writes)

    def before_write_through(self, results: Sequence[Tensor]) -> bool:
        is_view = super().before_write_through(results)
        # In a step autograd refuses writes to tensors that it follows.
        if is_view and not (self.step.params.in_step and all(result.requires_grad for result in results)):
            self.before_write()
        return is_view

    def keep_wide(self, value: Tensor) -> None:
        managed = self.managed
        is_wider = value.is_floating_point() and value.dtype.itemsize > managed.dtype.itemsize
        if managed.dtype in HALF_DTYPES and is_wider:
            with self.step.publishing(), untracked():
                # `expand` first: the user's `copy_` broadcasts its source, and the master takes the same values.
                flat = managed.laid_out(value.expand(managed.shape))
                self.states.full_precision(managed.chunk).set_whole(managed, flat)

    def holder_of(self, value: Tensor) -> str | None:
        chunk = self.step.params.chunk_at(value) if value.numel() else None
        if chunk is None or chunk.payload is None:
            return None
        # Only the address tells which parameter of the chunk it is: `value` may be any view.
        start = (value.data_ptr() - chunk.payload.data_ptr()) // chunk.payload.element_size()
        holder = chunk.parameter_at(start)
        # Padding behind the last element of a parameter belongs to none.
        is_of_holder = holder is not self.managed and start < holder.offset + holder.numel
        return holder.name if is_of_holder else None

    def replace_data(self, value: Tensor) -> None:
        """Raises ReleasedParameterError: a chunk has room for this shape and dtype only."""
        remedy = "To change a size, load model.state_dict() into the plain module, change that, and wrap it again"
        if value.shape == self.managed.shape:
            remedy = "A dtype is chosen by ShardedModel(..., dtype=)"
        raise ReleasedParameterError(
            f"parameter {self.managed.name!r} is {tuple(self.managed.shape)} {self.managed.dtype}; its .data cannot be "
            f"{tuple(value.shape)} {value.dtype}. {remedy}"
        )

    def gradient(self) -> Tensor | None:
        """The reduced gradient; inside a user's post-accumulate hook this rank's own, see gradient.py."""
        if self.in_user_hook:
            return own_grad(self.managed.parameter)
        return ReducedGradient.of(WholeGradient(self)) if has_gradient(self) else None

    def set_gradient(self, value: Tensor | None) -> None:
        if self.in_user_hook:
            set_own_grad(self.managed.parameter, value)
        elif value is None:
            self.states.before_gradient_write()
            self.step.grads.discard(self.managed)
        elif not isinstance(value, ReducedGradient):
            assign(self, value)
        # `parameter.grad *= 2` assigns the same gradient again, which was written already.
        elif not value.is_all_of(self.managed):
            assign(self, value.plain())

    def raise_flag(self) -> None:
        self.trainability.note_raised(self.managed)

    def copy(self) -> nn.Parameter:
        """A plain parameter, whole, in host memory. Collective."""
        with self.step.publishing(), torch.no_grad():
            self.step.check_idle("copy.deepcopy()")
            whole = self.states.weights(self.managed.chunk).copies([self.managed])[self.managed.index]
        with torch._C.DisableTorchFunctionSubclass():
            return nn.Parameter(whole, requires_grad=self.managed.parameter.requires_grad)

    @property
    def describe(self) -> str:
        return f"{super().describe}, in chunk {self.managed.chunk.index}"


def link_of(parameter: Tensor) -> Link | None:
    """The link of a `ShardedModel`'s parameter (released or plain) or of its lazy detach; None for any other tensor."""
    link = any_link_of(parameter)
    return link if isinstance(link, Link) else None
