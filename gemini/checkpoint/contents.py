"""What a checkpoint has of a model and its optimizer: every tensor with its name, and this rank's part of it.

Of each parameter one tensor is saved: its fp32 master where it has one, else the weights. A split master is joined. The
16-bit weights follow from the master by the rounding of every step, so they need no bytes. What all ranks hold whole
is divided between them, as the shards of stage 3 are: each byte is written by one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gemini.access.link import link_of
from gemini.access.states import FlatAccess, StateAccess, States, StoredAccess
from gemini.checkpoint.manifest import (
    GRADIENT,
    WEIGHT,
    GradientFact,
    OptimizerFact,
    ParameterFact,
    rank_key,
    scale_key,
    state_key,
)
from gemini.checkpoint.tensor_files import Box, Order, Part, check_dtype, whole
from gemini.checkpoint.values import bytes_of, encode, name_of
from gemini.memory.transfer import Region
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.sharded_optimizer import ShardedOptimizer
from gemini.optimizer.state_dict import names_by_chunk, numbers_of
from gemini.placement.demand import Kind, Tier
from gemini.runtime.chunk import Chunk, ManagedParameter
from optim import FP32, StateFormat
from sharding import ALIGNMENT


class Share(NamedTuple):
    """A run of a parameter's elements that one rank writes."""

    start: int  # in the parameter, in the order of its memory
    numel: int
    read_start: int  # in this rank's part of the chunk's state


def shares_of(managed: ManagedParameter) -> list[Share]:
    """What this rank writes of a parameter: its shard, also of states that are whole everywhere; one copy counts."""
    chunk = managed.chunk
    if chunk.replica or not managed.counts:
        return []
    is_whole = chunk.optim_layout.world_size == 1
    pieces = chunk.layout.pieces(chunk.rank, managed.offset, managed.numel)
    return [
        Share(each.payload_start - managed.offset, each.numel, each.payload_start if is_whole else each.shard_start)
        for each in pieces
    ]


def inside(managed: ManagedParameter, box: Box) -> Box:
    """A box of what is in a chunk of a parameter as one of the whole, which tensor parallelism may divide."""
    if managed.part is None:
        return box
    return Box(tuple(at + own for at, own in zip(box.offsets, managed.part.offsets, strict=True)), box.sizes)


@dataclass(frozen=True)
class ChunkEntry:
    """One state of one chunk: the parameters that have it, and what reads it."""

    chunk: Chunk
    access: StateAccess
    dtype: torch.dtype
    keys: tuple[tuple[str, ManagedParameter], ...]
    changes_unseen: bool  # users, or autograd, may write to it without asking for its tickets

    def parts(self) -> Iterator[tuple[int, Part]]:
        """The parts that this rank writes, each with the number of the file that it goes to."""
        for key, managed in self.keys:
            order = Order.of(managed.stride, managed.shape)
            boxes = [
                inside(managed, box)
                for share in shares_of(managed)
                for box, _ in order.boxes(managed.shape, share.start, share.start + share.numel)
            ]
            # A file has one box of a tensor, see tensor_files.py.
            yield from ((number, Part(key, box, self.dtype)) for number, box in enumerate(boxes))

    def values(self, contents: Sequence[Tensor]) -> Iterator[tuple[int, str, Tensor]]:
        """The elements of the same parts in the same order, 1-D, where the state rests: (number of the file, key, ...).

        contents: of the access's regions. Each value is a view of them, or a copy of one parameter's part.
        """
        for key, managed in self.keys:
            order, number = Order.of(managed.stride, managed.shape), 0
            for share in shares_of(managed):
                flat = self.access.read_in(contents, share.read_start, share.numel)
                for box, sizes in order.boxes(managed.shape, share.start, share.start + share.numel):
                    piece, flat = flat.split([box.numel, flat.numel() - box.numel])
                    # Elements lie in the order of their strides, and go into the file in that of the dimensions.
                    yield number, key, piece.view(sizes).permute(order.back).reshape(-1) if sizes else piece
                    number += 1


class Elements(StateAccess):
    """A state of parameters that share one format, as it is stored: no element is widened on its way to a file."""

    def __init__(self, access: StoredAccess, its: StateFormat) -> None:
        super().__init__(access.step, access.chunk)
        self._access = access
        self._format = its

    @property
    def regions(self) -> tuple[Region, ...]:
        return self._access.regions

    def read_in(self, contents: Sequence[Tensor], start: int, numel: int) -> Tensor:
        if not numel:
            return torch.empty(0, dtype=self._format.dtype, device="cpu")
        return self._access.stored_in(contents, start, numel).elements

    def scales_in(self, contents: Sequence[Tensor], start: int, numel: int) -> Tensor:
        """(blocks,) the scales of the same elements."""
        scales = self._access.stored_in(contents, start, numel).scales
        assert scales is not None
        return scales


@dataclass(frozen=True)
class ScaleEntry(ChunkEntry):
    """The scales of one state of one chunk: of each parameter one-dimensional, in the order of its blocks."""

    def parts(self) -> Iterator[tuple[int, Part]]:
        for key, managed in self.keys:
            for number, share in enumerate(shares_of(managed)):
                box = Box((share.start // ALIGNMENT,), (-(-share.numel // ALIGNMENT),))
                yield number, Part(key, box, self.dtype)

    def values(self, contents: Sequence[Tensor]) -> Iterator[tuple[int, str, Tensor]]:
        assert isinstance(self.access, Elements)
        for key, managed in self.keys:
            for number, share in enumerate(shares_of(managed)):
                yield number, key, self.access.scales_in(contents, share.read_start, share.numel)


def _stored_entries(
    chunk: Chunk, access: StoredAccess, keys: Iterable[tuple[str, ManagedParameter]]
) -> Iterator[ChunkEntry]:
    """A state whose parameters have several formats: an entry for each format, and one for scales."""
    by_format: dict[StateFormat, list[tuple[str, ManagedParameter]]] = {}
    for key, managed in keys:
        its = access.format_of(managed)
        # Blocks follow the order in memory. Of a parameter whose order is not that of its dimensions the file has fp32:
        # whoever reads it may have another one.
        in_order = Order.of(managed.stride, managed.shape).is_natural
        by_format.setdefault(its if in_order or not its.has_scales else FP32, []).append((key, managed))
    for its, some in by_format.items():
        if its == FP32:
            yield from _entry(chunk, access, some)
            continue
        elements = Elements(access, its)
        yield from _entry(chunk, elements, some)
        if its.has_scales:
            scales = tuple((scale_key(key), managed) for key, managed in some)
            yield ScaleEntry(chunk, elements, torch.float32, scales, changes_unseen=False)


class Plain(NamedTuple):
    """A tensor that is in no chunk, such as a buffer."""

    key: str
    value: Tensor


class Contents:
    """All that a checkpoint has of a model and its optimizer. Made between steps. Collective."""

    def __init__(self, model: ShardedModel, optimizer: ShardedOptimizer | None) -> None:
        """Raises CheckpointError for a tensor that no file can hold. Nothing has been written then."""
        self._model = model
        self._optimizer = optimizer
        manager = model.chunk_manager
        self._manager = manager
        self._states = States(manager)
        self._step = manager.step
        # Edits of weights count, and are in no home before this.
        self._step.params.finish_prefetch()
        self._step.binding.write_back_all()
        # One replica writes for all: a gradient must be the same in each.
        self._step.reductions.join_replicas()
        # All tensors under all their names; tied ones are one object.
        self._entries: dict[str, Any] = dict(nn.Module.state_dict(model.module, keep_vars=True))
        self.chunk_entries = list(self._chunk_entries())
        self.plain, self.own_buffers = self._plain()
        for entry in self.chunk_entries:
            for key, _ in entry.keys:
                check_dtype(key, entry.dtype)
        for key, value in self.plain:
            check_dtype(key, value.dtype)

    # -- tensors

    def parts(self) -> Iterator[tuple[int, Part]]:
        """The parts that this rank writes, each with the number of the file that it goes to."""
        for entry in self.chunk_entries:
            yield from entry.parts()
        for key, value in self.plain:
            yield 0, Part(key, whole(value.shape), value.dtype)

    def _chunk_entries(self) -> Iterator[ChunkEntry]:
        names = self._names_by_chunk()
        for chunk in self._manager.chunks:
            if chunk.holds_grad and any(not has_master(each) for each in chunk.parameters):
                # The gradient lies where the weights are read from.
                self._step.payloads.restore_parameters(chunk)
            yield from self._weights(chunk)
            for name in names.get(chunk.index, ()):
                having = [each for each in chunk.parameters if name in self._states.names_of(each)]
                access = self._states.of_optimizer(chunk, name)
                keys = ((state_key(each.name, name), each) for each in having)
                if isinstance(access, StoredAccess):
                    yield from _stored_entries(chunk, access, keys)
                else:
                    yield from _entry(chunk, access, keys)
            yield from self._gradients(chunk)

    def _weights(self, chunk: Chunk) -> Iterator[ChunkEntry]:
        with_master = [each for each in chunk.parameters if has_master(each)]
        others = [each for each in chunk.parameters if not has_master(each)]
        for access, some in ((self._states.full_precision(chunk), with_master), (self._states.weights(chunk), others)):
            yield from _entry(chunk, access, ((WEIGHT + each.name, each) for each in some))

    def _gradients(self, chunk: Chunk) -> Iterator[ChunkEntry]:
        gradient = self._step.grads.find(chunk)
        if gradient is not None and gradient.is_reduced:
            having = [each for each in chunk.parameters if gradient.agreed[each.position]]
            # As they rest, times the loss scale, and not as users see them.
            rests = FlatAccess(self._step, chunk, gradient.reduced())
            yield from _entry(chunk, rests, ((GRADIENT + each.name, each) for each in having), changes_unseen=True)

    def _names_by_chunk(self) -> dict[int, list[str]]:
        if self._optimizer is None:
            return {}
        return names_by_chunk(self._manager.communicator, self._optimizer.chunk_optimizer.states)

    def _plain(self) -> tuple[list[Plain], list[str]]:
        """Tensors in no chunk that this rank writes, and the names of those whose values differ from rank 0's."""
        communicator = self._manager.communicator.everyone
        here = {name: each.detach() for name, each in self._untied() if link_of(each) is None}
        digests = [_digest(value) for value in here.values()]
        of_rank_0 = communicator.all_gather_bytes(b"".join(digests), "digests of buffers")[0]
        if communicator.rank == 0:
            return [Plain(WEIGHT + name, value) for name, value in here.items()], []
        # Batch norms' running statistics are of each rank's own batches.
        size = sha256().digest_size
        differ = [
            name
            for number, (name, digest) in enumerate(zip(here, digests, strict=True))
            if of_rank_0[number * size : (number + 1) * size] != digest
        ]
        return [Plain(rank_key(communicator.rank, WEIGHT + name), here[name]) for name in differ], differ

    def _untied(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of the module's state dict once, under the first of its names."""
        seen: dict[Tensor, str] = {}
        for name, value in self._entries.items():
            if isinstance(value, Tensor) and value not in seen:
                seen[value] = name
                yield name, value

    # -- facts

    def parameters(self) -> list[ParameterFact]:
        """The parameters in chunks."""
        aliases: dict[int, list[str]] = {}
        for name, parameter in self._model.module.named_parameters(remove_duplicate=False):
            link = link_of(parameter)
            if link is not None and name != link.managed.name:
                aliases.setdefault(link.managed.index, []).append(name)
        return [
            ParameterFact(
                name=each.name,
                shape=tuple(each.whole_shape),
                dtype=name_of(each.dtype),
                aliases=tuple(aliases.get(each.index, ())),
                trained=each.requires_grad,
            )
            for each in self._manager.parameters
        ]

    def buffers(self) -> list[ParameterFact]:
        """Tensors of the module's state dict that are in no chunk."""
        return [
            ParameterFact(name=name, shape=tuple(value.shape), dtype=name_of(value.dtype))
            for name, value in self._untied()
            if link_of(value) is None
        ]

    def extra_states(self) -> dict[str, Any]:
        """What modules save of themselves beside tensors, encoded."""
        others = {name: value for name, value in self._entries.items() if not isinstance(value, Tensor)}
        return {name: encode(value, f"the extra state {name!r}") for name, value in others.items()}

    def step_number(self) -> int | None:
        """How many steps the optimizer has made, with skipped ones; None without an optimizer."""
        return None if self._optimizer is None else self._optimizer.chunk_optimizer.num_steps

    def settings(self) -> dict[str, str]:
        """The settings of the model, in words, for people."""
        return {name: str(value) for name, value in vars(self._model.settings).items() if value is not None}

    def gradients(self) -> GradientFact | None:
        """The gradients of an open window of micro-batches."""
        grads = self._manager.grads
        dtypes = {
            key.removeprefix(GRADIENT): name_of(entry.dtype)
            for entry in self.chunk_entries
            for key, _ in entry.keys
            if key.startswith(GRADIENT)
        }
        return GradientFact(num_backwards=grads.num_backwards, dtypes=dtypes) if dtypes else None

    def optimizer(self) -> OptimizerFact | None:
        """The optimizer's groups and scalars."""
        if self._optimizer is None:
            return None
        optimizer, groups = self._optimizer.chunk_optimizer, self._optimizer.param_groups
        known = numbers_of(groups)
        members = [each for each in self._manager.parameters if each.index in known]
        states = {each.name: list(self._states.names_of(each)) for each in members}
        scalars = {each.name: optimizer.states.scalars_of(each) for each in members}
        scale = None if optimizer.scaling.active is None else optimizer.scaling.active.state_dict()
        return OptimizerFact(
            kind=optimizer.kind,
            num_steps=optimizer.num_steps,
            groups=[_group(group, number) for number, group in enumerate(groups)],
            states={name: its for name, its in states.items() if its},
            scalars={name: encode(its, f"the state of {name!r}") for name, its in scalars.items() if its is not None},
            ema=None if optimizer.states.averages is None else optimizer.states.averages.counts(),
            loss_scale=None if scale is None else encode(scale, "the loss scale"),
        )


def has_master(managed: ManagedParameter) -> bool:
    """Whether the parameter's master may hold more than its weights."""
    return managed.owns_master and Kind.MASTER in managed.chunk.homes


def _entry(
    chunk: Chunk,
    access: StateAccess,
    keys: Iterable[tuple[str, ManagedParameter]],
    changes_unseen: bool = False,
) -> Iterator[ChunkEntry]:
    found = tuple(keys)
    if found:
        # A parameter home on the device may be what the parameters themselves are views of.
        home = chunk.homes[Kind.PARAM]
        shows = home.tier is Tier.DEVICE and any(region is home for region in access.regions)
        yield ChunkEntry(chunk, access, access.read(0, 0).dtype, found, changes_unseen or shows)


def _group(group: dict[str, Any], number: int) -> dict[str, Any]:
    """A param group with the names of its parameters. One in no chunk, which no rank shards, has no name here."""
    links = [link_of(parameter) for parameter in group["params"]]
    settings = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    encoded: dict[str, Any] = encode(settings, f"param group {number}")
    return {**encoded, "params": [link.managed.name for link in links if link is not None]}


def _digest(value: Tensor) -> bytes:
    return sha256(bytes_of(value)).digest()
