"""The optimizer's state as whole tensors, in torch.optim's format plus fp32 masters.

{"state": {number: {"step": ..., "exp_avg": whole tensor, ...}}, "param_groups": [...], "masters": {number: tensor}}

Numbers count parameters through the param groups, as torch does, so a plain optimizer's state dict loads here
(load_state.py) and this one's (without "masters") loads there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor

from gemini.access.link import link_of
from gemini.access.states import States
from gemini.chunks.chunk import ManagedParameter
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.chunk_state import ChunkOptimizerState
from gemini.optimizer.chunk_states import ChunkStates
from gemini.placement.demand import Kind
from gemini.ranks.communicator import Communicator


def whole_optimizer_state(
    model: ShardedModel, states: ChunkStates, groups: list[dict[str, Any]], rank0_only: bool = False
) -> dict[str, Any]:
    """Whole copies of the state in host memory, on all ranks or on rank 0 only. Collective.

    With `rank0_only` the other ranks take part in the collectives and keep nothing.
    """
    step, parts = model.chunk_manager.step, States(model.chunk_manager)
    keep = not rank0_only or step.communicator.rank == 0
    step.check_idle("optimizer.state_dict()")
    numbers = numbers_of(groups)
    state: dict[int, dict[str, Any]] = {}
    masters: dict[int, Tensor] = {}
    names = names_by_chunk(step.communicator, states)
    with torch.no_grad():
        for chunk in step.chunks:
            known = [managed for managed in chunk.parameters if managed.index in numbers]
            if states.has(chunk):
                entries = _whole_entries(parts, states.by_chunk[chunk.index], names[chunk.index], known if keep else ())
                state |= {numbers[index]: entry for index, entry in entries.items()}
            if Kind.MASTER in chunk.homes:
                mastered = [managed for managed in known if managed.owns_master]
                copies = parts.full_precision(chunk).copies(mastered if keep else ())
                masters |= {numbers[index]: master for index, master in copies.items()}
    if not keep:
        return {}
    counting = count()
    packed = [{**group, "params": list(islice(counting, len(group["params"])))} for group in groups]
    for group in packed:
        if "adamw_mode" in group:  # by which torch's Adam tells whether the state is AdamW's
            group["decoupled_weight_decay"] = group["adamw_mode"]
    return {"state": dict(sorted(state.items())), "param_groups": packed, "masters": dict(sorted(masters.items()))}


def names_by_chunk(communicator: Communicator, states: ChunkStates) -> dict[int, list[str]]:
    """The flat states of each chunk that exist on any rank, in sorted order. Collective."""
    # A torch optimizer creates states lazily, so ranks may have different ones, and gathers need one order.
    made = [f"{index} {name}" for index, state in states.by_chunk.items() for name in state.flats]
    found: dict[int, list[str]] = defaultdict(list)
    for words in communicator.agree_on_names(made):
        index, _, name = words.partition(" ")
        found[int(index)].append(name)
    return found


def _whole_entries(
    states: States, chunk_state: ChunkOptimizerState, names: Sequence[str], known: Sequence[ManagedParameter]
) -> dict[int, dict[str, Any]]:
    """The entries of one chunk's parameters, by parameter index. Collective."""
    chunk, scalars = chunk_state.chunk, chunk_state.scalars
    entries = {
        managed.index: {name: scalar_of(name, value) for name, value in its.items()}
        for managed in known
        if (its := scalars[managed.position]) is not None
    }
    for name in names:
        wanted = [m for m in known if m.index in entries and name in chunk_state.names(m.position)]
        for index, copy in states.of_optimizer(chunk, name).copies(wanted).items():
            entries[index][name] = copy
    return {index: entry for index, entry in entries.items() if entry}  # SGD without momentum keeps nothing


def numbers_of(groups: list[dict[str, Any]]) -> dict[int, int]:
    """Map each parameter's index in the model to its number in torch's state dict."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    return {link.managed.index: n for n, p in enumerate(parameters) if (link := link_of(p)) is not None}


def scalar_of(name: str, value: Any) -> Any:
    """`step` as torch writes it: a 0-dim fp32 tensor."""
    if name == "step" and not isinstance(value, Tensor):
        return torch.tensor(float(value), dtype=torch.float32, device="cpu")
    return value.clone() if isinstance(value, Tensor) else value
