"""What cannot be compiled inside a `ShardedModel`, or not now, or not on one rank alone, is refused by name."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import (
    BudgetError,
    DivergenceError,
    GeminiError,
    ReleasedParameterError,
    RemoteRankError,
    ShardedModel,
    ShardedOptimizer,
    register_external_parameter,
)
from tests.harness.ranks import RankPool
from tests.zoo.compiled import WHOLE, Net, assert_equal, compare, compile_blocks, least, trained, wrapped
from tests.zoo.mlp import CHUNK_NUMEL, WIDTH, adam, build, inputs, loss_of, train_step

pytestmark = pytest.mark.usefixtures("forgotten_graphs")


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


def _compile_others(rank: int, world_size: int, alone: bool) -> str:
    """What a rank is told if other ranks compile other blocks of the wrapped model, or alone: only rank 0 one."""
    model: Any = ShardedModel(build(Net), device="emulated", chunk_size=CHUNK_NUMEL)
    if rank == 0 or not alone:
        model.h[rank].compile(backend="eager")
    try:
        model(inputs(rank))
    except (DivergenceError, RemoteRankError) as error:
        return str(error)
    return ""


def test_ranks_that_compile_other_modules_are_told(ranks: RankPool) -> None:
    for said in ranks(2).run(_compile_others, False):
        assert "compiled: h.0" in said, said
        assert "compiled: h.1" in said, said


@pytest.mark.soak
def test_a_rank_that_compiles_alone_is_told_to_all(ranks: RankPool) -> None:
    for said in ranks(2).run(_compile_others, True, fresh=True, forked=True):
        assert "ranks took different ways" in said.result, said
