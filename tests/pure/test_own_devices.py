"""Ranks that use one GPU are told which; on a real one, tests/gpu/test_processes.py does so."""

import pytest
import torch.distributed as dist

from gemini.errors import UnsupportedError
from gemini.ranks.group import refuse_equal


def store_of(*announced: str) -> dist.Store:
    store = dist.HashStore()
    for rank, words in enumerate(announced):
        store.set(f"gemini/device/{rank}", words)
    return store


def test_ranks_with_a_gpu_each_pass() -> None:
    refuse_equal(store_of("a cuda:0", "b cuda:1", "c cuda:0"), [0, 1, 2])


def test_two_ranks_with_one_gpu_are_named() -> None:
    with pytest.raises(UnsupportedError, match=r"ranks 1 and 3 both use the GPU b.*calls cuda:0.*--nproc-per-node"):
        refuse_equal(store_of("a cuda:0", "b cuda:1", "c cuda:0", "b cuda:0"), [0, 1, 2, 3])


def test_ranks_of_other_groups_may_have_it() -> None:
    refuse_equal(store_of("a cuda:0", "a cuda:0"), [1])
