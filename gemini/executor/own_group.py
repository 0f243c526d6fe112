"""The process group of one model, beside the one that it was made for."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def connect(parent: dist.ProcessGroup, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """A process group of the parent's ranks and backends. Collective over these ranks, and no others.

    name: what no group of these ranks was ever called, the same on all of them. The ranks find one another under it
    in the store. `dist.new_group(use_local_synchronization=True)` derives a name from the number of groups that live
    in the process: after a group has ended, the next one would get its name, and find its addresses; and ranks of
    which one has a group more would wait for one another under different names.
    """
    backend, _ = c10d._world.pg_map[parent]
    ranks = dist.get_process_group_ranks(parent)
    whole = c10d._get_default_group()
    own: dist.ProcessGroup
    own, _ = c10d._new_process_group_helper(
        len(ranks),
        parent.rank(),
        ranks,
        backend,
        c10d._get_default_store(),
        c10d.GroupName(name),
        timeout=timeout,
        device_id=whole.bound_device_id,
        group_desc="gemini",
    )
    c10d._world.pg_group_ranks[own] = {global_rank: rank for rank, global_rank in enumerate(ranks)}
    return own
