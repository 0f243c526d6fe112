"""Fetch and release: brings a chunk's payload into a slot and binds its parameters to it, and takes both away again.

Release is lazy: a chunk that nobody pins stays in its slot until another chunk needs the slot. Which chunk then
leaves follows from the sequence of touches alone (`placement.next_use`), so it is equal on all ranks.
See also [Note: Held slots] in memory/slot.py and [Note: Edits] below.

[Note: Edits] Parameters may be written to outside their operators (`p.mul_()`, `p.data.zero_()`). The payload is
then newer than its home and the fp32 master; it is written back before the chunk leaves its slot, before a step and
before anything reads the home. Writes through the parameter raise its version counter; `.data` marks it edited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from gemini.chunks.chunk import Chunk, ChunkState, ManagedParameter
from gemini.errors import BudgetError, ReleasedParameterError, SlotError
from gemini.executor.communicator import Communicator
from gemini.memory.ledger import Traffic
from gemini.memory.slot import Slot, SlotPool
from gemini.memory.tier import MemoryTier, copy
from gemini.placement.demand import Kind, Tier
from gemini.placement.next_use import NextUse
from optim import absorb_edits_

_SETTLE_S = 2.0  # a gloo worker drops its references within tens of ms; anything longer is a view that someone keeps

Log = Callable[[str, Chunk, str, str], None]  # (what, chunk, from, to)


class Fetcher:
    """Owns the payload slots."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        device: MemoryTier,
        host: MemoryTier,
        communicator: Communicator,
        traffic: Traffic,
        released_class: type[nn.Parameter],
        log: Log,
    ) -> None:
        self.chunks = chunks
        self.device = device
        self.host = host
        self.communicator = communicator
        self.traffic = traffic
        self.released_class = released_class
        self.next_use = NextUse()
        self.pools: tuple[SlotPool, SlotPool] | None = None
        self.in_step = False  # an operator may find its parameters plain
        self.plain_chunks: list[Chunk] = []
        self.edited: dict[int, set[int]] = {}  # chunk -> positions of edited parameters
        self.versions: dict[int, list[int]] = {}  # chunk -> its parameters' versions when they were last written back
        self._edits_when_left: dict[int, list[int]] = {}  # chunk -> its parameters' edits when it was unbound
        self.slot_by_storage: dict[int, Slot] = {}
        self.resident_by_storage: dict[int, Chunk] = {  # homes that are payloads
            chunk.payload.untyped_storage()._cdata: chunk for chunk in chunks if chunk.payload is not None
        }
        self.num_fetches = 0
        self.num_evictions = 0
        self.on_touch: Callable[[], None] = lambda: None  # called before every touch of a chunk that can leave
        self._log = log

    def open_pools(self, regular: tuple[int, int], oversize: tuple[int, int]) -> None:
        """(bytes, count) of both slot sizes."""
        self.pools = (
            SlotPool(self.device, regular[0], regular[1], "slots"),
            SlotPool(self.device, oversize[0], oversize[1], "slots"),
        )

    # -- fetch and release

    def fetch(self, chunk: Chunk) -> Tensor:
        """The chunk's payload, (numel,) on the device. Collective where parameters are sharded."""
        if chunk.state is not ChunkState.RESIDENT:
            self.on_touch()
            self.next_use.touch(chunk.index)
            if chunk.state is ChunkState.RELEASED:
                with torch.inference_mode(False), torch.no_grad():
                    self._fill(chunk, self._free_slot(chunk))
        assert chunk.payload is not None
        return chunk.payload

    def _fill(self, chunk: Chunk, slot: Slot) -> None:
        cached = slot.views.get(chunk.index)
        if cached is None:
            assert slot.buffer is not None
            payload = slot.buffer[: chunk.payload_bytes].view(chunk.dtype)
            cached = payload, chunk.views_of(payload)
            slot.remember(chunk.index, *cached)
            self.slot_by_storage[slot.storage] = slot
        payload = cached[0]
        slot.chunk = chunk.index
        self.gather_into(chunk, payload)
        chunk.slot, chunk.payload, chunk.state = slot, payload, ChunkState.GATHERED
        self.num_fetches += 1
        self._log("fetch", chunk, chunk.homes[Kind.PARAM].tier, "slot")

    def gather_into(self, chunk: Chunk, payload: Tensor) -> None:
        """payload <- the whole content, from this rank's home and the other ranks'. Collective if sharded."""
        home = chunk.homes[Kind.PARAM]
        if chunk.home_layout.world_size == 1:
            copy(payload, home.flat, self.device, self.tier(home.tier), self.traffic)
        elif home.tier is Tier.DEVICE:
            self.communicator.all_gather(payload, home.flat, chunk.layout, chunk.index)
        else:
            for piece in chunk.layout.slices(self.communicator.rank):
                target = payload[piece.payload_start : piece.payload_start + piece.numel]
                source = home.flat[piece.shard_start : piece.shard_start + piece.numel]
                copy(target, source, self.device, self.host, self.traffic)
            self.communicator.all_gather(payload, None, chunk.layout, chunk.index)

    def _free_slot(self, chunk: Chunk) -> Slot:
        assert self.pools is not None
        pool = self.pools[chunk.oversize]
        slot = self._replaced(chunk, None)
        if slot is not None:
            return slot
        unpinned = [s.chunk for s in pool.slots if s.chunk is not None and not self.chunks[s.chunk].pins]
        if not unpinned:
            raise SlotError(self._no_slot(chunk, pool))
        victim = self.chunks[self.next_use.victim(unpinned)]
        slot = victim.slot
        assert slot is not None
        self.num_evictions += 1
        if self.release(victim):
            return slot
        slot = self._replaced(chunk, victim)
        assert slot is not None
        return slot

    def _replaced(self, chunk: Chunk, victim: Chunk | None) -> Slot | None:
        """A free slot of the chunk's pool, or None; for one that is held a spare is taken, if the budget has one."""
        assert self.pools is not None
        try:
            return self.pools[chunk.oversize].free()
        except BudgetError:
            whose = "another chunk" if victim is None else f"chunk {victim.index} ({victim.names()})"
            raise SlotError(
                f"{self.where()}: {whose} must leave its slot for chunk {chunk.index} ({chunk.names()}), but a view of "
                f"one of its parameters is still alive, and there is no spare slot in {self.device.capacity_bytes} "
                "bytes. Do not keep views of parameters (or .data of them) beyond their operator, or raise "
                "model_data_memory="
            ) from None

    def _no_slot(self, chunk: Chunk, pool: SlotPool) -> str:
        users = "; ".join(
            f"chunk {s.chunk} ({self.chunks[s.chunk].names()})" for s in pool.slots if s.chunk is not None
        )
        return (
            f"{self.where()} needs chunk {chunk.index} ({chunk.names()}), but all {len(pool.slots)} slots of "
            f"{pool.num_bytes} bytes are in use at this moment by {users}. Raise model_data_memory= or device_memory= "
            f"by {pool.num_bytes} bytes, or make chunk_size= smaller"
        )

    def where(self) -> str:
        return self.communicator.moments.describe(self.communicator.moments.now)

    def release(self, chunk: Chunk) -> bool:
        """Take a gathered chunk out of its slot. False if the slot is held by a view and left the pool."""
        assert chunk.state is ChunkState.GATHERED and chunk.slot is not None and self.pools is not None
        self.write_back(chunk)
        self.unbind(chunk)
        # [Note: Version bump] autograd saves a leaf (x @ w, w.norm()) without holding its storage; with a higher
        # version a save that bypassed our hooks is autograd's own error instead of a wrong gradient
        chunk.bump_versions()
        slot = chunk.slot
        chunk.slot, chunk.payload, chunk.state = None, None, ChunkState.RELEASED
        slot.chunk = None
        self._log("release", chunk, "slot", chunk.homes[Kind.PARAM].tier)
        if slot.num_holders() > 0 and not slot.settle(_SETTLE_S if self.communicator.world_size > 1 else 0.0):
            self.pools[chunk.oversize].set_aside(slot)
            return False
        return True

    def release_all(self) -> None:
        """Every gathered chunk leaves its slot."""
        for chunk in self.chunks:
            if chunk.state is ChunkState.GATHERED:
                slot = chunk.slot
                if self.release(chunk) and slot is not None and slot.buffer is not None:
                    self.device.poison(slot.buffer)

    def start_anew(self) -> None:
        """After a failed step: every slot is empty and nothing is expected, equally on all ranks."""
        self.in_step = False
        self.cover()
        self.release_all()
        for pool in self.pools or ():
            pool.empty()
        self.next_use.forget()

    def spread(self, chunk: Chunk) -> None:
        """Whole weights of which every rank has updated its slices become whole again. Collective."""
        home = chunk.homes[Kind.PARAM]
        with torch.no_grad():
            if home.tier is Tier.DEVICE:
                self.communicator.all_gather(home.flat, None, chunk.layout, chunk.index)
                return
            payload = self.fetch(chunk)
            self.communicator.all_gather(payload, None, chunk.layout, chunk.index)
            copy(home.flat, payload, self.host, self.device, self.traffic)
            self.device.synchronize()

    def staged_copy(self, staged: Tensor, source: Tensor, to: Tier, of: MemoryTier) -> Tensor:
        """`source` on tier `to`, in `staged` if that is the host; ready to be read."""
        target = staged if to is Tier.HOST else torch.empty_like(source, device=self.device.device)
        copy(target, source, self.tier(to), of, self.traffic)
        self.device.synchronize()
        return target

    # -- parameters

    def bind(self, chunk: Chunk) -> None:
        """Make the chunk's parameters plain `nn.Parameter`s that are views of its payload."""
        if chunk.plain:
            return
        if chunk.bound:
            for managed in chunk.parameters:
                managed.parameter.__class__ = nn.Parameter
        else:
            views = chunk.resident_views if chunk.slot is None else chunk.slot.views[chunk.index][1]
            with torch.inference_mode(False), torch.no_grad():
                for managed, view in zip(chunk.parameters, views, strict=True):
                    parameter = managed.parameter
                    parameter.__class__ = nn.Parameter  # first: setting .data of the other class would fetch
                    parameter.data = view
            self.versions[chunk.index] = [managed.parameter._version for managed in chunk.parameters]
        chunk.bound = chunk.plain = True
        self.plain_chunks.append(chunk)
        self._refuse_lost_edits(chunk)

    def _refuse_lost_edits(self, chunk: Chunk) -> None:
        """Raises if a view that was kept beyond the chunk's release was written to: versions tell, memory does not."""
        before = self._edits_when_left.pop(chunk.index, None)
        now = [version - chunk.num_bumps for version in self.versions[chunk.index]]
        if before is not None and before != now:
            lost = next(m.name for m, a, b in zip(chunk.parameters, before, now, strict=True) if a != b)
            raise ReleasedParameterError(
                f"parameter {lost!r} was written to through a view that was taken before it left the device; the write "
                "is lost. Write to the parameter itself, or take the view anew"
            )

    def cover(self) -> None:
        """All parameters become self-fetching again; those of chunks in a slot or at home stay bound."""
        for chunk in self.plain_chunks:
            if chunk.plain:
                for managed in chunk.parameters:
                    managed.parameter.__class__ = self.released_class
                chunk.plain = False
        self.plain_chunks.clear()

    def unbind(self, chunk: Chunk) -> None:
        """The chunk's parameters show their placeholders."""
        if not chunk.bound:
            return
        self._edits_when_left[chunk.index] = [version - chunk.num_bumps for version in self.versions[chunk.index]]
        with torch.inference_mode(False), torch.no_grad():
            for managed in chunk.parameters:
                parameter = managed.parameter
                parameter.__class__ = nn.Parameter
                parameter.data = managed.placeholder
                parameter.__class__ = self.released_class
        chunk.bound = chunk.plain = False

    # -- edits

    def mark_edited(self, managed: ManagedParameter) -> None:
        """The parameter's payload was, or may have been, written to."""
        chunk = managed.chunk
        self.edited.setdefault(chunk.index, set()).add(chunk.parameters.index(managed))

    def write_back(self, chunk: Chunk) -> None:
        """Bring edits of the payload to the home and the master. See [Note: Edits]."""
        positions = self.edited.pop(chunk.index, set())
        if chunk.bound:
            recorded = self.versions[chunk.index]
            with torch._C.DisableTorchFunctionSubclass():
                for position, managed in enumerate(chunk.parameters):
                    version = managed.parameter._version
                    if version != recorded[position]:
                        recorded[position] = version
                        positions.add(position)
        if positions and chunk.payload is not None:
            with torch.inference_mode(False), torch.no_grad():
                for position in sorted(positions):
                    self.write_parameter(chunk.parameters[position], chunk.payload)

    def rebase_versions(self, chunk: Chunk) -> None:
        """The versions of now are those of an unedited chunk."""
        if chunk.bound:
            with torch._C.DisableTorchFunctionSubclass():
                self.versions[chunk.index] = [managed.parameter._version for managed in chunk.parameters]

    def write_back_all(self, chunks: Iterable[Chunk] | None = None) -> None:
        """`write_back` of every chunk that has a payload."""
        for chunk in self.chunks if chunks is None else chunks:
            if chunk.payload is not None:
                self.write_back(chunk)

    def write_parameter(self, managed: ManagedParameter, payload: Tensor) -> None:
        """home, master <- the parameter's elements of `payload`. A master changes only where the payload did."""
        chunk = managed.chunk
        home = chunk.homes[Kind.PARAM]
        master = chunk.homes.get(Kind.MASTER)
        if home.flat.data_ptr() != payload.data_ptr():
            for piece in chunk.home_pieces(managed):
                target = home.flat[piece.shard_start : piece.shard_start + piece.numel]
                source = payload[piece.payload_start : piece.payload_start + piece.numel]
                copy(target, source, self.tier(home.tier), self.device, self.traffic)
            self.device.synchronize()
        if master is not None:
            for piece in chunk.optim_pieces(managed):
                old = master.flat[piece.shard_start : piece.shard_start + piece.numel]
                absorb_edits_(old, payload[piece.payload_start : piece.payload_start + piece.numel].to(old.device))

    def tier(self, tier: Tier) -> MemoryTier:
        return self.device if tier is Tier.DEVICE else self.host
