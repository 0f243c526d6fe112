"""How operations outside operators find the chunk of a parameter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gemini.errors import ReleasedParameterError
from gemini.memory.modes import untracked
from gemini.placement.next_use import Phase
from gemini.ranks.communicator import Communicator
from gemini.runtime.binding import Binding, shares_memory
from gemini.runtime.chunk import ManagedParameter
from gemini.runtime.gradient import grad_of, set_grad_of

# -- Parameter links: what a parameter that fetches itself knows of the memory behind it.
#
# A parameter carries its link as `_gemini`, the only thing that `released.py` asks. A `ShardedModel` (link.py) and
# a model that is still being built (building/store.py) have a kind of link each: it says how to reach their parameters.


class Owner(Protocol):
    """The object that fetches parameters. Parameters of one owner are fetched together."""

    @property
    def communicator(self) -> Communicator:
        """The communicator of the ranks that hold the parameters together."""

    @property
    def binding(self) -> Binding:
        """Binds the parameters, and notes writes to them."""


class ParameterLink(ABC):
    """How to reach one parameter."""

    may_be_emptied = False  # `.data` accepts memory without values, which come later

    def __init__(self, managed: ManagedParameter, owner: Owner) -> None:
        self.managed = managed
        self.owner = owner
        self.binding = owner.binding

    @abstractmethod
    def fetched(self, links: Sequence[Any], overwrites: bool, detached: bool) -> AbstractContextManager[None]:
        """Inside, the parameters of `links`, all of one owner, are plain and whole. May be collective.

        overwrites: the function sets every element of the only parameter, so its old values are not needed.
        detached: the function gets no parameter itself, so no graph that it builds reaches one.
        """

    def gathered(self, links: Sequence[Any]) -> AbstractContextManager[None]:
        """Do what `fetched` does, between steps, for as long as the user likes. Raises GeminiError inside a step."""
        return self.fetched(links, overwrites=False, detached=False)

    def whole(self) -> Tensor:
        """Inside `gathered`: the parameter's values. Writes to them leave no trace."""
        managed = self.managed
        assert managed.chunk.payload is not None
        return managed.view(managed.chunk.payload)

    def broadcast_from(self, rank: int) -> None:
        """Inside `gathered`: set all ranks' values, homes and masters to those of `rank`. Collective."""
        managed, payload = self.managed, self.managed.chunk.region()
        # What this rank alone has called meanwhile, such as `safe_get_local_*`, may have moved its position.
        communicator = self.owner.communicator
        communicator.position.set(managed.operator, Phase.TOUCH)
        with untracked():
            what = f"changes to {managed.name}"
            communicator.broadcast_(payload.flat[managed.in_payload], what, rank)
            self.binding.write_home(managed, payload)
        # Home and master have the new values on every rank: they are no edits any more.
        self.binding.forget_edits(managed)

    def part_of_master(self) -> Tensor | None:
        """Inside `gathered`: a copy of what `undo` needs beside the weights. None: nothing. Local."""
        return None

    def undo(self, before: Tensor, master: Tensor | None) -> None:
        """Inside `gathered`: set the parameter to `before`, as if nobody had written to it. Local.

        master: what `part_of_master` returned then. An inner block may have brought the change home since.
        """
        self.whole().copy_(before)
        if master is not None:
            with untracked():
                self.binding.restore_home(self.managed, self.managed.chunk.region(), master)
        self.binding.forget_edits(self.managed)

    def before_write(self) -> None:
        """The parameter, which is fetched, is about to be written to, or may be."""
        self.binding.before_write(self.managed)

    def keep_wide(self, value: Tensor) -> None:
        """The parameter was set to `value`. If that is wider, the master takes it before it is rounded. Local."""
        return

    def data(self, writes: bool = True) -> Tensor:
        """What `.data` gives of the parameter, which is fetched. writes: somebody may write to it unseen."""
        return self.managed.parameter.detach()

    def version(self) -> int:
        """How often the parameter, which is fetched, was written to."""
        return self.managed.version

    def before_write_through(self, results: Sequence[Tensor]) -> bool:
        """Whether one of `results`, which the user gets, is a view of the parameter that may be written to."""
        payload = self.managed.chunk.payload
        return payload is not None and any(shares_memory(result, payload) for result in results)

    def refuse_sharing(self, value: Tensor) -> None:
        """Raises ReleasedParameterError if `value`, a new `.data`, is another parameter's memory.

        The two would have to be one parameter from then on; copied values would differ after the next step.
        """
        other = any_link_of(value)
        holder = self.holder_of(value) if other is None else other.managed.name
        if holder is not None:
            own_name = self.managed.name
            raise ReleasedParameterError(
                f"parameter {own_name!r}: its .data cannot be the memory of {holder!r}. To tie the two, assign the "
                "parameter itself (a.weight = b.weight) before the model is wrapped; to copy values, write "
                "a.weight.data.copy_(b.weight.data)"
            )

    def holder_of(self, value: Tensor) -> str | None:
        """The name of another parameter in whose memory a plain tensor lies, if that is known."""
        return None

    def adopt_data(self) -> None:
        """Inside `gathered`: take the values of memory that the user may have assigned to `.data`. May raise."""
        whole, parameter = self.whole(), self.managed.parameter
        if type(parameter) is not nn.Parameter:  # `.data =` went through `__torch_function__`
            return
        value = parameter.data
        if value.data_ptr() == whole.data_ptr() and value.stride() == whole.stride():
            return
        # Back to the payload before anything is refused: the error must not leave the parameter in foreign memory.
        parameter.data = whole
        self.refuse_sharing(value)
        if self.fits(value):
            whole.copy_(value)
        else:
            self.replace_data(value)

    def mark_edited(self) -> None:
        """The parameter's values were written to, or may be."""
        self.binding.mark_edited(self.managed)

    def fits(self, value: Tensor) -> bool:
        """Whether the memory of the parameter can take `value` as its `.data`."""
        return value.shape == self.managed.shape and value.dtype == self.managed.dtype

    @abstractmethod
    def replace_data(self, value: Tensor) -> None:
        """Carry out `.data = value` where that does not fit. May raise ReleasedParameterError."""

    def gradient(self) -> Tensor | None:
        """The answer of `.grad`. May be collective, and raise."""
        return None

    @abstractmethod
    def set_gradient(self, value: Tensor | None) -> None:
        """Carry out `.grad = value`. May be collective, and raise."""

    def raise_flag(self) -> None:
        """requires_grad becomes True."""
        return

    @abstractmethod
    def copy(self) -> nn.Parameter:
        """A copy of the parameter. Collective. May raise."""

    @property
    def describe(self) -> str:
        return f"{tuple(self.managed.shape)}, {self.managed.dtype}"


def any_link_of(tensor: Tensor) -> ParameterLink | None:
    """The link of a parameter that fetches itself, of a model or a build, or of its lazy detach; else None."""
    if not getattr(tensor, "__dict__", None):
        return None  # as of most: wrapping asks thousands of plain parameters
    return detached_from(tensor).__dict__.get("_gemini")


def by_owner(links: Iterable[ParameterLink]) -> list[list[ParameterLink]]:
    """The links of each owner, a wrapped model or a build: these gather by different means, each its own parameters."""
    found: dict[object, list[ParameterLink]] = {}
    for link in links:
        found.setdefault(link.owner, []).append(link)
    return list(found.values())


def known_link_of(tensor: Tensor) -> ParameterLink:
    """The link of a tensor that is known to have one."""
    link = any_link_of(tensor)
    assert link is not None
    return link


def detached_from(tensor: Tensor) -> Tensor:
    """The parameter that a lazy detach was made from; any other tensor itself."""
    found: Tensor = tensor.__dict__.get("_detached_from", tensor)
    return found


def own_grad(parameter: Tensor) -> Tensor | None:
    """torch's own `.grad`, past the wrapped class."""
    with torch._C.DisableTorchFunctionSubclass():
        grad: Tensor | None = grad_of(parameter)
    return grad


def set_own_grad(parameter: Tensor, value: Tensor | None) -> None:
    """Set torch's own `.grad`, past the wrapped class. Local; raises what torch raises for another shape or dtype."""
    with torch._C.DisableTorchFunctionSubclass():
        set_grad_of(parameter, value)


def shown_grad(tensor: Tensor) -> Tensor | None:
    """The answer of `.grad`. What was detached has no link: its gradient is its own, as in plain PyTorch."""
    link: ParameterLink | None = tensor.__dict__.get("_gemini")
    return own_grad(tensor) if link is None else link.gradient()


def assign_grad(tensor: Tensor, value: Tensor | None) -> None:
    """Carry out `.grad = value`, of a parameter or of what was detached. May be collective, and raise."""
    link: ParameterLink | None = tensor.__dict__.get("_gemini")
    set_own_grad(tensor, value) if link is None else link.set_gradient(value)


# -- `torch.autograd.grad` and `backward(inputs=)` with respect to parameters that fetch themselves.
#
# Both need the parameters' places in the graph only: being an input fetches nothing, and backward fetches what it
# reads.


def gradients(
    outputs: Any, inputs: Any, *, materialize_grads: bool = False, allow_unused: bool | None = None, **options: Any
) -> tuple[Tensor | None, ...]:
    """The result of `torch.autograd.grad`."""
    edges = tuple(map(_edge, outputs)), tuple(map(_edge, inputs))
    # As in torch, `materialize_grads=True` allows unused inputs; `found` has None for them.
    found = torch.autograd.grad(*edges, allow_unused=materialize_grads or allow_unused, **options)
    # torch would make the zeros from the inputs; here these are edges, which have no shape.
    if not materialize_grads:
        return found
    return tuple(
        torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) if grad is None else grad
        for tensor, grad in zip(inputs, found, strict=True)
    )


def backward(tensors: Any, *, inputs: Any = None, **options: Any) -> None:
    """Do what `torch.autograd.backward` does. As an input a parameter is not fetched.

    Held from the first node of backward to the last, it would need a slot that backward may not have.
    """
    # A parameter that backward starts from is followed by a tensor of its own, which is no input of ours any more.
    roots = [
        tensor if not isinstance(tensor, Tensor) or any_link_of(tensor) is None else tensor.clone()
        for tensor in tensors
    ]
    torch.autograd.backward(roots, inputs=None if inputs is None else tuple(map(_edge, inputs)), **options)


def _edge(tensor: Any) -> Any:
    """The gradient edge of a parameter that fetches itself; any other tensor as it is."""
    if not isinstance(tensor, Tensor) or any_link_of(tensor) is None:
        return tensor
    if not tensor.requires_grad:
        raise RuntimeError("One of the differentiated Tensors does not require grad")  # torch's own message
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(tensor)
