"""Moving in: allocate homes and move the weights into them, chunk by chunk.

Each parameter's own memory is freed as soon as its values are in their home, so at no time is there more than the
homes so far plus one chunk, or one operator of a model that was built in a `ZeroInitContext`. Every move is recorded,
so that the weights can move out again if wrapping fails (`move_out.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gemini.access.gradient import own_grad, set_own_grad
from gemini.building.link import BuiltLink, built_link_of
from gemini.building.store import BuildStore
from gemini.chunks.chunk import Chunk, ManagedParameter
from gemini.chunks.placeholder import dense_stride, set_data, unguarded
from gemini.errors import UnsupportedError
from gemini.manager.masters import set_all_weights, set_weights
from gemini.memory.freed import Freed
from gemini.memory.memory import Memory
from gemini.memory.tier import MemoryTier
from gemini.placement.demand import Demand, Kind, Placement, Tier
from gemini.ranks.communicator import Communicator
from optim import HALF_DTYPES


@dataclass(frozen=True)
class Original:
    """How a parameter was before its values moved into a chunk."""

    dtype: torch.dtype
    device: torch.device
    gradient: Tensor | None  # of a backward before the model is wrapped
    store: BuildStore | None  # the store of the `ZeroInitContext` in which it was built
    built_name: str  # its name in that store


class Moves:
    """The moves so far. `originals` has the parameters, by index, whose values are only in their chunk's homes."""

    def __init__(self) -> None:
        self.originals: dict[int, Original] = {}
        self.received: set[int] = set()  # parameters, by index, that hold rank 0's values: membership only
        self.buffers: list[tuple[nn.Module, str, Tensor]] = []  # (owner, name, the buffer that was replaced)

    def note_buffer(self, owner: nn.Module, name: str, buffer: Tensor) -> None:
        """`buffer` is about to be replaced on the device."""
        self.buffers.append((owner, name, buffer))

    def note_received(self, indices: Iterable[int]) -> None:
        """These parameters hold rank 0's values from now on."""
        self.received.update(indices)

    def note_moved(self, originals: dict[int, Original]) -> None:
        """Only the homes have these parameters' values from now on."""
        self.originals |= originals

    def pop_original(self, index: int) -> Original:
        """How a moved parameter was; it has its values again."""
        return self.originals.pop(index)


def move_in(
    chunks: list[Chunk],
    placement: Placement,
    demand: Demand,
    communicator: Communicator,
    memory: Memory,
    moves: Moves,
) -> None:
    """Move rank 0's weights into every chunk's homes, and into masters that hold more than the weights. Collective.

    Raises BudgetError. Memory that only training needs is allocated when training begins: manager/training_state.py.
    """
    # Only weights that are given with more bits than their chunk has need a master now. Other masters are made from the
    # 16-bit weights when training begins.
    has_master = {chunk.index: any(managed.has_fractions for managed in chunk.parameters) for chunk in chunks}
    # Reserve all host memory at once: one exactly sized arena instead of one mapping per home.
    needed = 0
    for chunk, homes, its_demand in zip(chunks, placement.homes, demand.chunks, strict=True):
        for kind in (Kind.PARAM, *((Kind.MASTER,) if has_master[chunk.index] else ())):
            needed += its_demand.home_bytes[kind] if homes[kind] is Tier.HOST else 0
    memory.host.reserve(needed, "parameters and masters")
    freed = Freed()

    def take_home(chunk: Chunk, kind: Kind) -> None:
        tier = placement.homes[chunk.index][kind]
        chunk.allocate_home(kind, tier, memory, demand.chunks[chunk.index].home_bytes[kind])

    # Chunk by chunk: allocate the homes, fill them, and free the memory that the weights had.
    for chunk in chunks:
        # The parameter home of a chunk that keeps its slot is a part of that slot's payload: it takes no other memory.
        if chunk.index in placement.kept:
            chunk.keep_slot(memory.device)
        else:
            take_home(chunk, Kind.PARAM)
        if has_master[chunk.index]:
            take_home(chunk, Kind.MASTER)
        _fill(chunk, communicator, memory.device, moves)
        chunk.reside_at_home()
        # The weights' own memory is free by now, but malloc may keep it: see memory/freed.py.
        freed.note(chunk.payload_bytes)


@torch.no_grad()
def move_buffers_in(module: nn.Module, communicator: Communicator, device: MemoryTier, moves: Moves) -> None:
    """Move all buffers to the device, with rank 0's values. Collective."""
    moved: dict[Tensor, Tensor] = {}  # by the given buffer, which several modules may have
    for path, owner in module.named_modules():
        for leaf, buffer in list(owner._buffers.items()):
            if buffer is None:
                continue
            if buffer not in moved:
                on_device = buffer.to(device.device)
                if communicator.world_size > 1:
                    values = on_device.contiguous()
                    communicator.broadcast_(values, f"buffer {path}.{leaf}" if path else f"buffer {leaf}")
                    on_device = _with_values(on_device, values)
                moved[buffer] = on_device
            if moved[buffer] is not buffer:
                moves.note_buffer(owner, leaf, buffer)
                owner._buffers[leaf] = moved[buffer]


def _with_values(buffer: Tensor, values: Tensor) -> Tensor:
    """`buffer` with other values, in its own memory where that can hold them: other buffers may be views of it."""
    if dense_stride(buffer) == buffer.stride():
        return buffer.copy_(values)
    # Elements that are one in memory (`expand`) cannot be written together: write the first of each.
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in buffer.stride())
    buffer[once].copy_(values[once])
    # Rank 0's buffer may hold different values where this rank's has one element.
    return buffer if torch.equal(buffer, values) else values


def stores_of(links: Iterable[BuiltLink], ranks: tuple[int, ...]) -> list[BuildStore]:
    """Where the parameters are that were built in a `ZeroInitContext`, and have these links.

    Raises UnsupportedError if a store was made on other ranks than these.
    """
    # In order of the links, which all ranks have: releasing and closing the stores is collective.
    stores = list(dict.fromkeys(link.store for link in links))
    for built_on in (store.communicator.ranks for store in stores):
        if built_on != ranks:
            raise UnsupportedError(
                f"the model was built in a ZeroInitContext on ranks {built_on} and is wrapped on ranks {ranks}: "
                "call launch_from_torch() before the context, and give both the same process_group="
            )
    return stores


def close_empty(stores: list[BuildStore], communicator: Communicator) -> None:
    """Close the stores that no rank needs any more, which frees their process groups. Collective."""
    # A parameter outside of the wrapped module may still be in a store, on some rank. Only all ranks can close it.
    num_links = torch.tensor(
        [len(store.chunks.links()) for store in stores], dtype=torch.int64, device=communicator.device
    )
    # Ranks have agreed on the parameters that were built, so all of them skip the collective or none does.
    if stores:
        communicator.all_reduce_max_(num_links, "parameters left to build")
    for store, number in zip(stores, num_links.tolist(), strict=True):
        store.go_over(None)
        if number == 0:
            store.close()


def _fill(chunk: Chunk, communicator: Communicator, device: MemoryTier, moves: Moves) -> None:
    """Move weights into the chunk's homes: those that were built on shards, then the others. Collective.

    A store keeps its values until every rank has the whole chunk at home, so if a rank fails before that, no rank has
    dropped any of them. A rank that had would have to put the parameter back onto shards alone, which is collective.
    """
    links = [(managed, built_link_of(managed.parameter)) for managed in chunk.parameters]
    given = [managed for managed, link in links if link is None]
    built = [(managed, link) for managed, link in links if link is not None]
    # A rank without memory raises here. In the middle of a gather the other ranks would wait for it.
    if built:
        communicator.wait_for_all("room")
    for managed, link in built:
        # One by one, so that no more than the payload of one built operator is gathered beside the homes.
        with link.gathered([link]):
            set_weights(managed, managed.laid_out(link.whole()))
    if given:
        _fill_given(chunk, given, communicator, device, moves)
    if not built:
        return
    # Only when every rank has the whole chunk at home may any rank drop the values in the store. Noted before the wait:
    # a rank that has passed it drops its values at once, so from then on every rank must count the chunk as moved.
    moves.note_moved({managed.index: original_of(managed) for managed, _ in built})
    communicator.wait_for_all("chunk at home")
    let_go(managed for managed, _ in built)
    for managed, _ in built:
        set_data(managed.parameter, managed.placeholder)
        set_own_grad(managed.parameter, None)


def _fill_given(
    chunk: Chunk, given: list[ManagedParameter], communicator: Communicator, device: MemoryTier, moves: Moves
) -> None:
    """Move weights with memory of their own, from a payload that rank 0 broadcasts. Collective.

    After a failure the parameters whose memory was freed get memory again, with the values in the payload.
    """
    # A master holds more than a 16-bit weight, so the values travel in fp32 and are rounded at home.
    dtype = torch.float32 if chunk.dtype in HALF_DTYPES else chunk.dtype
    # Zeros, because `set_all_weights` copies the padding between parameters, too.
    payload = torch.zeros(chunk.numel, dtype=dtype, device=device.device)
    originals: dict[int, Original] = {}
    try:
        # Placeholders refuse to become a `.data` elsewhere: see [Note: Guarded placeholders].
        with unguarded():
            for managed in given:
                parameter = managed.parameter
                managed.view(payload).copy_(parameter.detach())
                # Noted before the memory is freed: after an error at any point every parameter without memory is in
                # `originals`.
                originals[managed.index] = original_of(managed)
                parameter.data = managed.placeholder
                set_own_grad(parameter, None)  # autograd would add the first gradient of the wrapped model to it
        if communicator.world_size > 1:
            communicator.broadcast_(payload, f"weights of chunk {chunk.index}")
            # If this rank alone fails below, `restore` leaves rank 0's values in the parameters, and they go home from
            # there: see [Note: Nothing is lost] in move_out.py.
            moves.note_received(originals)
        # A fine chunk has many small weights: one copy of them all is cheaper than a copy for each.
        if chunk.is_fine and len(given) == len(chunk.parameters):
            set_all_weights(chunk, payload)
        else:
            for managed in given:
                set_weights(managed, payload[managed.in_payload])
        moves.note_moved(originals)
    except BaseException:
        # `originals` has grown in the order of `given`.
        for managed in given[: len(originals)]:
            restore(managed, originals[managed.index], payload[managed.in_payload])
        raise


def original_of(managed: ManagedParameter) -> Original:
    """The record of a parameter that is about to move."""
    parameter, link = managed.parameter, built_link_of(managed.parameter)
    gradient = own_grad(parameter)
    if link is None:
        return Original(parameter.dtype, parameter.device, gradient, None, "")
    # The shard may rest on the host: the placeholder is on the device on which the user made the parameter.
    built = link.managed
    return Original(built.dtype, built.placeholder.device, gradient, link.store, built.name)


def let_go(members: Iterable[ManagedParameter]) -> None:
    """Remove parameters whose values have moved from the stores in which they were built, if any. Local."""
    by_chunk: dict[Chunk, list[BuiltLink]] = {}
    for managed in members:
        link = built_link_of(managed.parameter)
        if link is not None:
            by_chunk.setdefault(link.managed.chunk, []).append(link)
    for links in by_chunk.values():
        links[0].store.let_go(links)


def restore(managed: ManagedParameter, original: Original, values: Tensor) -> None:
    """Give the parameter memory of its own again, with `values`: (numel,), in the order of the payload."""
    # In the strides of before: a channels_last weight keeps its order in memory.
    own = torch.empty_strided(managed.shape, managed.stride, dtype=original.dtype, device=original.device)
    set_data(managed.parameter, own.copy_(managed.shaped(values)))
    set_own_grad(managed.parameter, original.gradient)
