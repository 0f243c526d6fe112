"""A device that lags behind, on the CPU: copies between host and device happen when the host waits for them.

Until then the host's side of a copy to it reads as NaN and must stay so, what a copy from it will read must stay as it
is, and neither may be given back, nor, if it is a temporary, die. The device sees its copies in order, as a stream
does. Whoever reads, writes or frees the host's side too early is found without a GPU.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from gemini.memory import tier as tiers
from gemini.memory.emulated import EmulatedTier
from gemini.memory.host import HostTier
from gemini.memory.ledger import Traffic
from gemini.memory.tier import MemoryTier
from tests import half

_POISON = 0xFF  # a NaN in every float dtype
_use_count = torch._C._storage_Use_Count


@dataclass
class LateCopies:
    """The copies of the models that are built after `install`."""

    writes: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (on the host, what it will hold)
    reads: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (on the host, what it must still hold)
    num_late: int = 0  # so far

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = tiers.copy
        for name, module in list(sys.modules.items()):
            if name.startswith("gemini.") and getattr(module, "copy", None) is original:
                monkeypatch.setattr(module, "copy", self._copy)
        monkeypatch.setattr(EmulatedTier, "synchronize", lambda tier: self.settle())
        give = HostTier.give

        def checked(tier: HostTier, buffer: Tensor, kind: str) -> None:
            busy = [kept for kept, _ in (*self.writes, *self.reads) if _overlap(kept, buffer)]
            assert not busy, f"{buffer.nbytes} bytes of {kind} were given back before a copy from or to them was done"
            give(tier, buffer, kind)

        monkeypatch.setattr(HostTier, "give", checked)

    def settle(self) -> None:
        """The host has waited for the device."""
        writes, reads = self.writes, self.reads
        self.writes, self.reads = [], []
        for kept, _ in (*writes, *reads):
            assert _has_other_owners(kept), (
                f"{kept.nbytes} bytes on the host died before a copy from or to them was done"
            )
        for target, _ in writes:
            untouched = bool((_bits(target) == _POISON).all())
            assert untouched, f"{target.numel()} elements were written to before the device had written them"
        for target, value in writes:
            target.copy_(value)
        self._check(reads)

    def _copy(
        self, target: Tensor, source: Tensor, target_tier: MemoryTier, source_tier: MemoryTier, traffic: Traffic
    ) -> None:
        to_host, from_host = target_tier.name == "host", source_tier.name == "host"
        if to_host == from_host:
            target.copy_(source)
            return
        traffic.copied(source_tier.name, target_tier.name, source.nbytes)
        self.num_late += 1
        with self._as_the_device_sees_it():
            if from_host:
                target.copy_(source)
                self.reads.append((source.detach(), source.clone()))
            else:
                overwritten = [read for read in self.reads if _overlap(read[0], target)]
                self._check(overwritten)
                self.reads = [read for read in self.reads if not any(read is each for each in overwritten)]
                self.writes.append((target.detach(), source.to(target.dtype, copy=True)))

    @contextmanager
    def _as_the_device_sees_it(self) -> Iterator[None]:
        """Its copies so far are done."""
        for target, value in self.writes:
            target.copy_(value)
        yield
        for target, _ in self.writes:
            _poison(target)

    @staticmethod
    def _check(reads: list[tuple[Tensor, Tensor]]) -> None:
        for source, wanted in reads:
            same = torch.equal(_bits(source), _bits(wanted))
            assert same, f"{source.numel()} elements of {source.dtype} were written to before the device had read them"


def _has_other_owners(tensor: Tensor) -> bool:
    """Another tensor than this one, and the views that are made of it here, has the storage."""
    own = torch.empty(1)
    alone = _use_count(own.untyped_storage()._cdata)
    return _use_count(tensor.untyped_storage()._cdata) > alone


def _bits(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous()
    return tensor.view(torch.uint8)


def _poison(tensor: Tensor) -> None:
    _bits(tensor).fill_(_POISON)


def _overlap(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes


@contextmanager
def installed() -> Iterator[LateCopies]:
    """Inside, copies of all models are late."""
    late = LateCopies()
    with pytest.MonkeyPatch.context() as monkeypatch:
        late.install(monkeypatch)
        yield late
        late.settle()


def detours(rank: int, world_size: int, wrap: dict[str, Any], reuse: bool, names: Sequence[str] = ()) -> int:
    """Those of `tests.half` end with the same bits when copies are late; returns how many were. names: some, or all."""
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
