"""The errors for a chunk that gets no slot."""

from __future__ import annotations

from collections.abc import Sequence

from gemini.chunks.chunk import Chunk
from gemini.errors import SlotError
from gemini.memory.slot import SlotPool


def slot_is_held(where: str, what: str, budget_bytes: int | None) -> SlotError:
    """The error for memory that a chunk must leave while a view keeps it.

    what: which chunk must leave, and for what.
    """
    place = "the memory that the device has left" if budget_bytes is None else f"{budget_bytes} bytes"
    more = "free memory there" if budget_bytes is None else "allow more with model_data_memory= or device_memory="
    return SlotError(
        f"{where}: {what}, but a view of one of its parameters is still alive, and there is no spare slot "
        f"in {place}. Do not keep views of parameters (or .data of them) beyond their operator, or {more}"
    )


def slots_are_in_use(where: str, chunk: Chunk, pool: SlotPool, chunks: Sequence[Chunk], has_budget: bool) -> SlotError:
    """The error for a pool all of whose slots are in use at this moment."""
    users = "; ".join(f"chunk {s.chunk} ({chunks[s.chunk].names()})" for s in pool.slots if s.chunk is not None)
    if has_budget:
        more = f"Allow {pool.num_bytes} bytes more with model_data_memory= or device_memory="
    # A built-in policy gives every chunk a slot if nothing limits model data: this is the user's own policy.
    else:
        more = "Nothing limits model data here: let place() of tensor_placement_policy= give more num_slots"
    return SlotError(
        f"{where} needs chunk {chunk.index} ({chunk.names()}), but all {len(pool.slots)} slots of "
        f"{pool.num_bytes} bytes are in use at this moment by {users}. {more}, or make chunk_size= smaller"
    )
