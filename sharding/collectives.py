"""The collectives of one process group, on shards and payloads.

`all_gather` turns shards into a payload in place, all units in one launch. `reduce_scatter` exchanges slices
(`all_to_all_single`) and adds them in rank order, on every backend, so that the sum has the same bits for any layout
and any number of ranks; where it was measured (gloo) it is also faster. With one rank nothing is launched. Every method
returns when its result can be used.

[Note: Tags] Every rank's `Tag` is compared before a result is used. When a rank receives more than it expects, gloo
ends the whole process from a thread of its own. This would happen if ranks launched different collectives. So on gloo
tags are sent first, in an envelope whose size is always the same, and a collective with a wrong tag is never launched.
Data that fits into the envelope travels in it. On other backends tags travel beside the payload, and comparing them
makes the host wait for the stream. A caller that knows that all ranks agree passes no tag.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.gloo import Gloo, InFlight, backends, check_backend, control_device, start_gather
from sharding.layout import ALIGNMENT, ShardLayout, WireFormat, even_parts
from sharding.tag import MOST_TOLD_BYTES, Announced, Tag, TagBuffers, Told
from sharding.wire import (
    decode_in_place,
    decode_to,
    encode,
    encode_by_rank,
    encode_own,
    encoded_part,
    sum_encoded,
)

# -- The sum over ranks in the order of ranks: its bits depend neither on the layout nor on the backend.


Scratch = Callable[[int, torch.dtype], Tensor]
"""(numel, dtype) -> a flat tensor of that many elements, on the payload's device, with undefined content."""

SUM_TILE_NUMEL = 1 << 18
"""Elements that are added at a time. The buffer stays small; fewer are slower, more are not faster."""


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of `dtype` are added up: fp32 for 16 bits, and their own otherwise."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def sum_rows(rows: Tensor, out: Tensor, divisor: int, scratch: Scratch) -> None:
    """Set out = (rows[0] + rows[1] + ...) / divisor, added in this order. Elementwise, so tiles change no bit."""
    dtype = sum_dtype(rows.dtype)
    half = dtype is not rows.dtype
    numel = out.numel()
    tile_numel = min(numel, SUM_TILE_NUMEL)
    # If `out` has the sum's dtype it is the accumulator itself. A narrower one would round after each rank's addition.
    tile = None if out.dtype == dtype else scratch(tile_numel, dtype)
    # A tensor on the rows' device: CUDA would multiply by the reciprocal of a Python number, which rounds twice.
    number = torch.full((), divisor, dtype=dtype, device=rows.device)
    for start in range(0, numel, SUM_TILE_NUMEL):
        target = out[start : start + tile_numel]
        total = target if tile is None else tile[: target.numel()]
        first, *others = rows[:, start : start + tile_numel]
        # Add the first two rows in one pass where no cast is needed.
        # torch adds two 16-bit tensors in 16 bits even into an fp32 `out`. A widened first row makes every addition one
        # in fp32.
        if half or not others:
            total.copy_(first)
        else:
            torch.add(first, others.pop(0), out=total)
        for other in others:
            total.add_(other)
        if divisor != 1:
            total.div_(number)
        if tile is not None:
            target.copy_(total)


_Add = Callable[[Tensor, Tensor, int], None]
"""add(rows, out, divisor): out = the sum of received rows, in rank order, / divisor."""


def replica_numels(numel: int, num_replicas: int, rounds: bool) -> list[int]:
    """The elements, of the sum's dtype, of each buffer with which replicas reduce a shard of `numel`.

    rounds: the result has another dtype than the sum.
    """
    if num_replicas == 1:
        return []
    # Parts are as large as the largest of them. This bound grows linearly with shards, which end on `ALIGNMENT`.
    received = numel + (num_replicas - 1 if ALIGNMENT % num_replicas else 0)
    return [numel, received] if rounds else [received]


def exchange_numels(numel: int, layout: ShardLayout, rounds: bool) -> list[tuple[int, int]]:
    """(numel, itemsize) of each buffer with which gradients in a wire format are reduced, but for one tile of the sum.

    numel: of this rank's shard, or of a tile of it. rounds: the result has another dtype than the sum, fp32.
    """
    wire, count = layout.wire, layout.num_replicas
    assert wire is not None
    num_bytes = wire.num_bytes(numel)
    # What is sent and received, and fp32 to work in.
    found = [(layout.world_size * num_bytes, 1)] * 2 + [(min(numel, SUM_TILE_NUMEL), 4)]
    if count == 1:
        return found
    # Parts that replicas add up are as large as the largest of them.
    received = num_bytes + (count - 1) * wire.block_bytes
    return [*found, (num_bytes, 1), (received, 1), *([(numel, 4)] if rounds else [])]


# -- The collectives of one process group, on shards and payloads.
#
# `all_gather` turns shards into a payload in place, all units in one launch. `reduce_scatter` exchanges slices
# (`all_to_all_single`) and adds them in rank order, on every backend, so that the sum has the same bits for any layout
# and any number of ranks; where it was measured (gloo) it is also faster. With one rank nothing is launched. Every
# method returns when its result can be used.
#
# [Note: Tags] Every rank's `Tag` is compared before a result is used. When a rank receives more than it expects, gloo
# ends the whole process from a thread of its own. This would happen if ranks launched different collectives. So on gloo
# tags are sent first, in an envelope whose size is always the same, and a collective with a wrong tag is never
# launched. Data that fits into the envelope travels in it. On other backends tags travel beside the payload, and
# comparing them makes the host wait for the stream. A caller that knows that all ranks agree passes no tag.
#
# [Note: Replicas] Where several groups hold the same shards, a reduction takes two exchanges, and has one order. Each
# group adds its ranks' slices in rank order, in the sum's dtype; these sums are added in the order of the groups, in
# that dtype too; then the total is divided by the number of all ranks and rounded once. A rank adds one part of its
# shard and sends it to its replicas, so that all of them hold equal bits. The second exchange is launched when the
# first is over: at the start of the reduction, which is one point on all ranks, and not at its end, which may be at
# another point on each. Otherwise a rank that ends a reduction would wait for a replica, which waits in another
# collective for a rank of its group, and so on in a circle. A layout of one replica reduces within the group alone:
# several such means may then be added up before `start_ordered_sum` takes the mean over the groups once.
#
# [Note: Quantised] A layout with a wire format makes all that travels by it quantised, which is approximate: see
# [Note: Bound] in layout.py. A gather shows all ranks the same values, this rank's own shard included. A reduction
# encodes each rank's slices once, and adds in fp32 in rank order. With replicas the sums of groups are encoded, and
# then the mean: two levels more. Blocks are the same in every layout, so that the bits depend on the ranks alone.


_CPU = torch.device("cpu")


def _wait(work: dist.Work) -> None:
    work.wait()


class Collectives:
    """The collectives of one group. `group=None` is one rank without torch.distributed, not the default group.

    wait: waits for a launch, and may watch for lost ranks meanwhile. device: the device of payloads and shards.
    replicas: the collectives of the ranks that hold this rank's shard in other groups, in which reductions go on.
    everyone: those of the ranks of all groups, which compare tags together on gloo.
    Raises ValueError if the group has no backend for that device. Not thread-safe: calls have one order on all ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        wait: Callable[[dist.Work], None] = _wait,
        device: torch.device = _CPU,
        replicas: Collectives | None = None,
        everyone: Collectives | None = None,
    ) -> None:
        if group is not None:
            check_backend(group, device)
        self.group = group
        self.replicas = replicas
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()
        self.wait = wait
        # Looked up by device: a group that `init_process_group()` made without a backend calls itself "undefined", and
        # its CPU backend is gloo all the same.
        self.checks_tags_first = group is not None and backends(group)[device.type] == "gloo"
        self._device = device
        self._control_device = device if group is None else control_device(group, device)
        self.bytes_sent = 0  # by this rank, from the sizes passed to torch, without tags
        self.calls: Counter[str] = Counter()  # launches by kind, without those of tags
        self._tags = TagBuffers(self.rank, self.world_size)
        self._gloo = Gloo(group, wait) if group is not None and self.checks_tags_first else None
        self._teller = self._gloo if everyone is None else everyone._gloo
        # torch 2.11 has the second name, which later versions deprecate.
        self._gather_coalesced: Any = getattr(group, "all_gather_single_coalesced", None) or getattr(
            group, "allgather_into_tensor_coalesced", None
        )

    def all_gather(self, payload: Tensor, shard: Tensor | None, layout: ShardLayout, tag: Tag | None) -> None:
        """Run `start_all_gather` and its `finish`."""
        self.start_all_gather(payload, shard, layout, tag).finish()

    def start_all_gather(
        self, payload: Tensor, shard: Tensor | None, layout: ShardLayout, tag: Tag | None, *, use: str = "all_gather"
    ) -> InFlight:
        """Fill the payload from every rank's shard.

        payload: 1-D, at least `layout.numel` elements. shard: `(layout.shard_numel,)` in the payload's dtype, may be
        this rank's slice of the payload; None where this rank's slices already lie in the payload at their place.
        Both belong to the collective until it is finished. All-gathers in flight at once need a `use` each.
        Start or finish raises `TagMismatch` on every rank; the payload is then garbage.
        """
        self._check_payload(payload, layout)
        if shard is not None:
            _check_flat("shard", shard, layout.shard_numel)
            if shard.dtype != payload.dtype:
                raise ValueError(f"shard is {shard.dtype}, payload is {payload.dtype}")
        if self.world_size == 1:
            if shard is not None:
                payload[: layout.numel].copy_(shard)
            return InFlight()
        if layout.wire is not None:
            return self._gather_encoded(payload, shard, layout, tag, use)
        self._count("all_gather", layout.numel * payload.itemsize)
        beside = None if tag is None else self._announce(tag, payload.device, use)
        if self._gloo is not None:
            return self._gloo.all_gather(payload, shard, layout, use)
        # All tensors of a coalesced NCCL launch have one dtype, so the tag travels as elements of the payload's dtype.
        inputs = [beside.own.view(payload.dtype)] if beside else []
        outputs = [beside.every.view(payload.dtype)] if beside else []
        for piece, unit in zip(layout.slices(self.rank), layout.units):
            # A unit of zero-size parameters has nothing to send. All ranks leave it out, because they have one layout.
            if unit.numel == 0:
                continue
            # Without a shard the input is this rank's slice of the output, which NCCL gathers in place, without a copy
            # of it.
            inputs.append(payload[piece.in_payload] if shard is None else shard[piece.in_shard])
            outputs.append(payload[unit.start : unit.start + unit.numel])
        launched = self._gather_coalesced(outputs, inputs)

        def finish() -> None:
            # First `wait`: it orders the current stream after the launch, and `verify` reads the tags on that stream.
            self.wait(launched)
            if beside:
                beside.verify()

        return InFlight(finish, [launched])

    def _gather_encoded(
        self, payload: Tensor, shard: Tensor | None, layout: ShardLayout, tag: Tag | None, use: str
    ) -> InFlight:
        """`start_all_gather` in the layout's wire format. See [Note: Encoded in place]."""
        encoded = encoded_part(payload, layout)
        encode_own(payload, shard, layout, self.rank, encoded)
        launched = self.start_all_gather(encoded, None, layout.encoded, tag, use=use)

        def finish() -> None:
            launched.finish()
            decode_in_place(payload, layout)

        return InFlight(finish, launched.works)

    def start_reduce_scatter(
        self,
        payload: Tensor,
        layout: ShardLayout,
        out: Tensor,
        tag: Tag | None,
        *,
        scratch: Scratch,
        mean: bool = True,
    ) -> InFlight:
        """Put this rank's shard of the sum, or mean, over all ranks' payloads into `out`.

        Added in rank order, in fp32 for 16-bit payloads and in the payload's own dtype otherwise, divided by
        the world size after the sum, rounded once into `out`'s dtype. With replicas: see [Note: Replicas].
        out: `(layout.shard_numel,)`, any float dtype; may be this rank's slice of the payload, of which
        nothing else is changed. scratch is asked for buffers that must not overlap each other: `layout.numel`
        elements of the payload's dtype, the same again if there are several units, and, if `out` has another
        dtype than the sum, min(`shard_numel`, `SUM_TILE_NUMEL`) of the sum's. With replicas also for what
        `replica_numels` says, of the sum's dtype. In a wire format, instead of all but the tile of the sum: for what
        `exchange_numels` says.
        Payload and scratch belong to the reduction until it is finished, and `out` is written by `finish`,
        which raises `TagMismatch` on every rank, with `out` untouched. One reduction at a time.
        """
        self._check_payload(payload, layout)
        _check_flat("out", out, layout.shard_numel)
        if not (payload.is_floating_point() and out.is_floating_point()):
            raise ValueError(f"reduce_scatter needs float tensors, got {payload.dtype} into {out.dtype}")
        if self.world_size == 1:
            out.copy_(payload[: layout.numel])
            return InFlight()
        # [slice for rank 0 | slice for rank 1 | ...] -> [slice from rank 0 | slice from rank 1 | ...]
        beside = None if tag is None else self._announce(tag, payload.device, "reduce_scatter")
        add: _Add
        if layout.wire is None:
            ranked, add = self._rank_major(payload, layout, scratch), partial(sum_rows, scratch=scratch)
            received, summed = scratch(layout.numel, payload.dtype), sum_dtype(payload.dtype)
        else:
            ranked, received, work = (scratch(*sizes) for sizes in _exchanged(layout))
            encode_by_rank(payload, layout, ranked, work)
            add, summed = partial(_sum_encoded, layout.wire, work, scratch), torch.float32
        self._count("reduce_scatter", ranked.nbytes)
        slices = dist.all_to_all_single(received, ranked, group=self.group, async_op=True)
        # Tags have a launch of their own: in a single launch every slice would have to be copied next to its tag. Both
        # are in flight at once.
        tags = start_gather(beside.own, beside.every, self.group) if beside else None
        if self.replicas is not None and layout.num_replicas > 1:
            self._order(slices)
            total = out if out.dtype is summed else scratch(out.numel(), summed)
            add(received.view(self.world_size, -1), total, 1)
            divisor = self.world_size * self.replicas.world_size if mean else 1
            if layout.wire is None:
                spread = self.replicas.start_ordered_sum(total, out, divisor, scratch)
            else:
                spread = self.replicas.start_encoded_sum(total, out, divisor, scratch, layout.wire, work)
            return _behind(tags, beside, spread, self.wait)

        def finish() -> None:
            self.wait(slices)
            if beside and tags:
                self.wait(tags)
                beside.verify()
            # `out` may be a part of the payload, which is a send buffer until the exchange is over: it is written from
            # here on.
            add(received.view(self.world_size, -1), out, self.world_size if mean else 1)

        return InFlight(finish, [slices, tags] if tags else [slices])

    def start_ordered_sum(self, own: Tensor, out: Tensor, divisor: int, scratch: Scratch) -> InFlight:
        """Put the sum over ranks of `own`, added in rank order and divided by `divisor`, into every rank's `out`.

        own: flat, of the dtype in which it is added; may be `out`, and is garbage afterwards. Each rank adds up one
        part, rounds it once into `out`'s dtype, and sends it to all. scratch: as in `start_reduce_scatter`. Returns
        when the exchange is over, or on a device in its stream's order; the parts are on their way.
        """
        numels = even_parts(own.numel(), self.world_size)
        mine, parts = numels[self.rank], out.split(numels)
        received = scratch(self.world_size * mine, own.dtype)
        self._count("replica_sum", own.nbytes)
        equal = [mine] * self.world_size
        self._order(dist.all_to_all_single(received, own, equal, numels, group=self.group, async_op=True))
        if mine:
            sum_rows(received.view(self.world_size, mine), parts[self.rank], divisor, scratch)
        self._count("replica_gather", out.nbytes)
        works = self._start_broadcasts(parts)

        def finish() -> None:
            for work in works:
                self.wait(work)

        return InFlight(finish, works)

    def start_encoded_sum(
        self, own: Tensor, out: Tensor, divisor: int, scratch: Scratch, wire: WireFormat, work: Tensor
    ) -> InFlight:
        """`start_ordered_sum` of fp32 in whole blocks, in a wire format: of what each rank adds, and of the sum.

        work: fp32, at least a block, which belongs to the collective until it is finished.
        """
        numels = [count * ALIGNMENT for count in even_parts(own.numel() // ALIGNMENT, self.world_size)]
        mine, sizes = numels[self.rank], [wire.num_bytes(numel) for numel in numels]
        sent = scratch(sum(sizes), torch.uint8)
        received = scratch(self.world_size * sizes[self.rank], torch.uint8)
        encode(wire, own, sent, work)
        self._count("replica_sum", sent.nbytes)
        equal = [sizes[self.rank]] * self.world_size
        self._order(dist.all_to_all_single(received, sent, equal, sizes, group=self.group, async_op=True))
        # The sum travels in the memory from which the ranks' parts were sent.
        parts = sent.split(sizes)
        if mine:
            total = own.split(numels)[self.rank]
            sum_encoded(wire, received.view(self.world_size, -1), total, divisor, work, None)
            encode(wire, total, parts[self.rank], work)
        self._count("replica_gather", sent.nbytes)
        works = self._start_broadcasts(parts)

        def finish() -> None:
            for each in works:
                self.wait(each)
            decode_to(wire, sent, out, work)

        return InFlight(finish, works)

    def _start_broadcasts(self, parts: Sequence[Tensor]) -> list[dist.Work]:
        """Send each rank's part to all. Parts may differ in size; all ranks launch them in one order."""
        return [
            dist.broadcast(part, group=self.group, group_src=rank, async_op=True)
            for rank, part in enumerate(parts)
            if part.numel()
        ]

    def _order(self, work: dist.Work) -> None:
        """Let what follows come behind a launch. On a device the stream waits, and the host does not."""
        if self._gloo is not None:
            self.wait(work)
        else:
            work.wait()

    def all_reduce_sum_(self, tensor: Tensor, tag: Tag | None = None) -> None:
        """Sum over ranks, in place. The order of a float sum is the backend's: use it for integers.

        With a tag, raises `TagMismatch` on every rank; the tensor is then garbage.
        """
        self._all_reduce(tensor, dist.ReduceOp.SUM, tag)

    def all_reduce_max_(self, tensor: Tensor, tag: Tag | None = None) -> None:
        """Largest value over ranks, in place; with a tag as in `all_reduce_sum_`."""
        self._all_reduce(tensor, dist.ReduceOp.MAX, tag)

    def broadcast_(self, tensor: Tensor, src: int = 0, tag: Tag | None = None) -> None:
        """Overwrite the tensor with that of rank `src` of the group. Its bytes are counted once, on `src`.

        With a tag, raises `TagMismatch` on every rank, and the tensor stays as it is.
        """
        if not 0 <= src < self.world_size:
            raise ValueError(f"src {src} is not one of {self.world_size} ranks")
        if self.world_size == 1:
            return
        if tag is not None:
            # The broadcast overwrites the tensor of every other rank, so its tags are compared before it on every
            # backend.
            self.check(tag, tensor.device, "broadcast")
        self.calls["broadcast"] += 1
        self.bytes_sent += tensor.nbytes if self.rank == src else 0
        # Started asynchronously, like every launch here: in a blocking call this rank could not look for lost ranks.
        self.wait(dist.broadcast(tensor, group=self.group, group_src=src, async_op=True))

    def exchange(
        self,
        sent: Tensor,
        sent_numels: Sequence[int],
        received: Tensor,
        received_numels: Sequence[int],
        tag: Tag | None = None,
    ) -> None:
        """Send each rank its part of `sent`, and fill `received` with the part that each rank has for this one.

        Both are 1-D, of one dtype, in rank order: `sent_numels[rank]` elements for a rank, `received_numels[rank]` from
        it. With a tag, raises `TagMismatch` on every rank, before anything is sent.
        """
        _check_flat("sent", sent, sum(sent_numels))
        _check_flat("received", received, sum(received_numels))
        if self.world_size == 1:
            received.copy_(sent)
            return
        if tag is not None:
            # Ranks that diverged may have parts of other sizes, of which a backend's error would say nothing.
            self.check(tag, sent.device, "exchange")
        self.calls["exchange"] += 1
        self.bytes_sent += (sent.numel() - sent_numels[self.rank]) * sent.itemsize
        sizes = list(received_numels), list(sent_numels)
        self._order(dist.all_to_all_single(received, sent, *sizes, group=self.group, async_op=True))

    def all_gather_bytes(self, data: bytes, tag: Tag | None = None) -> list[bytes]:
        """Every rank's bytes, in rank order. Lengths may differ. Nothing is unpickled.

        With a tag, raises `TagMismatch` on every rank, before the other ranks' lengths are used.
        """
        if self.world_size == 1:
            return [data]
        sizes, told = self._tell(tag, data)
        width = max(sizes)
        if told is not None:
            return told
        device = self._control_device
        # An all-gather takes the same number of bytes from every rank, so all pad theirs to the longest.
        every = torch.empty(width * self.world_size, dtype=torch.uint8, device=device)
        # A bytearray, because torch warns of a buffer that cannot be written to.
        own = torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)
        self._gather_flat(every, own.to(device))
        everything = every.cpu().numpy().tobytes()
        return [everything[rank * width : rank * width + size] for rank, size in enumerate(sizes)]

    def _tell(self, tag: Tag | None, data: bytes) -> Told:
        """The number of bytes of each rank, and the bytes themselves if all are small."""
        if self._gloo is not None:
            self._count("all_gather_bytes", self.world_size * min(len(data), MOST_TOLD_BYTES))
            return self._gloo.tell(tag, data)
        if tag is not None:
            self.check(tag, use="all_gather_bytes")
        lengths = torch.empty(self.world_size, dtype=torch.int64, device=self._control_device)
        self._gather_flat(lengths, torch.tensor([len(data)], dtype=torch.int64, device=self._control_device))
        sizes: list[int] = lengths.tolist()
        # If no rank has data, all ranks read that in the sizes and leave the second exchange out.
        return Told(sizes, None if any(sizes) else [b""] * self.world_size)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        if self.world_size == 1:
            return
        self.calls["barrier"] += 1
        self.wait(dist.barrier(group=self.group, async_op=True))

    def abort(self) -> None:
        """Abort collectives that a failure left half done, which would never end on a device. gloo has none. Local."""
        if self.group and not self.checks_tags_first:
            self.group._get_backend(self._device).abort()

    def _all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, tag: Tag | None = None) -> None:
        if self.world_size == 1:
            return
        # Ranks that diverged may be on different sides of this limit. With a tag both sides begin with an envelope, in
        # which the tags still meet.
        if self._gloo is not None and tensor.nbytes <= MOST_TOLD_BYTES:
            self._count("all_reduce", self.world_size * tensor.nbytes)
            self._gloo.all_reduce(tensor, op, tag)
            return
        # A ring sends each part twice: to be summed, and then the sum to all ranks.
        self._count("all_reduce", 2 * tensor.nbytes)
        beside = None if tag is None else self._announce(tag, tensor.device, "all_reduce")
        self.wait(dist.all_reduce(tensor, op=op, group=self.group, async_op=True))
        if beside:
            self.wait(start_gather(beside.own, beside.every, self.group))
            beside.verify()

    def _gather_flat(self, every: Tensor, own: Tensor) -> None:
        self._count("all_gather_bytes", every.nbytes)
        self.wait(start_gather(own, every, self.group))

    def _rank_major(self, payload: Tensor, layout: ShardLayout, scratch: Scratch) -> Tensor:
        """The payload as [shard of rank 0 | shard of rank 1 | ...]: itself if it is one unit, else a copy."""
        units = [(unit, piece) for unit, piece in zip(layout.units, layout.slices(0)) if unit.numel]
        if len(units) <= 1:
            return payload[: layout.numel]
        packed = scratch(layout.numel, payload.dtype)
        rows = packed.view(self.world_size, layout.shard_numel)
        # Every rank's slice of a unit has one size and one place in its shard, so those of rank 0 stand for all.
        for unit, piece in units:
            region = payload[unit.start : unit.start + unit.numel].view(self.world_size, -1)
            rows[:, piece.in_shard].copy_(region)
        return packed

    def _announce(self, tag: Tag, device: torch.device, use: str) -> Announced | None:
        """On gloo, compare the tags now. On other backends return what is to be sent along and compared afterwards."""
        if self.checks_tags_first:
            self.check(tag, device, use)
            return None
        return self._tags.announce(tag, device, use)

    def check(self, tag: Tag, device: torch.device | None = None, use: str = "check") -> None:
        """Raise `TagMismatch` on every rank unless all brought the same tag."""
        if self.world_size == 1:
            return
        if self._teller is not None:
            self._teller.tell(tag)
            return
        announced = self._tags.announce(tag, device or self._control_device, use)
        self.wait(start_gather(announced.own, announced.every, self.group))
        announced.verify()

    def _count(self, kind: str, total_bytes: int) -> None:
        self.calls[kind] += 1
        # A rank keeps 1/N of `total_bytes` to itself, in an all-gather, an exchange and both halves of a ring
        # all-reduce.
        self.bytes_sent += total_bytes * (self.world_size - 1) // self.world_size

    def _check_payload(self, payload: Tensor, layout: ShardLayout) -> None:
        if layout.world_size != self.world_size:
            raise ValueError(f"the layout is for {layout.world_size} ranks, the group has {self.world_size}")
        if payload.dim() != 1 or not payload.is_contiguous() or payload.numel() < layout.numel:
            raise ValueError(
                f"payload must be contiguous, 1-D, of at least {layout.numel} elements, got {tuple(payload.shape)}"
            )


def _exchanged(layout: ShardLayout) -> list[tuple[int, torch.dtype]]:
    """(numel, dtype) of what is sent, of what is received, and of fp32 memory to work in."""
    sizes = exchange_numels(layout.shard_numel, replace(layout, num_replicas=1), rounds=False)
    return [(numel, torch.uint8 if itemsize == 1 else torch.float32) for numel, itemsize in sizes]


def _sum_encoded(wire: WireFormat, work: Tensor, scratch: Scratch, rows: Tensor, out: Tensor, divisor: int) -> None:
    total = None if out.dtype is torch.float32 else scratch(min(out.numel(), work.numel()), torch.float32)
    sum_encoded(wire, rows, out, divisor, work, total)


def _behind(
    tags: dist.Work | None, beside: Announced | None, spread: InFlight, wait: Callable[[dist.Work], None]
) -> InFlight:
    """A reduction that goes on with the replicas, and whose tags are compared before the result is used."""

    def finish() -> None:
        if beside and tags:
            wait(tags)
            beside.verify()
        spread.finish()

    return InFlight(finish, [*spread.works, *([tags] if tags else [])])


def _check_flat(name: str, tensor: Tensor, numel: int) -> None:
    if tensor.shape != (numel,) or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous of shape ({numel},), got {tuple(tensor.shape)}")
