"""The process groups of one model: made, replaced after failures, given back."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gemini.errors import DivergenceError, UnsupportedError
from gemini.ranks.exit_report import default_store
from gemini.ranks.mesh import RankMesh
from gemini.ranks.watchdog import Watchdog
from sharding import Collectives, backends

# -- Each rank needs a GPU of its own: NCCL ends with "invalid usage" otherwise, and names neither ranks nor a remedy.


def announce_device(group: dist.ProcessGroup, device: torch.device) -> None:
    """Publish which GPU this rank uses. Local."""
    if _needs_its_own(group, device):
        uuid = torch.cuda.get_device_properties(device).uuid
        default_store().set(_key(dist.get_rank()), f"{uuid} {device}")


def refuse_shared(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises UnsupportedError on all ranks if two of them use one GPU. All have announced theirs."""
    if _needs_its_own(group, device):
        refuse_equal(default_store(), dist.get_process_group_ranks(group))


def refuse_equal(store: Any, ranks: Sequence[int]) -> None:
    """Raises UnsupportedError if two of these global ranks have announced the same GPU."""
    first: dict[str, int] = {}
    for rank, words in zip(ranks, store.multi_get([_key(rank) for rank in ranks]), strict=True):
        uuid, device = words.decode().split(" ")
        if uuid in first:
            raise UnsupportedError(
                f"ranks {first[uuid]} and {rank} both use the GPU {uuid}, which rank {rank} calls {device}: NCCL needs "
                "one for each rank. Start at most as many ranks on a machine as it has GPUs (torchrun "
                "--nproc-per-node), and let each choose its own: gemini.launch_from_torch() does, or "
                "torch.cuda.set_device(LOCAL_RANK). To try several ranks without as many GPUs, hide those there are: "
                "CUDA_VISIBLE_DEVICES= torchrun ..."
            )
        first[uuid] = rank


def _needs_its_own(group: dist.ProcessGroup, device: torch.device) -> bool:
    return device.type == "cuda" and backends(group)["cuda"] == "nccl"


def _key(global_rank: int) -> str:
    return f"gemini/device/{global_rank}"


# -- The process group of one model, beside the group that the user made.
#
# [Note: Dropped groups] A model that is dropped without `close()` is collected at a different moment on each rank, in
# the middle of any function. Its group cannot end there: a rank that ends its part closes the connections of ranks that
# may still use the model, and gloo waits for open collectives, which may need this very rank. So the collector only
# notes the group. When a model is made or closed, ranks meet without a model in use: there they tell one another the
# names of the groups that they have dropped, and end those that all of their ranks have dropped. A collective that one
# rank never joined fails on the other ranks once that rank has ended its part; until then theirs wait.


_OPEN_S = 1.0  # time for the other ranks to end their parts, which they do at the same point
_POLL_S = 0.002


@dataclass(eq=False)
class _Part:
    """This rank's part of a group."""

    name: str
    ranks: tuple[int, ...]  # global ones
    open: set[dist.Work] = field(default_factory=set)  # collectives that may still run
    is_left: bool = False  # all ranks have left the group

    def try_to_end(self, seconds: float) -> bool:
        """End this part of a group that all ranks have left; False if a collective stays open for `seconds`. Local."""
        deadline = time.monotonic() + seconds
        while not all(map(_is_over, self.open)):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        self.open.clear()
        # Unlike `destroy_process_group`, aborting is local on every backend.
        _end(self.name, c10d._abort_process_group)
        return True


def _is_over(work: dist.Work) -> bool:
    try:
        return work.is_completed()
    # Some backends raise here what the collective failed with.
    except RuntimeError:
        return True


# Groups that this rank has dropped and that have not ended.
_dropped: list[_Part] = []


class OwnGroup:
    """A process group of ranks of the parent, with its backends. Collective over these ranks only.

    name: a name that no group of these ranks ever had, equal on all of them. The ranks find one another by it in the
        store. ranks: global ones, in the order of the group; None: all of the parent's. open_works: takes launched
        collectives that this rank does not know to be over.

    `dist.new_group(use_local_synchronization=True)` derives a name from the number of groups that live in the process.
    After a group has ended, the next one would get its name and find its addresses, and ranks of which one has a group
    more would wait for one another under different names.
    """

    def __init__(
        self,
        parent: dist.ProcessGroup,
        name: str,
        timeout: timedelta,
        ranks: Sequence[int] | None = None,
        open_works: set[dist.Work] | None = None,
    ) -> None:
        ranks = dist.get_process_group_ranks(parent) if ranks is None else list(ranks)
        self._part = _Part(name, tuple(ranks), set() if open_works is None else open_works)
        self.group = _connect(parent, name, ranks, timeout)
        self._drop = weakref.finalize(self, _dropped.append, self._part)
        # The process's groups end with it.
        self._drop.atexit = False

    @property
    def open(self) -> set[dist.Work]:
        """Launched collectives that this rank does not know to be over. The caller adds and removes them."""
        return self._part.open

    def close(self) -> None:
        """End the group, with its threads and sockets, after all of its collectives. Collective."""
        # The finalizer would list a group that has ended among the dropped ones.
        self._drop.detach()
        _end(self._part.name, dist.destroy_process_group)

    def drop(self) -> None:
        """Leave the group to be ended where all ranks have dropped it. Local."""
        self._drop()

    def abort(self) -> None:
        """End the group, whatever is open in it. Local, but all ranks call it at the same point."""
        self._drop()
        self._part.is_left = True
        if self._part.try_to_end(_OPEN_S):
            _dropped.remove(self._part)


def dropped() -> list[str]:
    """The names of the groups that this rank has dropped and that have not ended."""
    # A copy: the cycle collector may append to the list at any moment.
    return [part.name for part in _dropped[:]]


def end_dropped(by_rank: Mapping[int, set[str]]) -> None:
    """End the groups that all of their ranks have dropped. by_rank: the results of `dropped()`, by global rank.

    Local, but all these ranks call it at the same point, and end groups in the same order.
    """
    for part in sorted(_dropped[:], key=lambda part: part.name):
        # Collectives that were open at an earlier meeting have had this time: later meetings do not wait for them.
        wait_s = 0.0 if part.is_left else _OPEN_S
        part.is_left = part.is_left or all(part.name in by_rank.get(rank, ()) for rank in part.ranks)
        if part.is_left and part.try_to_end(wait_s):
            _dropped.remove(part)


def _end(name: str, end: Callable[[dist.ProcessGroup], None]) -> None:
    """Remove the group from torch's tables, which hold the last reference, unless the user has ended it already."""
    for group, its_name in list(c10d._world.pg_names.items()):
        if its_name == name:
            end(group)


def _connect(parent: dist.ProcessGroup, name: str, ranks: list[int], timeout: timedelta) -> dist.ProcessGroup:
    backend, _ = c10d._world.pg_map[parent]
    whole = c10d._get_default_group()
    own: dist.ProcessGroup
    own, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        backend,
        c10d._get_default_store(),
        c10d.GroupName(name),
        timeout=timeout,
        device_id=whole.bound_device_id,
        group_desc="gemini",
    )
    # `_new_process_group_helper` leaves this entry to its caller; rank translations read it.
    c10d._world.pg_group_ranks[own] = {global_rank: rank for rank, global_rank in enumerate(ranks)}
    return own


# -- The process groups that carry the collectives of one model: opened, replaced after a failure, and ended.


class Links(NamedTuple):
    """How this rank reaches the others."""

    all: Collectives  # all ranks, for what they agree on
    shards: Collectives  # those that share the shards with this one: the same ones where there are no replicas
    nearby: Collectives | None = None  # those that hold a second copy of the weights with this one
    across: Collectives | None = None  # those with this one's place in other groups, see `RankMesh.groups`


class Connection:
    """The connection of this rank to the others.

    It has groups of its own: a collective that a failure left open must not be matched with one of the user's.
    """

    def __init__(self, mesh: RankMesh, watch: Watchdog | None, rank_timeout_s: float, device: torch.device) -> None:
        """watch: what waits for collectives. None on one rank, which needs no group."""
        self.works: set[dist.Work] = set()  # launched collectives that this rank does not know to be over
        self._parent, self._rows, self._nearby, self._across = mesh.group, mesh.rows, mesh.nearby, mesh.across
        self._watch = watch
        # Longer than the watchdog's, so that the watchdog is first to report a lost rank, with its place in the step.
        self._timeout = timedelta(seconds=rank_timeout_s + 60)
        self._device = device
        self._own: list[OwnGroup] = []
        if self._parent is not None and watch is not None:
            announce_device(self._parent, device)

    @property
    def is_open(self) -> bool:
        """There is a group. One rank never has one."""
        return bool(self._own)

    def open(self) -> Links:
        """The collectives of groups that were just made. Collective.

        Raises UnsupportedError if ranks share a GPU, and DivergenceError if they have different meshes.
        """
        if self._parent is None or self._watch is None:
            alone = Collectives(None)
            return Links(alone, alone)
        self._watch.join()
        refuse_shared(self._parent, self._device)
        self._own, self.works = [], set()
        everyone = self._connected(self._watch.name)
        self._watch.begin_group(self.works)
        if self._across:
            _refuse_other_rows(everyone.all_gather_bytes(repr(self._nearby).encode()))
            places = next(ranks for ranks in self._across if dist.get_rank() in ranks)
            across = self._connected(f"{self._watch.name}/across groups of {places[0]}", places, None, everyone)
            ordered = self._connected(f"{self._watch.name}/in the order of places", self._rows[0], None, everyone)
            return Links(everyone, ordered, self._with_copy(everyone), across)
        if len(self._rows) == 1:
            return Links(everyone, everyone, self._with_copy(everyone))
        # Ranks with other rows would look for one another under other names, until the timeout.
        _refuse_other_rows(everyone.all_gather_bytes(repr(self._rows).encode()))
        here = dist.get_rank()
        row = next(row for row in self._rows if here in row)
        column = [ranks[row.index(here)] for ranks in self._rows]
        # Groups of one name find one another, so each row and each column has its own.
        replicas = self._connected(f"{self._watch.name}/replicas of {column[0]}", column)
        shards = self._connected(f"{self._watch.name}/shards of {row[0]}", row, replicas, everyone)
        return Links(everyone, shards, self._with_copy(everyone))

    def _with_copy(self, everyone: Collectives) -> Collectives | None:
        """The ranks that hold a second copy of the weights together with this one. None: there is none."""
        if not self._nearby:
            return None
        assert self._watch is not None
        part = next(part for part in self._nearby if dist.get_rank() in part)
        return self._connected(f"{self._watch.name}/second copy of {part[0]}", part, None, everyone)

    def _connected(self, name: str, ranks: Sequence[int] | None = None, *others: Collectives | None) -> Collectives:
        assert self._parent is not None and self._watch is not None
        own = OwnGroup(self._parent, name, self._timeout, ranks, self.works)
        self._own.append(own)
        return Collectives(own.group, self._watch.wait, self._device, *others)

    def replace(self, links: Links) -> Links:
        """The collectives of other groups of the same ranks, after a failure that every rank caught. Collective."""
        _abort(links)
        before = self._own
        others = self.open()
        for own in before:
            own.abort()  # `open` has waited for all ranks: each ends its part here
        return others

    def close(self, links: Links) -> Links:
        """Give the groups back, with their threads and sockets. Collective, except after a failure.

        Returns collectives of this rank alone.
        """
        if self._own and self._watch is not None:
            if self._watch.failed:
                _abort(links)
                for own in self._own:
                    own.drop()  # other ranks may not have heard of the failure yet
            else:
                links.all.barrier()  # gloo's destructor waits for the other ranks: leave together
                for own in self._own:
                    own.close()
        self._own, self.works = [], set()
        alone = Collectives(None)
        return Links(alone, alone)


def _abort(links: Links) -> None:
    links.all.abort()
    if links.shards is not links.all:
        links.shards.abort()
        if links.shards.replicas is not None:
            links.shards.replicas.abort()
    for others in (links.nearby, links.across):
        if others is not None:
            others.abort()


def _refuse_other_rows(of_ranks: Sequence[bytes]) -> None:
    """Raises DivergenceError on all ranks if they have different meshes. of_ranks: the rows of each rank, in words."""
    for rank, words in enumerate(of_ranks):
        if words != of_ranks[0]:
            raise DivergenceError(
                f"the device_mesh differs between ranks: rank 0 has the groups {of_ranks[0].decode()}, rank {rank} has "
                f"{words.decode()}. Give all ranks one mesh, or one shard_group_size"
            )
