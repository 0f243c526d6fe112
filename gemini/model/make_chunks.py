"""Makes a model's chunks from the facts in its plan. Only the placeholders' few bytes are allocated."""

from __future__ import annotations

import functools

import torch
from torch import nn

from gemini.chunks.chunk import Chunk
from gemini.chunks.placeholder import placeholder
from gemini.placement.plan import Plan
from gemini.placement.scratch import whole_exchange_bytes
from gemini.settings import torch_dtype
from optim import HALF_DTYPES


def make_chunks(plan: Plan, by_name: dict[str, nn.Parameter], device: torch.device, rank: int) -> list[Chunk]:
    """The plan's chunks, with the place of each parameter in them, and no homes yet. Local."""
    uses = enumerate(plan.spec.first_uses(), start=1)  # position 0 is the model itself
    first_operator = {weight.name: place for place, weights in uses for weight in weights}
    chunks = []
    # Parameters of one shape and dtype share a placeholder.
    placeholder_of = functools.cache(placeholder)
    index = 0
    for chunk_facts in plan.packing.chunks:
        dtypes = chunk_facts.dtypes
        # Packing puts trained and frozen weights into different chunks, so the first one answers for all.
        kind, trainable = torch_dtype(dtypes.weight), by_name[chunk_facts.names[0]].requires_grad
        chunk = Chunk(
            index=chunk_facts.index,
            dtype=kind,
            trainable=trainable,
            layout=chunk_facts.layout,
            oversize=chunk_facts.oversize,
            rank=rank,
            home_layout=chunk_facts.home_layout,
            optim_layout=chunk_facts.optim_layout,
            travel_dtype=torch_dtype(dtypes.travel),
            gradient_dtype=torch_dtype(dtypes.rest),
            sum_dtype=torch_dtype(dtypes.sums),
            exchange_bytes=whole_exchange_bytes(chunk_facts, plan.settings.stage),
            widens=dtypes.widens,
            narrows=dtypes.narrows,
            splits_master=chunk_facts.splits_master,
            may_lend_home=chunk_facts.may_lend_home,
            is_chosen=chunk_facts.is_chosen,
            is_fine=chunk_facts.is_fine,
        )
        for name, offset in zip(chunk_facts.names, chunk_facts.offsets, strict=True):
            parameter = by_name[name]
            shown = placeholder_of(kind, device, parameter.shape)
            # `index` counts through all chunks: it numbers the parameters of the model.
            managed = chunk.manage(parameter, name, index, offset, first_operator[name], shown)
            # The given weight has more bits than the chunk's 16: the master must start from it.
            if trainable and kind in HALF_DTYPES and parameter.dtype is not kind:
                managed.note_fractions()
            chunk.hold(parameter)
            index += 1
        chunks.append(chunk)
    return chunks
