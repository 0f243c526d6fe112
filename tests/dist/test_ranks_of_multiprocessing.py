"""Ranks that a script starts with multiprocessing: their processes end in a way of their own, and are heard of too."""

import multiprocessing
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gemini import RemoteRankError
from tests.dist.failing import batch, make, train_step
from tests.harness.on_ranks import in_soak


def _train(rank: int, how: str, folder: Path) -> None:
    """Rank 1 fails between two steps. As ranks of `torch.multiprocessing` do, it may make an exit of its exception."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    model, optimizer, _ = make(rank_timeout=60)
    train_step(model, optimizer, rank, 0)
    try:
        if rank == 1:
            raise ValueError("the data broke")
        model(batch(rank, 1))
    except ValueError:
        if how == "exits":
            sys.exit(1)
        raise
    except RemoteRankError as error:
        (folder / "told").write_text(str(error))
        raise


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.soak)])
@pytest.mark.parametrize("how", ["exits", *in_soak("raises")])
def test_an_exception_that_ends_a_rank_is_told_to_the_others(method: str, how: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context(method)
    processes = [context.Process(target=_train, args=(rank, how, tmp_path)) for rank in (0, 1)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()
    assert [process.exitcode for process in processes] == [1, 1]
    assert "rank 1 failed: ValueError: the data broke" in (tmp_path / "told").read_text()
