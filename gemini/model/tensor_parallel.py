"""Tensor parallelism: parameters that are `DTensor`s of another mesh dimension lie in chunks by their local tensors.

While a model is wrapped, each `DTensor` parameter of its modules gives way to a plain parameter over the local tensor.
From then on everything below sees plain parameters. Around the forward of the operator that has it, the module has a
`DTensor` again, made of the fetched local tensor, so that torch's rules for sharded operands apply. Its gradient comes
back through `DTensor.from_local`, laid out as the weight is: partial gradients of a replicated weight are summed up
over the parts there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gemini.access.released import ReleasedParameter
from gemini.building.store import built_link_of
from gemini.errors import DivergenceError, UnsupportedError
from gemini.model.operators import Found, is_compiled
from gemini.ranks.communicator import Communicator
from gemini.ranks.mesh import RankMesh
from gemini.ranks.parts import DTensorLayout, TensorPart, is_dtensor, note_local
from gemini.runtime.chunk import Chunk

Places = list[tuple[nn.Module, str]]
"""Modules with the names that they have for a parameter."""


class LocalParameters:
    """The parameters of a module whose local tensors have taken the place of `DTensor`s, and its other parameters.

    parts: which part of a whole each parameter of the module is. Empty: there is no other dimension.
    """

    def __init__(self) -> None:
        self.parts: dict[nn.Parameter, TensorPart] = {}
        self._places: dict[nn.Parameter, Places] = {}  # of those that were `DTensor`s
        self._given: dict[nn.Parameter, Any] = {}  # the `DTensor`s, by what took their place

    @property
    def are_any(self) -> bool:
        """Whether any parameter was a `DTensor`."""
        return bool(self._given)

    def add_local(self, places: Places, given: Any, part: TensorPart) -> None:
        """Put a plain parameter over the local tensor in the place of `given`, which holds no memory from then on."""
        local = nn.Parameter(given._local_tensor.detach(), requires_grad=given.requires_grad)
        self.parts[local], self._places[local], self._given[local] = part, places, given
        for owner, leaf in places:
            owner._parameters[leaf] = local
        # Otherwise whoever still has the old parameter, such as an optimizer, would keep its memory alive.
        given._local_tensor = given._local_tensor.new_empty(0)
        note_local(given, local)

    def note_plain(self, parameters: Collection[nn.Parameter], is_first: bool) -> None:
        """These are no `DTensor`s: all parts have copies of them, of which those of the first count."""
        for parameter in parameters:
            if parameter not in self.parts:
                nowhere = (0,) * parameter.dim()
                self.parts[parameter] = TensorPart(None, parameter.shape, nowhere, is_first)

    def undo(self) -> None:
        """Give the module its `DTensor`s back, with what their local tensors are now."""
        for local, given in self._given.items():
            given._local_tensor = local.data
            note_local(given, None)
            for owner, leaf in self._places[local]:
                owner._parameters[leaf] = given
        self._given.clear()

    def compare_copies(self, module: nn.Module, communicator: Communicator) -> None:
        """Raises DivergenceError, on all parts, unless plain parameters and buffers are equal on all. Collective."""
        if communicator.parts is None:
            return
        tensors = [*module.named_parameters(), *module.named_buffers()]
        copies = {name: each for name, each in tensors if each not in self._given and built_link_of(each) is None}
        digests = b"".join(sha256(_bytes_of(each)).digest() for each in copies.values())
        every = communicator.parts.collectives.all_gather_bytes(digests)
        size = sha256().digest_size
        for index, name in enumerate(copies):
            if len({words[index * size : (index + 1) * size] for words in every}) > 1:
                raise DivergenceError(
                    f"{name!r} is no DTensor and has other values on other ranks of the tensor-parallel dimension, "
                    "which would be trained apart: build the model from one seed on all ranks, before "
                    "parallelize_module()"
                )

    def show(self, operators: Found, chunks: Sequence[Chunk]) -> Iterator[RemovableHandle]:
        """Have modules see `DTensor`s while their operators run. The caller takes the handles, which end that.

        Raises UnsupportedError for a compiled operator.
        """
        by_operator: dict[nn.Module, list[tuple[nn.Module, str, DTensorLayout]]] = {}
        for parameter, places in self._places.items():
            layout = self.parts[parameter].layout
            assert layout is not None
            for owner, leaf in places:
                by_operator.setdefault(_operator_of(owner, operators), []).append((owner, leaf, layout))
        cut_in = [(chunk, self._cut_in(chunk)) for chunk in chunks]
        beside = {parameter: cut for chunk, cut in cut_in for parameter in chunk.raw}
        for operator, _ in operators if by_operator else ():
            its = by_operator.get(operator, [])
            if its and is_compiled(operator):
                raise UnsupportedError(
                    f"{type(operator).__name__} has DTensor parameters and is compiled: the compiler would trace how "
                    "they are put together. Compile modules without DTensors, or wrap the model uncompiled"
                )
            own = [owner._parameters[leaf] for owner, leaf, _ in its] + list(operator._parameters.values())
            covered = {each: None for parameter in own if parameter is not None for each in beside.get(parameter, ())}
            if its or covered:
                shown = _Shown(its, tuple(covered))
                yield operator.register_forward_pre_hook(shown.before)
                yield operator.register_forward_hook(shown.after, always_call=True)

    def _cut_in(self, chunk: Chunk) -> list[nn.Parameter]:
        """The parameters of a chunk of which this rank has a part."""
        return [each for each in chunk.raw if each in self._given and self.parts[each].is_cut]


class _Shown:
    """The hooks around one operator, whose modules have `DTensor`s meanwhile.

    Parameters of which this rank has a part are never plain, though their chunk is: outside of the operator a function
    would take the part for the whole. As they fetch themselves, the function is refused.
    """

    def __init__(self, places: Sequence[tuple[nn.Module, str, DTensorLayout]], covered: Sequence[nn.Parameter]) -> None:
        """covered: what is in the chunks that this operator makes plain."""
        self._places = places
        self._covered = covered
        self._calls: list[list[tuple[nn.Module, str, nn.Parameter]]] = []  # of each running call: what it has replaced

    def before(self, module: nn.Module, args: Any) -> None:
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._calls.append(replaced)
        for owner, leaf, layout in self._places:
            local = owner._parameters[leaf]
            # A module that calls itself has them already.
            if local is not None and not is_dtensor(local):
                replaced.append((owner, leaf, local))
                if isinstance(local, ReleasedParameter):  # not what `torch.func.functional_call` has put here
                    local.__class__ = nn.Parameter  # type: ignore[assignment]
                # Not by `setattr`, which takes parameters alone.
                shown: Any = layout.shown(local)
                owner._parameters[leaf] = shown
        self._cover()

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        # Empty if a hook before ours has raised, as a fetch may.
        for owner, leaf, local in self._calls.pop() if self._calls else ():
            owner._parameters[leaf] = local
        self._cover()

    def _cover(self) -> None:
        for parameter in self._covered:
            parameter.__class__ = ReleasedParameter


def _operator_of(owner: nn.Module, operators: Found) -> nn.Module:
    """The operator that fetches the parameters of `owner`: itself, or the leaf around it."""
    modules = [module for module, _ in operators]
    if owner in modules:
        return owner
    return next(module for module in reversed(modules) if owner in module.modules())


def _bytes_of(value: Tensor) -> bytes:
    flat = value.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


# -- From a module with `DTensor`s to one with local tensors, and back if wrapping fails.


@contextmanager
def local_parameters(
    module: nn.Module, mesh: RankMesh, ignored: Collection[nn.Parameter]
) -> Iterator[tuple[LocalParameters, RankMesh]]:
    """The module has local tensors, for good, unless the block ends with an exception. Gives `mesh` with the parts.

    Local. Raises UnsupportedError for a `DTensor` that cannot be in a chunk; nothing has changed then.
    """
    found: dict[nn.Parameter, tuple[str, Places]] = {}
    for path, owner in module.named_modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is not None and is_dtensor(parameter) and parameter not in ignored:
                _, places = found.setdefault(parameter, (f"{path}.{leaf}" if path else leaf, []))
                places.append((owner, leaf))
    for name, buffer in module.named_buffers():
        if is_dtensor(buffer):
            raise UnsupportedError(f"buffer {name!r} is a DTensor: keep it as a plain tensor, equal on all ranks")
    locals_ = LocalParameters()
    parts = {parameter: _part_of(name, parameter, mesh) for parameter, (name, _) in found.items()}
    for parameter, (name, _) in found.items():
        mesh = _with_parts(name, parameter, mesh)
    try:
        for parameter, (_, places) in found.items():
            locals_.add_local(places, parameter, parts[parameter])
        if len(mesh.parts) > 1:
            rest = [each for each in module.parameters() if each not in ignored]
            locals_.note_plain(rest, mesh.parts[0] == dist.get_rank())
        yield locals_, mesh
    except BaseException:
        locals_.undo()
        raise


def _with_parts(name: str, parameter: Any, mesh: RankMesh) -> RankMesh:
    """`mesh`, whose parts are the ranks of this parameter's mesh."""
    ranks = tuple(parameter.device_mesh.mesh.flatten().tolist())
    if mesh.parts in ((), ranks):
        groups = (*mesh.exchanges, *parameter.device_mesh.get_all_groups())
        return replace(mesh, parts=ranks, exchanges=tuple(dict.fromkeys(groups)))
    raise UnsupportedError(
        f"parameter {name!r} is a DTensor over ranks {list(ranks)}, and others are over ranks {list(mesh.parts)}: one "
        "dimension of a mesh may divide a model's tensors"
    )


def _part_of(name: str, parameter: Any, mesh: RankMesh) -> TensorPart:
    """Raises UnsupportedError for what no chunk can hold."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    over, placements = parameter.device_mesh, tuple(parameter.placements)
    ranks = over.mesh.flatten().tolist()
    shared = {rank for row in mesh.rows for rank in row}
    if len(shared.intersection(ranks)) > 1 or dist.get_rank() not in shared:
        raise UnsupportedError(
            f"parameter {name!r} is a DTensor over ranks {ranks}, which share the shards of this model: fully_shard or "
            f"distribute_tensor has divided it among them already. {_DATA_MESH}; and wrap a module without fully_shard"
        )
    # Exactly these classes: a `_StridedShard`, which is one, holds elements that are no box of the whole.
    for placement in placements:
        if type(placement) not in (Replicate, Shard):
            raise UnsupportedError(
                f"parameter {name!r} is a DTensor with placement {placement!r}: a chunk holds Shard and Replicate. "
                "Redistribute it before ShardedModel(...), parameter.redistribute(placements=[...])"
            )
    shape, offsets = compute_local_shape_and_global_offset(parameter.shape, over, placements)
    local = parameter._local_tensor
    if tuple(shape) != tuple(local.shape):
        raise UnsupportedError(
            f"parameter {name!r} is a DTensor whose local tensor has shape {tuple(local.shape)}, and of "
            f"{tuple(parameter.shape)} this rank should have {tuple(shape)}: make it by distribute_tensor()"
        )
    coordinate = over.get_coordinate()
    counts = all(at == 0 for at, each in zip(coordinate, placements, strict=True) if each.is_replicate())
    layout = DTensorLayout(over, placements, parameter.shape, parameter.stride(), local.shape)
    return TensorPart(layout, parameter.shape, tuple(offsets), counts)


_DATA_MESH = (
    "Tensor parallelism needs the dimension of the data by itself: mesh = init_device_mesh(device, (2, 2), "
    "mesh_dim_names=('dp', 'tp')), parallelize_module(model, mesh['tp'], ...), ShardedModel(model, "
    "device_mesh=mesh['dp'])"
)
