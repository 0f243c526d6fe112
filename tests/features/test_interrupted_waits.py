"""Ctrl-C while the training thread waits for a thread of the model: nothing hangs, the end of the process included.

An exception that a trace function raises comes between two operations of the interpreter, as the signal's handler does.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

import gemini
from gemini.checkpoint import file_io
from gemini.memory.transfer import CopyRoom, Loan, Region
from gemini.memory.work import WorkThread
from gemini.memory.workers import Over, WorkPiece
from gemini.placement.demand import Tier
from tests.features.test_deferred_update import assert_as_plain, wrapped
from tests.harness import slow_updates
from tests.zoo import mlp

ROOT = Path(__file__).parents[2]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_while_waiting_loses_nothing(interruptible: None) -> None:
    with slow_updates.installed() as slow:
        model, optimizer = wrapped()
        mlp.loss_of(model, 1).backward()
        wait_for = WorkThread.wait_for

        def interrupted(self: WorkThread, over: Over) -> None:
            assert not over.is_over
            os.kill(os.getpid(), signal.SIGINT)  # it comes in the wait, or right before it
            wait_for(self, over)

        with slow.held():
            optimizer.step()
            with mock.patch.object(WorkThread, "wait_for", interrupted), pytest.raises(KeyboardInterrupt):
                mlp.loss_of(model, 2)
        mlp.train_step(model, optimizer, 2)
        assert_as_plain(model, 3)


def test_an_interrupt_of_a_wait_for_a_loan_leaves_it_to_be_waited_for(interruptible: None) -> None:
    """A checkpoint that is written in the background reads what the next step would write to."""
    region = Region(Tier.HOST, mlp.inputs(0).view(-1))
    loan = Loan([region], CopyRoom(0))
    loan.read()
    wait = Over.wait

    def interrupted(self: Over) -> None:
        os.kill(os.getpid(), signal.SIGINT)  # it comes in the wait, or right before it
        wait(self)

    with mock.patch.object(Over, "wait", interrupted), pytest.raises(KeyboardInterrupt):
        loan.wait()
    loan.end()
    loan.wait()


@pytest.mark.parametrize("name", ["save_checkpoint", "load_checkpoint"])
def test_an_interrupt_of_a_save_or_a_load_leaves_the_next_one_to_go_on(
    name: str, tmp_path: Path, interruptible: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_io, "PIECE_BYTES", 256)  # threads write and read these small states
    model, optimizer = wrapped()
    mlp.train_step(model, optimizer, 0)
    gemini.save_checkpoint(tmp_path, model, optimizer, tag="first")
    wait, places = WorkPiece.wait, list[str]()

    def interrupted(self: WorkPiece) -> None:
        if not places:
            places.append("here")
            os.kill(os.getpid(), signal.SIGINT)  # it comes in the wait, or right before it
        wait(self)

    with mock.patch.object(WorkPiece, "wait", interrupted), pytest.raises(KeyboardInterrupt):
        getattr(gemini, name)(tmp_path, model, optimizer)
    before = gemini.state_hash(model, optimizer)
    gemini.save_checkpoint(tmp_path, model, optimizer, tag="second")
    mlp.train_step(model, optimizer, 1)
    gemini.load_checkpoint(tmp_path, model, optimizer, tag="second")
    assert gemini.state_hash(model, optimizer) == before


# Interrupts before each line, and behind each function, that waits of the training thread run: of ours, and of the
# library's where they use it. The model goes on, or says that it is torn.
PROGRAM = """
import sys, tempfile
from contextlib import suppress
from pathlib import Path
import concurrent.futures, queue, threading
import gemini
from gemini import GeminiError
from gemini.memory import disk, memory, transfer
from tests.harness import slow_updates
from tests.zoo import mlp

modules = [disk, memory, transfer, sys.modules.get("gemini.memory.workers"), threading, queue]
FILES = {module.__file__ for module in modules if module is not None}
FILES |= {str(each) for each in Path(concurrent.futures.__file__).parent.glob("*.py")}
options = {"tensor_placement_policy": sys.argv[1], "deferred_update": sys.argv[2] == "deferred"}
if sys.argv[1] == "disk":
    options["disk_path"] = tempfile.gettempdir()


def build():
    model = gemini.ShardedModel(mlp.build(), **mlp.placed(**options))
    optimizer = gemini.ShardedOptimizer(model, mlp.adam(model.parameters()))
    mlp.train_step(model, optimizer, 0)
    return model, optimizer


class Interrupts:
    def __init__(self, stop=None):
        self.places, self.stop = {}, stop

    def __enter__(self):
        sys.settrace(self.note)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def note(self, frame, event, argument):
        if frame.f_code.co_filename not in FILES or frame.f_code.co_name == "__del__":
            return None
        if event in ("line", "return"):
            place = frame.f_code, event, frame.f_lineno
            self.places[place] = None
            if place == self.stop:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.note


def trains(model, optimizer):
    for step in range(2):
        mlp.train_step(model, optimizer, step)
    gemini.state_hash(model, optimizer)


with slow_updates.installed(0.002):
    pair = build()
    with Interrupts() as first:
        trains(*pair)
    num_interrupted = 0
    for place in first.places:
        try:
            with Interrupts(place):
                trains(*pair)
        except KeyboardInterrupt:
            num_interrupted += 1
        except GeminiError:  # the first use after an interrupt may say so
            pass
        pair[1].zero_grad()
        try:
            trains(*pair)
        except GeminiError as error:
            assert "failed half way" in str(error), error
            pair[0].close()
            pair = build()
assert num_interrupted > 0.7 * len(first.places) > 20, (num_interrupted, len(first.places))
print("goes on")
"""


@pytest.mark.parametrize(("place", "when"), [("cpu", "deferred"), ("disk", "deferred"), ("disk", "at once")])
def test_ctrl_c_anywhere_in_a_wait_for_a_thread_or_the_disk_hangs_nothing(place: str, when: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, place, when]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "goes on\n", done.stderr[-4000:]


# A script whose main thread has come to its end while another one trains, saves and loads.
IN_A_THREAD = """
import sys, tempfile, threading
import gemini
from gemini.checkpoint import file_io
from tests.zoo import mlp

file_io.PIECE_BYTES = 256  # so that threads write and read these small states, as they do large ones
disk = {"disk_path": tempfile.gettempdir()} if sys.argv[1] == "disk" else {}
where = mlp.placed(tensor_placement_policy=sys.argv[1], deferred_update=True, **disk)
model = gemini.ShardedModel(mlp.build(), **where)
optimizer = gemini.ShardedOptimizer(model, mlp.adam(model.parameters()))
plain, its = mlp.plain()
main = threading.current_thread()


def train():
    main.join()
    for step in range(3):
        mlp.train_step(model, optimizer, step)
        mlp.train_step(plain, its, step)
    before = gemini.state_hash(model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        gemini.save_checkpoint(folder, model, optimizer)
        mlp.train_step(model, optimizer, 3)
        gemini.load_checkpoint(folder, model, optimizer)
    assert gemini.state_hash(model, optimizer) == before
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(plain))
    print("trained")


threading.Thread(target=train).start()
"""


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_a_thread_trains_saves_and_loads_after_the_end_of_the_main_thread(place: str) -> None:
    command = [sys.executable, "-c", IN_A_THREAD, place]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
