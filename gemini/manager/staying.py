"""Chunks that stay: gathered at the root's forward, all together, and used like chunks at home until the next update.

[Note: Staying chunks] With several ranks at stage 3 a chunk may keep a slot of its own. It then needs only one gather
after each update; the machinery around its operators (hooks, pins, handles, parameters that become plain and fetch
themselves again) only decides when. For operators with tiny parameters that machinery costs more than the gather: some
15 us a parameter, in which gloo moves 16 KiB. So if every chunk is at home, or keeps a slot and holds many small
parameters, the root gathers everything that updates have made stale. Then nothing leaves before the next update, and
[Note: Resident models] applies. Parameters stay views of the slot for good. An update raises their version counters, as
it does for a parameter at home. So autograd refuses a graph from before the update, and a view that a user keeps shows
the new weights after the next gather, as in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemini.chunks.chunk import Chunk
from gemini.chunks.param_state import ParamState
from gemini.manager.params import ParamStore


def mark_staying(chunks: Sequence[Chunk]) -> bool:
    """Decide which chunks stay. True if no payload leaves between forward and update; equal on all ranks."""
    all_stay = all(_is_at_home(chunk) or _may_stay(chunk) for chunk in chunks)
    for chunk in chunks:
        # All or nothing: if one chunk can leave, the operators' hooks stay on for all.
        chunk.decide_stay(all_stay and not _is_at_home(chunk))
    return all_stay


def make_plain(chunks: Sequence[Chunk], params: ParamStore) -> None:
    """Gather what updates have made stale, and make all parameters plain. Collective."""
    stale = [chunk for chunk in chunks if chunk.stays and chunk.state is ParamState.RELEASED]
    if stale:
        params.fetch_all(stale)
    for chunk in chunks:
        params.binding.bind(chunk)


def _is_at_home(chunk: Chunk) -> bool:
    """Whether the chunk is resident for good: a home that may be lent is not."""
    # Not `lends_home`, which is known only once gradients have their homes: training takes these later.
    return chunk.state is ParamState.RESIDENT and not (chunk.may_lend_home and chunk.trainable)


def _may_stay(chunk: Chunk) -> bool:
    # A home that may be lent leaves its slot at a reduction: see [Note: Lent payloads] in grad_homes.py.
    return chunk.is_fine and chunk.own_slot is not None and not chunk.may_lend_home
