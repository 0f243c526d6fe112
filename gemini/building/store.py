"""The store of a model under construction: its parameters rest on shards over the ranks, one chunk per operator.

A chunk is gathered when something uses one of its parameters. When another chunk is used, rank 0 broadcasts what was
written, because random numbers differ between ranks, and the values go back to the shards.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemini.building.binding import BuildBinding, alive
from gemini.building.link import BuiltLink, built_link_of
from gemini.chunks.chunk import Chunk, ManagedParameter
from gemini.chunks.placeholder import placeholder, set_data
from gemini.errors import GeminiError
from gemini.manager.masters import set_weights
from gemini.memory.freed import Freed
from gemini.memory.host import HostTier
from gemini.memory.memory import Memory
from gemini.memory.modes import untracked
from gemini.memory.tier import MemoryTier
from gemini.placement.demand import Kind, Tier
from gemini.placement.packing import PackingInput, pack
from gemini.placement.trace import Phase
from gemini.ranks.communicator import Communicator
from gemini.ranks.position import StepPosition
from optim import round_master_
from sharding import ParameterSpec, ShardLayout, ShardStrategy, backends

_WHOLE = 2**62  # bytes: an operator is one chunk, however large
_EXTENT_BYTES = 2**26  # of address space for shards; untouched pages take no memory
_SMALL_BYTES = 2**20  # an operator of at most this size is copied into one payload, to broadcast it at once


class BuildStore:
    """The shards of one context's parameters on this rank. Creating and using it is collective.

    home_of: maps a number of bytes to the tier where a shard of that size rests.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        strategy: ShardStrategy,
        home_of: Callable[[int], Tier],
        device: MemoryTier,
        rank_timeout_s: float,
    ) -> None:
        self._strategy = strategy
        self._home_of = home_of
        self._position = StepPosition(["the model under construction"])
        carries_cpu = process_group is None or "cpu" in backends(process_group)
        carrier = torch.device("cpu") if carries_cpu else device.device
        self._own = Communicator(process_group, self._position, rank_timeout_s, carrier)
        self._memory = Memory(device, HostTier(extent_bytes=_EXTENT_BYTES))
        self.binding = BuildBinding(self._memory, self._own)
        self._freed = Freed()
        self._placeholder = functools.cache(placeholder)
        self._chunks: weakref.WeakSet[Chunk] = weakref.WeakSet()
        self._num_chunks = 0
        self.is_closed = False

    # -- in

    def shard(self, operator: str, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Put the parameters of one operator onto shards, with rank 0's values. Frees their memory. Collective."""
        self._check_open(operator)
        number = self._position.add(operator)
        self._position.set(number, Phase.BUILD)
        # A chunk has one dtype and one device.
        groups: dict[tuple[torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in parameters:
            groups.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
        with self.communicator.publishing(), untracked():
            # Ranks that build different models would hang in a later broadcast: compare first.
            if self.communicator.world_size > 1:
                shapes = [(name, tuple(p.shape), p.stride(), str(p.dtype), p.device.type) for name, p in parameters]
                self.communicator.agree(repr((operator, shapes)).encode(), f"operator {operator} under construction")
            for (dtype, device), members in groups.items():
                self._shard_group(number, operator, dtype, device, members)

    def _shard_group(
        self,
        number: int,
        operator: str,
        dtype: torch.dtype,
        device: torch.device,
        members: Sequence[tuple[str, nn.Parameter]],
    ) -> None:
        inputs = [PackingInput(ParameterSpec(n, p.numel(), tuple(p.shape)), "", dtype.itemsize) for n, p in members]
        (packed,) = pack([inputs], self._strategy, _WHOLE, self.communicator.world_size)
        chunk = self._make_chunk(dtype, packed.layout)
        offsets = dict(zip(packed.names, packed.offsets, strict=True))
        flats: list[Tensor] = []
        for name, parameter in members:
            shown = self._placeholder(dtype, device, parameter.shape)
            managed = chunk.manage(parameter, f"{operator}.{name}", len(flats), offsets[name], number, shown)
            parameter._gemini = BuiltLink(managed, self)  # type: ignore[attr-defined]
            flats.append(managed.laid_out(parameter.data))
        self._take_rank_0s(chunk, flats)
        # The plain weights are freed by now, but malloc may keep their memory (memory/freed.py).
        self._freed.note(chunk.payload_bytes)

    def _make_chunk(self, dtype: torch.dtype, layout: ShardLayout) -> Chunk:
        """A chunk with a home for its shard. Nothing is trained yet, so it has no other state."""
        chunk = Chunk(
            index=self._num_chunks,
            dtype=dtype,
            trainable=False,
            layout=layout,
            oversize=False,
            rank=self.communicator.rank,
            home_layout=layout,
            optim_layout=layout,
            travel_dtype=dtype,
            gradient_dtype=dtype,
            sum_dtype=dtype,
        )
        num_bytes = layout.shard_numel * dtype.itemsize
        tier = self._home_of(num_bytes)
        chunk.allocate_home(Kind.PARAM, tier, self._memory, num_bytes)
        ledger = self._memory.tier(tier).ledger
        # A chunk ends with the last of its parameters, which the user may drop at any time: then its home is uncounted.
        weakref.finalize(chunk, ledger.count_freed, Kind.PARAM, num_bytes).atexit = False
        self._num_chunks += 1
        self._chunks.add(chunk)
        return chunk

    def _take_rank_0s(self, chunk: Chunk, flats: list[Tensor]) -> None:
        """Write rank 0's values of all parameters to the home. Empties `flats`, to free tensors early. Collective."""
        communicator = self.communicator
        # Small operators: one broadcast. Large ones: parameter by parameter, so that no second copy of all is needed.
        if chunk.payload_bytes <= _SMALL_BYTES:
            payload = torch.zeros(chunk.numel, dtype=chunk.dtype, device=communicator.device)
            for managed in chunk.parameters:
                self.binding.show_placeholder(managed)
                payload[managed.in_payload].copy_(flats.pop(0))
            # Ranks have just agreed on what they build, so the broadcasts need no tag.
            communicator.broadcast_(payload, None)
            home = chunk.homes[Kind.PARAM].flat
            for piece in chunk.layout.slices(chunk.rank):
                home[piece.in_shard].copy_(payload[piece.in_payload])
        else:
            for managed in chunk.parameters:
                self.binding.show_placeholder(managed)
                flat = flats.pop(0)
                # On other ranks receive into new memory: the parameter's own may be shared with a tensor of the user's.
                if communicator.rank:
                    del flat
                    flat = torch.empty(managed.numel, dtype=chunk.dtype, device=communicator.device)
                communicator.broadcast_(flat, None)
                set_weights(managed, flat)
        self.binding.note_left(chunk)

    # -- use

    @contextmanager
    def fetched(self, wanted: Sequence[ManagedParameter], overwrites: bool = False) -> Iterator[None]:
        """A context in which the parameters are plain and whole. Collective, unless `overwrites`.

        overwrites: the caller writes the whole parameter, so its old values are not gathered.
        """
        self._check_open(wanted[0].name)
        # The order of collectives must not depend on the order of the arguments.
        chunks = sorted(dict.fromkeys(each.chunk for each in wanted), key=lambda chunk: chunk.index)
        before = self._position.now
        pinned: list[Chunk] = []
        try:
            with self.communicator.publishing(), untracked():
                # Release what nobody uses any more before anything else is gathered.
                for chunk in [chunk for chunk in self.binding.valid if chunk not in chunks and not chunk.pins]:
                    self._release(chunk)
                for chunk in chunks:
                    members = [each for each in wanted if each.chunk is chunk]
                    self._position.set(members[0].operator, Phase.TOUCH)
                    self._fetch(chunk, members, overwrites)
                    chunk.pin()
                    pinned.append(chunk)
            # Outside of `publishing`: an exception of the user's code is not published from here.
            yield
            # After an exception the values stay invalid, and `BuildBinding.write_parameter` ignores them.
            if overwrites:
                self.binding.valid[wanted[0].chunk].add(wanted[0].position)
        finally:
            self._position.return_to(before)
            for chunk in pinned:
                chunk.lift_pin()
                # A use around this one goes on, and needs the parameters plain.
                if not chunk.pins and chunk.plain:
                    self.binding.cover_chunk(chunk)

    def _fetch(self, chunk: Chunk, members: Sequence[ManagedParameter], overwrites: bool) -> None:
        binding = self.binding
        # One rank with its home on the parameters' device needs no payload: the home is one.
        if chunk not in binding.valid:
            device, home = members[0].placeholder.device, chunk.homes[Kind.PARAM].flat
            is_whole = self.communicator.world_size == 1 and home.device == device
            binding.open(chunk, home if is_whole else torch.empty(chunk.numel, dtype=chunk.dtype, device=device))
        binding.bind(chunk)
        # A gather overwrites the payload, so bring edits of its valid parameters home before.
        if not (overwrites or binding.valid[chunk].issuperset(each.position for each in members)):
            binding.write_back(chunk)
            self._gather(chunk)

    def _gather(self, chunk: Chunk) -> None:
        assert chunk.payload is not None
        # The process group may not carry the payload's device: gather on the device that it carries, then copy.
        carried = chunk.payload
        if carried.device != self.communicator.device and self.communicator.world_size > 1:
            carried = torch.empty_like(carried, device=self.communicator.device)
        home = chunk.homes[Kind.PARAM].flat
        self.communicator.all_gather(carried, home.to(carried.device), chunk.layout, chunk.index)
        if carried is not chunk.payload:
            chunk.payload.copy_(carried)
        self.binding.fill(chunk)

    def _release(self, chunk: Chunk) -> None:
        """Bring edits home and drop the payload. Collective if there are edits."""
        self.binding.write_back(chunk)
        self.binding.close(chunk)

    def release_all(self) -> None:
        """Release all gathered chunks. Collective."""
        with self.communicator.publishing():
            for chunk in list(self.binding.valid):
                self._release(chunk)

    def restart(self) -> None:
        """Drop all payloads and edits after a failure that every rank caught, so that all ranks are alike. Local."""
        for chunk in list(self.binding.valid):
            chunk.reset_pins()
            self.binding.close(chunk)
        self.binding.reset()

    def go_over(self, communicator: Communicator | None) -> None:
        """Use the communicator of the model that is wrapping these parameters; None: the store's own again. Local.

        During a wrap all ranks wait on one communicator, so that each of them hears of a failing rank.
        """
        self.binding.go_over(communicator or self._own)

    def copy(self, its: ManagedParameter) -> nn.Parameter:
        """A copy of the parameter, sharded like it. Collective."""
        original, (operator, _, name) = its.parameter, its.name.rpartition(".")
        with self.fetched([its]), torch.no_grad():
            copied = nn.Parameter(original.detach().clone(), original.requires_grad)
        self.shard("copy of " + operator, [(name, copied)])
        return copied

    def replace(self, link: BuiltLink, value: Tensor) -> None:
        """Give the parameter data of another shape, dtype or order in memory, in a chunk of its own. Collective."""
        managed = link.managed
        parameter, (operator, _, name) = managed.parameter, managed.name.rpartition(".")
        with self.communicator.publishing(), torch.no_grad():
            values = value.detach().clone()
            # `let_go` needs a chunk without edits: those of the parameter's neighbours would be lost.
            self.binding.write_back(managed.chunk)
            self.let_go([link])
            set_data(parameter, values)
        del values  # `shard` frees the parameter's memory: hold no reference to it
        self.shard(operator, [(name, parameter)])

    # -- out

    def finish(self, dtype: torch.dtype | None) -> None:
        """End the context: cast the weights. Collective."""
        # Edits go home first, because it is the shards that are rounded.
        self.release_all()
        if dtype is not None:
            self._cast(dtype)

    def _cast(self, dtype: torch.dtype) -> None:
        """Round every fp32, fp16 and bf16 weight to `dtype`, shard by shard. Local; nothing is fetched."""
        kinds = (torch.float32, torch.float16, torch.bfloat16)
        with untracked():
            waiting = [c for c in self._in_order() if c.dtype in kinds and c.dtype is not dtype][::-1]
            # Taken out of the list one by one: in it, all old shards would stay beside all rounded ones.
            while waiting:
                self._round(waiting.pop(), dtype)

    def _round(self, chunk: Chunk, dtype: torch.dtype) -> None:
        """Move the chunk's parameters into a new chunk of another dtype, with rounded values."""
        # The layout counts elements, so it serves for another dtype as well.
        rounded = self._make_chunk(dtype, chunk.layout)
        round_master_(rounded.homes[Kind.PARAM].flat, chunk.homes[Kind.PARAM].flat.float())
        for link in _links_of(chunk):
            managed = link.managed
            shown = self._placeholder(dtype, managed.placeholder.device, managed.shape)
            link.follow(
                rounded.manage(managed.parameter, managed.name, managed.index, managed.offset, managed.operator, shown)
            )
            self.binding.show_placeholder(link.managed)
        chunk.drop_parameters(list(chunk.parameters))
        self.binding.note_left(rounded)

    def _in_order(self) -> list[Chunk]:
        # A WeakSet has no order, and all ranks must go through their chunks in the same one.
        return sorted(self._chunks, key=lambda chunk: chunk.index)

    def links(self) -> list[BuiltLink]:
        """The links of all parameters that still exist on this rank, in order of construction."""
        return [link for chunk in self._in_order() for link in _links_of(chunk)]

    def let_go(self, links: Sequence[BuiltLink]) -> None:
        """Make these parameters, all of one chunk, ordinary parameters without values. Local.

        May be interrupted and called again.
        """
        self.binding.part_with(links[0].managed.chunk, {link.managed for link in links})
        for link in links:
            parameter = link.managed.parameter
            link.guard.remove()
            parameter.__class__ = nn.Parameter
            del parameter._gemini  # type: ignore[attr-defined]

    @property
    def communicator(self) -> Communicator:
        """The communicator in use: the store's own, or that of the model that is being wrapped."""
        return self.binding.communicator

    @property
    def num_operators(self) -> int:
        """The number of operators put onto shards so far, including those that the user has dropped."""
        # The table begins with an entry for the model itself.
        return len(self._position.operators) - 1

    def close(self) -> None:
        """Give the process group back. Collective."""
        if not self.is_closed:
            # The wrap is over, so failures are published on the store's own communicator again.
            with self._own.publishing():
                self.release_all()
                self.is_closed = True
                self._own.close()

    def _check_open(self, what: str) -> None:
        if self.is_closed:
            raise GeminiError(f"{what}: the ranks of its ZeroInitContext have parted; build the model again")


def _links_of(chunk: Chunk) -> list[BuiltLink]:
    links = (built_link_of(parameter) for _, parameter in alive(chunk))
    return [link for link in links if link is not None]
