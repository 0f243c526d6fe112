"""Chunks of a model that is still being built: the parameters of one operator, sharded as soon as it is made.

A parameter belongs to its module alone: chunks know theirs weakly, and parameters their chunk by their link, so that
what the model drops while it is built (a tied head, a layer that is replaced) takes its shards with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gemini.chunks.placeholder import expanded, placeholder, set_data
from gemini.errors import GeminiError, ReleasedParameterError, UnsupportedError
from gemini.executor.snapshots import shares_memory
from gemini.model.link import ParameterLink, any_link_of
from gemini.model.released import ReleasedParameter
from optim import round_master_
from sharding import ShardLayout

if TYPE_CHECKING:
    from gemini.model.build_store import BuildStore
    from gemini.ranks.communicator import Communicator


@dataclass(eq=False)
class BuiltParameter:
    """A parameter's place in its chunk."""

    name: str
    chunk: BuiltChunk
    position: int  # among the chunk's parameters
    offset: int  # elements
    shape: torch.Size
    stride: tuple[int, ...]
    placeholder: Tensor = field(repr=False)  # expanded NaN, on the device where the parameter was made
    reference: weakref.ref[nn.Parameter]

    @property
    def parameter(self) -> nn.Parameter:
        alive = self.reference()
        assert alive is not None, f"{self.name} is used although it is gone"
        return alive

    @property
    def dtype(self) -> torch.dtype:
        return self.placeholder.dtype

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def region(self, payload: Tensor) -> Tensor:
        """(numel,) its elements of `payload`, in the order in which they lie there."""
        return payload[self.offset : self.offset + self.numel]

    def view(self, payload: Tensor) -> Tensor:
        return torch.as_strided(payload, self.shape, self.stride, payload.storage_offset() + self.offset)

    def show_placeholder(self, parameter: nn.Parameter) -> None:
        """What autograd itself saved of the parameter is stale then: its version says so."""
        torch.autograd.graph.increment_version(parameter)
        parameter.__class__ = nn.Parameter  # first: setting .data of the other class would fetch
        set_data(parameter, self.placeholder)
        parameter.__class__ = ReleasedParameter


@dataclass(eq=False)
class BuiltChunk:
    """One operator's parameters of one dtype and device.

    `home` is this rank's shard. While something uses the parameters they are views of `payload`, which is memory of
    its own: a view that outlives the use keeps what it has seen.
    """

    index: int
    operator: int  # in the table of positions
    layout: ShardLayout
    home: Tensor  # (layout.shard_numel,)
    device: torch.device  # where the parameters were made, and are used
    parameters: list[weakref.ref[BuiltParameter]] = field(default_factory=list)
    payload: Tensor | None = None  # (layout.numel,) on `device`, while fetched
    pins: int = 0
    valid: set[int] = field(default_factory=set)  # positions whose values are in the payload
    edited: set[int] = field(default_factory=set)  # positions that were, or may have been, written to
    versions: dict[int, int] = field(default_factory=dict)  # by position, when the payload was last brought home
    held: list[tuple[BuiltParameter, nn.Parameter]] = field(default_factory=list)  # while fetched, on all ranks alike

    def living(self) -> list[tuple[BuiltParameter, nn.Parameter]]:
        """The parameters that are still there."""
        places = (reference() for reference in self.parameters)
        return [(its, p) for its in places if its is not None and (p := its.reference()) is not None]

    def versions_now(self) -> dict[int, int]:
        with torch._C.DisableTorchFunctionSubclass():
            return {its.position: parameter._version for its, parameter in self.living()}

    def round_to(self, dtype: torch.dtype) -> None:
        """Have weights of another dtype from now on. Local; nothing may be fetched."""
        rounded = torch.empty_like(self.home, dtype=dtype)
        round_master_(rounded, self.home.float())
        self.home = rounded
        empty = placeholder(dtype, self.device)
        for its, parameter in self.living():
            its.placeholder = expanded(empty, its.shape)
            its.show_placeholder(parameter)
        self.versions = self.versions_now()

    def newer(self) -> set[int]:
        """Positions of parameters that were written to since `versions`."""
        return {position for position, version in self.versions_now().items() if version != self.versions[position]}

    def refuse_lost_edits(self) -> None:
        """Raises if a view that was kept beyond the chunk's release was written to: versions tell, memory does not."""
        newer = set() if self.payload is self.home else self.newer()  # views of a home are never lost
        for its in (its for its, _ in self.held if its.position in newer):
            raise ReleasedParameterError(
                f"parameter {its.name!r} was written to through a view that was taken before "
                "other parameters were used; the write is lost. Write to the parameter itself, or take the view anew"
            )


class BuiltLink(ParameterLink[BuiltParameter]):
    """The link of a parameter whose model is being built."""

    may_be_emptied = True  # and then initialised

    def __init__(self, managed: BuiltParameter, store: BuildStore) -> None:
        self.managed = managed
        self.store = store
        self.guard: RemovableHandle | None = None  # refuses backward, once the context has ended

    @property
    def owner(self) -> object:
        return self.store

    def fetched(self, links: Sequence[BuiltLink], overwrites: bool) -> AbstractContextManager[None]:
        return self.store.fetched([link.managed for link in links], overwrites)

    def gathered(self, links: Sequence[BuiltLink]) -> AbstractContextManager[None]:
        return self.store.fetched([link.managed for link in links])

    @property
    def communicator(self) -> Communicator:
        return self.store.communicator

    def whole(self) -> Tensor:
        assert self.managed.chunk.payload is not None
        return self.managed.view(self.managed.chunk.payload)

    def spread(self, rank: int) -> None:
        self.store.spread(self.managed, rank)

    def undo(self, before: Tensor) -> None:
        self.whole().copy_(before)
        self.store.forget_edits(self.managed)

    def before_write_through(self, results: Sequence[Tensor]) -> bool:
        payload = self.managed.chunk.payload
        return payload is not None and any(shares_memory(result, payload) for result in results)

    def mark_edited(self) -> None:
        self.managed.chunk.edited.add(self.managed.position)

    def replace_data(self, value: Tensor) -> None:
        self.store.replace(self.managed, value)

    def gradient(self) -> Tensor | None:
        return None

    def assign_gradient(self, value: Tensor) -> None:
        raise UnsupportedError(f"{self.managed.name!r} cannot be given a gradient before its model is a ShardedModel")

    def discard_gradient(self) -> None:
        return

    def before_requires_grad(self, value: bool) -> None:
        return

    def deepcopy(self, memo: dict[int, Any]) -> nn.Parameter:
        return self.store.deepcopy(self.managed, memo)


def refusal(name: str) -> Callable[[Tensor], NoReturn]:
    """A hook that a backward through parameter `name` runs into."""

    def refuse(grad: Tensor) -> NoReturn:
        raise GeminiError(
            f"backward() reaches parameter {name!r}, which was built in a ZeroInitContext and is sharded: wrap the "
            "model in ShardedModel(...) and train that"
        )

    return refuse


def built_link_of(parameter: Tensor) -> BuiltLink | None:
    """The link of a parameter that was built in a `ZeroInitContext` and not wrapped yet; None for any other tensor."""
    link = any_link_of(parameter)
    return link if isinstance(link, BuiltLink) else None
