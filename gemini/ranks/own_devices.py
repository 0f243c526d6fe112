"""Each rank needs a GPU of its own: NCCL ends with "invalid usage" otherwise, and names neither ranks nor a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gemini.errors import UnsupportedError
from gemini.ranks.exit_report import default_store
from sharding import backends


def announce(group: dist.ProcessGroup, device: torch.device) -> None:
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
