"""What is done otherwise on gloo, where the launches are what a collective of few bytes costs.

Each launch wakes a thread on every rank, which sends and wakes another one. The cheapest that gloo has is an
all-to-all, so few bytes go by it. `python -m benchmarks.collective_cost` times them beside each other.

[Note: gloo and coalescing] gloo's coalesced all-gather corrupts the heap when something else is in flight: with
torch 2.13 two ranks crash within some 20,000 rounds of two in flight, and once in 500 training runs with a single
one. The same load with one launch a unit ran for 400,000 collectives. So coalescing is for other backends.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .backend import start_gather
from .envelope import Envelopes, Told
from .in_flight import InFlight
from .layout import ShardLayout
from .tag import Tag

MOST_REPEATED_BYTES = 1 << 16
"""Of a payload that goes by one all-to-all. It takes as many bytes again, which no plan counts, so they are few."""


class Gloo:
    """Of one group. `wait`: as of the `Collectives` that it belongs to, which says what is checked before."""

    def __init__(self, group: dist.ProcessGroup, wait: Callable[[dist.Work], None]) -> None:
        self._group = group
        self._wait = wait
        self._rank, self._world_size = group.rank(), group.size()
        self._envelopes = Envelopes(group, wait)
        self._repeated: dict[tuple[torch.device, str], Tensor] = {}

    def all_gather(self, payload: Tensor, shard: Tensor | None, layout: ShardLayout, use: str) -> InFlight:
        """As `Collectives.start_all_gather`, without a tag."""
        if len(layout.units) != 1:
            return self._gather_units(payload, shard, layout)
        (own,) = layout.slices(self._rank)
        if 0 < layout.numel * payload.itemsize <= MOST_REPEATED_BYTES:
            sent = self._repeat(payload[own.in_payload] if shard is None else shard, use)
            # as bytes: an exchange of numbers is a reduction, to whoever reads a profile
            received = payload[: layout.numel].view(torch.uint8)
            work: dist.Work = dist.all_to_all_single(received, sent, group=self._group, async_op=True)
            return InFlight(lambda: self._wait(work), [work])
        if shard is not None:
            payload[own.in_payload].copy_(shard)
        # every rank's slice to all, in place; gloo's own all-gather takes a copy and a third more time
        slices = [payload[layout.slices(rank)[0].in_payload] for rank in range(self._world_size)]
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
        """Tell all ranks the tag and `data`. With a tag, raises `TagMismatch` on every rank."""
        return self._envelopes.exchange(tag, data)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, tag: Tag | None) -> None:
        """In place; SUM, in rank order, or MAX. At most `MOST_TOLD_BYTES`. Raises `TagMismatch` as `tell`."""
        own = tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
        # Before the exchange: a rank without memory for its result would fail after the others have theirs.
        result = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
        told = self._envelopes.exchange(tag, own).data or []
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
            shard = torch.cat([payload[piece.in_payload] for piece in layout.slices(self._rank)])
        rows = payload.new_empty(self._world_size, layout.shard_numel)
        work = start_gather(shard, rows.view(-1), self._group)

        def unpack() -> None:
            self._wait(work)
            for unit, piece in zip(layout.units, layout.slices(0), strict=True):
                region = payload[unit.start : unit.start + unit.numel].view(self._world_size, piece.numel)
                region.copy_(rows[:, piece.in_shard])

        return InFlight(unpack, [work])

    def _repeat(self, own: Tensor, use: str) -> Tensor:
        """`own` once for each rank, as an all-to-all sends it, in bytes. The buffer is that of the last `use`."""
        key, num_bytes = (own.device, use), self._world_size * own.nbytes
        if key not in self._repeated or self._repeated[key].numel() < num_bytes:
            # a buffer made inside inference mode could not be written outside it
            with torch.inference_mode(False):
                self._repeated[key] = torch.empty(num_bytes, dtype=torch.uint8, device=own.device)
        sent = self._repeated[key][:num_bytes]
        sent.view(self._world_size, own.nbytes).copy_(own.view(torch.uint8))
        return sent
