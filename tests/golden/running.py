"""Runs cases, each on as many ranks as it wants, and makes one result of what the ranks say."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.golden.cases import Case
from tests.golden.training import Result, train
from tests.harness.ranks import RankPool

BATCH = 8  # cases that ranks get at a time


def on_ranks(pool: RankPool, cases: Sequence[Case]) -> Iterator[tuple[Case, Result]]:
    """Results as they come; cases of one rank run here, in this process and without torch.distributed."""
    for case in cases:
        if case.ranks == 1:
            yield case, train(0, 1, case.options)
    for world_size in sorted({case.ranks for case in cases} - {1}):
        of_size = [case for case in cases if case.ranks == world_size]
        for start in range(0, len(of_size), BATCH):
            batch = of_size[start : start + BATCH]
            found = pool(world_size).run(train_many, [case.options for case in batch], timeout_s=60 + 20 * len(batch))
            yield from zip(batch, (merged(list(each)) for each in zip(*found, strict=True)), strict=True)


def train_many(rank: int, world_size: int, cases: list[dict[str, Any]]) -> list[Result]:
    """Several cases one after the other. Collective."""
    return [train(rank, world_size, options) for options in cases]


def merged(by_rank: list[Result]) -> Result:
    """What ranks agree on, once; of hashes that differ one of all, in rank order; of numbers that differ all."""
    bits, counts = ([result[part] for result in by_rank] for part in ("bits", "counts"))
    return {"bits": _merged(bits, _one_hash), "counts": _merged(counts, list)}


def _merged(by_rank: Sequence[Any], differing: Callable[[Sequence[Any]], Any]) -> Any:
    first = by_rank[0]
    if all(each == first for each in by_rank):
        return first
    if all(isinstance(each, dict) for each in by_rank):
        names = dict.fromkeys(name for each in by_rank for name in each)
        return {name: _merged([each.get(name) for each in by_rank], differing) for name in names}
    if all(isinstance(each, list) and len(each) == len(first) for each in by_rank):
        return [_merged(each, differing) for each in zip(*by_rank, strict=True)]
    return differing(by_rank)


def _one_hash(by_rank: Sequence[Any]) -> str:
    return hashlib.sha256("".join(map(str, by_rank)).encode()).hexdigest()[: len(str(by_rank[0]))]
