"""The harness itself: what comes back from ranks, and what happens when they fail."""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import RankError, RankPool, Ranks, RankTimeout


def where(rank: int, world_size: int) -> tuple[int, int, int, int]:
    return rank, world_size, dist.get_world_size(), torch.get_num_threads()


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def summed(rank: int, world_size: int, x: torch.Tensor, *, scale: float) -> torch.Tensor:
    y = x * (rank + 1) * scale
    dist.all_reduce(y)
    return y


def drawn(rank: int, world_size: int) -> float:
    return torch.rand(()).item()


def raise_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        raise ValueError(f"rank {rank} says no")
    dist.barrier()


class Unsendable(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def raise_unsendable(rank: int, world_size: int) -> None:
    raise Unsendable("this", "that")


def hang_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        time.sleep(600)


def one_collective_too_many(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(3))


def die(rank: int, world_size: int, bad: int, code: int) -> str:
    if rank == bad:
        print("about to die", file=sys.stderr, flush=True)
        os._exit(code)
    return "alive"


def own_group(rank: int, world_size: int) -> tuple[bool, str | None]:
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    return before, os.environ.get("HARNESS_SAYS")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_knows_its_place_and_uses_one_thread(ranks: RankPool, world_size: int) -> None:
    assert ranks(world_size).run(where) == [(r, world_size, world_size, 1) for r in range(world_size)]


def test_tensors_and_keywords_go_in_and_results_come_back(ranks: RankPool) -> None:
    results = ranks(2).run(summed, torch.arange(3.0), scale=2.0)
    assert [r.tolist() for r in results] == [[0.0, 6.0, 12.0]] * 2


def test_processes_serve_many_cases_and_each_starts_from_the_same_seed(ranks: RankPool) -> None:
    assert ranks(2).run(process_id) == ranks(2).run("tests.dist.test_ranks_harness:process_id")
    assert ranks(2).run(drawn) == ranks(2).run(drawn)


def test_a_case_that_is_not_top_level_is_refused(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="top-level"):
        ranks(2).run(lambda rank, world_size: None)


@pytest.fixture
def spare() -> Ranks:
    """Ranks of this test alone: failures here cost no other test its processes."""
    ranks = Ranks(2)
    yield ranks
    assert all(code == 0 for code in ranks.stop())


def test_failures_come_with_the_rank_and_its_traceback_and_cost_only_that_group(spare: Ranks) -> None:
    with pytest.raises(ValueError, match="rank 1 says no") as caught:
        spare.run(raise_on, 1)
    notes = "\n".join(caught.value.__notes__)
    assert "rank 1 of 2" in notes
    assert "in raise_on" in notes

    with pytest.raises(RankError, match="this and that"):
        spare.run(raise_unsendable)

    assert spare.run(where)[1][0] == 1


def test_a_hang_is_killed_with_stacks_and_the_next_case_has_fresh_ranks(spare: Ranks) -> None:
    before = spare.run(process_id)
    started = time.monotonic()
    with pytest.raises(RankTimeout, match=r"hang_on: no answer within 2 s") as caught:
        spare.run(hang_on, 1, timeout_s=2)
    assert time.monotonic() - started < 20
    assert "in hang_on" in str(caught.value)
    assert not set(before) & set(spare.run(process_id))


@pytest.mark.soak
def test_a_rank_that_runs_one_collective_too_many_fails_in_its_own_case(spare: Ranks) -> None:
    with pytest.raises(RuntimeError):
        spare.run(one_collective_too_many, timeout_s=5)


def test_a_rank_that_dies_is_named_with_its_exit_code(spare: Ranks) -> None:
    with pytest.raises(RankError, match="rank 0 with 7"):
        spare.run(die, 0, 7)


@pytest.mark.soak
def test_fresh_ranks_report_exit_codes_output_and_errors() -> None:
    died, alive = Ranks(2).run(die, 0, 9, fresh=True)
    assert (died.exitcode, alive.exitcode, alive.result) == (9, 0, "alive")
    assert "about to die" in died.stderr

    failed, waited = Ranks(2).run(raise_on, 0, fresh=True, forked=True)
    assert failed.exitcode == 1
    assert "rank 0 says no" in failed.stderr
    assert isinstance(failed.error, ValueError)
    assert waited.exitcode == 1  # its barrier lost a peer


def test_fresh_ranks_can_start_their_own_process_group() -> None:
    exits = Ranks(2).run(own_group, fresh=True, forked=True, init_group=False, env={"HARNESS_SAYS": "hello"})
    assert [e.result for e in exits] == [(False, "hello")] * 2
    assert [e.exitcode for e in exits] == [0, 0]
