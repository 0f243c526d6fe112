"""A module becomes a sharded one: chunks are made, parameters move in, and out again if that fails."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gemini.access.parameter_link import any_link_of, own_grad, set_own_grad
from gemini.access.released import ReleasedParameter
from gemini.building.store import BuildStore, BuiltLink, built_link_of
from gemini.errors import BudgetError, GeminiError, RankLostError, UnsupportedError
from gemini.memory.arena import Freed
from gemini.memory.disk import DiskTier
from gemini.memory.memory import RankMemory, choose_tiers
from gemini.memory.tier import MemoryTier
from gemini.memory.transfer import ready
from gemini.model.operators import (
    InputCasting,
    buffers_in_words,
    describe,
    find_operators,
    input_casting,
    model_spec,
    weights_of,
)
from gemini.model.tensor_parallel import LocalParameters
from gemini.monitor.device import DeviceSource, source_of
from gemini.monitor.live import MemoryMonitor
from gemini.monitor.readings import share_of_host
from gemini.placement.budget import FreeBytes
from gemini.placement.demand import Demand, Kind, Placement, Tier
from gemini.placement.needs import Packed, whole_exchange_bytes
from gemini.placement.plan import Plan
from gemini.placement.policy import PLACE_ALIKE, placement_in_words
from gemini.placement.search import plan_first
from gemini.progress import progress
from gemini.ranks.communicator import Communicator, StepPosition
from gemini.ranks.mesh import RankMesh
from gemini.ranks.parts import TensorPart
from gemini.runtime.binding import full_precision, set_all_weights, set_weights
from gemini.runtime.chunk import Chunk, ManagedParameter, dense_stride, placeholder, set_data, unguarded
from gemini.runtime.manager import ChunkManager
from gemini.runtime.recovery import clear_our_frames
from gemini.settings import Settings, torch_dtype
from optim import HALF_DTYPES

# -- The free memory of the machine when a model is wrapped, for budgets that the user did not give.
#
# Live readings differ between ranks, because other processes allocate and free meanwhile, and plans made from them
# would differ too. So ranks agree on the least reading of each kind before they plan.


_UNBOUNDED = 2**62  # a reading of a device that has no bound


def read_free(settings: Settings, own: tuple[int, int], communicator: Communicator, device: DeviceSource) -> FreeBytes:
    """The free bytes of each tier for which `settings` name no budget: the least over all ranks. Collective.

    own: bytes on the device and on the host that the model already has or will give back, which count as free.
    Raises nothing of its own. Ranks must have agreed on `settings` before.
    """
    # Ranks agreed on `settings`, so all of them skip the collective or none does.
    needs_device = settings.model_data_memory is None
    if not needs_device and settings.host_memory is not None:
        return FreeBytes()
    monitor = MemoryMonitor(device)
    free = monitor.read_device().available_bytes if needs_device else None
    # A rank whose device has no bound must not lower the least of the others.
    on_device = _UNBOUNDED if free is None else free + own[0]
    # Every rank of a host reads the same free memory, so each counts its share.
    on_host = share_of_host(monitor.read_host().available_bytes) + own[1]
    on_device, on_host = communicator.least((on_device, on_host), "free memory")
    return FreeBytes(None if on_device == _UNBOUNDED else on_device, on_host if settings.host_memory is None else None)


def bytes_freed(parameters: Iterable[nn.Parameter], device: torch.device, source: DeviceSource) -> int:
    """Bytes that wrapping frees on `device` and that `source` counts as in use: parameters there, and built shards."""
    if not source.counts_tensors:
        return 0  # they were never missing from what it calls free
    links = {parameter: built_link_of(parameter) for parameter in parameters}
    chunks = dict.fromkeys(link.managed.chunk for link in links.values() if link is not None)
    homes = [chunk.homes[Kind.PARAM].flat for chunk in chunks]
    own = [parameter for parameter, link in links.items() if link is None]
    return sum(each.nbytes for each in (*homes, *own) if each.device == device)


# -- Makes a model's chunks from the facts in its plan. Only the placeholders' few bytes are allocated.


def make_chunks(
    plan: Plan,
    by_name: dict[str, nn.Parameter],
    device: torch.device,
    rank: int,
    replica: int,
    parts: Mapping[nn.Parameter, TensorPart],
) -> list[Chunk]:
    """The plan's chunks, with the place of each parameter in them, and no homes yet. Local.

    rank, replica: which of the shards this rank holds, and which of its replicas. parts: of whole parameters.
    """
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
            replica=replica,
            home_layout=chunk_facts.home_layout,
            optim_layout=chunk_facts.optim_layout,
            fetch_layout=chunk_facts.fetch_layout,
            grad_layout=chunk_facts.grad_layout,
            secondary_layout=chunk_facts.secondary_layout,
            in_groups=chunk_facts.in_groups,
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
            managed = chunk.manage(parameter, name, index, offset, first_operator[name], shown, parts.get(parameter))
            # The given weight has more bits than the chunk's 16: the master must start from it.
            if trainable and kind in HALF_DTYPES and parameter.dtype is not kind:
                managed.note_fractions()
            chunk.hold(parameter)
            index += 1
        chunks.append(chunk)
    return chunks


# -- Moving in: allocate homes and move the weights into them, chunk by chunk.
#
# Each parameter's own memory is freed as soon as its values are in their home, so at no time is there more than the
# homes so far plus one chunk, or one operator of a model that was built in a `ZeroInitContext`. Every move is recorded,
# so that the weights can move out again if wrapping fails (below).


@dataclass(frozen=True)
class Original:
    """How a parameter was before its values moved into a chunk."""

    dtype: torch.dtype
    device: torch.device
    gradient: Tensor | None  # of a backward before the model is wrapped
    store: BuildStore | None  # the store of the `ZeroInitContext` in which it was built
    built_name: str  # its name in that store


class MovesIn:
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
    memory: RankMemory,
    moves: MovesIn,
) -> None:
    """Move rank 0's weights into every chunk's homes, and into masters that hold more than the weights. Collective.

    Raises BudgetError. Memory that only training needs is allocated when training begins: runtime/training.py.
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
    with progress("weights into chunks", sum(chunk.payload_bytes for chunk in chunks)) as told:
        for chunk in chunks:
            # The parameter home of a chunk that keeps its slot is a part of that slot's payload: no other memory.
            if chunk.index in placement.kept:
                chunk.keep_slot(memory.device)
            else:
                take_home(chunk, Kind.PARAM)
            if has_master[chunk.index]:
                take_home(chunk, Kind.MASTER)
            _fill(chunk, communicator, memory.device, moves)
            chunk.reside_at_home()
            # The weights' own memory is free by now, but malloc may keep it: see memory/arena.py.
            freed.note(chunk.payload_bytes)
            told(chunk.payload_bytes)


@torch.no_grad()
def move_buffers_in(module: nn.Module, communicator: Communicator, device: MemoryTier, moves: MovesIn) -> None:
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
                "call launch_from_torch() before the context, and give both the same process_group= or device_mesh="
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


def _fill(chunk: Chunk, communicator: Communicator, device: MemoryTier, moves: MovesIn) -> None:
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
    chunk: Chunk, given: list[ManagedParameter], communicator: Communicator, device: MemoryTier, moves: MovesIn
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
            # there: see [Note: Nothing is lost] in this file.
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


# -- Moving out: if wrapping fails half way, the module gets its weights back and is as it was.
#
# Weights that have moved are in the chunks' homes, on several ranks a part on each. All ranks have heard of the
# failure, so they restart together and gather chunk by chunk. The values are then those of rank 0, as wrapping
# promises. Weights that were rounded without a master (frozen ones, wrapped in a narrower dtype) stay rounded.
#
# [Note: Nothing is lost] On several ranks a chunk is broadcast only when every rank has reached it, so every rank has
# all earlier chunks at home. A rank that failed in the middle of a chunk has all of its values in the payload. It
# brings its part home before the ranks gather the chunk, since the other ranks may have nothing but their parts.


LOST = "_gemini_lost"
"""Marks a parameter whose values are gone. Without the mark its placeholder could be wrapped as if it were weights."""


class _LostWeightsError(GeminiError):
    """A rank failed in the middle of a chunk that it had not received yet."""


class MovingOut:
    """Undoes a wrapping that failed.

    `Wrapping` tells it of stores before ranks agree on the model, and of chunks before they agree on the plan.
    Therefore nothing has moved on any rank as long as one rank has no chunks.
    """

    def __init__(self, communicator: Communicator, memory: RankMemory) -> None:
        self.stores: list[BuildStore] = []  # stores of parameters built in a `ZeroInitContext`
        self.chunks: list[Chunk] = []
        self.moves = MovesIn()
        self.communicator = communicator
        self.memory = memory

    def undo(self, error: BaseException) -> None:
        """Undo the wrapping after `error`, of which all ranks know. Collective. Adds a note to it if weights are lost.

        Raises nothing of its own: where the weights cannot be given back, that is the note.
        """
        clear_our_frames()  # collectives that they still know could not end
        # What is local comes first: it is right also if the collectives below fail.
        for managed in self._managed():
            self._make_plain(managed)
        for owner, name, buffer in self.moves.buffers:
            owner._buffers[name] = buffer
        try:
            if isinstance(error, RankLostError):
                raise RankLostError("a rank that had a part of the weights is gone")
            # A module that is wrapped inside inference_mode must get memory that it can be trained in.
            with torch.inference_mode(False), torch.no_grad():
                if self._restart():
                    self._give_back()
            # All ranks are here, so the process group of this wrap can end now.
            self.communicator.close()
        except Exception as second:
            lost = [managed for managed in self._managed() if managed.index in self.moves.originals]
            # Mark the same parameters on all ranks, or one rank would wrap the module again and wait for the others.
            if isinstance(second, _LostWeightsError):
                lost = self._managed()
            for managed in lost:
                setattr(managed.parameter, LOST, True)
            if lost:
                error.add_note(
                    f"{len(lost)} parameters could not be given back their weights ({second}): build the module again"
                )
        finally:
            # The communicator of this wrap ends. A store that still has parameters uses its own again.
            for store in self.stores:
                store.go_over(None)

    def _managed(self) -> list[ManagedParameter]:
        return [managed for chunk in self.chunks for managed in chunk.parameters]

    def _make_plain(self, managed: ManagedParameter) -> None:
        """Make it an ordinary parameter again, with its current data."""
        parameter = managed.parameter
        # A `Link` is this wrap's. A `BuiltLink` stays: the store that it leads to still has the values.
        if any_link_of(parameter) is not None and built_link_of(parameter) is None:
            parameter.__class__ = nn.Parameter
            del parameter._gemini  # type: ignore[attr-defined]
        if parameter.requires_grad is not managed.requires_grad:
            parameter.requires_grad_(managed.requires_grad)

    def _restart(self) -> bool:
        """Restart the communicators of all ranks. Returns whether anything may have moved. Collective."""
        if self.communicator.watch is not None:
            self.communicator.restart(after_wrapping=True)
        # The hash is part of every tag, and only some ranks may have set it.
        self.communicator.follow_plan(0)
        has_plan, device = bool(self.chunks), self.communicator.device
        # The maxima of a flag and of its negation: whether some rank has a plan, and whether some rank has none.
        planned = torch.tensor([has_plan, not has_plan], dtype=torch.int64, device=device)
        self.communicator.all_reduce_max_(planned, "what was planned")
        some_have, some_lack = planned.tolist()
        may_have_moved = bool(some_have and not some_lack)
        # A restart drops edits that a store has not brought home. If nothing has moved, they must stay.
        for store in self.stores if may_have_moved else ():
            store.restart()
        return may_have_moved

    def _give_back(self) -> None:
        """Give every moved parameter its values back, chunk by chunk. Collective."""
        self._complete()
        moved = self._moved()
        for chunk in self.chunks:
            members = [managed for managed in chunk.parameters if managed.index in moved]
            if not members:
                continue
            # A rank that failed right after the ranks had found the chunk at home may still have links to the store.
            let_go(members)
            payloads: dict[bool, Tensor] = {}  # True: gathered from the masters
            for managed in members:
                original = self.moves.originals[managed.index]
                # A master has the bits of a wider weight that the chunk's dtype has no room for.
                exact = Kind.MASTER in chunk.homes and original.dtype is not chunk.dtype
                if exact not in payloads:
                    payloads[exact] = self._gather(chunk, exact)
                restore(managed, original, payloads[exact][managed.in_payload])
                self._done(managed)
            self._free(chunk)

    def _complete(self) -> None:
        """Bring home what this rank has received, as the ranks did that did not fail in this chunk. Local."""
        originals = self.moves.originals
        for managed in self._managed():
            if managed.index in self.moves.received and managed.index not in originals:
                set_weights(managed, managed.laid_out(managed.parameter.detach()))
                originals[managed.index] = original_of(managed)

    def _moved(self) -> set[int]:
        """The parameters, by index, whose values are at home on all ranks. Collective.

        Raises _LostWeightsError if only some ranks have the values of a parameter.
        """
        managed, originals = self._managed(), self.moves.originals
        flags = [each.index in originals for each in managed]
        rows = [flags, [not flag for flag in flags]]
        # The maxima over ranks tell for each parameter whether some rank has its values, and whether some rank lacks
        # them.
        words = torch.tensor(rows, dtype=torch.int64, device=self.communicator.device)
        self.communicator.all_reduce_max_(words, "what has moved")
        moved = set()
        for each, some_have, some_lack in zip(managed, *words.tolist(), strict=True):
            if some_have and not some_lack:
                moved.add(each.index)
            elif some_have and built_link_of(each.parameter) is not None:
                # Not all ranks had the chunk at home, so its store still has the values.
                originals.pop(each.index, None)
            elif some_have:
                raise _LostWeightsError(f"no rank has the whole of {each.name!r}")
        return moved

    def _gather(self, chunk: Chunk, of_master: bool) -> Tensor:
        """All weights of a chunk, (numel,): in fp32 from the masters, or as they are. Collective."""
        if of_master:
            part, layout = full_precision(chunk, 0, chunk.optim_numel), chunk.optim_layout
        else:
            part, layout = ready(chunk.homes[Kind.PARAM]), chunk.home_layout
        # Every rank holds it whole, such as weights below stage 3 and masters at stage 0.
        if layout.world_size == 1:
            return part[: chunk.numel]
        # This rank's part is put into the payload first, where an all-gather without a shard expects it.
        payload = torch.zeros(chunk.numel, dtype=part.dtype, device=self.communicator.device)
        for piece in layout.slices(chunk.rank):
            payload[piece.in_payload].copy_(part[piece.in_shard])
        self.communicator.all_gather(payload, None, chunk.layout, chunk.index)
        return payload

    def _done(self, managed: ManagedParameter) -> None:
        """Finish a parameter that is whole again. One that was built on shards goes back onto them: collective."""
        original = self.moves.pop_original(managed.index)
        if original.store is None or original.store.is_closed:
            return
        operator, _, name = original.built_name.rpartition(".")
        original.store.shard(operator, [(name, managed.parameter)])

    def _free(self, chunk: Chunk) -> None:
        """Free the chunk's memory before the next chunk's weights get memory of their own."""
        if chunk.own_slot is not None:
            # The parameter home is a part of this slot and must not be freed once more below.
            chunk.close_own_slot()
        if chunk.payload is not None:
            chunk.end_residence()
        for kind in list(chunk.homes):
            chunk.free_home(kind, self.memory)


# -- Wrapping: a module's weights go into chunks, on all ranks or on none.
#
# Ranks agree on the module, on what is free, and on the plan that follows from these, before anything moves. What fails
# later is undone by `MovingOut`.


class Wrapping:
    """One module that is being wrapped, on this rank. Collective to make: it opens the model's process group."""

    def __init__(
        self,
        module: nn.Module,
        by_name: dict[str, nn.Parameter],
        ignored: Collection[nn.Parameter],
        settings: Settings,
        mesh: RankMesh,
        cast_inputs: bool,
        local: LocalParameters,
    ) -> None:
        """ignored: parameters of the module that go into no chunk. cast_inputs: as of `ShardedModel`.

        mesh: the ranks; `settings` are `over` them. local: of `module`, which parts they are.
        """
        self.weights = weights_of(module, settings)
        self.casting: dict[nn.Module, InputCasting] = {**self.weights.casting}
        if cast_inputs:
            in_chunks = (dtype for each, dtype in self.weights.parameters.items() if each not in ignored)
            self.casting[module] = input_casting(settings, in_chunks)
        self._cast_inputs = cast_inputs
        device_tier, host_tier = choose_tiers(settings.device)
        self._device = source_of(settings.device)
        self.gathers = settings.gathers(mesh.world_size)
        self._places: dict[nn.Parameter, int] = {}
        self.operators = find_operators(module, self.gathers, self._places, ignored)
        position = StepPosition(["", *(operator.name for _, operator in self.operators)])
        self.communicator = Communicator(mesh, position, settings.rank_timeout, device_tier.device)
        folder = settings.disk_path
        # One rank alone may find that its folder takes no file.
        with self.communicator.publishing():
            disk = None if folder is None else DiskTier(Path(folder), checks=settings.disk_checksums)
            self._memory = RankMemory(device_tier, host_tier, disk)
        self._back = MovingOut(self.communicator, self._memory)
        self._module = module
        self._by_name = by_name
        self._settings = settings
        self.local = local

    def plan(self) -> tuple[Plan, BudgetError | None]:
        """The plan that all ranks have agreed on; if it is one for inference, why training is refused. Collective.

        Nothing has moved. Raises BudgetError if the model does not fit, and DivergenceError if ranks differ.
        """
        communicator, settings, by_name = self.communicator, self._settings, self._by_name
        self.local.compare_copies(self._module, communicator)
        links = ((name, built_link_of(parameter)) for name, parameter in by_name.items())
        built = {name: link for name, link in links if link is not None}
        self._back.stores = stores_of(built.values(), communicator.ranks)
        spec = model_spec(by_name, self.operators, self._places, self.weights)
        # What the plan does not depend on is compared here, and is not in its hash.
        given = (*settings.shared(), f"cast_inputs={self._cast_inputs}")
        # One rank's buffer would be broadcast into another's, and gloo ends the process where their sizes differ.
        buffers = buffers_in_words(self._module) if communicator.world_size > 1 else []
        facts = repr((given, spec, [*built], buffers)).encode()
        communicator.agree(facts, "the model", describe(given, spec, [*built], buffers))
        device = self._memory.device.device
        own = bytes_freed(self._places, device, self._device), 0
        free = read_free(settings, own, communicator, self._device)
        with progress("planning", sum(weight.numel * weight.dtype.itemsize for weight in spec.weights)):
            first, refused = plan_first(Packed(spec, settings, communicator.world_size), settings, free)
        place = communicator.shard_rank, communicator.replica
        self._back.chunks = make_chunks(first, by_name, device, *place, self.local.parts)
        # A policy of the user's was compared by its name alone: its placement may still differ by rank.
        had = placement_in_words(first.placement, first.budget_bytes)
        communicator.agree(first.hash.to_bytes(4, "little"), "the plan", had, PLACE_ALIKE)
        communicator.follow_plan(first.hash)
        self._memory.allow(first.budget)
        return first, refused

    def move_weights(self, plan: Plan) -> ChunkManager:
        """Move weights and buffers to where the plan has them. Collective. `undo` brings them back."""
        communicator, memory, back = self.communicator, self._memory, self._back
        for store in back.stores:
            # From here on ranks that gather what was built hear of a failure on any rank.
            store.go_over(communicator)
            store.release_all()  # brings edits home before anything moves
        move_buffers_in(self._module, communicator, memory.device, back.moves)
        move_in(back.chunks, plan.placement, plan.demand, communicator, memory, back.moves)
        return ChunkManager(back.chunks, memory, plan, communicator, ReleasedParameter, self._device)

    def end(self) -> None:
        """The module is wrapped. Collective."""
        # No rank returns before all are here: giving the weights back after a failure is collective.
        self.communicator.wait_for_all("model is wrapped")
        close_empty(self._back.stores, self.communicator)

    def undo(self, error: BaseException) -> None:
        """Give the module its weights back after `error`, of which all ranks know: it is as it was. Collective."""
        self._back.undo(error)
