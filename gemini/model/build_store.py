"""Where the parameters of a model rest while it is built: sharded over the ranks, one chunk an operator.

A chunk is gathered when something uses one of its parameters. What was written is then broadcast by rank 0, as random
numbers differ by rank, and goes back to the shards when another chunk is used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemini.chunks.placeholder import dense_stride, expanded, placeholder, set_data
from gemini.errors import GeminiError
from gemini.memory.freed import ShardMemory
from gemini.model.built_chunk import BuiltChunk, BuiltLink, BuiltParameter, built_link_of, refusal
from gemini.model.released import ReleasedParameter
from gemini.placement.packing import PackingInput, pack
from gemini.ranks.communicator import Communicator
from gemini.ranks.position import Phase, StepPosition
from sharding import ParameterSpec, ShardStrategy, backends

_WHOLE = 2**62  # bytes: an operator is one chunk, however large
_SMALL_BYTES = 2**20  # an operator of at most this is broadcast in one piece, for which it is copied


class BuildStore:
    """The shards of one context's parameters on this rank. Collective to create, and so is every use.

    home_of: num_bytes -> the device where that many bytes of shards are to rest.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        strategy: ShardStrategy,
        home_of: Callable[[int], torch.device],
        accelerator: torch.device,
        rank_timeout_s: float,
    ) -> None:
        self._strategy = strategy
        self._home_of = home_of
        self._position = StepPosition(["the model under construction"])
        carries_cpu = process_group is None or "cpu" in backends(process_group)
        self._carrier = torch.device("cpu") if carries_cpu else accelerator
        self.communicator = Communicator(process_group, self._position, rank_timeout_s, self._carrier)
        self._chunks: weakref.WeakSet[BuiltChunk] = weakref.WeakSet()
        self._fetched: list[BuiltChunk] = []
        self._num_chunks = 0
        self._memory = ShardMemory()
        self.is_closed = False

    # -- in

    def shard(self, operator: str, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Take the parameters of one operator with rank 0's values; their own memory is freed. Collective."""
        self._check_open(operator)
        number = self._position.add(operator)
        self._position.set(number, Phase.BUILD)
        groups: dict[tuple[torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in parameters:
            groups.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
        with self.communicator.publishing(), torch.inference_mode(False), torch.no_grad():
            shapes = [(name, tuple(p.shape), p.stride(), str(p.dtype), p.device.type) for name, p in parameters]
            if self.communicator.world_size > 1:
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
        numel = packed.layout.shard_numel
        home = self._memory.zeros(numel, dtype, self._home_of(numel * dtype.itemsize))
        chunk = BuiltChunk(self._num_chunks, number, packed.layout, home, device)
        self._num_chunks += 1
        empty = placeholder(dtype, device)
        offsets = dict(zip(packed.names, packed.offsets, strict=True))
        flats = []
        for name, parameter in members:
            stride = dense_stride(parameter)
            its = BuiltParameter(
                f"{operator}.{name}",
                chunk,
                len(chunk.parameters),
                offsets[name],
                parameter.shape,
                stride,
                expanded(empty, parameter.shape),
                weakref.ref(parameter),
            )
            chunk.parameters.append(weakref.ref(its))
            parameter._gemini = BuiltLink(its, self)  # type: ignore[attr-defined]
            values = parameter.data
            if values.stride() != stride:
                values = torch.empty_strided(parameter.shape, stride, dtype=dtype, device=device).copy_(values)
            flats.append(torch.as_strided(values, (its.numel,), (1,), values.storage_offset()))
            del values
        self._take_rank_0s(chunk, flats)
        chunk.versions = chunk.versions_now()
        self._chunks.add(chunk)
        self._memory.note(packed.layout.numel * dtype.itemsize)

    def _take_rank_0s(self, chunk: BuiltChunk, flats: list[Tensor]) -> None:
        """home <- rank 0's values of all parameters, which ranks have agreed on. Empties `flats`. Collective."""
        is_small = chunk.layout.numel * chunk.home.itemsize <= _SMALL_BYTES
        if self.communicator.world_size > 1 and is_small:
            payload = chunk.home.new_zeros(chunk.layout.numel, device=self._carrier)
            for (its, _), flat in zip(chunk.living(), flats, strict=True):
                its.region(payload).copy_(flat)
            self.communicator.broadcast_(payload, None)
            flats[:] = [its.region(payload) for its, _ in chunk.living()]
        for its, parameter in chunk.living():
            its.show_placeholder(parameter)
            if self.communicator.rank and not is_small:  # the memory may be the user's: given up, not written to
                del flats[0]
                flats.insert(0, chunk.home.new_empty(its.numel, device=self._carrier))
            if not is_small:
                self._take_values(flats[0], None)
            self._bring_home(its, flats.pop(0))

    def _take_values(self, flat: Tensor, what: str | None, src: int = 0) -> None:
        """flat <- the values of rank `src`. what: None where ranks have agreed on it. Collective."""
        if self.communicator.world_size > 1:
            carried = flat.to(self._carrier)
            self.communicator.broadcast_(carried, what, src)
            if carried is not flat:
                flat.copy_(carried)

    def _bring_home(self, its: BuiltParameter, flat: Tensor) -> None:
        """home <- this rank's elements of `flat` (numel,)."""
        chunk = its.chunk
        for piece in chunk.layout.pieces(self.communicator.rank, its.offset, its.numel):
            start = piece.payload_start - its.offset
            chunk.home[piece.shard_start : piece.shard_start + piece.numel].copy_(flat[start : start + piece.numel])

    # -- use

    @contextmanager
    def fetched(self, wanted: Sequence[BuiltParameter], overwrites: bool = False) -> Iterator[None]:
        """Inside, the parameters are plain and whole. Collective, unless `overwrites`."""
        self._check_open(wanted[0].name)
        chunks = sorted(dict.fromkeys(its.chunk for its in wanted), key=lambda chunk: chunk.index)
        before = self._position.now
        with self.communicator.publishing():
            for chunk in [chunk for chunk in self._fetched if chunk not in chunks and not chunk.pins]:
                self._release(chunk)
            for chunk in chunks:
                self._position.set(chunk.operator, Phase.TOUCH)
                positions = {its.position for its in wanted if its.chunk is chunk}
                self._fetch(chunk, positions, overwrites)
                chunk.pins += 1
        try:  # what the user does inside and fails in is no failure of ours
            yield
            if overwrites:
                wanted[0].chunk.valid.add(wanted[0].position)
        finally:
            self._position.now = before
            for chunk in chunks:
                chunk.pins -= 1
                if not chunk.pins:
                    for _, parameter in chunk.held:
                        parameter.__class__ = ReleasedParameter

    def _fetch(self, chunk: BuiltChunk, positions: set[int], overwrites: bool) -> None:
        with torch.inference_mode(False), torch.no_grad():
            if chunk.payload is None:
                self._bind(chunk)
            if not (overwrites or positions <= chunk.valid):
                self._write_back(chunk)
                self._gather(chunk)
            for _, parameter in chunk.held:
                parameter.__class__ = nn.Parameter

    def _bind(self, chunk: BuiltChunk) -> None:
        """Memory for the payload, whose content is not there yet."""
        at_home = self.communicator.world_size == 1 and chunk.home.device == chunk.device
        self._fetched.append(chunk)  # first: what is interrupted in here is released with the others
        chunk.payload = chunk.home if at_home else chunk.home.new_empty(chunk.layout.numel, device=chunk.device)
        chunk.valid = set(range(len(chunk.parameters))) if at_home else set()
        chunk.held = chunk.living()
        for its, parameter in chunk.held:
            parameter.__class__ = nn.Parameter
            set_data(parameter, its.view(chunk.payload))
        chunk.refuse_lost_edits()

    def _gather(self, chunk: BuiltChunk) -> None:
        assert chunk.payload is not None
        carried = chunk.payload
        if carried.device != self._carrier and self.communicator.world_size > 1:
            carried = torch.empty_like(carried, device=self._carrier)
        self.communicator.all_gather(carried, chunk.home.to(carried.device), chunk.layout, chunk.index)
        if carried is not chunk.payload:
            chunk.payload.copy_(carried)
        chunk.valid = set(range(len(chunk.parameters)))

    def _write_back(self, chunk: BuiltChunk) -> None:
        """Rank 0's edits, on all ranks and at home. Collective."""
        assert chunk.payload is not None
        edited = (chunk.edited | chunk.newer()) & chunk.valid
        for its in (its for its, _ in chunk.held if its.position in edited):
            flat = its.region(chunk.payload)
            self._take_values(flat, f"values of {its.name}")
            if chunk.payload is not chunk.home:
                self._bring_home(its, flat)
        chunk.edited.clear()
        chunk.versions = chunk.versions_now()

    def spread(self, its: BuiltParameter, src: int) -> None:
        """The values of rank `src` of a fetched parameter, on all ranks and at home. Collective."""
        assert its.chunk.payload is not None
        flat = its.region(its.chunk.payload)
        self._take_values(flat, f"changes to {its.name}", src)
        if its.chunk.payload is not its.chunk.home:
            self._bring_home(its, flat)
        self.forget_edits(its)

    def forget_edits(self, its: BuiltParameter) -> None:
        """What was written to a fetched parameter is home, or undone. Local."""
        its.chunk.edited.discard(its.position)
        its.chunk.versions[its.position] = its.chunk.versions_now()[its.position]

    def _release(self, chunk: BuiltChunk, writes_back: bool = True) -> None:
        """Bring edits home; the parameters show their placeholders. Collective, but for the edits local."""
        with torch.inference_mode(False), torch.no_grad():
            if writes_back:
                self._write_back(chunk)
            for its, parameter in chunk.held:
                its.show_placeholder(parameter)
            chunk.versions = chunk.versions_now()
        chunk.payload, chunk.held, chunk.valid = None, [], set()
        self._fetched.remove(chunk)

    def release_all(self) -> None:
        """Nothing is gathered any more. Collective."""
        with self.communicator.publishing():
            for chunk in list(self._fetched):
                self._release(chunk)

    def restart(self) -> None:
        """After a failure that every rank caught: nothing is gathered, equally on all ranks. Collective."""
        for chunk in list(self._fetched):
            chunk.pins = 0
            self._release(chunk, writes_back=False)
        self.communicator.restart()

    def deepcopy(self, its: BuiltParameter, memo: dict[int, Any]) -> nn.Parameter:
        """A copy of the parameter, sharded like it. Collective."""
        original = its.parameter
        known: nn.Parameter | None = memo.get(id(original))
        if known is not None:
            return known
        with self.fetched([its]), torch.no_grad():
            copied = nn.Parameter(original.detach().clone(), original.requires_grad)
        self.shard("copy of " + its.name.rpartition(".")[0], [(its.name.rpartition(".")[2], copied)])
        memo[id(original)] = copied
        return copied

    def replace(self, its: BuiltParameter, value: Tensor) -> None:
        """The parameter gets data of another shape or dtype, and a chunk of its own. Collective."""
        parameter, (operator, _, name) = its.parameter, its.name.rpartition(".")
        with torch.no_grad():
            values = value.detach().clone()
            self.let_go(its)
            set_data(parameter, values)
        del values
        self.shard(operator, [(name, parameter)])

    # -- out

    def finish(self, dtype: torch.dtype | None) -> None:
        """The context ends; from now on a backward that reaches its parameters is refused. Collective."""
        self.release_all()
        if dtype is not None:
            self._cast(dtype)
        for chunk in list(self._chunks):
            for its, parameter in chunk.living():
                link = built_link_of(parameter)
                if link is not None and parameter.requires_grad:
                    link.guard = parameter.register_hook(refusal(its.name))

    def _cast(self, dtype: torch.dtype) -> None:
        """Round every fp32, fp16 and bf16 weight to `dtype`, shard by shard. Local."""
        with torch.inference_mode(False), torch.no_grad():
            for chunk in sorted(self._chunks, key=lambda chunk: chunk.index):
                if chunk.home.dtype in (torch.float32, torch.float16, torch.bfloat16) and chunk.home.dtype is not dtype:
                    chunk.round_to(dtype)

    @contextmanager
    def values(self, its: BuiltParameter) -> Iterator[Tensor]:
        """(numel,) the parameter's values. Collective."""
        with self.fetched([its]):
            assert its.chunk.payload is not None
            yield its.region(its.chunk.payload)

    def let_go(self, its: BuiltParameter) -> None:
        """The parameter is an ordinary one, without values, from now on. Local; may be interrupted and called again."""
        parameter, link = its.parameter, built_link_of(its.parameter)
        if link is not None and link.guard is not None:
            link.guard.remove()
        its.chunk.held = [(other, p) for other, p in its.chunk.held if other is not its]
        parameter.__class__ = nn.Parameter
        set_data(parameter, its.placeholder)
        del parameter._gemini  # type: ignore[attr-defined]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that build together."""
        return self.communicator.ranks

    @property
    def num_operators(self) -> int:
        """Operators that were taken so far, those that are gone included."""
        return len(self._position.operators) - 1

    @property
    def num_parameters(self) -> int:
        """Parameters that are still here on this rank."""
        return sum(len(chunk.living()) for chunk in self._chunks)

    def close(self) -> None:
        """Give the process group back. Collective."""
        if not self.is_closed:
            self.release_all()
            self.is_closed = True
            self.communicator.close()

    def _check_open(self, what: str) -> None:
        if self.is_closed:
            raise GeminiError(f"{what}: the ranks of its ZeroInitContext have parted; build the model anew")
