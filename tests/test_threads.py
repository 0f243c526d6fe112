"""Threads that share a model: one at a time is in a forward or backward, and one that ended leaves nothing stuck."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import GeminiError, ShardedModel
from tests.test_interrupts import BY, CALLS, PLACES
from tests.zoo import mlp

ROOT = Path(__file__).parents[1]


class Meeting(nn.Module):
    """Layer 3 waits in its forward until it is told to go on."""

    def __init__(self, model: ShardedModel) -> None:
        super().__init__()
        self.inside, self.go_on = threading.Event(), threading.Event()
        model.module.layers[3].register_forward_pre_hook(self.wait)
        self.thread = 0

    def wait(self, *_: Any) -> None:
        if threading.get_ident() == self.thread:
            self.inside.set()
            assert self.go_on.wait(20)


def in_thread(what: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(what())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


@PLACES
@BY
def test_a_second_thread_in_a_forward_is_refused_and_the_first_goes_on(called: str, place: str) -> None:
    model, optimizer = mlp.sharded(place)
    reference, its = mlp.plain()
    meeting = Meeting(model)

    def first() -> Tensor:
        meeting.thread = threading.get_ident()
        return mlp.train_step(model, optimizer, 0)

    thread, losses = in_thread(first)
    assert meeting.inside.wait(20)
    with pytest.raises(GeminiError, match="another thread is inside a forward of this model"):
        CALLS[called](model)(mlp.inputs(1))
    if place == "cuda":  # everything is resident: a part of the model needs nothing of it
        assert torch.equal(model.module.layers[0](mlp.inputs(1)), reference.layers[0](mlp.inputs(1)))
    else:
        with pytest.raises(GeminiError, match="another thread is inside a forward of this model"):
            model.module.layers[0](mlp.inputs(1))
    with pytest.raises(GeminiError, match="inside a forward"):
        model.state_dict()
    meeting.go_on.set()
    thread.join(20)
    meeting.thread = 0
    assert torch.equal(losses[0], mlp.train_step(reference, its, 0))
    for step in (1, 2):
        assert torch.equal(mlp.train_step(model, optimizer, step), mlp.train_step(reference, its, step))
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))


def test_a_forward_while_another_thread_is_in_a_backward_is_refused() -> None:
    model, optimizer = mlp.sharded()
    reference, its = mlp.plain()
    inside, go_on = threading.Event(), threading.Event()

    def backward() -> None:
        loss = mlp.loss_of(model, 0)
        layers = model.module.layers
        layers[3].weight.register_hook(lambda grad: (inside.set(), go_on.wait(20), grad)[2])
        loss.backward()

    thread, results = in_thread(backward)
    assert inside.wait(20), results
    with pytest.raises(GeminiError, match="another thread is inside a backward of this model"):
        model(mlp.inputs(1))
    with pytest.raises(GeminiError, match="inside a forward or backward"):
        optimizer.step()
    go_on.set()
    thread.join(20)
    optimizer.step()
    mlp.train_step(reference, its, 0)
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))


@BY
def test_a_thread_that_was_ended_in_a_forward_leaves_the_model_to_others(called: str) -> None:
    model, optimizer = mlp.sharded()
    reference, its = mlp.plain()
    model.module.layers[3].forward = lambda x: (_ for _ in ()).throw(SystemExit)  # torch runs no hook after it
    thread, _ = in_thread(lambda: CALLS[called](model)(mlp.inputs(1)))
    thread.join(20)
    del model.module.layers[3].forward
    for step in range(2):
        assert torch.equal(mlp.train_step(model, optimizer, step), mlp.train_step(reference, its, step))
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))


@BY
def test_the_users_hooks_stay_when_a_call_of_another_thread_is_over(called: str) -> None:
    model, _ = mlp.sharded()
    model.module.layers[3].forward = lambda x: (_ for _ in ()).throw(SystemExit)
    thread, _ = in_thread(lambda: CALLS[called](model)(mlp.inputs(1)))
    thread.join(20)
    del model.module.layers[3].forward
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda it: it):
        loss = mlp.loss_of(model, 0)
    assert packed
    loss.backward()


# In a process of its own: the first models of a process register something with torch that it takes once.
FIRST_MODELS = """
import threading
import gemini
from tests.zoo import mlp

modules, together, trained = [mlp.build() for _ in range(3)], threading.Barrier(3), []


def train(module):
    together.wait()
    model = gemini.ShardedModel(module, **mlp.placed(tensor_placement_policy="cpu"))
    optimizer = gemini.ShardedOptimizer(model, mlp.adam(model.parameters()))
    mlp.train_step(model, optimizer)
    trained.append(gemini.state_hash(model, optimizer))


threads = [threading.Thread(target=train, args=(module,)) for module in modules]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(trained), len(set(trained)))
"""


def test_the_first_models_of_a_process_are_wrapped_in_several_threads_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_MODELS], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "3 1\n"), done.stderr[-4000:]
