"""Where parameters go while a model is being built, and the chunks that they fill."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemini.access.link import hook_last
from gemini.access.parameter_link import ParameterLink, any_link_of, set_own_grad
from gemini.access.released import ReleasedParameter
from gemini.errors import GeminiError, UnsupportedError
from gemini.memory.arena import Freed, HostTier
from gemini.memory.disk import DiskTier
from gemini.memory.memory import RankMemory
from gemini.memory.modes import untracked
from gemini.memory.tier import MemoryTier
from gemini.memory.transfer import Region, wait_on_tier
from gemini.placement.demand import Kind, Tier
from gemini.placement.next_use import Phase
from gemini.placement.packing import PackingInput, pack
from gemini.ranks.communicator import Communicator, StepPosition
from gemini.ranks.mesh import RankMesh
from gemini.runtime.binding import Binding, set_weights
from gemini.runtime.chunk import Chunk, ManagedParameter, dense_stride, have_one_order, placeholder, set_data
from optim import round_master_
from sharding import ParameterSpec, ShardLayout, ShardStrategy, backends

# -- Links of parameters whose model is under construction in a `ZeroInitContext`.


class BuiltLink(ParameterLink):
    """The link of a parameter whose model is under construction."""

    may_be_emptied = True  # `.data` may be set to memory without values, which are initialised later

    def __init__(self, managed: ManagedParameter, store: BuildStore) -> None:
        super().__init__(managed, store)
        self.store = store
        # On frozen parameters, too: they may be unfrozen at any time.
        self.guard = hook_last(managed.parameter, partial(_refuse_gradient, managed.name), None)

    def follow(self, managed: ManagedParameter) -> None:
        """The parameter has moved to another chunk, in which it is `managed`."""
        self.managed = managed

    def fetched(self, links: Sequence[BuiltLink], overwrites: bool, detached: bool) -> AbstractContextManager[None]:
        # `detached` changes nothing here: no memory follows the flags of a model that is built.
        return self.store.fetched([link.managed for link in links], overwrites)

    def fits(self, value: Tensor) -> bool:
        # In other strides, random numbers that are drawn later, and sums, would have another order.
        managed = self.managed
        return super().fits(value) and have_one_order(dense_stride(value), managed.stride, value.shape)

    def replace_data(self, value: Tensor) -> None:
        self.store.replace(self, value)

    def set_gradient(self, value: Tensor | None) -> None:
        """Raises UnsupportedError for any gradient but None."""
        if value is not None:
            name = self.managed.name
            raise UnsupportedError(f"{name!r} cannot be given a gradient before its model is a ShardedModel")

    def copy(self) -> nn.Parameter:
        return self.store.copy(self.managed)


def _refuse_gradient(name: str, parameter: Tensor) -> NoReturn:
    """Raises GeminiError: nothing takes the gradient of a parameter that no `ShardedModel` has."""
    set_own_grad(parameter, None)  # the first gradient of a wrapped model would be added to it
    raise GeminiError(
        f"backward() reaches parameter {name!r}, which was built in a ZeroInitContext and is sharded: wrap the "
        "model in ShardedModel(...) and train that"
    )


def built_link_of(parameter: Tensor) -> BuiltLink | None:
    """The link of a parameter that was built in a `ZeroInitContext` and not wrapped yet; None for any other tensor."""
    link = any_link_of(parameter)
    return link if isinstance(link, BuiltLink) else None


# -- Binds the parameters of a model under construction to payloads, and brings writes to them to the shards.
#
# Random numbers differ between ranks, so only rank 0's writes count: its values are broadcast before they go home.


_SMALL_BYTES = 2**20  # an operator of at most this size is copied into one payload, to broadcast it at once


class BuildBinding(Binding):
    """The binding of one context.

    Each payload has memory of its own, so a view that the user keeps beyond the chunk's use keeps its values.
    """

    def __init__(self, memory: RankMemory, communicator: Communicator) -> None:
        # Chunks with a payload -> positions of the parameters whose values are in it. A parameter that is only
        # overwritten gathers nothing, so its neighbours' values may be missing.
        self.valid: dict[Chunk, set[int]] = {}
        super().__init__(self.valid, memory, ReleasedParameter)
        self.communicator = communicator

    def go_over(self, communicator: Communicator) -> None:
        """Use this communicator for what is brought home. Nothing is on its way."""
        self.communicator = communicator

    def show_placeholder(self, managed: ManagedParameter) -> None:
        """Let the parameter show a placeholder.

        The version is raised, so that autograd refuses a backward that would read the placeholder as a saved weight.
        """
        parameter = managed.parameter
        torch.autograd.graph.increment_version(parameter)
        # Assigning `.data` of the released class would fetch the parameter first.
        parameter.__class__ = nn.Parameter
        set_data(parameter, managed.placeholder)
        parameter.__class__ = self.released_class

    def note_left(self, chunk: Chunk) -> None:
        """Record the versions at which the parameters began to show placeholders.

        A higher version later means that the user wrote to a view of the old memory, and that write would be lost.
        """
        # Only `versions()` needs `raw` here: it would keep parameters alive that the user drops.
        chunk.hold_parameters([(managed, managed.parameter) for managed in chunk.parameters])
        self.note_edits_when_left(chunk, chunk.versions())
        chunk.let_parameters_die()

    def take_rank_0s(self, chunk: Chunk, flats: list[Tensor]) -> None:
        """Write rank 0's values of all parameters to the home. Empties `flats`, to free tensors early. Collective."""
        communicator = self.communicator
        # Small operators: one broadcast. Large ones: parameter by parameter, so that no second copy of all is needed.
        if chunk.payload_bytes <= _SMALL_BYTES:
            payload = torch.zeros(chunk.numel, dtype=chunk.dtype, device=communicator.device)
            for managed in chunk.parameters:
                self.show_placeholder(managed)
                payload[managed.in_payload].copy_(flats.pop(0))
            # Ranks have just agreed on what they build, so the broadcasts need no tag.
            communicator.broadcast_(payload, None)
            home = chunk.homes[Kind.PARAM].flat
            for piece in chunk.layout.slices(chunk.rank):
                home[piece.in_shard].copy_(payload[piece.in_payload])
        else:
            for managed in chunk.parameters:
                self.show_placeholder(managed)
                flat = flats.pop(0)
                # On other ranks receive into new memory: the parameter's own may be shared with a tensor of the user's.
                if communicator.rank:
                    del flat
                    flat = torch.empty(managed.numel, dtype=chunk.dtype, device=communicator.device)
                communicator.broadcast_(flat, None)
                set_weights(managed, flat)
        self.note_left(chunk)

    def open(self, chunk: Chunk, payload: Tensor) -> None:
        """Give the chunk a payload without content, and hold its parameters alive until `close`. Local."""
        here = alive(chunk)
        # Register it first: if an interrupt comes in the middle, the chunk is closed with the others.
        self.valid[chunk] = set()
        chunk.hold_parameters(here)
        is_home = payload is chunk.homes[Kind.PARAM].flat
        # What is written to a view of the home is never lost.
        self.renumber_edits(chunk, None if is_home else [each.position for each in chunk.parameters])
        # The user may have dropped parameters since the last use: number the remaining ones.
        for position, each in enumerate(chunk.parameters):
            each.number(position)
        chunk.reside_in(payload)
        if is_home:
            self.fill(chunk)

    def fill(self, chunk: Chunk) -> None:
        """Record that the payload has the values of all parameters."""
        self.valid[chunk] = set(range(len(chunk.parameters)))

    def close(self, chunk: Chunk) -> None:
        """Let the parameters show placeholders and drop the payload, which lives on if the user has a view. Local.

        Works from any state that an interrupt in the middle of `open`, `bind` or this method may have left.
        """
        if chunk.payload is not None:
            if not chunk.bound:
                self.note_versions(chunk)
                chunk.note_bound()
            self.unbind(chunk)
            chunk.bump_versions()
            chunk.end_residence()
        chunk.let_parameters_die()
        self.drop_chunk(chunk)
        self.valid.pop(chunk, None)

    def part_with(self, chunk: Chunk, gone: Collection[ManagedParameter]) -> None:
        """Remove parameters from the chunk, which has no edits. Local; may be interrupted and called again."""
        # Positions change, so close the chunk and open it again with the same payload.
        payload, is_full = chunk.payload, len(self.valid.get(chunk, ())) == len(chunk.raw)
        if payload is not None:
            self.close(chunk)
        chunk.drop_parameters(gone)
        if payload is not None and is_full and chunk.parameters:
            self.open(chunk, payload)
            self.fill(chunk)

    def write_parameter(self, managed: ManagedParameter, payload: Region) -> None:
        """Bring rank 0's edits to all ranks and to the shards. Collective.

        A write that failed half way left the values invalid, and is ignored.
        """
        if managed.position in self.valid[managed.chunk]:
            self.communicator.broadcast_(payload.flat[managed.in_payload], f"values of {managed.name}")
            self.write_home(managed, payload)

    def write_home(self, managed: ManagedParameter, payload: Region) -> None:
        super().write_home(managed, payload)
        # The home is freed when the user drops its parameters, which may be before the copy has ended.
        wait_on_tier(managed.chunk.homes[Kind.PARAM])


def alive(chunk: Chunk) -> list[tuple[ManagedParameter, nn.Parameter]]:
    """The parameters of a chunk that still exist: the user may drop some while the model is built."""
    return [(each, parameter) for each in chunk.parameters if (parameter := each.reference()) is not None]


# -- The chunks of a model under construction: one per operator, dtype and device, each with a home and no other state.


class BuiltChunks:
    """The chunks of one context on this rank. A chunk lives as long as one of its parameters.

    home_of: maps a number of bytes to the tier where a shard of that size rests.
    """

    def __init__(self, memory: RankMemory, home_of: Callable[[int], Tier], binding: BuildBinding) -> None:
        self.placeholder = functools.cache(placeholder)
        self._memory = memory
        self._home_of = home_of
        self._binding = binding
        self._chunks: weakref.WeakSet[Chunk] = weakref.WeakSet()
        self._num_chunks = 0

    def make(self, dtype: torch.dtype, layout: ShardLayout) -> Chunk:
        """A chunk with a home for its shard. Nothing is trained yet, so it has no other state."""
        chunk = Chunk(
            index=self._num_chunks,
            dtype=dtype,
            trainable=False,
            layout=layout,
            oversize=False,
            rank=self._binding.communicator.rank,
            home_layout=layout,
            optim_layout=layout,
            fetch_layout=layout,
            grad_layout=layout,
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

    def cast(self, dtype: torch.dtype) -> None:
        """Round every fp32, fp16 and bf16 weight to `dtype`, shard by shard. Local; nothing is fetched."""
        kinds = (torch.float32, torch.float16, torch.bfloat16)
        with untracked():
            waiting = [c for c in self.in_order() if c.dtype in kinds and c.dtype is not dtype][::-1]
            # Taken out of the list one by one: in it, all old shards would stay beside all rounded ones.
            while waiting:
                self._round(waiting.pop(), dtype)

    def _round(self, chunk: Chunk, dtype: torch.dtype) -> None:
        """Move the chunk's parameters into a new chunk of another dtype, with rounded values."""
        # The layout counts elements, so it serves for another dtype as well.
        rounded = self.make(dtype, chunk.layout)
        round_master_(rounded.homes[Kind.PARAM].flat, chunk.homes[Kind.PARAM].flat.float())
        for link in _links_of(chunk):
            managed = link.managed
            shown = self.placeholder(dtype, managed.placeholder.device, managed.shape)
            link.follow(
                rounded.manage(managed.parameter, managed.name, managed.index, managed.offset, managed.operator, shown)
            )
            self._binding.show_placeholder(link.managed)
        chunk.drop_parameters(list(chunk.parameters))
        self._binding.note_left(rounded)

    def in_order(self) -> list[Chunk]:
        """The chunks of which a parameter still exists, in order of construction."""
        # A WeakSet has no order, and all ranks must go through their chunks in the same one.
        return sorted(self._chunks, key=lambda chunk: chunk.index)

    def links(self) -> list[BuiltLink]:
        """The links of all parameters that still exist on this rank, in order of construction."""
        return [link for chunk in self.in_order() for link in _links_of(chunk)]


def _links_of(chunk: Chunk) -> list[BuiltLink]:
    links = (built_link_of(parameter) for _, parameter in alive(chunk))
    return [link for link in links if link is not None]


# -- The store of a model under construction: its parameters rest on shards over the ranks, one chunk per operator.
#
# A chunk is gathered when something uses one of its parameters. When another chunk is used, rank 0 broadcasts what was
# written, because random numbers differ between ranks, and the values go back to the shards.


_WHOLE = 2**62  # bytes: an operator is one chunk, however large
_EXTENT_BYTES = 2**26  # of address space for shards; untouched pages take no memory


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
        disk: DiskTier | None = None,
    ) -> None:
        self._strategy = strategy
        self._position = StepPosition(["the model under construction"])
        carries_cpu = process_group is None or "cpu" in backends(process_group)
        carrier = torch.device("cpu") if carries_cpu else device.device
        self._own = Communicator(RankMesh.of(process_group), self._position, rank_timeout_s, carrier)
        self._disk = disk
        memory = RankMemory(device, HostTier(extent_bytes=_EXTENT_BYTES), disk)
        self.binding = BuildBinding(memory, self._own)
        self.chunks = BuiltChunks(memory, home_of, self.binding)
        self._freed = Freed()
        self._num_uses = Counter[int]()  # by chunk: uses of its payload that go on
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
        chunk = self.chunks.make(dtype, packed.layout)
        offsets = dict(zip(packed.names, packed.offsets, strict=True))
        flats: list[Tensor] = []
        for name, parameter in members:
            shown = self.chunks.placeholder(dtype, device, parameter.shape)
            managed = chunk.manage(parameter, f"{operator}.{name}", len(flats), offsets[name], number, shown)
            parameter._gemini = BuiltLink(managed, self)  # type: ignore[attr-defined]
            flats.append(managed.laid_out(parameter.data))
        self.binding.take_rank_0s(chunk, flats)
        # The plain weights are freed by now, but malloc may keep their memory (memory/arena.py).
        self._freed.note(chunk.payload_bytes)

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
                unused = [each for each in self.binding.valid if each not in chunks and not self._num_uses[each.index]]
                for chunk in unused:
                    self._release(chunk)
                for chunk in chunks:
                    members = [each for each in wanted if each.chunk is chunk]
                    self._position.set(members[0].operator, Phase.TOUCH)
                    self._fetch(chunk, members, overwrites)
                    self._num_uses[chunk.index] += 1
                    pinned.append(chunk)
            # Outside of `publishing`: an exception of the user's code is not published from here.
            yield
            # After an exception the values stay invalid, and `BuildBinding.write_parameter` ignores them.
            if overwrites:
                self.binding.valid[wanted[0].chunk].add(wanted[0].position)
        finally:
            self._position.return_to(before)
            for chunk in pinned:
                self._num_uses[chunk.index] -= 1
                # A use around this one goes on, and needs the parameters plain.
                if not self._num_uses[chunk.index] and chunk.plain:
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
        self.communicator.all_gather_of_all(carried, home.to(carried.device), chunk.layout, chunk.index)
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
        self._num_uses.clear()
        for chunk in list(self.binding.valid):
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
            self.chunks.cast(dtype)

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
                if self._disk is not None:
                    self._disk.close()

    def _check_open(self, what: str) -> None:
        if self.is_closed:
            raise GeminiError(f"{what}: the ranks of its ZeroInitContext have parted; build the model again")
