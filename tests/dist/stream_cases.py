"""A stand-in for NCCL on gloo ranks: collectives that are ordered with a stream, and a host that is not held up.

As with NCCL, `wait()` returns at once, whatever has arrived; `is_completed()` says whether the collective is over; a
coalesced launch takes tensors of one dtype; tags travel beside the payload; and what a failed rank left half done stays
on the device until the group is aborted.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import sharding.collectives
from gemini import RemoteRankError, state_hash
from gemini.ranks import communicator
from gemini.ranks import group as connection
from sharding import Collectives
from tests.dist.failing import Boom, batch, boom, make, train_step

LATE_S = 0.002  # so that whoever does not wait reads what was there before
events: list[str] = []


class StreamWork:
    """What NCCL returns: the host is not held up, and the result is there later."""

    def __init__(self, works: list[dist.Work], outputs: list[tuple[Tensor, Tensor]]) -> None:
        self._works, self._outputs = works, outputs
        self._started = time.monotonic()

    def is_completed(self) -> bool:
        if self._works and time.monotonic() - self._started > LATE_S and all(w.is_completed() for w in self._works):
            for work in self._works:
                work.wait()
            for output, arrived in self._outputs:
                output.copy_(arrived)
            self._works = []
        return not self._works

    def wait(self, timeout: Any = None) -> bool:
        return True


class LikeNccl:
    """`torch.distributed` as `sharding.collectives` sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def broadcast(self, tensor: Tensor, **options: Any) -> StreamWork:
        arrived = tensor.clone()
        return StreamWork([dist.broadcast(arrived, **options)], [(tensor, arrived)])

    def all_reduce(self, tensor: Tensor, **options: Any) -> StreamWork:
        arrived = tensor.clone()
        return StreamWork([dist.all_reduce(arrived, **options)], [(tensor, arrived)])

    def all_to_all_single(self, output: Tensor, source: Tensor, **options: Any) -> StreamWork:
        arrived = torch.empty_like(output)
        return StreamWork([dist.all_to_all_single(arrived, source.clone(), **options)], [(output, arrived)])

    def all_gather_into_tensor(self, output: Tensor, source: Tensor, **options: Any) -> StreamWork:
        arrived = torch.empty_like(output)
        return StreamWork([dist.all_gather_into_tensor(arrived, source.clone(), **options)], [(output, arrived)])

    all_gather_single = all_gather_into_tensor

    def barrier(self, **options: Any) -> StreamWork:
        return StreamWork([dist.barrier(**options)], [])


class StreamCollectives(Collectives):
    """Of a group whose backend is not gloo, as far as they know."""

    def __init__(self, group: Any, *rest: Any) -> None:
        super().__init__(group, *rest)
        self._gather_coalesced = self._coalesced

    def _coalesced(self, outputs: list[Tensor], inputs: list[Tensor]) -> StreamWork:
        assert len({tensor.dtype for tensor in outputs + inputs}) == 1, "NCCL coalesces tensors of one dtype"
        events.append("coalesced")
        arrived = [torch.empty_like(output) for output in outputs]
        works = [
            dist.all_gather_into_tensor(into, source.clone(), group=self.group, async_op=True)
            for into, source in zip(arrived, inputs, strict=True)
        ]
        return StreamWork(works, list(zip(outputs, arrived, strict=True)))

    def abort(self) -> None:
        events.append("abort")


@contextmanager
def like_nccl() -> Iterator[None]:
    events.clear()
    named = {"cpu": "nccl"}
    with (
        patch.object(sharding.collectives, "dist", LikeNccl()),
        patch.object(sharding.collectives, "backends", lambda group: named),
        patch.object(communicator, "backends", lambda group: named),
        patch.object(connection, "Collectives", StreamCollectives),
    ):
        yield


def trains_as_on_gloo(rank: int, world_size: int, stage: int, dtype: torch.dtype | None) -> tuple[int, int, set[str]]:
    """(hash, hash on gloo, what was launched)."""
    hashes = []
    for nccl in (True, False):
        if nccl:
            with like_nccl():
                hashes.append(_trained(rank, stage, dtype))
                launched = set(events)
        else:
            hashes.append(_trained(rank, stage, dtype))
    return hashes[0], hashes[1], launched


def _trained(rank: int, stage: int, dtype: torch.dtype | None) -> int:
    model, optimizer, _ = make(slots=1, stage=stage, dtype=dtype, shard_strategy="tensor")
    events.clear()  # make() asks for the least budget, and the group of that wrap is aborted
    for step in range(3):
        optimizer.backward(model(batch(rank, step).to(dtype or torch.float32)).float().square().mean())
        optimizer.step()
    found = state_hash(model, optimizer)
    model.close()
    return found


def a_failed_rank_is_heard_of(rank: int, world_size: int) -> tuple[str, float, list[str], bool]:
    """Rank 1 fails in a forward: (the error, seconds until it was raised, aborts, training goes on as if without)."""
    with like_nccl():
        model, optimizer, net = make(rank_timeout=60)
        events.clear()  # of the wrap that asks for the least budget
        train_step(model, optimizer, rank, 0)
        if rank == 1:
            net.at[3] = boom
        started, message = time.monotonic(), "nothing"
        try:
            train_step(model, optimizer, rank, 1)
        except (Boom, RemoteRankError) as error:
            message = f"{type(error).__name__}: {error}"
        took_s = time.monotonic() - started
        net.at.clear()
        train_step(model, optimizer, rank, 1)
        aborted = [event for event in events if event == "abort"]
        found = state_hash(model, optimizer)
        model.close()
    calm, its, _ = make()
    for step in range(2):
        train_step(calm, its, rank, step)
    same = found == state_hash(calm, its)
    calm.close()
    return message, took_s, aborted, same
