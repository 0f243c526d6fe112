"""A device on which every copy between host and device is late: it is made when its ticket is waited for, not before.

Each copy runs on a stream of its own, and tickets are all that orders them. Until the host has waited for a copy to the
host, its target reads as NaN there and must stay so. Until then the source of a copy from the host must stay, and
neither may be given back nor, if it is a temporary, die. The same holds on the device's side until `wait_on_stream`. A
copy may use what another one uses only behind its ticket. So whoever reads, writes or frees memory too early is found
without a GPU, even where a single stream would still have ordered it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from gemini.memory import transfer
from gemini.memory.arena import HostTier
from gemini.memory.memory import EmulatedTier
from gemini.memory.transfer import Region, Ticket
from gemini.observe import Feed
from gemini.placement.demand import Tier
from tests.zoo import half

_POISON = 0xFF  # a NaN in every float dtype
_use_count = torch._C._storage_Use_Count
_numbers = count()


class LateCopy:
    """One copy, and its ticket. Its read or write is over when whoever is on that side has waited for it."""

    def __init__(self, lane: LateLane, to: Region, source: Region, behind: Sequence[Ticket]) -> None:
        self.number = next(_numbers)
        self.lane = lane
        self.to_host = to.tier is Tier.HOST
        self.behind = [each for each in behind if isinstance(each, LateCopy) and not each.is_over]
        self.target: Tensor | None = to.flat.detach()  # None: the write is over
        self.source: Tensor | None = source.flat.detach()  # None: the read is over
        with lane.as_seen_by(self):
            self.value = self.source.to(self.target.dtype, copy=True)
            self.wanted = self.source.clone()

    @property
    def is_over(self) -> bool:
        return self.source is None and self.target is None

    def all_before(self) -> list[LateCopy]:
        """Those that are over when this one is; itself is the last."""
        found, todo = {self}, [self]
        while todo:
            todo += (new := [each for each in todo.pop().behind if each not in found])
            found.update(new)
        return sorted(found, key=lambda each: each.number)

    def implies(self, earlier: Ticket) -> bool:
        return earlier in self.all_before()

    def wait(self) -> None:
        with self.lane.lock:
            for each in self.all_before():
                each.check_owners()
                each.end()

    def order(self) -> None:
        with self.lane.lock:
            for each in self.all_before():
                each.check_owners()
                each.end_read() if each.to_host else each.end_write()

    def device_side(self) -> Tensor | None:
        return self.source if self.to_host else self.target

    def host_side(self) -> Tensor | None:
        return self.target if self.to_host else self.source

    def check_owners(self) -> None:
        for tensor in (self.source, self.target):
            if tensor is not None:
                what = f"{tensor.numel()} elements of {tensor.dtype}"
                assert self.lane.has_other_owners(tensor), f"{what} died before a copy from or to them was done"

    def end(self) -> None:
        self.end_read()
        self.end_write()

    def end_read(self) -> None:
        if self.source is not None:
            self.check_read()
            self.source = None

    def end_write(self) -> None:
        if self.target is not None:
            target, what = self.target, f"{self.target.numel()} elements of {self.target.dtype}"
            self.target = None
            assert bool((_bits(target) == _POISON).all()), f"{what} were written to before a copy to them was done"
            target.copy_(self.value)
            self.lane.poison()  # a later copy may go to a part of it

    def check_read(self) -> None:
        assert self.source is not None
        what = f"{self.source.numel()} elements of {self.source.dtype}"
        same = torch.equal(_bits(self.source), _bits(self.wanted))
        assert same, f"{what} were written to before a copy from them was done"


class LateLane:
    """The copies of one model."""

    def __init__(self) -> None:
        self.copies: list[LateCopy] = []  # that are not over
        self.num_late = 0
        self.heard = Feed()
        self.lock = threading.RLock()  # a thread that updates weights makes copies, too

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def start(self, to: Region, source: Region, behind: Sequence[Ticket], copied: object = None) -> LateCopy:
        for each in behind:
            if not isinstance(each, LateCopy):  # a thread, or a sum that the host makes
                each.order()
        # What a thread has left may be copies.
        behind = [late for each in behind for late in getattr(each, "_left", [each])]
        with self.lock:
            return self._start(to, source, behind)

    def _start(self, to: Region, source: Region, behind: Sequence[Ticket]) -> LateCopy:
        self.copies = [each for each in self.copies if not each.is_over]
        for each in self.copies:  # a temporary that died is found while there is a model to blame
            each.check_owners()
        late = LateCopy(self, to, source, behind)
        assert late.target is not None and late.source is not None
        known = late.all_before()
        for each in self.copies:
            both = late.source, late.target
            of_target = each.target is not None and any(_overlap(each.target, used) for used in both)
            of_source = each.source is not None and _overlap(each.source, late.target)
            if of_target or of_source:
                assert each in known, f"a copy of {late.value.nbytes} bytes is not behind one that uses the same memory"
            if of_source:
                with self.as_seen_by(each):
                    each.end_read()
        self.copies.append(late)
        self.num_late += 1
        self.poison()
        return late

    @contextmanager
    def as_seen_by(self, late: LateCopy) -> Iterator[None]:
        """Inside, what a copy is behind is done."""
        for each in late.all_before():
            if each is not late and each.target is not None:
                each.target.copy_(each.value)
        yield
        self.poison()

    def poison(self) -> None:
        for each in self.copies:
            if each.target is not None:
                _bits(each.target).fill_(_POISON)

    def has_other_owners(self, tensor: Tensor) -> bool:
        """Another tensor than those of the copies has the storage."""
        storage = tensor.untyped_storage()._cdata
        sides = (side for each in self.copies for side in (each.source, each.target) if side is not None)
        ours = sum(side.untyped_storage()._cdata == storage for side in sides)
        return _use_count(storage) > ours + _ONE_MORE


@dataclass
class LateCopies:
    """The copies of the models that are built after `install`."""

    lanes: list[LateLane] = field(default_factory=list)

    @property
    def num_late(self) -> int:
        return sum(lane.num_late for lane in self.lanes)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(transfer, "lane_of", lambda device: self._lane())
        for tier, side in ((HostTier, LateCopy.host_side), (EmulatedTier, LateCopy.device_side)):
            monkeypatch.setattr(tier, "free", self._checked(tier.free, side))

    def _lane(self) -> LateLane:
        self.lanes.append(LateLane())
        return self.lanes[-1]

    def _checked(self, free: Callable[..., None], side: Callable[[LateCopy], Tensor | None]) -> Callable[..., None]:
        def checked(tier: Any, buffer: Tensor, kind: str) -> None:
            sides = [found for lane in self.lanes for each in lane.copies if (found := side(each)) is not None]
            busy = any(_overlap(found, buffer) for found in sides)
            assert not busy, f"{buffer.nbytes} bytes of {kind} were given back before a copy from or to them was done"
            free(tier, buffer, kind)

        return checked

    def finish_all(self) -> None:
        """All copies are done. Models may be gone by now, with memory that nobody has used since."""
        for lane in self.lanes:
            for each in lane.copies:
                each.end()


def _bits(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous()
    return tensor.view(torch.uint8)


def _overlap(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes


_ONE_MORE = _use_count((_one := torch.empty(1)).untyped_storage()._cdata) - 1  # references beside the tensors' own


@contextmanager
def installed() -> Iterator[LateCopies]:
    """Inside, copies of all models are late."""
    late = LateCopies()
    with pytest.MonkeyPatch.context() as monkeypatch:
        late.install(monkeypatch)
        yield late
        late.finish_all()


def detours(rank: int, world_size: int, wrap: dict[str, Any], reuse: bool, names: Sequence[str] = ()) -> int:
    """Those of tests/zoo/half.py end with the same bits when copies are late; how many were. names: of some, or all."""
    num_late = 0
    for detour in half.DETOURS:
        if names and detour.__name__[1:] not in names:
            continue
        if detour.__name__ == "_keeps_views" and "model_data_memory" in wrap:
            continue  # a view takes a slot, and there is none to spare
        wanted_state, wanted = half.end_of(half.Trained(rank, world_size, reuse, wrap), detour)
        with installed() as late:
            state, found = half.end_of(half.Trained(rank, world_size, reuse, wrap), detour)
        assert torch.equal(torch.stack(found), torch.stack(wanted)), (detour.__name__, wrap)
        assert state == wanted_state, (detour.__name__, wrap)
        num_late += late.num_late
    return num_late
