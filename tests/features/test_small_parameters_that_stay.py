"""Models of many small parameters, whose chunks stay from the root's forward until the step, on several ranks.

All ranks see the same data, so the mean of their gradients is each one's own, to the bit.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import (
    GatheredParameters,
    ShardedModel,
    ShardedOptimizer,
    UnsupportedError,
    safe_get_full_grad,
    safe_set_full_fp32_param,
)
from tests.harness.on_ranks import gathered, on_ranks, on_ranks_with
from tests.small_parameters import CHUNK_NUMEL, LAYERS, WIDTH, Chain, loss_of, raw_grads
from tests.test_resident import chain, per_layer, python_calls, wrapped
from tests.test_resident import loss_of as loss_of_chain
from tests.zoo import mlp


def pairs(stage: int, **arguments: Any) -> list[tuple[Any, Any]]:
    model = ShardedModel(mlp.build(Chain), device="emulated", chunk_size=CHUNK_NUMEL, stage=stage, **arguments)
    plain = mlp.build(Chain)
    return [(model, ShardedOptimizer(model, mlp.adam(model.parameters()))), (plain, mlp.adam(plain.parameters()))]


@pytest.mark.sampled(2)
@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_whatever_comes_between_two_steps_changes_no_bit(rank: int, world_size: int, stage: int) -> None:
    """Everything that may come between two steps, beside one plain process."""
    (model, _optimizer), (plain, _its) = both = pairs(stage)
    manager = model.chunk_manager
    gathers = []
    for step in range(8):
        for each, steps in both:
            sharded = each is model
            module = model.module if sharded else plain
            if step == 2:  # parts that are called by themselves, on weights that the step has changed
                assert torch.equal(module.layers[7](torch.ones(1, WIDTH)), plain.layers[7](torch.ones(1, WIDTH)))
            if step == 3:
                with torch.no_grad():
                    module.layers[3].weight.mul_(0.5)
                with GatheredParameters(module.layers[4].bias, modifier_rank=0) if sharded else nullcontext():
                    with torch.no_grad():
                        module.layers[4].bias.add_(1.0)
            if step in (4, 6):  # frozen for two steps
                module.layers[10].requires_grad_(step == 6)
            for micro_batch in range(1 + step % 2):
                before = manager.communicator.collectives.calls["all_gather"]
                used = slice(step % 3, LAYERS - step)
                unsynced = model.no_sync() if sharded and step == 5 and not micro_batch else nullcontext()
                again = "inside" if step == 6 else ""
                with unsynced:
                    loss_of(each, 10 * step + micro_batch, used=used, again=again).backward()
                if sharded:
                    gathers.append(manager.communicator.collectives.calls["all_gather"] - before)
            if step == 1:  # an evaluation between backward and step
                with torch.no_grad():
                    loss_of(each, step)
            steps.step()
            steps.zero_grad(set_to_none=step != 1)
        if step == 4:
            names = {name: value.clone() for name, value in plain.state_dict().items()}
            mlp.assert_same(dict(model.state_dict().items()), names)
    mlp.assert_same_models(both)
    assert raw_grads(model) == 0
    assert manager.step.payloads.is_resident
    assert [chunk.stays for chunk in manager.chunks] == [stage == 3] * 2
    if stage == 3:
        assert gathers[0] == 2, "both chunks at the root"
        assert gathers[2] == 0, "nothing is gathered again between micro-batches"


@on_ranks(2)
def test_values_that_are_set_right_after_weights_were_read_are_trained_on(rank: int, world_size: int) -> None:
    """As a script does that saves its model, or goes back to a saved one, between two steps."""
    (model, _optimizer), (plain, _its) = both = pairs(3)
    for step in range(3):
        for each, steps in both:
            loss_of(each, step).backward()
            steps.step()
            steps.zero_grad()
            saved = {name: value + 1.0 for name, value in each.state_dict().items()}
            if step:
                each.load_state_dict(saved)
            elif each is model:
                for name, parameter in model.module.named_parameters():
                    safe_set_full_fp32_param(parameter, saved[name])
            else:
                plain.load_state_dict(saved)
        assert torch.equal(model.module(torch.ones(1, WIDTH)), plain(torch.ones(1, WIDTH)))
    mlp.assert_same_models(both)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_an_operator_costs_the_calls_of_plain_pytorch_and_a_gradient_one(
    rank: int, world_size: int, stage: int
) -> None:
    """Python calls that one layer more costs, in the steady state: hardly any."""

    def forward(layers: int) -> int:
        model, optimizer = wrapped(layers, stage=stage)
        _steps(model, optimizer)
        return python_calls(lambda: loss_of_chain(model))

    def backward(layers: int) -> int:
        model, optimizer = wrapped(layers, stage=stage)
        _steps(model, optimizer)
        loss = loss_of_chain(model)
        return python_calls(loss.backward)

    def step(layers: int) -> int:
        model, optimizer = wrapped(layers, stage=stage)
        _steps(model, optimizer)
        loss_of_chain(model).backward()
        return python_calls(optimizer.step)

    plain = chain(20), chain(60)
    by_layers = {20: plain[0], 60: plain[1]}
    wanted = per_layer(lambda layers: python_calls(lambda: loss_of_chain(by_layers[layers])))
    assert per_layer(forward) == pytest.approx(wanted, abs=0.5)
    assert per_layer(backward) <= 2 * 1.5  # a weight and a bias, and what a chunk more costs
    assert per_layer(step) <= 1.0


def _steps(model: nn.Module, optimizer: ShardedOptimizer) -> None:
    for _ in range(3):
        loss_of_chain(model).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_a_view_that_outlives_a_step_shows_new_weights_and_a_graph_is_refused(rank: int, world_size: int) -> None:
    """What a user keeps of weights that an update changes."""
    (model, _optimizer), (plain, _its) = both = pairs(3)
    kept: list[Tensor] = []
    said = []
    for each, steps in both:
        module = model.module if each is model else plain
        graph = loss_of(each, 0)
        kept.append(module.layers[5].weight.data)
        loss_of(each, 1).backward()
        steps.step()
        try:
            graph.backward()
        except RuntimeError as error:
            said.append(str(error))
        steps.zero_grad()
        del graph
    loss_of(model, 2)
    assert torch.equal(*kept)
    (model.module.layers[6].weight.data).add_(1.0)  # through the parameter: an edit like any other
    plain.layers[6].weight.data.add_(1.0)
    for each, steps in both:
        loss_of(each, 3).backward()
        steps.step()
    mlp.assert_same_models(both)
    assert len(said) == 2 and said[0] == said[1]
    assert "modified by an inplace operation" in said[0]


@on_ranks(2)
def test_ranks_that_all_catch_an_error_go_on(rank: int, world_size: int) -> None:
    """Every rank catches an error in the middle of a backward, and one in a forward; training goes on from there."""
    (model, _optimizer), (_plain, _its) = both = pairs(3)
    for _ in range(2):
        for each, steps in both:
            loss_of(each, 0).backward()
            steps.step()
            steps.zero_grad()

    def fail(*_: Any) -> None:
        raise ValueError("stopped")

    for register in ("register_full_backward_hook", "register_forward_hook"):
        handle = getattr(model.module.layers[20], register)(fail)
        try:
            loss_of(model, 1).backward()
            raise AssertionError("nothing failed")
        except ValueError:
            handle.remove()
    try:
        loss_of(model, 1).backward(create_graph=True)
        raise AssertionError("nothing was refused")
    except UnsupportedError:
        pass
    for number in range(2):
        for each, steps in both:
            loss_of(each, 2 + number).backward()
            steps.step()
            steps.zero_grad()
    mlp.assert_same_models(both)


@on_ranks_with("stage", {2: [2, 3], 3: [3]})
def test_a_gradient_is_none_where_no_rank_has_one(rank: int, world_size: int, stage: int) -> None:
    """Those whose `.grad` is None; those that only rank 1 uses have one on every rank."""
    (model, optimizer), _ = pairs(stage)
    for step in range(2):
        loss_of(model, step, used=slice(2, LAYERS if rank == 1 else LAYERS - 3)).backward()
        none = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        whole = safe_get_full_grad(model.module.layers[LAYERS - 1].weight)
        assert whole is not None and whole.abs().sum() > 0
        optimizer.step()
        optimizer.zero_grad()
    assert (
        gathered(none) == [[f"layers.{layer}.{kind}" for layer in (0, 1) for kind in ("weight", "bias")]] * world_size
    )
