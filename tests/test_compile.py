"""`torch.compile` of modules inside a `ShardedModel`, of all of it, before and after it is wrapped."""

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from gemini import (
    BudgetError,
    GeminiError,
    ReleasedParameterError,
    ShardedModel,
    ShardedOptimizer,
    register_external_parameter,
)
from tests.compiled import BLOCKS, BY_BLOCKS, WAYS, WHOLE, Block, Counting, Net, compile_blocks
from tests.zoo.mlp import CHUNK_NUMEL, WIDTH, adam, assert_same, build, inputs, loss_of, smallest_budget, train_step
from tests.zoo.mlp import weights_of as weights

STEPS = 3
Step = Callable[[nn.Module, Any, int], Tensor]


@pytest.fixture(autouse=True)
def forgotten_graphs() -> Iterator[None]:
    """No test finds graphs of another one, and none meets the limit on recompilations."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def wrapped(module: nn.Module, budget: int | None = None) -> ShardedModel:
    return ShardedModel(module, device="emulated", chunk_size=CHUNK_NUMEL, model_data_memory=budget)


def least(make: Callable[[], nn.Module]) -> int:
    """The smallest budget of what `make` builds."""
    return smallest_budget(make, chunk_size=CHUNK_NUMEL)


def trained(model: Any, step: Step = train_step) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and weights of a few steps."""
    parameters = adam(model.parameters())
    is_sharded = any(isinstance(each, ShardedModel) for each in (model, getattr(model, "_orig_mod", None)))
    optimizer = ShardedOptimizer(model, parameters) if is_sharded else parameters
    return [step(model, optimizer, number) for number in range(STEPS)], weights(model)


def assert_equal(got: tuple[list[Tensor], dict[str, Tensor]], wanted: tuple[list[Tensor], dict[str, Tensor]]) -> None:
    assert all(map(torch.equal, got[0], wanted[0]))
    assert_same(got[1], wanted[1])


def compare(make: Callable[[], nn.Module], step: Step = train_step) -> ShardedModel:
    """What `make` compiles trains at its smallest budget as it does in plain PyTorch."""
    wanted = trained(make(), step)
    torch._dynamo.reset()
    model = wrapped(make(), least(make))
    assert_equal(trained(model, step), wanted)
    return model


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model_trains_like_the_compiled_plain_module_and_is_compiled_once(way: str, when: str) -> None:
    plain_backend, backend = Counting(), Counting()
    wanted = trained(WAYS[way](build(Net), backend=plain_backend, fullgraph=True))
    torch._dynamo.reset()
    budget = least(lambda: WAYS[way](build(Net)))
    counts = []

    def step(model: nn.Module, optimizer: Any, number: int) -> Tensor:
        loss = train_step(model, optimizer, number)
        counts.append(backend.num_graphs)
        return loss

    if when == "before":
        model: Any = wrapped(WAYS[way](build(Net), backend=backend, fullgraph=True), budget)
        got = trained(model, step)
    else:
        model = wrapped(build(Net), budget)
        got = trained(WAYS[way](model, backend=backend, fullgraph=True), step)
    assert_equal(got, wanted)
    assert counts == [plain_backend.num_graphs] * STEPS
    assert len(model.operators) == (1 if way in WHOLE else 1 + BLOCKS)
    assert model.observer.counts["evict"] > STEPS or way in WHOLE


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_backends_that_trace_backward_too_get_the_same_bits(backend: str) -> None:
    model = compare(lambda: compile_blocks(build(Net), backend=backend))
    assert model.observer.counts["evict"] > STEPS


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("place", ["resident", "smallest"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", WAYS)
def test_all_ways_placements_and_backends(way: str, when: str, place: str, backend: str) -> None:
    wanted = trained(WAYS[way](build(Net), backend=backend))
    torch._dynamo.reset()
    budget = None if place == "resident" else least(lambda: WAYS[way](build(Net)))
    if when == "before":
        got = trained(wrapped(WAYS[way](build(Net), backend=backend), budget))
    else:
        got = trained(WAYS[way](wrapped(build(Net), budget), backend=backend))
    assert_equal(got, wanted)


# -- refusals


def test_a_model_compiled_whole_is_refused_under_a_budget_that_cannot_hold_it() -> None:
    budget = least(lambda: build(Net))
    with pytest.raises(BudgetError, match=r"The model is compiled, .*: compile smaller modules inside it"):
        wrapped(WHOLE["whole"](build(Net)), budget)


@pytest.mark.parametrize("way", WHOLE)
def test_compiling_what_cannot_be_held_changes_nothing(way: str) -> None:
    wanted = trained(build(Net))
    model = wrapped(build(Net), least(lambda: build(Net)))
    compiled = WHOLE[way](model, backend="eager")
    with pytest.raises(BudgetError, match=r"The model is compiled, .*: compile smaller modules inside it"):
        compiled(inputs(0))
    if way == "whole in place":
        model.module._compiled_call_impl = None
    assert_equal(trained(model), wanted)


class Borrower(nn.Module):
    """A compiled function uses another module's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.project = torch.compile(nn.functional.linear, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        weight: Any = self.layers[0].weight
        projected: Tensor = self.project(x, weight)
        return projected


def test_a_compiled_function_that_borrows_a_parameter_is_refused_unless_it_is_registered() -> None:
    def registered() -> nn.Module:
        model = build(Borrower)
        register_external_parameter(model, model.layers[0].weight)
        return model  # type: ignore[no-any-return]

    budget = least(lambda: build(Borrower))
    refusal = r"a compiled function uses parameter 'layers\.0\.weight'.*: compile the module"
    with pytest.raises(ReleasedParameterError, match="^" + refusal):
        wrapped(build(Borrower), budget)(inputs(0))
    compare(registered)


def test_modules_are_compiled_between_steps() -> None:
    model = wrapped(build(Net), least(lambda: compile_blocks(build(Net))))
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    loss_of(model).backward()
    compile_blocks(model, backend="eager")
    with pytest.raises(GeminiError, match=r"compiled: h\.0, .* between the micro-batches of a step"):
        model(inputs(1))
    optimizer.step()
    optimizer.zero_grad()
    train_step(model, optimizer, 1)


# -- beside other things


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
