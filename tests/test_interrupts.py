"""A forward or backward that Ctrl-C ended is over: it leaves nothing stuck or wrong. For threads: test_threads.py.

Signals are real ones: SIGINT, sent to this process, raises KeyboardInterrupt wherever Python happens to be.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gemini import ShardedModel
from tests.zoo import mlp

PLACES = pytest.mark.parametrize("place", ["smallest", "cuda"])
CALLS: dict[str, Callable[[ShardedModel], Callable[..., Any]]] = {
    "the model": lambda model: model,
    "its module": lambda model: model.module,
}
BY = pytest.mark.parametrize("called", CALLS)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # a signal is handled between two bytecodes
        pass


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        interrupt()
        return grad


def interrupted(model: ShardedModel, where: str, run: Callable[[], Any]) -> None:
    """`run`, in which layer 3 is interrupted: in its forward, a hook before or after it, or on its way back."""
    layer = model.module.layers[3]
    if where == "forward":
        layer.forward = lambda x: (interrupt(), nn.Linear.forward(layer, x))[1]
    handle = {
        "hook before": lambda: layer.register_forward_pre_hook(interrupt),
        "hook after": lambda: layer.register_forward_hook(interrupt),
        "backward": lambda: layer.register_forward_hook(lambda module, args, output: InBackward.apply(output)),
        "gradient hook": lambda: layer.register_full_backward_hook(interrupt),
        "hook of the model": lambda: model.module.register_forward_hook(interrupt),
    }.get(where, lambda: None)()
    with pytest.raises(KeyboardInterrupt):
        run()
    if where == "forward":
        del layer.forward
    if handle is not None:
        handle.remove()


FORWARD = ["forward", "hook before", "hook after", "hook of the model"]
BACKWARD = ["backward", "gradient hook"]


def loss(call: Callable[..., Any], step: int) -> Tensor:
    return mlp.loss_of(call, step)  # type: ignore[arg-type]


@PLACES
@BY
@pytest.mark.parametrize("where", FORWARD)
def test_after_ctrl_c_in_a_forward_what_was_trained_can_be_saved_and_trained_on(
    where: str, called: str, place: str
) -> None:
    model, optimizer = mlp.sharded(place)
    reference, its = mlp.plain()
    mlp.train_step(model, optimizer, 0)
    mlp.train_step(reference, its, 0)
    loss(CALLS[called](model), 1).backward()  # a micro-batch that is over keeps its gradient
    loss(reference, 1).backward()
    for _ in range(2):
        interrupted(model, where, lambda: CALLS[called](model)(mlp.inputs(2)))
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))
    assert set(optimizer.state_dict()["state"]) == set(its.state_dict()["state"])
    optimizer.step()
    its.step()
    its.zero_grad()
    interrupted(model, where, lambda: CALLS[called](model)(mlp.inputs(2)))
    for step in (3, 4):
        assert torch.equal(mlp.train_step(model, optimizer, step), mlp.train_step(reference, its, step))
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))


@PLACES
@pytest.mark.parametrize("where", BACKWARD)
@pytest.mark.parametrize("then", ["step", "save", "forward", "read a weight"])
def test_after_ctrl_c_in_a_backward_its_gradients_are_dropped_and_the_user_is_told(
    where: str, place: str, then: str
) -> None:
    model, optimizer = mlp.sharded(place)
    reference, its = mlp.plain()
    mlp.train_step(model, optimizer, 0)
    mlp.train_step(reference, its, 0)
    interrupted(model, where, lambda: mlp.loss_of(model, 1).backward())
    what: dict[str, Callable[[], Any]] = {
        "step": optimizer.step,  # without a gradient it changes nothing
        "save": lambda: mlp.weights_of(model),
        "forward": lambda: model(mlp.inputs(1)),
        "read a weight": lambda: model.module.layers[5].weight.norm(),
    }
    with pytest.warns(UserWarning, match="gradients since the last step are incomplete and were dropped") as told:
        what[then]()
    assert told[0].filename in (__file__, mlp.__file__), "where the script uses the model"
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))
    for step in (1, 2):
        assert torch.equal(mlp.train_step(model, optimizer, step), mlp.train_step(reference, its, step))


@BY
def test_after_ctrl_c_torchs_own_settings_are_the_users_again(called: str) -> None:
    model, _ = mlp.sharded()
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        interrupted(model, "forward", lambda: CALLS[called](model)(mlp.inputs(0)))
    model.state_dict()
    assert torch.is_autocast_cache_enabled()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    packed.clear()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        (torch.ones(3, requires_grad=True).exp() * 2).sum().backward()
    assert packed == [3]


@PLACES
def test_a_model_that_catches_ctrl_c_in_a_layer_itself_goes_on(place: str) -> None:
    model, optimizer = mlp.sharded(place)
    reference, its = mlp.plain()
    catches = model.module.layers[2]
    forward = type(reference).forward

    def patient(x: Tensor) -> Tensor:
        catches.forward = interrupt
        with pytest.raises(KeyboardInterrupt):
            catches(x)
        del catches.forward
        return forward(model.module, x)

    for step in range(3):
        model.module.forward = patient
        got = mlp.train_step(model, optimizer, step)
        del model.module.forward
        assert torch.equal(got, mlp.train_step(reference, its, step))
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))


class Interrupter:
    """Sends SIGINT at random moments while `armed`; at other times it is not raised."""

    def __init__(self) -> None:
        self.armed = self.ends = False
        signal.signal(signal.SIGINT, self._handle)
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> "Interrupter":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.armed, self.ends = False, True
        self._thread.join()

    def _handle(self, *_: Any) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def _send(self) -> None:
        generator = random.Random(0)
        while not self.ends:
            time.sleep(generator.uniform(1e-3, 12e-3))
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("times", [25, pytest.param(2000, marks=pytest.mark.soak)])
@PLACES
def test_ctrl_c_at_any_moment_of_forward_and_backward_changes_no_bit(place: str, times: int) -> None:
    model, optimizer = mlp.sharded(place)
    reference, its = mlp.plain()
    num_interrupted = step = 0
    with Interrupter() as interrupter:
        while num_interrupted < times or step < 5:
            call = CALLS[list(CALLS)[num_interrupted % 2]](model)
            torch.set_grad_enabled(True)  # an interrupt may come as torch leaves one of its own modes, in any loop
            was_interrupted = False
            try:
                interrupter.armed = True
                loss(call, step).backward()
                interrupter.armed = False
            except KeyboardInterrupt:
                num_interrupted += 1
                if call is model:
                    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))
                was_interrupted = True
            if was_interrupted:
                mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))
                optimizer.zero_grad()
                continue
            optimizer.step()
            loss(reference, step).backward()
            its.step()
            its.zero_grad()
            step += 1
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))
