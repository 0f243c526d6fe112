"""Parameters and buffers of a module that share memory without being the same object.

After `a.weight.data = b.weight.data` two parameters share one memory. In chunks each would have its own copy, and their
values would diverge at the first step. If both have the same extent, they become one parameter under two names, as
`a.weight = b.weight` makes them. Any other overlap is refused, because no chunk can represent it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gemini.building.link import built_link_of
from gemini.errors import UnsupportedError
from gemini.model.move_out import LOST
from gemini.script import warn_at_script


class _Extent(NamedTuple):
    """The bytes [start, end) of its storage that a tensor spans."""

    name: str
    tensor: Tensor
    start: int
    end: int

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)

    def __str__(self) -> str:
        return f"{'parameter' if self.is_parameter else 'buffer'} {self.name!r}"

    def is_that_of(self, other: _Extent) -> bool:
        mine, theirs = self.tensor, other.tensor
        # Both lie in one storage, by which `_shared` groups, so an equal start is an equal address.
        same = mine.shape == theirs.shape and mine.stride() == theirs.stride() and mine.dtype is theirs.dtype
        return same and self.is_parameter and other.is_parameter and self.start == other.start

    def overlaps(self, other: _Extent) -> bool:
        """Whether some element belongs to both. Spans may interlock without sharing one, as columns of a matrix do."""
        # Elements of different sizes may overlap in part: treat any shared span as an overlap.
        if self.tensor.dtype is not other.tensor.dtype:
            return True
        # Mark the elements of one tensor in a mask of the common span, and look for marks at those of the other.
        itemsize, first = self.tensor.dtype.itemsize, min(self.start, other.start)
        # On the CPU whatever torch's default device is: on "meta" the mask would hold no marks.
        marks = torch.zeros((max(self.end, other.end) - first) // itemsize, dtype=torch.bool, device="cpu")

        def of(extent: _Extent) -> Tensor:
            tensor = extent.tensor
            return torch.as_strided(marks, tensor.shape, tensor.stride(), (extent.start - first) // itemsize)

        of(self).fill_(True)
        return bool(of(other).any())


class Tie(NamedTuple):
    """A parameter that was replaced by another one with the same memory."""

    owner: nn.Module
    leaf: str  # its name in its owner
    parameter: nn.Parameter
    names: tuple[str, str]  # names in the model of the parameter that stayed and of the replaced one

    def undo(self) -> None:
        """Give the owner its own parameter back, which shares its memory with the one that stayed."""
        kept = self.owner._parameters[self.leaf]
        # A wrapping that failed has given the one that stayed other memory, or has lost its values.
        if kept is not None and not hasattr(kept, LOST):
            self.parameter.data = kept.data
        setattr(self.owner, self.leaf, self.parameter)


@contextmanager
def tied_aliases(module: nn.Module) -> Iterator[list[Tie]]:
    """`tie_aliases` for good, unless the block ends with an exception: the module then has its own parameters again."""
    ties = tie_aliases(module)
    try:
        yield ties
    except BaseException:
        for tie in ties:
            tie.undo()
        raise


def tie_aliases(module: nn.Module) -> list[Tie]:
    """Merge parameters that have the same memory into one parameter.

    Raises UnsupportedError with both names for any other overlap. Nothing has changed then.
    """
    ties: dict[Tensor, _Extent] = {}  # by the parameter that gives way
    for extents in _shared(module):
        reaching: list[_Extent] = []
        # Sweep over the storage: only extents that reach beyond the current start can overlap.
        for extent in sorted(extents, key=lambda each: each.start):
            reaching = [each for each in reaching if each.end > extent.start]
            for other in reaching:
                if other.is_that_of(extent):
                    _check_flags(other, extent)
                    # `extent` does not join `reaching`: `other` stands for it there, with the same bytes.
                    ties[extent.tensor] = other
                    break
                if (extent.is_parameter or other.is_parameter) and other.overlaps(extent):
                    raise UnsupportedError(
                        f"{other} and {extent} share memory, but not as one parameter under two names: a "
                        "chunk holds each by itself. Give one memory of its own (clone()), or compute it in forward"
                    )
            else:
                reaching.append(extent)
    # No overlap was refused: replace parameters now, at every place in the module that has them.
    made: list[Tie] = []
    for path, owner in module.named_modules() if ties else ():
        for leaf, parameter in list(owner._parameters.items()):
            if parameter is not None and parameter in ties:
                kept = ties[parameter]
                # Not through `_parameters`: `nn.RNNBase` has a second list of its weights, which its `__setattr__`
                # updates.
                setattr(owner, leaf, kept.tensor)
                made.append(Tie(owner, leaf, parameter, (kept.name, f"{path}.{leaf}" if path else leaf)))
    return made


def warn_of_ties(ties: Sequence[Tie]) -> None:
    """Warn about trained parameters that became one."""
    trained = [tie.names for tie in ties if tie.parameter.requires_grad]
    if trained:
        pairs = ", ".join(f"{one!r} and {other!r}" for one, other in trained)
        warn_at_script(
            f"{pairs} share their memory: each pair is one parameter under two names from now on, whose gradients are "
            "added up and stepped once. Two parameters of plain PyTorch would step that memory twice",
        )


def _shared(module: nn.Module) -> list[list[_Extent]]:
    """The tensors that share a storage with another one, by storage, in the module's order."""
    found: dict[tuple[torch.device, int], list[tuple[str, Tensor]]] = {}
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        # These have no strided memory of their own that another tensor could share.
        if built_link_of(tensor) is not None or tensor.layout is not torch.strided:
            continue
        # Tensors without elements share nothing, and all have the same null pointer.
        if tensor.numel():
            storage = tensor.untyped_storage()
            # On "meta" all pointers are null: an estimate goes by the storage itself.
            place = tensor.device, storage._cdata if tensor.is_meta else storage.data_ptr()
            found.setdefault(place, []).append((name, tensor))
    several = [[_extent(*each) for each in its] for its in found.values() if len(its) > 1]
    # Buffers may share memory among themselves: no chunk holds them.
    return [extents for extents in several if any(each.is_parameter for each in extents)]


def _extent(name: str, tensor: Tensor) -> _Extent:
    # In bytes, because tensors of several dtypes may view one storage.
    start = int(tensor.storage_offset()) * tensor.dtype.itemsize
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _Extent(name, tensor, start, start + span * tensor.dtype.itemsize)


def _check_flags(one: _Extent, other: _Extent) -> None:
    if one.tensor.requires_grad is not other.tensor.requires_grad:
        trained, frozen = (one, other) if one.tensor.requires_grad else (other, one)
        raise UnsupportedError(
            f"parameters {trained.name!r} and {frozen.name!r} share their memory, and only the first is trained. Give "
            "both the same requires_grad, or one of them memory of its own (clone())"
        )
