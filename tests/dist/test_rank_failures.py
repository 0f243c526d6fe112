"""One rank's failure ends all with its message; ranks that take different ways are told apart, never mixed up."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.dist import failure_cases as cases
from tests.dist.ranks import RankPool

SOAK = pytest.mark.soak


@pytest.mark.parametrize("where", ["forward", "killed", *(pytest.param(w, marks=SOAK) for w in ("backward", "step"))])
def test_an_exception_on_one_rank_ends_all_with_its_message(ranks: RankPool, where: str) -> None:
    started = time.monotonic()
    exits = ranks(2).run(cases.one_rank_raises, where, fresh=True, timeout_s=60)
    assert time.monotonic() - started < 50, "30 s, and the start of the ranks"
    assert all(e.exitcode != 0 for e in exits), [e.exitcode for e in exits]
    other = exits[0].stderr
    if where == "killed":
        assert "RankLostError" in other
    else:
        words = {"step": "lr must be", "backward": "in backward"}.get(where, where)
        assert "RemoteRankError: rank 1 failed" in other
        assert words in other


def test_an_exception_that_ends_the_script_of_one_rank_is_told_to_the_other(tmp_path: Path) -> None:
    """Two real scripts: what escapes a loss function or a data loader is published on the way out."""
    script = Path(__file__).with_name("script_that_fails.py")
    environment = {**os.environ, "PYTHONPATH": str(script.parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(tmp_path / "store")]
    processes = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    try:
        errors = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 1 for process in processes), errors
    assert "RemoteRankError: rank 1 failed: ValueError: the loader broke" in errors[0]


def test_a_failure_that_every_rank_catches_is_forgotten_together(ranks: RankPool) -> None:
    exits = ranks(2).run(cases.all_catch_and_go_on, fresh=True, timeout_s=120)
    assert [e.exitcode for e in exits] == [0, 0], exits[0].stderr[-3000:]
    results = [e.result for e in exits]
    assert all(caught == 2 for _, _, caught in results)
    assert results[0][0] == results[0][1] == results[1][0] == results[1][1]


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ("forward", ["layers.3", "layers.6"]),
        ("touch in forward", ["layers.3", "layers.7"]),
        pytest.param("outside a step", ["layers.5", "layers.2"], marks=SOAK),
        pytest.param("evaluation", ["layers.0", "layers.4"], marks=SOAK),
        pytest.param("skipped backward", [], marks=SOAK),
    ],
)
def test_ranks_that_take_different_ways_get_an_error_naming_both(ranks: RankPool, how: str, names: list[str]) -> None:
    exits = ranks(2).run(cases.ranks_diverge, how, fresh=True, timeout_s=90)
    for one in exits:
        assert one.result is not None, one.stderr[-2000:]
        message, unchanged = one.result
        assert message.startswith(("DivergenceError", "RemoteRankError")), message
        assert all(name in message for name in names), message
        assert unchanged, "no foreign data reached the weights"


def test_references_dropped_late_change_neither_evictions_nor_bits(ranks: RankPool) -> None:
    calm = ranks(2).run(cases.late_references, False, timeout_s=60)
    disturbed = ranks(2).run(cases.late_references, True, timeout_s=60)
    assert calm[0][0] == calm[1][0] == disturbed[0][0] == disturbed[1][0]
    assert len({hash_ for _, hash_ in calm + disturbed}) == 1
    assert any(what == "release" for what, _ in calm[0][0])


def test_weights_become_those_of_rank_0(ranks: RankPool) -> None:
    assert len(set(ranks(2).run(cases.different_weights))) == 1


@pytest.mark.parametrize("what", ["stage", "budget"])
def test_different_arguments_are_refused_with_what_differs(ranks: RankPool, what: str) -> None:
    exits = ranks(2).run(cases.different_arguments, what, fresh=True, timeout_s=60)
    for one in exits:
        assert one.result, one.stderr[-2000:]
        assert ("stage=2" in one.result and "stage=3" in one.result) if what == "stage" else "plan" in one.result


def test_a_slow_rank_is_not_lost_and_a_lost_one_is_named(ranks: RankPool) -> None:
    assert ranks(2).run(cases.one_rank_dawdles, 5.0, 60.0, timeout_s=90) == ["done", "done"]
    exits = ranks(2).run(cases.one_rank_dawdles, 9.0, 3.0, fresh=True, timeout_s=90)
    assert exits[0].result is not None and "RankLostError" in exits[0].result, exits[0].stderr[-2000:]
    assert "forward of layers.0" in exits[0].result
