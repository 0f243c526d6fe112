"""Tensor parallelism: ranks that hold other parts of a model's tensors, beside those that share their shards.

torch's `parallelize_module`, or a `tp_plan` of Hugging Face, makes parameters `DTensor`s over one dimension of a mesh.
What a chunk holds of such a parameter is its local tensor: gathered, reduced and updated among the ranks of the data
dimension alone. This file has what the other dimension adds: which part of the whole a local tensor is (`TensorPart`),
and the ranks of the parts as a group of their own (`PartsGroup`), for what concerns the whole model.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gemini.errors import DivergenceError
from gemini.ranks.group import OwnGroup
from gemini.ranks.watchdog import Watchdog
from sharding import Collectives


@dataclass(frozen=True, eq=False)
class TensorPart:
    """Which part of a whole parameter this rank's local tensor is.

    Args:
        layout: how a `DTensor` is made of the local tensor. None: the parameter is no `DTensor`, all have copies.
        shape: of the whole.
        offsets: of the local tensor in it, in every dimension.
        counts: of ranks with equal copies of this part, this one adds it to norms and writes it to checkpoints.
    """

    layout: DTensorLayout | None
    shape: torch.Size
    offsets: tuple[int, ...]
    counts: bool

    @property
    def is_cut(self) -> bool:
        """Whether the ranks have different parts, and not copies."""
        return self.layout is not None and any(each.is_shard() for each in self.layout.placements)

    def whole(self, local: Tensor) -> Tensor:
        """The whole of which `local` is this rank's part, on its device. Collective over the parts; else `local`."""
        if self.layout is None or not self.is_cut:
            return local
        shown: Any = self.layout.shown(local.to(self.layout.mesh.device_type))
        whole: Tensor = shown.full_tensor()
        return whole.to(local.device)

    def of(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole, as a view. A `DTensor` that is laid out otherwise is gathered: collective."""
        if is_dtensor(whole):
            divided: Any = whole
            if self.layout is not None and self.layout.is_of(divided):
                local: Tensor = divided.to_local()
                return local
            whole = gathered(divided)
        if not self.is_cut or self.layout is None:
            return whole
        sizes = self.layout.local_shape
        return whole[tuple(slice(at, at + size) for at, size in zip(self.offsets, sizes, strict=True))]


@dataclass(frozen=True, eq=False)
class DTensorLayout:
    """How a `DTensor` is divided: what `DTensor.from_local` needs beside the local tensor."""

    mesh: Any  # a `DeviceMesh`
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    local_shape: torch.Size

    def shown(self, local: Tensor) -> Tensor:
        """A `DTensor` over `local`, with which it shares memory and graph."""
        from torch.distributed.tensor import DTensor

        shown: Tensor = DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return shown

    def is_of(self, other: Any) -> bool:
        """Whether a `DTensor` is divided so."""
        return bool(other.device_mesh == self.mesh and tuple(other.placements) == self.placements)


def is_dtensor(tensor: object) -> bool:
    """Whether it is a `DTensor`. Does not import DTensor, which takes long."""
    dtensors = sys.modules.get("torch.distributed.tensor")
    return dtensors is not None and isinstance(tensor, dtensors.DTensor)


def gathered(divided: Any) -> Tensor:
    """The whole of a `DTensor`, on the device of its mesh. Collective over that."""
    # Rows of a state dict may be in host memory, where a mesh of GPUs gathers nothing.
    if divided.device.type != divided.device_mesh.device_type:
        divided = divided.to(divided.device_mesh.device_type)
    whole: Tensor = divided.full_tensor()
    return whole


_LOCAL = "_gemini_local"  # of a `DTensor` that has given way to a parameter over its local tensor: that one


def note_local(given: Tensor, local: Tensor | None) -> None:
    """`local` has taken the place of the parameter `given`. None: it has its place back."""
    vars(given).pop(_LOCAL, None)
    if local is not None:
        vars(given)[_LOCAL] = local


def local_of(parameter: Tensor) -> Tensor:
    """What has taken the place of a parameter that somebody has from before its model was wrapped; else itself."""
    found: Tensor = vars(parameter).get(_LOCAL, parameter)
    return found


# -- The ranks of the parts.


_num_groups: Counter[tuple[int, ...]] = Counter()  # by the global ranks of the parts


def _wait(work: dist.Work) -> None:
    work.wait()


class PartsGroup:
    """The ranks that hold the other parts for this rank's data. Collective to make, among them.

    It has few uses: a step's norm, and what is whole, such as a checkpoint.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        wait: Callable[[dist.Work], None] | None,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        # Longer than a watchdog's, which says more of who is missing.
        self._ranks, self._timeout = ranks, timedelta(seconds=timeout_s + 60)
        self._wait, self._device = wait or _wait, device
        self._open()

    def _open(self) -> None:
        parent = dist.group.WORLD
        assert parent is not None
        ranks = self._ranks
        # AllRanks make their models in one order, so that the count tells apart the groups of the same ranks.
        name = f"gemini/parts/{_num_groups[ranks]}/{'-'.join(map(str, ranks))}"
        _num_groups[ranks] += 1
        self._own = OwnGroup(parent, name, self._timeout, ranks)
        self.collectives = Collectives(self._own.group, self._wait, self._device)

    def replace(self) -> None:
        """Go on in another group of the same ranks, after a failure that all of them caught. Collective."""
        self.collectives.abort()
        before = self._own
        self._open()
        before.abort()

    @property
    def index(self) -> int:
        """Which of the parts this rank holds."""
        return self.collectives.rank

    @property
    def size(self) -> int:
        """The number of parts."""
        return self.collectives.world_size

    def close(self, has_failed: bool) -> None:
        """Give the group back. Collective, except after a failure."""
        if has_failed:
            self._own.drop()  # other parts may not have heard of the failure
        else:
            self.collectives.barrier()
            self._own.close()

    def all_gather_lists(self, data: Sequence[bytes]) -> list[bytes]:
        """The bytes of each part's list, part by part. Lengths may differ. Collective."""
        sizes = json.dumps([len(each) for each in data]).encode()
        every_sizes = self.collectives.all_gather_bytes(sizes)
        every = self.collectives.all_gather_bytes(b"".join(data))
        found = []
        for its_sizes, words in zip(every_sizes, every, strict=True):
            at = 0
            for size in json.loads(its_sizes):
                found.append(words[at : at + size])
                at += size
        return found


# -- All ranks of a model: those of each part that share its shards, part by part.


class AllRanks(Protocol):
    """What checkpoints need of the ranks that save together: those of one part (`Communicator`), or `Everyone`."""

    @property
    def watch(self) -> Watchdog | None: ...

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def publishing(self) -> AbstractContextManager[None]: ...

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]: ...

    def agree(self, data: bytes, what: str, shown: str | None = None, remedy: str = "") -> None: ...


class Everyone:
    """The ranks of all parts together. Has the part of a communicator that checkpoints need, under the same names."""

    def __init__(self, own: AllRanks, parts: PartsGroup) -> None:
        """own: the communicator of this rank's part."""
        self._own, self._parts = own, parts
        self.rank = parts.index * own.world_size + own.rank
        self.world_size = parts.size * own.world_size

    @property
    def watch(self) -> Watchdog | None:
        """That of this rank's part."""
        return self._own.watch

    def publishing(self) -> AbstractContextManager[None]:
        """Around a block: an exception that leaves it is published to the ranks of this part."""
        return self._own.publishing()

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        """Every rank's bytes, in order of their ranks here. Collective."""
        return self._parts.all_gather_lists(self._own.all_gather_bytes(data, what))

    def agree(self, data: bytes, what: str, shown: str | None = None, remedy: str = "") -> None:
        """Raises DivergenceError unless every rank passes the same `data`. Collective. Arguments as elsewhere."""
        every = self.all_gather_bytes(data, what)
        different = [rank for rank, its in enumerate(every) if its != every[0]]
        if different:
            one, other = (every[rank].decode(errors="replace") for rank in (0, different[0]))
            raise DivergenceError(
                f"{what} differs between rank 0 and rank {different[0]} of all parts: {one} against {other}. {remedy}"
            )
