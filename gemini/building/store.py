"""The store of a model under construction: its parameters rest on shards over the ranks, one chunk per operator.

A chunk is gathered when something uses one of its parameters. When another chunk is used, rank 0 broadcasts what was
written, because random numbers differ between ranks, and the values go back to the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemini.building.binding import BuildBinding
from gemini.building.built_chunks import BuiltChunks
from gemini.building.link import BuiltLink
from gemini.chunks.chunk import Chunk, ManagedParameter
from gemini.chunks.placeholder import set_data
from gemini.errors import GeminiError
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
from sharding import ParameterSpec, ShardStrategy, backends

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
    ) -> None:
        self._strategy = strategy
        self._position = StepPosition(["the model under construction"])
        carries_cpu = process_group is None or "cpu" in backends(process_group)
        carrier = torch.device("cpu") if carries_cpu else device.device
        self._own = Communicator(process_group, self._position, rank_timeout_s, carrier)
        memory = Memory(device, HostTier(extent_bytes=_EXTENT_BYTES))
        self.binding = BuildBinding(memory, self._own)
        self.chunks = BuiltChunks(memory, home_of, self.binding)
        self._freed = Freed()
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
        # The plain weights are freed by now, but malloc may keep their memory (memory/freed.py).
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

    def _check_open(self, what: str) -> None:
        if self.is_closed:
            raise GeminiError(f"{what}: the ranks of its ZeroInitContext have parted; build the model again")
