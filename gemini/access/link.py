"""Links: what a parameter that fetches itself knows of the memory behind it.

A parameter carries its link as `_gemini`. `released.py` asks nothing else, so whatever keeps parameters somewhere, a
`ShardedModel` or a model that is still being built, says here how to get at them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from gemini.access.gradient import WholeGradient, assign, has_gradient, of_one_rank, own_grad, set_own_grad
from gemini.access.reduced_gradient import ReducedGradient
from gemini.access.states import States
from gemini.chunks.chunk import ManagedParameter
from gemini.errors import ReleasedParameterError
from gemini.manager.snapshots import shares_memory
from gemini.memory.modes import unseen, untracked
from optim import HALF_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemini.access.saved_tensors import SavedTensors
    from gemini.access.trainability import Trainability
    from gemini.manager.binding import Binding
    from gemini.ranks.communicator import Communicator


class Owner(Protocol):
    """Who fetches parameters; those of one owner are fetched together."""

    @property
    def communicator(self) -> Communicator:
        """Of the ranks that hold them together."""

    @property
    def binding(self) -> Binding:
        """What they show, and where writes to them are noted."""


class ParameterLink(ABC):
    """How to get at one parameter."""

    may_be_emptied = False  # `.data` takes memory without values: values come later

    def __init__(self, managed: ManagedParameter, owner: Owner) -> None:
        self.managed = managed
        self.owner = owner
        self.binding = owner.binding

    @abstractmethod
    def fetched(self, links: Sequence[Any], overwrites: bool, detached: bool) -> AbstractContextManager[None]:
        """Inside, the parameters of `links`, all of one owner, are plain and whole. May be collective.

        overwrites: the function sets every element of the only one, whose old values need not be there.
        detached: it gets none of them itself, so that no graph that it builds reaches them.
        """

    def gathered(self, links: Sequence[Any]) -> AbstractContextManager[None]:
        """`fetched`, between steps and for as long as the user likes. Raises GeminiError inside a step."""
        return self.fetched(links, overwrites=False, detached=False)

    def whole(self) -> Tensor:
        """Inside `gathered`: its values, which may be written to without a trace."""
        managed = self.managed
        assert managed.chunk.payload is not None
        return managed.view(managed.chunk.payload)

    def spread(self, rank: int) -> None:
        """Inside `gathered`: the values of `rank` on all ranks, at home and in the master. Collective."""
        managed, payload = self.managed, self.managed.chunk.region()
        with untracked():
            what = f"changes to {managed.name}"
            self.owner.communicator.broadcast_(payload.flat[managed.in_payload], what, rank)
            self.binding.write_home(managed, payload)
        self.binding.forget_edits(managed)

    def undo(self, before: Tensor) -> None:
        """Inside `gathered`: the parameter has these values, and nobody has written to it. Local."""
        self.whole().copy_(before)
        self.binding.forget_edits(self.managed)

    def before_write(self) -> None:
        """The parameter, which is there, is about to be written to, or may be."""
        self.binding.before_write(self.managed)

    def keep_wide(self, value: Tensor) -> None:
        """The parameter was set to `value`: where that is wider, the master takes it before it is rounded. Local."""
        return

    def version(self) -> int:
        """How often the parameter, which is there, was written to."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.managed.parameter._version

    def before_write_through(self, results: Sequence[Tensor]) -> bool:
        """Whether one of `results`, which the user gets, is a view of the parameter, and may be written to."""
        payload = self.managed.chunk.payload
        return payload is not None and any(shares_memory(result, payload) for result in results)

    def refuse_sharing(self, value: Tensor) -> None:
        """Raises ReleasedParameterError if `value`, which is to be `.data`, is another parameter's memory.

        The two would have to be one parameter from then on; copied values would part at the next step.
        """
        other = any_link_of(value)
        holder = self.holder_of(value) if other is None else other.managed.name
        if holder is not None:
            mine = self.managed.name
            raise ReleasedParameterError(
                f"parameter {mine!r}: its .data cannot be the memory of {holder!r}. To tie the two, assign the "
                "parameter itself (a.weight = b.weight) before the model is wrapped; to copy values, write "
                "a.weight.data.copy_(b.weight.data)"
            )

    def holder_of(self, value: Tensor) -> str | None:
        """The name of another parameter in whose memory a plain tensor lies, if that is known."""
        return None

    def adopt_data(self) -> None:
        """Inside `gathered`: the user may have assigned other memory to `.data`; its values move in. May raise."""
        whole, parameter = self.whole(), self.managed.parameter
        if type(parameter) is not nn.Parameter:  # then an assignment has told us
            return
        value = parameter.data
        if value.data_ptr() == whole.data_ptr() and value.stride() == whole.stride():
            return
        parameter.data = whole
        self.refuse_sharing(value)
        if value.shape != whole.shape or value.dtype != whole.dtype:
            self.replace_data(value)
        else:
            whole.copy_(value)

    def mark_edited(self) -> None:
        """The parameter's values were, or may be, written to."""
        self.binding.mark_edited(self.managed)

    @abstractmethod
    def replace_data(self, value: Tensor) -> None:
        """`.data = value` of another shape or dtype. May raise ReleasedParameterError."""

    def gradient(self) -> Tensor | None:
        """What `.grad` answers. May be collective, and raise."""
        return None

    @abstractmethod
    def set_gradient(self, value: Tensor | None) -> None:
        """`.grad = value`. May be collective, and raise."""

    def raise_flag(self) -> None:
        """requires_grad becomes True."""
        return

    @abstractmethod
    def copy(self) -> nn.Parameter:
        """A copy of the parameter. Collective. May raise."""

    @property
    def describe(self) -> str:
        return f"{tuple(self.managed.shape)}, {self.managed.dtype}"


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
        self.in_user_hook = False  # a post-accumulate hook of the user's runs, with this parameter

    @contextmanager
    def fetched(self, links: Sequence[Link], overwrites: bool, detached: bool) -> Iterator[None]:
        with ExitStack() as stack:
            self._touch(links, stack, detached)
            stack.enter_context(self.saved_tensors.pushed(link.managed.chunk for link in links))
            yield

    def _touch(self, links: Sequence[Link], stack: ExitStack, detached: bool) -> None:
        """What the user does with the parameters and fails in is no failure of ours: that is not published."""
        with self.step.publishing(), unseen():
            raised = self.trainability.flags_raised
            if raised and not detached and any(link.managed.index in raised for link in links):
                self.trainability.apply_outside()
            touched = [link.managed for link in links]
            stack.enter_context(self.step.touching(touched, self.managed.operator))

    @contextmanager
    def gathered(self, links: Sequence[Link]) -> Iterator[None]:
        step = self.step
        step.check_idle("GatheredParameters")
        self.trainability.before_use()
        with ExitStack() as stack:
            self._touch(links, stack, detached=False)
            chunks = {link.managed.chunk.index: link.managed.chunk for link in links}.values()
            step.binding.write_back_all(chunks)
            for chunk in chunks:
                for managed in chunk.parameters:
                    step.binding.before_write(managed)
            yield

    def before_write(self) -> None:
        if self.in_user_hook and self.owner.communicator.world_size > 1:  # they have parts, or copies, of the weights
            raise of_one_rank(self, "writes to the weights")
        super().before_write()

    def before_write_through(self, results: Sequence[Tensor]) -> bool:
        is_view = super().before_write_through(results)
        # in a step, autograd refuses writes to what it follows
        if is_view and not (self.step.params.in_step and all(result.requires_grad for result in results)):
            self.before_write()
        return is_view

    def keep_wide(self, value: Tensor) -> None:
        managed = self.managed
        is_wider = value.is_floating_point() and value.dtype.itemsize > managed.dtype.itemsize
        if managed.dtype in HALF_DTYPES and is_wider:
            with self.step.publishing(), untracked():
                flat = managed.laid_out(value.expand(managed.shape))
                self.states.full_precision(managed.chunk).set_whole(managed, flat)

    def holder_of(self, value: Tensor) -> str | None:
        chunk = self.step.params.chunk_at(value) if value.numel() else None
        if chunk is None or chunk.payload is None:
            return None
        start = (value.data_ptr() - chunk.payload.data_ptr()) // chunk.payload.element_size()
        holder = chunk.parameter_at(start)
        is_of_holder = holder is not self.managed and start < holder.offset + holder.numel
        return holder.name if is_of_holder else None

    def replace_data(self, value: Tensor) -> None:
        remedy = "To change a size, load model.state_dict() into the plain module, change that, and wrap it anew"
        if value.shape == self.managed.shape:
            remedy = "A dtype is chosen by ShardedModel(..., dtype=)"
        raise ReleasedParameterError(
            f"parameter {self.managed.name!r} is {tuple(self.managed.shape)} {self.managed.dtype}; its .data cannot be "
            f"{tuple(value.shape)} {value.dtype}. {remedy}"
        )

    def gradient(self) -> Tensor | None:
        """The reduced gradient, but inside a user's post-accumulate hook: see gradient.py."""
        if self.in_user_hook:
            return own_grad(self.managed.parameter)
        return ReducedGradient.of(WholeGradient(self)) if has_gradient(self) else None

    def set_gradient(self, value: Tensor | None) -> None:
        if self.in_user_hook:
            set_own_grad(self.managed.parameter, value)
        elif value is None:
            if self.states.optimizer is not None:
                self.states.optimizer.before_gradient_write()
            self.step.grads.discard(self.managed)
        elif not isinstance(value, ReducedGradient):
            assign(self, value)
        elif not value.is_all_of(self.managed):
            assign(self, value.plain())

    def raise_flag(self) -> None:
        self.trainability.flags_raised.add(self.managed.index)  # memory follows

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


def any_link_of(tensor: Tensor) -> ParameterLink | None:
    """The link of a parameter that fetches itself, whoever has its memory, or of its lazy detach; else None."""
    return detached_from(tensor).__dict__.get("_gemini") if hasattr(tensor, "__dict__") else None


def detached_from(tensor: Tensor) -> Tensor:
    """The parameter that a lazy detach is of, whoever has its memory by now; any other tensor itself."""
    found: Tensor = tensor.__dict__.get("_detached_from", tensor)
    return found
