"""The user's hooks on the state dicts of an optimizer, which run as in `torch.optim.Optimizer`'s own methods."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch.optim import Optimizer

from gemini.ranks.communicator import Communicator

Its = TypeVar("Its", bound=Optimizer)
Arguments = ParamSpec("Arguments")
State = dict[str, Any]


def saves_with_hooks(
    state_dict: Callable[Concatenate[Its, Arguments], State],
) -> Callable[Concatenate[Its, Arguments], State]:
    """Run the hooks before and after `state_dict`. The latter may return another dict.

    On a rank that keeps nothing of the state there is nothing for them to see.
    """

    @wraps(state_dict)
    def hooked(self: Its, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> State:
        # torch runs these hooks inside its own `state_dict` and `load_state_dict`, which a `ShardedOptimizer`
        # overrides.
        with _publishing(self):
            for before in self._optimizer_state_dict_pre_hooks.values():
                before(self)
        state = state_dict(self, *args, **kwargs)
        for after in self._optimizer_state_dict_post_hooks.values() if state else ():
            replaced = after(self, state)
            state = state if replaced is None else replaced
        return state

    return hooked


def loads_with_hooks(load_state_dict: Callable[[Its, State], None]) -> Callable[[Its, State], None]:
    """Run the hooks before and after `load_state_dict`. The former may return another dict to load."""

    @wraps(load_state_dict)
    def hooked(self: Its, state_dict: State) -> None:
        state = dict(state_dict)  # hooks may change it, and it is the user's
        with _publishing(self):
            for before in self._optimizer_load_state_dict_pre_hooks.values():
                replaced = before(self, state)
                state = state if replaced is None else replaced
        load_state_dict(self, state)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    return hooked


def _publishing(optimizer: Any) -> AbstractContextManager[None]:
    """Around hooks that run before a collective, in which the other ranks would wait for one that failed here.

    For those behind it nobody waits: ranks that have none of them, or none that fails, may go on.
    """
    communicator: Communicator = optimizer.model.chunk_manager.communicator
    return communicator.publishing()
