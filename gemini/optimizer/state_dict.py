"""The optimizer's state as whole tensors, in torch.optim's format plus fp32 masters.

{"state": {number: {"step": ..., "exp_avg": whole tensor, ...}}, "param_groups": [...], "masters": {number: tensor}}

Numbers count parameters through the param groups, as torch does, so a plain optimizer's state dict loads here and
this one's (without "masters") loads there.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gemini.chunks.chunk import Chunk, ManagedParameter
from gemini.executor.executor import Executor
from gemini.executor.masters import whole_master, write_master
from gemini.model.link import link_of
from gemini.model.weights import gather_optimizer_state
from gemini.optimizer.chunk_state import ChunkOptimizerState
from gemini.placement.demand import Kind


def whole_optimizer_state(
    executor: Executor, states: Mapping[int, ChunkOptimizerState], groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """Collective."""
    executor.check_idle("optimizer.state_dict()")
    executor.binding.write_back_all()
    numbers = _numbers(groups)
    state: dict[int, dict[str, Any]] = {}
    masters: dict[int, Tensor] = {}
    with torch.no_grad():
        for chunk_state in states.values():
            chunk = chunk_state.chunk
            known = [m for m in chunk.parameters if m.index in numbers and m.requires_grad]
            names = executor.communicator.agree_on_names(sorted(chunk_state.flats))
            wholes = {n: gather_optimizer_state(executor, chunk, _flat(chunk_state, n)) for n in names}
            for managed in known:
                position = chunk.parameters.index(managed)
                scalars = chunk_state.scalars[position]
                if scalars is not None:
                    entry: dict[str, Any] = {name: _scalar(name, value) for name, value in scalars.items()}
                    entry |= {n: _view(wholes[n], managed).clone() for n in sorted(chunk_state.names(position))}
                    if entry:  # SGD without momentum keeps nothing
                        state[numbers[managed.index]] = entry
            master = whole_master(chunk)
            if master is not None:
                whole = gather_optimizer_state(executor, chunk, master)
                masters |= {numbers[managed.index]: _view(whole, managed).clone() for managed in known}
    packed = [
        {k: v for k, v in group.items() if k != "params"} | {"params": _members(group, numbers)} for group in groups
    ]
    return {"state": dict(sorted(state.items())), "param_groups": packed, "masters": dict(sorted(masters.items()))}


def load_optimizer_state(
    executor: Executor,
    states: Mapping[int, ChunkOptimizerState],
    groups: list[dict[str, Any]],
    saved: Mapping[str, Any],
) -> None:
    """Raises ValueError or KeyError before anything is changed."""
    executor.check_idle("optimizer.load_state_dict()")
    executor.settle_unfrozen()
    executor.binding.write_back_all()
    numbers = _numbers(groups)
    trained = [(state, m) for state in states.values() for m in state.chunk.parameters if m.requires_grad]
    by_number = {numbers[m.index]: (state, m) for state, m in trained if m.index in numbers}
    frozen = {numbers[m.index]: m.name for c in executor.chunks for m in c.parameters if m.index in numbers}
    frozen = {number: name for number, name in frozen.items() if number not in by_number}
    _check(groups, saved, by_number, frozen)
    left = [name for number, name in frozen.items() if number in saved["state"]]
    if left:
        warnings.warn(f"frozen, so their state was not loaded: {', '.join(left)}", stacklevel=4)
    for group, loaded in zip(groups, saved["param_groups"], strict=True):
        group.update({name: value for name, value in loaded.items() if name != "params"})
    for chunk_state in states.values():
        if chunk_state.chunk.lent:  # its weights are those of the masters until now
            executor.fetcher.take_back(chunk_state.chunk)
    with torch.no_grad():
        for number, (chunk_state, managed) in by_number.items():
            position = chunk_state.chunk.parameters.index(managed)
            entry = saved["state"].get(number)
            scalars: dict[str, Any] | None = None if entry is None else {}
            chunk_state.scalars[position] = scalars
            chunk_state.made[position] = ()
            for flat in chunk_state.flats.values():
                _write(chunk_state.chunk, managed, flat, None)
            if entry is not None and scalars is not None:
                for name, value in entry.items():
                    if isinstance(value, Tensor) and value.shape == managed.shape and name != "step":
                        if name not in chunk_state.flats:
                            chunk_state.take([name], executor.fetcher)
                        _write(chunk_state.chunk, managed, chunk_state.flats[name], value)
                        chunk_state.note_made({position: (name,)})
                    else:
                        scalars[name] = _unscalar(name, value, chunk_state)
        masters = saved.get("masters", {})
        for chunk_state in states.values():
            given = [(m, masters[n]) for n, (its, m) in by_number.items() if its is chunk_state and n in masters]
            if given and Kind.MASTER in chunk_state.chunk.homes:
                _load_masters(executor, chunk_state.chunk, given)


def _load_masters(executor: Executor, chunk: Chunk, given: list[tuple[ManagedParameter, Tensor]]) -> None:
    """Collective. A split master brings its upper half, the parameter itself."""
    if chunk.splits_master:
        executor.before_chunk_update(chunk)
    for managed, value in given:
        flat = _laid_out(value, managed, torch.float32)
        for piece in chunk.optim_pieces(managed):
            start = piece.payload_start - managed.offset
            write_master(chunk, piece.shard_start, flat[start : start + piece.numel])
    if chunk.splits_master:
        executor.after_chunk_update(chunk)
        if chunk.home_layout.world_size < chunk.optim_layout.world_size:
            executor.fetcher.spread(chunk)


def _check(
    groups: list[dict[str, Any]],
    saved: Mapping[str, Any],
    known: Mapping[int, tuple[ChunkOptimizerState, ManagedParameter]],
    frozen: Mapping[int, str],
) -> None:
    for key in ("state", "param_groups"):
        if key not in saved:
            raise ValueError(
                f"this is not an optimizer state dict: it has no {key!r} (found {sorted(map(str, saved))})"
            )
    sizes, loaded = [len(g["params"]) for g in groups], [len(g["params"]) for g in saved["param_groups"]]
    if sizes != loaded:
        raise ValueError(f"the state dict has param groups of {loaded} parameters, this optimizer of {sizes}")
    for part in ("state", "masters"):
        if not isinstance(saved.get(part, {}), Mapping):
            raise ValueError(f"{part!r} of an optimizer state dict must be a dict, found {type(saved[part]).__name__}")
        for number, entry in saved.get(part, {}).items():
            if number in frozen:
                continue
            if number not in known:
                raise ValueError(f"{part} of parameter {number}: this optimizer has no such parameter")
            chunk_state, managed = known[number]
            if part == "state" and not isinstance(entry, Mapping):
                raise ValueError(
                    f"state of parameter {number} ({managed.name}) is a {type(entry).__name__}, not a dict"
                )
            tensors = entry.items() if part == "state" else [("master", entry)]
            for name, value in tensors:
                if name == "step" and (isinstance(value, str) or not _is_number(value)):
                    raise ValueError(f"step of parameter {number} ({managed.name}) is not a number: {value!r}")
                if (name == "master" or name in chunk_state.flats) and not isinstance(value, Tensor):
                    raise ValueError(
                        f"{name} of parameter {number} ({managed.name}) is a {type(value).__name__}, not a tensor"
                    )
                if isinstance(value, Tensor) and value.dim() and value.shape != managed.shape:
                    raise ValueError(
                        f"{name} of parameter {number} ({managed.name}) has shape {tuple(value.shape)}, expected "
                        f"{tuple(managed.shape)}"
                    )


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def _numbers(groups: list[dict[str, Any]]) -> dict[int, int]:
    """Parameter index in the model -> its number in torch's state dict."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    return {link.managed.index: n for n, p in enumerate(parameters) if (link := link_of(p)) is not None}


def _members(group: dict[str, Any], numbers: dict[int, int]) -> list[int]:
    return [numbers[link.managed.index] for p in group["params"] if (link := link_of(p)) is not None]


def _flat(state: ChunkOptimizerState, name: str) -> Tensor:
    """The rank's part of a state; zeros if only other ranks have it so far."""
    flat = state.flats.get(name)
    return torch.zeros(state.chunk.optim_numel, dtype=state.dtype) if flat is None else flat


def _view(whole: Tensor, managed: ManagedParameter) -> Tensor:
    return torch.as_strided(whole, managed.shape, managed.stride, managed.offset)


def _write(chunk: Chunk, managed: ManagedParameter, flat: Tensor, value: Tensor | None) -> None:
    """flat's elements of `managed` <- `value` (None: zeros)."""
    if value is not None:
        value = _laid_out(value, managed, flat.dtype)
    for piece in chunk.optim_pieces(managed):
        target = flat[piece.shard_start : piece.shard_start + piece.numel]
        if value is None:
            target.zero_()
        else:
            start = piece.payload_start - managed.offset
            target.copy_(value[start : start + piece.numel])


def _laid_out(value: Tensor, managed: ManagedParameter, dtype: torch.dtype) -> Tensor:
    """(numel,) on the CPU: the elements in the order in which they lie in the payload."""
    laid_out = torch.empty_strided(managed.shape, managed.stride, dtype=dtype).copy_(value)
    return torch.as_strided(laid_out, (managed.numel,), (1,))


def _scalar(name: str, value: Any) -> Any:
    """`step` as torch writes it: a 0-dim fp32 tensor."""
    if name == "step" and not isinstance(value, Tensor):
        return torch.tensor(float(value), dtype=torch.float32)
    return value.clone() if isinstance(value, Tensor) else value


def _unscalar(name: str, value: Any, state: ChunkOptimizerState) -> Any:
    """As this optimizer's update keeps it: a count where that is a number here, else as given."""
    if name == "step" and state.counts_steps:
        return int(value)
    return value.clone() if isinstance(value, Tensor) else value
