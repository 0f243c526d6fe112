"""For all tests: one thread, the `ranks` fixture, and lines that tests want to be seen though they pass.

One thread in the test process, as in the ranks: some kernels (layer norm's backward) sum in an order that the number
of threads decides, and references are compared bit by bit. The collector of garbage leaves alone what was there before
the first test, such as the modules of transformers, which each collection would otherwise look through for half a
second. No deadline for an example of hypothesis: on a busy machine any of them may take long, which is no fault of the
code.
"""

import gc
import os
import sys
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests.harness.ranks import RankPool
from tests.harness.sampling import mark_what_is_left_out

torch.set_num_threads(1)
hypothesis.settings.register_profile("gemini", deadline=None)
hypothesis.settings.load_profile("gemini")


LONG = (
    "tests/golden/test_golden.py",
    "tests/test_many_parameters.py",
    "tests/test_examples.py",
    "tests/test_benchmarks.py",
    "tests/test_run_clm.py",
    "tests/test_quick_start.py",
    "tests/test_triton_kernels.py",
    "tests/test_house_rules.py",
    "tests/test_pinned_memory.py",
    "tests/pure/test_cpu_kernels.py",
    "tests/features/test_plan_command.py",
    "tests/features/test_transformers_trainer.py",
    "tests/features/test_transformers_checkpoints.py",
    "tests/features/test_lightning.py",
    "tests/features/test_accelerate.py",
    "tests/dist/test_rank_failures.py",
    "tests/dist/test_divergence.py",
    "tests/dist/test_many_chunks.py",
    "tests/dist/test_memory.py",
    "tests/features/test_zero_init_memory.py",
    "tests/features/test_compile.py",
)
"""Files with few tests that take long: they begin first. Workers that share a run by files would otherwise meet them
last, as these have few tests, and one worker would be idle at the end."""


def pytest_configure() -> None:
    """A worker and the ranks that it starts have processors of their own, and run for as long as they have work.

    Ranks wake each other thousands of times a second. Where every processor is busy, wake-ups that go to another one,
    and take it away from who runs there, cost a sixth of the time of tests with ranks.
    """
    if sys.platform != "linux":
        return
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    number, count = os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:], os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    if mine := sorted(os.sched_getaffinity(0))[int(number) :: int(count)]:
        os.sched_setaffinity(0, mine)


@pytest.hookimpl(tryfirst=True)  # before pytest looks for marks that -m names
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_what_is_left_out(items)
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Lightning's launchers give torch all processors, here and in processes to come: the next test has one again."""
    before = os.environ.get("OMP_NUM_THREADS")
    yield
    torch.set_num_threads(1)
    if before is None:
        os.environ.pop("OMP_NUM_THREADS", None)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(world_size).run(case, *args)` on gloo processes that live for the session."""
    pool = RankPool()
    yield pool
    codes = pool.stop()
    assert all(code == 0 for of_size in codes.values() for code in of_size), f"exit codes by world size: {codes}"


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests noted with `record_property("shown", line)`."""
    for report in terminalreporter.getreports("passed"):
        for name, line in report.user_properties:
            if name == "shown":
                terminalreporter.write_line(str(line))
