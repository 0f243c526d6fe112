"""Whole tensors in and out: state_dict and load_state_dict.

A state dict is that of the plain module: its keys, shapes and values, as copies in host memory. It is whole, or an
error.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as _EXTRA_STATE
from torch.nn.modules.module import _IncompatibleKeys

from gemini.access.link import link_of
from gemini.access.states import States, take_masters
from gemini.access.trainability import Trainability

_ALIKE = "All ranks must load the same keys"


def whole_state_dict(module: nn.Module, states: States, rank0_only: bool, prefix: str) -> OrderedDict[str, Any]:
    """Copies of all parameters and buffers under the plain module's names, on the CPU. Collective."""
    step = states.step
    step.check_idle("state_dict()")
    # keep_vars gives the parameters themselves, which have links, and the hooks of state_hooks.py let them pass.
    entries: Mapping[str, Any] = nn.Module.state_dict(module, prefix=prefix, keep_vars=True)
    links = {name: link_of(value) for name, value in entries.items() if isinstance(value, Tensor)}
    keep = not rank0_only or step.communicator.rank == 0
    wanted = {link.managed.chunk.index for link in links.values() if link is not None}
    # By parameter index: tied names share one copy, as in the plain module.
    wholes: dict[int, Tensor] = {}
    with torch.no_grad():
        for index in sorted(wanted):
            chunk = step.chunks[index]
            # Each chunk is gathered once, in one order on all ranks, also by ranks that keep nothing.
            wholes |= states.weights(chunk).copies(chunk.parameters if keep else ())
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
        if not isinstance(value, Tensor):
            problems.append(f"{name} is a {type(value).__name__}, not a tensor")
        elif value.is_meta:
            problems.append(f"{name} is on the device meta, without values")
        elif value.shape != entry.shape:
            problems.append(f"{name} has shape {tuple(value.shape)}, the model has {tuple(entry.shape)}")
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
                states.full_precision(managed.chunk).set_whole(managed, managed.laid_out(value.detach()))
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
