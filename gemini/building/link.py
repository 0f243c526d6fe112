"""Links of parameters whose model is under construction in a `ZeroInitContext`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gemini.access.link import ParameterLink, any_link_of
from gemini.chunks.chunk import ManagedParameter
from gemini.errors import GeminiError, UnsupportedError

if TYPE_CHECKING:
    from gemini.building.store import BuildStore


class BuiltLink(ParameterLink):
    """The link of a parameter whose model is under construction."""

    may_be_emptied = True  # `.data` may be set to memory without values, which are initialised later

    def __init__(self, managed: ManagedParameter, store: BuildStore) -> None:
        super().__init__(managed, store)
        self.store = store
        self.guard: RemovableHandle | None = None  # handle of the hook that `refuse_backward` registers

    def follow(self, managed: ManagedParameter) -> None:
        """The parameter has moved to another chunk, in which it is `managed`."""
        self.managed = managed

    def fetched(self, links: Sequence[BuiltLink], overwrites: bool, detached: bool) -> AbstractContextManager[None]:
        return self.store.fetched([link.managed for link in links], overwrites)

    def replace_data(self, value: Tensor) -> None:
        self.store.replace(self, value)

    def set_gradient(self, value: Tensor | None) -> None:
        """Raises UnsupportedError for any gradient but None."""
        if value is not None:
            name = self.managed.name
            raise UnsupportedError(f"{name!r} cannot be given a gradient before its model is a ShardedModel")

    def refuse_backward(self) -> None:
        """Make a backward that reaches the parameter raise, now that the context has ended.

        Nothing would take the gradient of a parameter that no `ShardedModel` has.
        """
        name, parameter = self.managed.name, self.managed.parameter

        def refuse(grad: Tensor) -> NoReturn:
            raise GeminiError(
                f"backward() reaches parameter {name!r}, which was built in a ZeroInitContext and is sharded: wrap the "
                "model in ShardedModel(...) and train that"
            )

        # torch refuses hooks on tensors that need no gradient.
        if parameter.requires_grad:
            self.guard = parameter.register_hook(refuse)

    def copy(self) -> nn.Parameter:
        return self.store.copy(self.managed)


def built_link_of(parameter: Tensor) -> BuiltLink | None:
    """The link of a parameter that was built in a `ZeroInitContext` and not wrapped yet; None for any other tensor."""
    link = any_link_of(parameter)
    return link if isinstance(link, BuiltLink) else None
