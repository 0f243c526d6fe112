"""How collectives are launched on a backend, and what gloo needs besides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.layout import ShardLayout
from sharding.tag import Envelopes, Tag, Told

# -- A collective between its start and its end.


@dataclass(frozen=True)
class InFlight:
    """A collective that was started. Others may be started before it is finished. Finishing launches nothing."""

    finish: Callable[[], None] = lambda: None
    works: Sequence[dist.Work] = ()  # the launches of the collective, which have ended when it is finished


# -- The backends of a process group by device, and torch's name for an all-gather.


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Backend by device type, in whichever form `init_process_group` got it: "gloo", "cpu:gloo,cuda:nccl", none."""
    pairs = dist.get_backend_config(group).split(",")
    return {device: backend for device, _, backend in (pair.partition(":") for pair in pairs)}


def check_backend(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises ValueError if the group cannot carry tensors of `device`."""
    found = backends(group)
    if device.type not in found:
        words = ",".join(f"{kind}:{backend}" for kind, backend in found.items())
        raise ValueError(
            f"the process group has no backend for tensors on {device.type!r}, only {words}: call "
            "init_process_group() without a backend, or name one for each device, such as 'cpu:gloo,cuda:nccl'"
        )


def control_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """The device on which small control messages travel: the CPU if the group can, else `device`."""
    return torch.device("cpu") if "cpu" in backends(group) else device


def start_gather(own: Tensor, every: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start an all-gather of every rank's `own`, all of one size, into `every`."""
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.11's name
    work: dist.Work = gather(every, own, group=group, async_op=True)
    return work


# -- Collectives that are done differently on gloo, where small collectives cost as much as their launches.
#
# Each launch wakes a thread on every rank, which sends and wakes another one. gloo's cheapest launch is an all-to-all,
# so small messages use it. `python -m benchmarks.collective_cost` compares the times.
#
# [Note: gloo and coalescing] gloo's coalesced all-gather corrupts the heap when something else is in flight: with
# torch 2.13 two ranks crash within some 20,000 rounds of two in flight, and once in 500 training runs with a single
# one. The same load with one launch a unit ran for 400,000 collectives. So coalescing is for other backends.


MOST_REPEATED_BYTES = 1 << 16
"""Payloads of at most this size are gathered by one all-to-all. It needs a send buffer of the same size, which no plan
counts, so the limit is small."""


class Gloo:
    """The gloo collectives of one group. `wait` is that of its `Collectives`, which has checked all arguments."""

    def __init__(self, group: dist.ProcessGroup, wait: Callable[[dist.Work], None]) -> None:
        self._group = group
        self._wait = wait
        self._rank, self._world_size = group.rank(), group.size()
        self._envelopes = Envelopes(group, wait)
        self._repeated: dict[tuple[torch.device, str], Tensor] = {}

    def all_gather(self, payload: Tensor, shard: Tensor | None, layout: ShardLayout, use: str) -> InFlight:
        """Like `Collectives.start_all_gather`, without a tag."""
        if len(layout.units) != 1:
            return self._gather_units(payload, shard, layout)
        (own,) = layout.slices(self._rank)
        # The choice follows from the layout alone, which is equal on all ranks: all of them launch the same
        # collectives.
        if 0 < layout.numel * payload.itemsize <= MOST_REPEATED_BYTES:
            sent = self._repeat(payload[own.in_payload] if shard is None else shard, use)
            # As bytes, so that a profile does not show an all-to-all of numbers, which is how gradients are reduced.
            received = payload[: layout.numel].view(torch.uint8)
            work: dist.Work = dist.all_to_all_single(received, sent, group=self._group, async_op=True)
            return InFlight(partial(self._wait, work), [work])
        if shard is not None:
            payload[own.in_payload].copy_(shard)
        # One broadcast per rank gathers in place. gloo's own all-gather copies, and takes a third more time.
        slices = [payload[layout.slices(rank)[0].in_payload] for rank in range(self._world_size)]
        # gloo matches collectives by the order of their launch, so every rank launches the broadcasts in rank order.
        works = [
            dist.broadcast(part, group=self._group, group_src=rank, async_op=True)
            for rank, part in enumerate(slices)
            if part.numel()
        ]

        def wait_for_all() -> None:
            for work in works:
                self._wait(work)

        return InFlight(wait_for_all, works)

    def tell(self, tag: Tag | None, data: bytes = b"") -> Told:
        """Send the tag and `data` to all ranks. With a tag, raises `TagMismatch` on every rank."""
        return self._envelopes.exchange(tag, data)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, tag: Tag | None) -> None:
        """Reduce at most `MOST_TOLD_BYTES` in place: SUM, in rank order, or MAX. Raises `TagMismatch` like `tell`."""
        own = tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
        # Before the exchange: a rank without memory for its result would fail after the others have theirs.
        result = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
        told = self._envelopes.exchange(tag, own).data or []
        # An empty tensor has taken part in the exchange for its tag. `frombuffer` would refuse its empty data.
        if not tensor.numel():
            return
        rows = torch.frombuffer(bytearray(b"".join(told)), dtype=tensor.dtype).view(self._world_size, -1)
        if op == dist.ReduceOp.SUM:
            torch.sum(rows, 0, dtype=tensor.dtype, out=result)
        else:
            torch.amax(rows, 0, out=result)
        tensor.copy_(result.view(tensor.shape))

    def _gather_units(self, payload: Tensor, shard: Tensor | None, layout: ShardLayout) -> InFlight:
        if not layout.numel:
            return InFlight()
        if shard is None:
            # gloo's all-gather takes one contiguous input, and this rank's slices of several units lie apart.
            shard = torch.cat([payload[piece.in_payload] for piece in layout.slices(self._rank)])
        # Gather whole shards, rank by rank, and copy them into the units: coalescing is broken, see the note above.
        # This buffer has the payload's size, and no plan counts it. `unpack` keeps it alive until the gather is over.
        rows = payload.new_empty(self._world_size, layout.shard_numel)
        work = start_gather(shard, rows.view(-1), self._group)

        def unpack() -> None:
            self._wait(work)
            # All ranks' slices of a unit have the same place in their shards, so those of rank 0 stand for all.
            for unit, piece in zip(layout.units, layout.slices(0), strict=True):
                region = payload[unit.start : unit.start + unit.numel].view(self._world_size, piece.numel)
                region.copy_(rows[:, piece.in_shard])

        return InFlight(unpack, [work])

    def _repeat(self, own: Tensor, use: str) -> Tensor:
        """The send buffer of an all-to-all, in bytes: `own` once for each rank. Each `use` has a buffer of its own."""
        key, num_bytes = (own.device, use), self._world_size * own.nbytes
        if key not in self._repeated or self._repeated[key].numel() < num_bytes:
            # A buffer made inside inference mode could not be written outside it.
            with torch.inference_mode(False):
                self._repeated[key] = torch.empty(num_bytes, dtype=torch.uint8, device=own.device)
        sent = self._repeated[key][:num_bytes]
        sent.view(self._world_size, own.nbytes).copy_(own.view(torch.uint8))
        return sent
