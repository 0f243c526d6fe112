"""State dicts of the wrapped module itself, or of any part of it: taken and loaded.

Hugging Face's `save_pretrained()`, peft and torch.distributed.checkpoint call `state_dict()` of modules, not of the
`ShardedModel`. torch asks every module for its own part, so a hook on each module that owns parameters or buffers puts
whole copies in host memory into that part. With several ranks both are collective: all ranks do them alike.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gemini.access.link import link_of
from gemini.access.released import LazyDetach
from gemini.access.states import States


class StateHooks:
    """The hooks of one model."""

    def __init__(self, states: States) -> None:
        self._states = states
        self._step = states.step
        self._keeps_vars = False  # argument of the innermost state_dict(), equal for all its parts
        self._tied: set[nn.Parameter] = set()  # parameters with several names; membership only
        # The references are weak, so that whole copies are freed with the user's state dict.
        self._copies: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # of tied ones, by index
        self._first_names: dict[int, str] = {}  # the names of these copies in the state dict
        self._errors: list[str] | None = None  # torch's list of what went wrong in the last load: each load has its own

    def install(self, root: nn.Module) -> list[RemovableHandle]:
        handles: list[RemovableHandle] = []
        seen: set[nn.Parameter] = set()  # membership only
        for module in root.modules():
            own = [parameter for parameter in module._parameters.values() if parameter is not None]
            self._tied.update(parameter for parameter in own if parameter in seen)
            seen.update(own)
            # Modules with buffers alone count, too: buffers are on the device, and state dicts hold copies on the host.
            if own or module._buffers:
                handles.append(module.register_state_dict_pre_hook(self._before_state_dict))
                after = module._register_state_dict_hook(self._after_state_dict)
                hooks: Any = module._state_dict_hooks  # ordered
                # First of all hooks: the user's then see whole tensors.
                hooks.move_to_end(after.id, last=False)
                handles.append(after)
                handles.append(module.register_load_state_dict_pre_hook(self._before_load))
        return handles

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._keeps_vars = keep_vars
        # With keep_vars=True the caller gets the parameters themselves, for which nothing is gathered.
        if not keep_vars:
            with self._step.publishing():
                self._step.check_idle("state_dict()")

    def _after_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if self._keeps_vars:
            return
        if type(module)._save_to_state_dict is nn.Module._save_to_state_dict:
            # The default implementation writes these names only; a module's own may write any.
            names = [prefix + name for name in (*module._parameters, *module._buffers)]
        else:
            names = [name for name in state if name.startswith(prefix)]
        # Each parameter is gathered, in the order of the dict, which is equal on all ranks.
        with self._step.publishing():
            for name in names:
                value = state.get(name)
                if isinstance(value, LazyDetach):
                    state[name] = self._whole(name, value, state)
                elif isinstance(value, Tensor):
                    state[name] = value.detach().to("cpu", copy=True)

    def _whole(self, name: str, value: LazyDetach, state: dict[str, Any]) -> Tensor:
        """A whole copy. Tied names share one, as in the plain module."""
        link = link_of(value)
        assert link is not None
        managed = link.managed
        known = self._copies.get(managed.index)
        # The copy must be of this state dict: one of an earlier call may hold older values.
        is_of_this = state.get(self._first_names.get(managed.index, "")) is known
        if known is not None and is_of_this:
            return known
        whole = self._states.weights(managed.chunk).copies([managed])[managed.index]
        if managed.parameter in self._tied:
            self._copies[managed.index], self._first_names[managed.index] = whole, name
        return whole

    def _before_load(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        """Make torch copy into the parameters, which takes values to their masters, instead of replacing them."""
        # torch sets this for `load_state_dict(assign=True)`, which would put plain tensors in the parameters' place.
        metadata["assign_to_params_buffers"] = False
        errors: list[str] = rest[-1]
        with self._step.publishing():
            self._step.check_idle("load_state_dict()")
            # Whatever raises while torch copies into a parameter it notes as an error of that parameter, and goes on
            # with the next: also what this rank hears of another one. So all ranks meet before the first copy, and
            # hear there of a rank that could not read its file.
            if errors is not self._errors:
                self._errors = errors
                self._step.communicator.wait_for_all("load_state_dict()")
