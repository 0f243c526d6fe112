"""Whole tensors in and out: state_dict and load_state_dict.

A state dict is the plain module's: its keys, shapes and values, as copies in host memory. It is whole or an error.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as _EXTRA_STATE
from torch.nn.modules.module import _IncompatibleKeys

from gemini.chunks.chunk import Chunk, ManagedParameter
from gemini.executor.executor import Executor
from gemini.executor.masters import round_as_master, set_master
from gemini.model.freezing import Freezing
from gemini.model.link import link_of
from gemini.placement.demand import Kind


def whole_state_dict(module: nn.Module, executor: Executor, rank0_only: bool, prefix: str) -> OrderedDict[str, Any]:
    """Copies of all parameters and buffers under the plain module's names, on the CPU. Collective."""
    executor.check_idle("state_dict()")
    entries: Mapping[str, Any] = nn.Module.state_dict(module, prefix=prefix, keep_vars=True)
    links = {name: link_of(value) for name, value in entries.items() if isinstance(value, Tensor)}
    keep = not rank0_only or executor.communicator.rank == 0
    wanted = {link.managed.chunk.index for link in links.values() if link is not None}
    # by parameter index: tied names share one copy, as in the plain module
    wholes = whole_parameters(executor, [chunk for chunk in executor.chunks if chunk.index in wanted], keep)
    if not keep:
        return OrderedDict()
    result: OrderedDict[str, Any] = OrderedDict()
    _take_metadata(result, entries)
    for name, value in entries.items():
        link = links.get(name)
        if link is not None:
            result[name] = wholes[link.managed.index]
        elif isinstance(value, Tensor):
            result[name] = value.detach().to("cpu", copy=True)
        else:
            result[name] = value
    return result


def _take_metadata(to: OrderedDict[str, Any], entries: Mapping[str, Any]) -> None:
    """Versions of modules, by which those know what a state dict means that they load."""
    vars(to)["_metadata"] = vars(entries)["_metadata"]


@torch.no_grad()
def whole_parameters(executor: Executor, chunks: Iterable[Chunk], keep: bool = True) -> dict[int, Tensor]:
    """CPU copies of the chunks' parameters by index; none on a rank that does not `keep` them. Collective."""
    wholes: dict[int, Tensor] = {}
    for chunk in chunks:
        payload = executor.fetch(chunk)
        if keep:
            wholes |= _copies(chunk, payload)
    return wholes


@torch.no_grad()
def whole_parameter(executor: Executor, managed: ManagedParameter) -> Tensor:
    """A CPU copy of one parameter. Collective."""
    payload = executor.fetch(managed.chunk)
    return managed.view(payload).to("cpu", copy=True)


def _copies(chunk: Chunk, payload: Tensor) -> dict[int, Tensor]:
    """Copies of a chunk's parameters by index. A function of its own: no view of the slot outlives it."""
    views = chunk.views_of(payload)
    return {m.index: view.to("cpu", copy=True) for m, view in zip(chunk.parameters, views, strict=True)}


def load_whole_state_dict(
    module: nn.Module, executor: Executor, freezing: Freezing, state: Mapping[str, Any], strict: bool
) -> _IncompatibleKeys:
    """Set parameters, fp32 masters and buffers from whole tensors, equal on all ranks. Collective.

    Raises RuntimeError with every missing, unexpected and wrong-shaped key before anything is changed.
    """
    executor.check_idle("load_state_dict()")
    freezing.settle_unfrozen()
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state_dict() takes a dict of tensors, found {type(state).__name__}")
    entries: Mapping[str, Any] = nn.Module.state_dict(module, keep_vars=True)
    missing = [name for name in entries if name not in state]
    unexpected = [name for name in state if name not in entries]
    problems = []
    if strict and missing:
        problems.append(f"missing keys: {', '.join(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected keys: {', '.join(unexpected)}")
    for name in entries:
        if name in state and isinstance(entries[name], Tensor):
            value = state[name]
            if not isinstance(value, Tensor):
                problems.append(f"{name} is a {type(value).__name__}, not a tensor")
            elif value.shape != entries[name].shape:
                problems.append(f"{name} has shape {tuple(value.shape)}, the model has {tuple(entries[name].shape)}")
    if problems:
        raise RuntimeError("load_state_dict() changed nothing: " + "; ".join(problems))
    values: dict[int, Tensor] = {}
    executor.binding.write_back_all()
    with torch.no_grad():
        for name, entry in entries.items():
            if name not in state or not isinstance(entry, Tensor):
                continue
            link = link_of(entry)
            if link is not None:
                values[link.managed.index] = state[name]
            else:
                entry.copy_(state[name])
        for chunk in executor.chunks:
            given = {m.index: values[m.index] for m in chunk.parameters if m.index in values}
            if given:
                _load_chunk(executor, chunk, given)
    for path, part in module.named_modules():
        extra = f"{path}.{_EXTRA_STATE}" if path else _EXTRA_STATE
        if extra in entries and extra in state:
            part.set_extra_state(state[extra])
    return _IncompatibleKeys(missing, unexpected)


def load_part(
    module: nn.Module,
    executor: Executor,
    freezing: Freezing,
    state: dict[str, Any],
    prefix: str,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """`load_whole_state_dict` of the keys that begin with `prefix`, as a part of a module that is not sharded."""
    mine = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
    try:
        result = load_whole_state_dict(module, executor, freezing, mine, strict=False)
    except RuntimeError as error:
        errors.append(str(error))
    else:
        missing += [prefix + key for key in result.missing_keys]
        unexpected += [prefix + key for key in result.unexpected_keys]
    # torch goes on to the wrapped module, whose names have one part more: there it finds what the module has already
    for name, value in nn.Module.state_dict(module, keep_vars=True).items():
        state[f"{prefix}module.{name}"] = value


def _load_chunk(executor: Executor, chunk: Chunk, given: dict[int, Tensor]) -> None:
    payload = executor.fetch(chunk)
    binding = executor.binding
    for managed in chunk.parameters:
        if managed.index not in given:
            continue
        value = given[managed.index].detach()
        binding.before_write(managed)
        payload[managed.in_payload].copy_(round_as_master(managed.laid_out(value), chunk.dtype))
        binding.write_parameter(managed, chunk.region())  # a master that rounds to this weight already stays as it is
        if Kind.MASTER in chunk.homes and value.dtype is not chunk.dtype and managed.owns_master:
            set_master(managed, value)
    binding.rebase_versions(chunk)
    chunk.num_updates += 1


def gather_optimizer_state(executor: Executor, chunk: Chunk, flat: Tensor) -> Tensor:
    """(numel,) on the CPU: the whole of something that every rank holds `optim_numel` elements of. Collective."""
    if chunk.optim_layout.world_size == 1:
        return flat.to("cpu", copy=True)
    device = executor.fetcher.device.device
    whole = torch.empty(chunk.numel, dtype=flat.dtype, device=device)
    executor.communicator.all_gather(whole, flat.to(device), chunk.layout, chunk.index)
    return whole.cpu()
