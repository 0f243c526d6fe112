"""One rank's failure ends all with its message, or is forgotten by all that catch it."""

import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gemini import RankLostError
from tests.dist import failure_cases as cases
from tests.harness.ranks import RankPool

SCRIPT = Path(__file__).with_name("script_that_fails.py")
SOAK = pytest.mark.soak


def run_script(where: str, who: int, init_method: str) -> tuple[list[int], list[str]]:
    return ends_of(start_script(where, who, init_method))


def start_script(where: str, who: int, init_method: str) -> list[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), where, str(who), init_method]
    return [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]


def ends_of(processes: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """(exit codes, stderr) by rank. They must end by themselves, interpreter exit included."""
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], errors


@pytest.mark.parametrize(
    ("where", "message"),
    [
        pytest.param("forward", "ValueError: the forward broke", marks=SOAK),
        pytest.param("loss", "ValueError: the loss broke", marks=SOAK),
        pytest.param("backward", "ValueError: the backward broke", marks=SOAK),
        pytest.param("step", "lr must be", marks=SOAK),
        pytest.param("loader", "ValueError: the loader broke", marks=SOAK),
        pytest.param("wrap", "stage must be", marks=SOAK),
        pytest.param("exit", "its script has ended", marks=SOAK),
    ],
)
def test_an_exception_on_one_rank_ends_all_with_its_message(where: str, message: str, tmp_path: Path) -> None:
    codes, errors = run_script(where, 1, f"file://{tmp_path / 'store'}")
    assert codes == [1, 4 if where == "exit" else 1], errors
    assert "RemoteRankError: rank 1 failed: " in errors[0]
    assert message in errors[0]


@pytest.mark.parametrize("where", [pytest.param("ends", marks=SOAK), "ends, destroys its group"])
def test_a_rank_that_saves_alone_hears_that_the_other_has_ended_its_script(where: str, tmp_path: Path) -> None:
    """`if rank == 0: torch.save(model.state_dict())` as the last line, or a loader with fewer batches on one rank."""
    codes, errors = run_script(where, 1, f"file://{tmp_path / 'store'}")
    assert codes == [1, 0], errors
    assert "RemoteRankError: rank 1 failed: its script has ended, without an exception" in errors[0], errors[0]
    assert "state_dict() outside `if rank == 0`, with rank0_only=True" in errors[0], errors[0]
    assert "killed" not in errors[0], errors[0]


@SOAK
@pytest.mark.parametrize("where", ["loss", "forward"])
def test_the_rank_that_holds_the_store_leaves_when_the_others_know(where: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    codes, errors = run_script(where, 0, f"tcp://127.0.0.1:{port}")
    assert codes == [1, 1], errors
    assert f"RemoteRankError: rank 0 failed: ValueError: the {where} broke" in errors[1]


def test_a_killed_rank_is_lost(ranks: RankPool) -> None:
    survivor, killed = ranks(2).run(cases.one_is_killed_in_a_step, fresh=True, forked=True, timeout_s=60)
    assert (survivor.exitcode, killed.exitcode) == (1, -9), survivor
    assert isinstance(survivor.error, RankLostError)
    assert "rank 0 lost rank 1 at " in str(survivor.error)


@pytest.mark.soak
def test_a_killed_rank_is_lost_where_no_connection_tells_of_it(ranks: RankPool) -> None:
    """Ranks that begin together meet at the store, which knows no connections: without a look, `rank_timeout` later."""
    started = time.monotonic()
    survivor, killed = ranks(2).run(cases.one_is_killed_before_a_second_model, fresh=True, forked=True, timeout_s=60)
    assert (survivor.exitcode, killed.exitcode) == (1, -9), survivor
    assert isinstance(survivor.error, RankLostError)
    assert "rank 0 lost rank 1 at " in str(survivor.error)
    assert "its process is gone without a word" in str(survivor.error)
    assert time.monotonic() - started < 45


@SOAK
@pytest.mark.parametrize("where", ["killed", "killed-before-another-model"])
def test_a_script_whose_other_rank_was_killed_says_so_and_ends(where: str, tmp_path: Path) -> None:
    codes, errors = run_script(where, 1, f"file://{tmp_path / 'store'}")
    assert codes == [1, -9], errors
    assert "RankLostError: rank 0 lost rank 1 at " in errors[0]


@SOAK
@pytest.mark.parametrize("attempt", range(10))
def test_a_rank_killed_at_any_time_is_lost(attempt: int, tmp_path: Path) -> None:
    """From outside, in a step or between two; the other one says so and ends.

    A busy machine takes its time to start ranks. Before they have met, the one that is left waits in torch's own
    `init_process_group`, for as long as that does.
    """
    who = attempt % 2
    processes = start_script("endless", who, f"file://{tmp_path / 'store'}")
    deadline = time.monotonic() + 100
    while len(list(tmp_path.glob("*-trains"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.Random(attempt).random() * 2)  # some steps
    processes[who].kill()
    codes, errors = ends_of(processes)
    assert codes == ([-9, 1] if who == 0 else [1, -9]), errors
    assert "RankLostError" in errors[1 - who], errors


@SOAK
def test_ranks_that_diverge_leave_the_interpreter_too(tmp_path: Path) -> None:
    codes, errors = run_script("diverging", 1, f"file://{tmp_path / 'store'}")
    assert codes == [1, 1], errors
    assert all("DivergenceError" in error or "RemoteRankError" in error for error in errors)


def test_the_failure_of_a_rank_that_does_not_catch_ends_the_one_that_does(ranks: RankPool) -> None:
    started = time.monotonic()
    exits = ranks(2).run(cases.a_failure_that_only_one_rank_catches, fresh=True, forked=True, timeout_s=60)
    assert time.monotonic() - started < 30, "the start of the ranks included"
    assert [type(e.error).__name__ for e in exits] == ["RemoteRankError", "RemoteRankError"], exits
    assert all(e.exitcode != 0 for e in exits)


@pytest.mark.parametrize(
    ("world_size", "stage"), [(2, 3), pytest.param(2, 2, marks=SOAK), pytest.param(3, 3, marks=SOAK)]
)
def test_failures_that_every_rank_catches_are_forgotten_together(ranks: RankPool, world_size: int, stage: int) -> None:
    exits = ranks(world_size).run(cases.all_catch_and_go_on, stage, fresh=True, forked=True, timeout_s=150)
    assert [e.exitcode for e in exits] == [0] * world_size, exits[0].stderr[-3000:] + exits[1].stderr[-3000:]
    for one in exits:
        got, wanted, caught, norm = one.result
        assert got == wanted, "weights, moments and steps are those of a run that never failed"
        assert not any(words.endswith("nothing") for words in caught), caught
        assert norm == 0, "a step after a backward that failed finds no gradient"
    assert len({one.result[0] for one in exits}) == 1


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_ctrl_c_on_one_rank_that_all_catch_training_goes_on(ranks: RankPool, where: str) -> None:
    (others, *hashes), (interrupted, *same) = ranks(2).run(cases.an_interrupt_that_all_catch, where, timeout_s=60)
    assert [words.split(":")[0] for words in interrupted] == ["KeyboardInterrupt"] * 2
    assert all(words.startswith("RemoteRankError: rank 1 failed: ") for words in others), others
    assert hashes == same
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("deferred", [False, True], ids=["in the step", "beside the next forward"])
def test_a_step_that_fails_half_way_is_final_on_all_ranks(ranks: RankPool, deferred: bool) -> None:
    exits = ranks(2).run(cases.a_torn_step, deferred, fresh=True, forked=True, timeout_s=60)
    for one in exits:
        assert one.result is not None, one.stderr[-3000:]
        assert all("failed half way" in words for words in one.result[1][-1:]), one.result
    assert "Boom" in exits[1].result[0]


@pytest.mark.soak
def test_a_forked_worker_that_touches_a_sharded_model_is_told_at_once(ranks: RankPool) -> None:
    for said, goes_on in ranks(2).run(cases.a_forked_worker_reads_a_weight, timeout_s=40):
        assert "UnsupportedError" in said
        assert "was forked from rank" in said
        assert "num_workers=0" in said
        assert goes_on, "training after it has other bits"


@SOAK
def test_a_slow_rank_is_not_lost_and_a_lost_one_is_named(ranks: RankPool) -> None:
    exits = ranks(2).run(cases.one_rank_dawdles, 3.0, 30.0, fresh=True, timeout_s=60)
    assert [e.result for e in exits] == ["done", "done"], [e.stderr[-2000:] for e in exits]
    exits = ranks(2).run(cases.one_rank_dawdles, 6.0, 2.0, fresh=True, timeout_s=60)
    assert exits[0].result is not None and "RankLostError" in exits[0].result, exits[0].stderr[-2000:]
    assert "forward of" in exits[0].result


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_from_before_a_forward_that_failed_on_all_ranks_are_dropped_and_that_is_said(
    ranks: RankPool, stage: int
) -> None:
    ranks(2).run(cases.a_forward_that_all_catch_drops_gradients, stage)
