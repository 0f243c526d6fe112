"""Links of parameters whose model is under construction in a `ZeroInitContext`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor, nn

from gemini.access.gradient import set_own_grad
from gemini.access.gradient_hooks import hook_last
from gemini.access.parameter_link import ParameterLink, any_link_of
from gemini.chunks.chunk import ManagedParameter
from gemini.chunks.placeholder import dense_stride, have_one_order
from gemini.errors import GeminiError, UnsupportedError

if TYPE_CHECKING:
    from gemini.building.store import BuildStore


class BuiltLink(ParameterLink):
    """The link of a parameter whose model is under construction."""

    may_be_emptied = True  # `.data` may be set to memory without values, which are initialised later

    def __init__(self, managed: ManagedParameter, store: BuildStore) -> None:
        super().__init__(managed, store)
        self.store = store
        # On frozen parameters, too: they may be unfrozen at any time.
        self.guard = hook_last(managed.parameter, partial(_refuse_gradient, managed.name), None)

    def follow(self, managed: ManagedParameter) -> None:
        """The parameter has moved to another chunk, in which it is `managed`."""
        self.managed = managed

    def fetched(self, links: Sequence[BuiltLink], overwrites: bool, detached: bool) -> AbstractContextManager[None]:
        # `detached` changes nothing here: no memory follows the flags of a model that is built.
        return self.store.fetched([link.managed for link in links], overwrites)

    def fits(self, value: Tensor) -> bool:
        # In other strides, random numbers that are drawn later, and sums, would have another order.
        managed = self.managed
        return super().fits(value) and have_one_order(dense_stride(value), managed.stride, value.shape)

    def replace_data(self, value: Tensor) -> None:
        self.store.replace(self, value)

    def set_gradient(self, value: Tensor | None) -> None:
        """Raises UnsupportedError for any gradient but None."""
        if value is not None:
            name = self.managed.name
            raise UnsupportedError(f"{name!r} cannot be given a gradient before its model is a ShardedModel")

    def copy(self) -> nn.Parameter:
        return self.store.copy(self.managed)


def _refuse_gradient(name: str, parameter: Tensor) -> NoReturn:
    """Raises GeminiError: nothing takes the gradient of a parameter that no `ShardedModel` has."""
    set_own_grad(parameter, None)  # the first gradient of a wrapped model would be added to it
    raise GeminiError(
        f"backward() reaches parameter {name!r}, which was built in a ZeroInitContext and is sharded: wrap the "
        "model in ShardedModel(...) and train that"
    )


def built_link_of(parameter: Tensor) -> BuiltLink | None:
    """The link of a parameter that was built in a `ZeroInitContext` and not wrapped yet; None for any other tensor."""
    link = any_link_of(parameter)
    return link if isinstance(link, BuiltLink) else None
