"""Compiled modules beside checkpointing, autocast, failures, and calls of the same modules as they are."""

import gc
import sys
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from gemini import ShardedModel, ShardedOptimizer
from tests.zoo.compiled import (
    BLOCKS,
    BY_BLOCKS,
    WHOLE,
    Block,
    Counting,
    Net,
    assert_equal,
    compare,
    compile_blocks,
    least,
    trained,
    wrapped,
)
from tests.zoo.mlp import CHUNK_NUMEL, WIDTH, adam, build, inputs, loss_of, train_step

pytestmark = pytest.mark.usefixtures("forgotten_graphs")


class Both(nn.Module):
    """One block is called as it is, and compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.other = Block(), nn.Linear(WIDTH, WIDTH)
        self.fast = torch.compile(self.block, backend="eager", fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.other(self.fast(self.other(self.block(x))))
        return result


def test_a_block_may_be_called_both_compiled_and_as_it_is() -> None:
    compare(lambda: build(Both))


def test_modules_may_be_compiled_again_and_not_any_more() -> None:
    wanted = trained(build(Net))

    def step(model: Any, optimizer: Any, number: int) -> Tensor:
        for block in model.h:
            if number == 1:
                block._compiled_call_impl = None
            else:
                block.compile(backend="eager")
        loss = train_step(model, optimizer, number)
        assert sum(operator.is_compiled for operator in model.operators) == (0 if number == 1 else BLOCKS)
        return loss

    assert_equal(trained(wrapped(build(Net), least(lambda: compile_blocks(build(Net)))), step), wanted)


class Grows(nn.Module):
    """It calls whatever comes into a list that is empty at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.late = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))), nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        for each in self.late:
            x = each(x)
        return x


def test_a_compiled_module_may_come_late_into_an_empty_list() -> None:
    compiled: dict[nn.Module, nn.Module] = {}

    def step(model: Any, optimizer: Any, number: int) -> Tensor:
        if number == 0:
            compiled[model] = torch.compile(model.layers[0], backend="eager", fullgraph=True)  # type: ignore[assignment]
        if number == 1:
            model.late.append(compiled[model])
        return train_step(model, optimizer, number)

    compare(lambda: build(Grows), step)


def test_a_compiled_function_may_call_the_model() -> None:
    wanted = trained(build(Net))
    backend = Counting()

    def step(model: nn.Module, optimizer: Any, number: int) -> Tensor:
        loss: Tensor = torch.compile(loss_of, backend=backend)(model, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    model = wrapped(build(Net))
    assert_equal(trained(model, step), wanted)
    assert model.operators[0].is_compiled
    assert backend.num_graphs > 0


class Failing(Block):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("this block fails")
        return super().forward(x)


@pytest.mark.parametrize("way", BY_BLOCKS)
def test_training_goes_on_after_a_compiled_block_failed(way: str) -> None:
    def make() -> nn.Module:
        model = build(Net)
        model.h = nn.ModuleList(build(Failing) for _ in range(BLOCKS))
        return BY_BLOCKS[way](model, backend="eager")

    def step(model: nn.Module, optimizer: Any, number: int) -> Tensor:
        failing = [module for module in model.modules() if isinstance(module, Failing)]
        if number == 1:
            for module in failing:
                module.fails = True
            with pytest.raises(ValueError, match="this block fails"):
                model(inputs(number))
            for module in failing:
                module.fails = False
        return train_step(model, optimizer, number)

    compare(make, step)


class InParts(nn.Module):
    """Its operators run in a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x)) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def test_a_block_that_the_compiler_gave_up_trains_under_autocast() -> None:
    """Its operations run one by one then, and the compiler looks at what they call: also at hooks of autograd."""

    def stop(module: nn.Module, args: Any, output: Any) -> None:
        raise ValueError("this hook fails")

    found = []
    for wraps in (True, False):
        torch._dynamo.reset()
        blocks = nn.Sequential(build(InParts), build(InParts))
        model: nn.Module = wrapped(blocks) if wraps else blocks
        for block in blocks:
            block.compile(backend="eager")
        handle = blocks[0].up.register_forward_hook(stop)  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="this hook fails"):
            model(inputs(0))
        handle.remove()
        for number in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number == 1):
                model(inputs(number)).square().mean().backward()
        found.append([each.grad.clone() for each in blocks.parameters() if each.grad is not None])
    assert all(map(torch.equal, *found)) and len(found[0]) == 6


def test_a_whole_training_step_may_be_compiled() -> None:
    """The compiler compiles the model in it, and leaves backward's hooks and the optimizer as they are."""
    found = []
    for wraps in (True, False):
        torch._dynamo.reset()
        blocks = build(Net)
        options: Any = {"device": "emulated", "chunk_size": CHUNK_NUMEL, "tensor_placement_policy": "cpu"}
        model: nn.Module = ShardedModel(blocks, **options) if wraps else blocks
        plain = adam(model.parameters())
        optimizer: Any = ShardedOptimizer(model, plain) if isinstance(model, ShardedModel) else plain

        @torch.compile(backend="eager")
        def step(number: int, model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            loss = loss_of(model, number)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        found.append([step(number) for number in range(3)])
    assert all(map(torch.equal, *found))


class Refusing(Block):
    """Computes, and fails then."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        raise ValueError("this block refuses")


class Catching(Net):
    """Goes on in the same forward without the blocks that fail."""

    def __init__(self) -> None:
        super().__init__()
        self.refusing = nn.ModuleList(Refusing() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block, refusing in zip(self.h, self.refusing, strict=True):
            with suppress(ValueError):
                x = refusing(x)
            x = block(x)
        return x


def test_a_forward_that_catches_what_compiled_blocks_raise_needs_no_more_room() -> None:
    def make() -> nn.Module:
        model = build(Catching)
        for block in (*model.h, *model.refusing):
            block.compile(backend="eager")
        return model  # type: ignore[no-any-return]

    compare(make)


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False)  # type: ignore[assignment]
        return x


def test_compiled_blocks_are_recomputed() -> None:
    compare(lambda: BY_BLOCKS["in place"](build(Checkpointed), backend="aot_eager"))


def test_compiled_blocks_evaluate_and_run_under_autocast() -> None:
    def step(model: nn.Module, optimizer: Any, number: int) -> Tensor:
        with torch.no_grad():
            before = model(inputs(number)).sum()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack([before, loss.detach()])

    compare(lambda: compile_blocks(build(Net), backend="aot_eager"), step)


def test_a_compiled_model_is_not_taken_for_its_wrapper() -> None:
    model = wrapped(WHOLE["whole"](build(Net), backend="eager"))
    assert not hasattr(model, "_orig_mod")
    losses, _ = trained(torch.compile(model, backend="eager"))
    assert all(map(torch.equal, losses, trained(build(Net))[0]))


def test_a_model_may_be_collected_while_another_one_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    model: Any = wrapped(build(Net), least(lambda: build(Net)))
    model(inputs(0))
    del model
    with FakeTensorMode():
        gc.collect()
    assert not failed


def test_a_closed_model_leaves_the_modules_own_compiled_call() -> None:
    module = BY_BLOCKS["in place"](build(Net), backend="eager")
    blocks: Any = module.h
    before = [block._compiled_call_impl for block in blocks]
    model = wrapped(module)
    assert all(block._compiled_call_impl is not call for block, call in zip(blocks, before, strict=True))
    model.close()
    assert all(block._compiled_call_impl is call for block, call in zip(blocks, before, strict=True))
