"""Whole weights in state dicts, out and in."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as _EXTRA_STATE
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils.hooks import RemovableHandle

from gemini.access.link import link_of
from gemini.access.released import LazyDetach
from gemini.access.states import States, take_masters
from gemini.replan.trainability import Trainability

# -- Whole tensors in and out: state_dict and load_state_dict.
#
# A state dict is that of the plain module: its keys, shapes and values, as copies in host memory. It is whole, or an
# error.


_ALIKE = "All ranks must load the same keys"


def whole_state_dict(module: nn.Module, states: States, rank0_only: bool, prefix: str) -> OrderedDict[str, Any]:
    """Copies of all parameters and buffers under the plain module's names, on the CPU. Collective.

    Wholes; inside `model.sharded_state_dicts()` `DTensor`s of parameters.
    """
    step, shards = states.step, states.manager.row_shards
    step.check_idle("state_dict()")
    refuse_rank0_only(states, rank0_only)
    # keep_vars gives the parameters themselves, which have links, and the hooks below let them pass.
    entries: Mapping[str, Any] = nn.Module.state_dict(module, prefix=prefix, keep_vars=True)
    links = {name: link_of(value) for name, value in entries.items() if isinstance(value, Tensor)}
    # A rank with another part of the model keeps its parts until rank 0 has joined them.
    keep = not rank0_only or step.communicator.rank == 0
    wanted = {link.managed.chunk.index for link in links.values() if link is not None}
    # By parameter index: tied names share one copy, as in the plain module.
    wholes: dict[int, Tensor] = {}
    with torch.no_grad():
        for index in sorted(wanted):
            chunk = step.chunks[index]
            # Each chunk is gathered once, in one order on all ranks, also by ranks that keep nothing.
            wholes |= states.saved_weights(chunk, chunk.parameters if keep else ())
        # Not chunk by chunk: ranks with other parts of the model may have other chunks. All have these names.
        for managed in dict.fromkeys(each.managed for each in links.values() if each is not None) if keep else ():
            if managed.part is not None and shards is None:
                wholes[managed.index] = managed.part.whole(wholes[managed.index])
    keep = not rank0_only or step.communicator.everyone.rank == 0
    result: OrderedDict[str, Any] = OrderedDict()
    if not keep:
        return result
    # Versions, by which modules know which format they load.
    vars(result)["_metadata"] = vars(entries)["_metadata"]
    for name, value in entries.items():
        link = links.get(name)
        if link is not None:
            value = wholes[link.managed.index]
        elif isinstance(value, Tensor):
            value = value.detach().to("cpu", copy=True)
        result[name] = value
    return result


def refuse_rank0_only(states: States, rank0_only: bool) -> None:
    """Raises ValueError where each rank keeps rows of its own, and rank 0 is to keep all. Local."""
    if rank0_only and states.manager.row_shards is not None:
        raise ValueError(
            "rank0_only=True inside sharded_state_dicts(), where each rank keeps its rows: leave one of the two out"
        )


def load_whole_state_dict(
    module: nn.Module, states: States, trainability: Trainability, state: Mapping[str, Any], strict: bool
) -> _IncompatibleKeys:
    """Set parameters, fp32 masters and buffers from whole tensors, equal on all ranks. Collective.

    Raises RuntimeError with every missing, unexpected and wrong-shaped key before anything is changed.
    """
    step = states.step
    step.check_idle("load_state_dict()")
    # A parameter that was unfrozen since the last forward gets its master before it is set.
    trainability.apply_unfrozen()
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state_dict() takes a dict of tensors, found {type(state).__name__}")
    entries: Mapping[str, Any] = nn.Module.state_dict(module, keep_vars=True)
    missing = [name for name in entries if name not in state]
    unexpected = [name for name in state if name not in entries]
    # Collect every problem before anything is changed.
    problems = []
    if strict and missing:
        problems.append(f"missing keys: {', '.join(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected keys: {', '.join(unexpected)}")
    given = {
        name: (entry, state[name]) for name, entry in entries.items() if isinstance(entry, Tensor) and name in state
    }
    for name, (entry, value) in given.items():
        link = link_of(entry)
        shape = entry.shape if link is None else link.managed.whole_shape
        if not isinstance(value, Tensor):
            problems.append(f"{name} is a {type(value).__name__}, not a tensor")
        elif value.is_meta:
            problems.append(f"{name} is on the device meta, without values")
        elif value.shape != shape:
            problems.append(f"{name} has shape {tuple(value.shape)}, the model has {tuple(shape)}")
    if problems:
        also = (
            ". model.module.load_state_dict() also runs what modules do to their keys when they load" if missing else ""
        )
        raise RuntimeError("load_state_dict() changed nothing: " + "; ".join(problems) + also)
    # Ranks that load different keys would have different weights from here on.
    step.communicator.agree("\n".join(sorted(map(str, state))).encode(), "the keys of load_state_dict()", remedy=_ALIKE)
    links = [(link_of(entry), value) for entry, value in given.values()]
    # Memory first: a lack of it must not leave the model half loaded.
    with step.publishing(), torch.no_grad():
        take_masters(step, ((link.managed, value) for link, value in links if link is not None))
    with torch.no_grad():
        for entry, value in given.values():
            link = link_of(entry)
            if link is None:
                entry.copy_(value)
            else:
                managed = link.managed
                value = managed.own(value.detach())
                states.full_precision(managed.chunk).set_whole(managed, managed.laid_out(value))
    for path, part in module.named_modules():
        extra = f"{path}.{_EXTRA_STATE}" if path else _EXTRA_STATE
        if extra in entries and extra in state:
            part.set_extra_state(state[extra])
    return _IncompatibleKeys(missing, unexpected)


def load_part(
    module: nn.Module,
    states: States,
    trainability: Trainability,
    state: dict[str, Any],
    prefix: str,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Load the keys with `prefix`, as torch loads a module that contains the model. See `load_whole_state_dict`."""
    own_entries = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
    try:
        # torch decides itself, with the `strict` of its caller, what missing and unexpected keys lead to.
        result = load_whole_state_dict(module, states, trainability, own_entries, strict=False)
    # torch collects the errors of all parts and raises them together.
    except RuntimeError as error:
        errors.append(str(error))
    else:
        missing += [prefix + key for key in result.missing_keys]
        unexpected += [prefix + key for key in result.unexpected_keys]
    # torch will now descend into `self.module` and look for '<prefix>module.<name>'. Put the current values there, so
    # that it finds nothing missing.
    for name, value in nn.Module.state_dict(module, keep_vars=True).items():
        state[f"{prefix}module.{name}"] = value


# -- State dicts of the wrapped module itself, or of any part of it: taken and loaded.
#
# Hugging Face's `save_pretrained()`, peft and torch.distributed.checkpoint call `state_dict()` of modules, not of the
# `ShardedModel`. torch asks every module for its own part, so a hook on each module that owns parameters or buffers
# puts whole copies in host memory into that part. With several ranks both are collective: all ranks do them alike.


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
        # What a load has of the last module, in whose place there are the values that the data ranks have of it: whole
        # tensors of all modules at once may not fit.
        self._given: dict[str, Tensor] = {}
        self._loading: dict[str, Any] | None = None
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
                handles.append(module.register_load_state_dict_post_hook(self._after_load))
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
        whole = self._states.saved_weight(managed)
        if managed.part is not None and self._states.manager.row_shards is None:
            whole = managed.part.whole(whole)
        if managed.parameter in self._tied:
            self._copies[managed.index], self._first_names[managed.index] = whole, name
        return whole

    def _after_load(self, module: nn.Module, keys: Any) -> None:
        self._give_back()

    def _give_back(self) -> None:
        """Put what a load was given back into its dict. torch has copied a module's values before the next one's."""
        if self._loading is not None:
            self._loading.update(self._given)
        self._loading, self._given = None, {}

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
        self._give_back()
        self._loading = state
        for name, parameter in module._parameters.items():
            link, value = None if parameter is None else link_of(parameter), state.get(prefix + name)
            if link is not None and isinstance(value, Tensor) and value.shape == link.managed.whole_shape:
                self._given[prefix + name] = value
                state[prefix + name] = link.managed.own(value.detach())
