"""Whole weights of which every rank has updated a part, as at stages 1 and 2."""

from __future__ import annotations

import torch

from gemini.chunks.chunk import Chunk
from gemini.executor.step import Step
from gemini.memory.transfer import wait_on_stream
from gemini.placement.demand import Kind, Tier


def spread(step: Step, chunk: Chunk) -> None:
    """Whole weights of which every rank has updated its slices become whole again. Collective."""
    params, home = step.params, chunk.homes[Kind.PARAM]
    with torch.no_grad():
        if home.tier is Tier.DEVICE:
            wait_on_stream(home)
            params.communicator.all_gather(home.flat, None, chunk.layout, chunk.index)
            return
        payload = step.fetch(chunk)
        params.communicator.all_gather(payload, None, chunk.layout, chunk.index)
        params.memory.transfer.copy(home, chunk.region())
        wait_on_stream(chunk.region())
