"""The collectives of one model: each is tagged with what it is about, watched while it is waited for, and counted.

[Note: Ranks agree] Chunks have one size, so two ranks that gather different chunks would exchange garbage without
any error. Every collective therefore carries (plan hash, sequence number, chunk, moment) of every rank, and data
whose tags differ is never used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from gemini.errors import DivergenceError
from gemini.executor.moment import Moments
from gemini.executor.watch import RankWatch
from sharding import Collectives, ShardLayout, Tag, TagMismatch


class Communicator:
    """Collectives of a process group of its own; `group=None` is one rank. Collective to create."""

    def __init__(self, group: dist.ProcessGroup | None, moments: Moments, rank_timeout_s: float) -> None:
        self.moments = moments
        self.plan_hash = 0
        self._sequence = 0
        self._doing = "start"
        self._parent = group
        self.watch: RankWatch | None = None
        if group is not None and group.size() > 1:
            self.watch = RankWatch(group, rank_timeout_s, self._where)
        self.collectives = self._connect()

    @property
    def rank(self) -> int:
        return self.collectives.rank

    @property
    def world_size(self) -> int:
        return self.collectives.world_size

    def all_gather(self, payload: Tensor, shard: Tensor | None, layout: ShardLayout, chunk: int) -> None:
        """Fill `payload` from all ranks' shards (this rank's own may already lie in place). Collective."""
        tag = self._next("all-gather", chunk)
        try:
            self.collectives.all_gather(payload, shard, layout, tag)
        except TagMismatch as mismatch:
            raise self._diverged(mismatch) from None

    def start_reduce_scatter(
        self,
        payload: Tensor,
        layout: ShardLayout,
        out: Tensor,
        chunk: int,
        scratch: Callable[[int, torch.dtype], Tensor],
    ) -> Callable[[], None]:
        """Start this rank's shard of the mean over ranks, summed in rank order; call what it returns. Collective.

        `payload` and what `scratch` gave out must not be touched before that call, which writes `out`.
        """
        tag = self._next("reduce-scatter", chunk)
        reduction = self.collectives.start_reduce_scatter(payload, layout, out, tag, mean=True, scratch=scratch)

        def finish() -> None:
            try:
                reduction.finish()
            except TagMismatch as mismatch:
                raise self._diverged(mismatch) from None

        return finish

    def all_reduce_sum_(self, tensor: Tensor, what: str) -> None:
        """Collective."""
        self._next(what, 0)
        self.collectives.all_reduce_sum_(tensor)

    def all_reduce_max_(self, tensor: Tensor, what: str) -> None:
        """Collective."""
        self._next(what, 0)
        self.collectives.all_reduce_max_(tensor)

    def broadcast_(self, tensor: Tensor, what: str) -> None:
        """Rank 0's tensor on every rank. Collective."""
        self._next(what, 0)
        self.collectives.broadcast_(tensor)

    def agree(self, data: bytes, what: str) -> None:
        """Raises DivergenceError unless every rank brought the same bytes. Collective."""
        self._next(what, 0)
        others = self.collectives.all_gather_bytes(data)
        different = [rank for rank, other in enumerate(others) if other != others[0]]
        if different:
            one, other = others[0], others[different[0]]
            pairs = enumerate(zip(one, other, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
            start = max(0, at - 80)
            raise DivergenceError(
                f"{what} differs between rank 0 and rank {different[0]}: ...{one[start : at + 80]!r} against "
                f"...{other[start : at + 80]!r}. All ranks must build the same model with the same arguments"
            )

    def agree_on_names(self, names: list[str]) -> list[str]:
        """The sorted union of every rank's names. Collective."""
        self._next("names", 0)
        everything = self.collectives.all_gather_bytes("\n".join(names).encode())
        return sorted({name for one in everything for name in one.decode().split("\n") if name})

    def restart(self) -> None:
        """A clean process group after a failure that every rank caught. Collective."""
        if self.watch is not None:
            self.watch.rejoin()
            self._sequence = 0
            self.collectives = self._connect()

    def _connect(self) -> Collectives:
        # a group of our own: a collective that a failure left half done must not meet the user's next one
        own: dist.ProcessGroup | None = None
        if self._parent is not None and self._parent.size() > 1:
            ranks = dist.get_process_group_ranks(self._parent)
            own = dist.new_group(ranks, use_local_synchronization=len(ranks) != dist.get_world_size())
        collectives = Collectives(own)
        if self.watch is not None:
            collectives.wait = self.watch.wait
        return collectives

    def _next(self, what: str, chunk: int) -> Tag:
        self._sequence += 1
        self._doing = f"{what} of chunk {chunk}" if what in ("all-gather", "reduce-scatter") else what
        return Tag(self.plan_hash, self._sequence & 0xFFFFFFFF, chunk, self.moments.now)

    def _where(self) -> str:
        return f"{self._doing}, {self.moments.describe(self.moments.now)} (collective {self._sequence})"

    def _diverged(self, mismatch: TagMismatch) -> DivergenceError:
        words = "; ".join(
            f"rank {rank} was at {self.moments.describe(tag.moment)} with chunk {tag.chunk} (collective "
            f"{tag.sequence}{'' if tag.plan_hash == self.plan_hash else ', another plan'})"
            for rank, tag in sorted(mismatch.found.items())
        )
        return DivergenceError(f"ranks took different ways: {words}. All ranks must run the same operators")
