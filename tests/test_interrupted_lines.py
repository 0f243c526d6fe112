"""Ctrl-C at each line of our own code that a forward and backward, or a use between steps, run, one after the other.

An exception that a trace function raises leaves the line that it is about to run, as the signal's handler does.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemini import GatheredParameters, GeminiError, ShardedModel, ShardedOptimizer, state_hash
from gemini.memory.memory import EmulatedTier
from gemini.memory.slot import Slot
from gemini.memory.tier import Ledger, MemoryTier
from gemini.runtime.manager import ChunkManager
from tests.zoo import mlp

_ROOT = Path(__file__).parents[1]
_OURS = tuple(str(_ROOT / package) for package in ("gemini", "sharding", "optim"))
_OF_GRADIENTS = ("runtime/grad", "placement/gradient", "runtime/reduce", "runtime/arrivals", "memory/slot")

Line = tuple[str, int]


class Trace:
    """Notes which of our own lines run; raises KeyboardInterrupt before `stop` runs for the first time."""

    def __init__(self, stop: Line | None = None) -> None:
        self.lines: dict[Line, None] = {}  # in order
        self._stop = stop

    def __enter__(self) -> "Trace":
        sys.settrace(self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(None)

    def _note(self, frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            self.lines[line] = None
            if line == self._stop:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._note


@pytest.mark.parametrize("part", [_OF_GRADIENTS, pytest.param(("",), marks=pytest.mark.soak)], ids=["gradients", "all"])
@pytest.mark.parametrize("place", ["smallest", "cuda"])
def test_ctrl_c_before_a_line_changes_no_bit(place: str, part: tuple[str, ...]) -> None:
    model, optimizer = mlp.sharded(place)
    reference, its = mlp.plain()
    mlp.train_step(model, optimizer, 0)
    mlp.train_step(reference, its, 0)
    with Trace() as trace:
        mlp.loss_of(model, 1).backward()
    optimizer.zero_grad()
    lines = [line for line in trace.lines if any(f"gemini/{name}" in line[0] for name in part)]
    num_interrupted = 0
    for number, line in enumerate(lines, 1):
        try:  # a line may not run again, such as those that take memory at the first use
            with Trace(line):
                mlp.loss_of(model, number).backward()
        except KeyboardInterrupt:
            num_interrupted += 1
        torch.set_grad_enabled(True)  # torch may have been leaving one of its own modes
        optimizer.zero_grad()
        losses = [mlp.train_step(*pair, number) for pair in ((model, optimizer), (reference, its))]
        assert torch.equal(*losses), line
        mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))
    assert num_interrupted > max(30, 0.8 * len(lines))


def _gather(model: ShardedModel, _: ShardedOptimizer) -> None:
    with GatheredParameters(model.module.layers[2].weight):
        pass


# Uses of the model and its optimizer that change nothing, after a backward.
_USES: dict[str, Callable[[ShardedModel, ShardedOptimizer], Any]] = {
    "save": lambda model, _: model.state_dict(),
    "norm of the gradients": lambda _, optimizer: optimizer.clip_grad_norm_(1e9),
    "norm of a weight": lambda model, _: model.module.layers[3].weight.norm(),
    "gathered": _gather,
    "rest": lambda model, _: model.chunk_manager.give_room(),
}
_OF_SLOTS = (
    *("runtime/params.py", "runtime/params.py", "runtime/calls.py", "runtime/step.py"),
    *("memory/slot.py", "memory/modes.py"),
)


def _lines_of(function: Callable[..., Any]) -> set[Line]:
    return {(function.__code__.co_filename, line) for *_, line in function.__code__.co_lines() if line is not None}


def _lines(run: Callable[[], Any], part: tuple[str, ...]) -> list[Line]:
    with Trace() as trace:
        run()
    # As a slot gives its memory back, the ledger may be left with its bytes.
    but = set().union(*map(_lines_of, (Slot.close, MemoryTier.free, EmulatedTier.free, Ledger.count_freed)))
    found = [line for line in trace.lines if any(f"gemini/{name}" in line[0] for name in part) and line not in but]
    assert len(found) > 10
    return found


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # inside `Slot.__del__`
@pytest.mark.parametrize("part", [_OF_SLOTS, pytest.param(("",), marks=pytest.mark.soak)], ids=["slots", "all"])
@pytest.mark.parametrize("use", _USES)
def test_ctrl_c_before_a_line_between_steps_holds_no_slot_and_changes_no_bit(use: str, part: tuple[str, ...]) -> None:
    """Of two slots: a model that loses one for each line is soon refused a forward."""
    model, optimizer = mlp.sharded()
    reference, its = mlp.plain()
    mlp.train_step(model, optimizer, 0)
    mlp.train_step(reference, its, 0)
    mlp.loss_of(model, 1).backward()
    for number, line in enumerate(_lines(lambda: _USES[use](model, optimizer), part), 1):
        optimizer.zero_grad()
        mlp.loss_of(model, number).backward()
        try:
            with Trace(line):
                _USES[use](model, optimizer)
        except KeyboardInterrupt:
            mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))  # also while the traceback is alive
        assert torch.is_grad_enabled(), line
        optimizer.zero_grad()
        losses = [mlp.train_step(*pair, number) for pair in ((model, optimizer), (reference, its))]
        assert torch.equal(*losses), line
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))


@pytest.mark.parametrize(
    ("place", "every"),
    [
        ("smallest", 29),
        ("cuda", 7),
        *(pytest.param(place, 1, marks=pytest.mark.soak) for place in ("smallest", "cuda")),
    ],
)
def test_after_ctrl_c_in_a_step_the_weights_are_from_before_or_behind_it_or_the_model_says_that_it_is_torn(
    place: str, every: int
) -> None:
    """A step leaves None for gradients, so a loop that goes on calls `zero_grad` nowhere but behind an interrupt."""

    def trained() -> tuple[tuple[ShardedModel, ShardedOptimizer], tuple[nn.Module, torch.optim.Optimizer]]:
        pairs = mlp.sharded(place), mlp.plain()
        for pair in pairs:
            mlp.train_step(*pair, 0)
        return pairs

    (model, optimizer), (reference, its) = trained()
    mlp.loss_of(model, 1).backward()
    lines = _lines(optimizer.step, ("",))[::every]
    mlp.train_step(reference, its, 1)
    ends = {"before": 0, "behind": 0, "torn": 0}
    for number, line in enumerate(lines, 2):
        mlp.loss_of(model, number).backward()
        with suppress(KeyboardInterrupt), Trace(line):
            optimizer.step()
        torch.set_grad_enabled(True)  # torch may have been leaving one of its own modes
        try:
            weights = mlp.weights_of(model)
        except GeminiError as error:
            if "failed half way" not in str(error):
                raise
            with pytest.raises(GeminiError, match="failed half way"):
                model(mlp.inputs(1))
            model.close()
            ends["torn"] += 1
            (model, optimizer), (reference, its) = trained()
            continue
        before = mlp.weights_of(reference)
        is_before = all(torch.equal(weights[name], before[name]) for name in before)
        ends["before" if is_before else "behind"] += 1
        if is_before:
            optimizer.zero_grad()
        else:
            mlp.train_step(reference, its, number)
        mlp.assert_same(weights, mlp.weights_of(reference))
        losses = [mlp.train_step(*pair, number) for pair in ((model, optimizer), (reference, its))]
        assert torch.equal(*losses), line
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))
    assert all(ends.values()), ends


@pytest.mark.filterwarnings("ignore:discarding gradients ended with an exception")
@pytest.mark.parametrize("place", ["smallest", "cuda"])
def test_after_ctrl_c_in_zero_grad_all_gradients_are_left_or_none(place: str) -> None:
    model, optimizer = mlp.sharded(place)
    reference, its = mlp.plain()
    mlp.train_step(model, optimizer, 0)
    mlp.train_step(reference, its, 0)
    mlp.loss_of(model, 1).backward()
    for number, line in enumerate(_lines(optimizer.zero_grad, ("runtime/grad",)), 1):
        mlp.loss_of(model, number).backward()
        with suppress(KeyboardInterrupt), Trace(line):
            optimizer.zero_grad()
        left = [parameter.grad is not None for parameter in model.parameters()]
        assert any(left) == all(left), line
        if any(left):
            mlp.loss_of(reference, number).backward()
        for pair in ((model, optimizer), (reference, its)):
            mlp.train_step(*pair, number)
        mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))


def test_ctrl_c_between_a_move_of_states_and_their_plan_is_said_at_every_use() -> None:
    model, optimizer = mlp.sharded()
    mlp.train_step(model, optimizer, 0)
    _, first, *_ = sorted(_lines_of(ChunkManager.adopt))  # behind that of `def`
    with pytest.raises(KeyboardInterrupt), Trace(first):
        model.change_budgets(model_data_memory="1MB")
    for use in (model.state_dict, optimizer.step, lambda: model(mlp.inputs(1))):
        with pytest.raises(GeminiError, match="failed half way"):
            use()
    model.close()


_OF_AVERAGES = ("optimizer/step",)


@pytest.mark.parametrize("part", [_OF_AVERAGES, pytest.param(("",), marks=pytest.mark.soak)], ids=["some", "all"])
def test_ctrl_c_in_a_look_at_the_averages_leaves_the_weights_or_a_model_that_says_so(part: tuple[str, ...]) -> None:
    def made() -> tuple[ShardedModel, ShardedOptimizer]:
        model = mlp.wrap("cpu")
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()), ema=0.5)
        for step in range(2):
            mlp.train_step(model, optimizer, step)
        return model, optimizer

    def look(optimizer: ShardedOptimizer) -> None:
        assert optimizer.ema is not None
        with optimizer.ema.weights():
            pass

    model, optimizer = made()
    wanted, num_torn, num_kept = state_hash(model, optimizer), 0, 0
    with Trace() as trace:
        look(optimizer)
    for line in [line for line in trace.lines if any(f"gemini/{name}" in line[0] for name in part)]:
        with suppress(KeyboardInterrupt), Trace(line):
            look(optimizer)
        try:
            found = state_hash(model, optimizer)
        except GeminiError as error:
            found = str(error)
            model.close()
            model, optimizer = made()
        assert found == wanted or "failed half way" in found, line
        num_torn += found != wanted
        num_kept += found == wanted
    assert num_kept > 5
    assert num_torn or part == _OF_AVERAGES
    model.close()
