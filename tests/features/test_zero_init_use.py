"""What users do with a model that they build in a `ZeroInitContext`, before it is wrapped."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from gemini import (
    GatheredParameters,
    GeminiError,
    ReleasedParameterError,
    ShardedModel,
    ShardedOptimizer,
    UnsupportedError,
    ZeroInitContext,
)
from optim import HybridAdam
from tests.harness.on_ranks import on_ranks
from tests.zoo import building
from tests.zoo.building import assert_same_state


def test_gathered_parameters_work_inside_and_undo_what_no_rank_answers_for() -> None:
    with ZeroInitContext():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        with GatheredParameters(model, modifier_rank=0):
            nn.init.ones_(model[0].weight)
        before = model[1].weight.clone()
        with pytest.raises(UnsupportedError, match=r"Linear 1\.weight"), GatheredParameters(model[1].weight):
            nn.init.ones_(model[1].weight)
    state = ShardedModel(model).state_dict()
    assert torch.equal(state["0.weight"], torch.ones(3, 3))
    assert torch.equal(state["1.weight"], before)


@pytest.mark.parametrize("inside", [True, False])
def test_embeddings_are_resized_and_modules_are_cast_before_wrapping(inside: bool) -> None:
    torch.manual_seed(5)
    plain = building.gpt2()
    torch.manual_seed(6)
    plain.resize_token_embeddings(101)
    plain.transformer.h[0].half()
    torch.manual_seed(5)
    with ZeroInitContext() as context:
        model = building.gpt2()
        if inside:
            _resize_and_cast(model)
    if not inside:
        _resize_and_cast(model)
    assert context._store is not None
    assert model.to("cpu").transformer.wte.weight.shape == (101, 32)
    assert_same_state(model, plain)
    assert_same_state(ShardedModel(model), plain)


def _resize_and_cast(model: Any) -> None:
    torch.manual_seed(6)
    model.resize_token_embeddings(101)
    model.transformer.h[0].half()


@pytest.mark.parametrize("inside", [True, False])
def test_adapters_join_a_model_that_is_built(inside: bool) -> None:
    import peft

    def adapted(module: nn.Module) -> nn.Module:
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
        return peft.get_peft_model(module, config)

    torch.manual_seed(5)
    plain = adapted(building.gpt2())
    torch.manual_seed(5)
    with ZeroInitContext():
        module = building.gpt2()
        if inside:
            module = adapted(module)
    if not inside:
        module = adapted(module)
    model = ShardedModel(module)
    assert_same_state(model, plain)
    optimizer = ShardedOptimizer(model, HybridAdam([p for p in model.parameters() if p.requires_grad], lr=0.01))
    tokens = torch.arange(20).view(2, 10)
    losses = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_state_dicts_load_inside() -> None:
    torch.manual_seed(1)
    plain = building.EditedByParent()
    with ZeroInitContext():
        model = building.EditedByParent()
        model.load_state_dict(plain.state_dict())
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})
    model.load_state_dict({key: value.clone() for key, value in plain.state_dict().items()})  # and after it
    assert_same_state(ShardedModel(model), plain)


@pytest.mark.parametrize("way", ["as built", "unfrozen", "copied", "gathered", "inside"])
def test_gradients_before_wrapping_are_an_error(way: str) -> None:
    with ZeroInitContext():
        model = nn.Linear(3, 3).requires_grad_(way != "unfrozen")
        nn.Linear(3, 3)  # it comes after the operator, which is on shards by now
        if way == "inside":
            refused(model)
    if way == "copied":
        model = copy.deepcopy(model)
    with GatheredParameters(model, enabled=way == "gathered"):
        refused(model.requires_grad_())
    sharded = ShardedModel(model)
    sharded(torch.ones(1, 3)).sum().backward()
    gradient: Any = model.bias.grad
    assert torch.equal(gradient.clone(), torch.ones(3))


def refused(model: nn.Module) -> None:
    loss = model(torch.ones(1, 3)).sum()
    with pytest.raises(GeminiError, match="wrap the model in ShardedModel"):
        loss.backward()


def test_gradients_that_pass_through_unwrapped_weights_are_an_error_too() -> None:
    with ZeroInitContext():
        model = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4)).requires_grad_(False)
    x = torch.randn(2, 4, requires_grad=True)
    loss = model(x).square().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x)


def test_what_was_detached_before_wrapping_reads_the_wrapped_weights() -> None:
    with ZeroInitContext() as context:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    detached, state = model[0].weight.detach(), model.state_dict()
    sharded = ShardedModel(model, tensor_placement_policy="cpu")
    assert context._store is not None and context._store.is_closed
    optimizer = ShardedOptimizer(sharded, HybridAdam(sharded.parameters()))
    for _ in range(2):
        loss = sharded(torch.ones(1, 3)).sum()
        assert all(value.isfinite().all() for value in state.values())
        loss.backward()
        optimizer.step()
        assert torch.equal(detached.clone(), sharded.state_dict()["0.weight"])
        assert torch.equal(detached.clone(), state["0.weight"].clone())
    assert sharded(torch.ones(1, 3)).isfinite().all()


def test_on_one_rank_a_late_write_through_a_view_reaches_the_weight() -> None:
    with ZeroInitContext(), torch.no_grad():
        first, second = nn.Linear(300, 3), nn.Linear(3, 3)
        row = first.weight[0]
        nn.Linear(2, 2)
        second.weight.zero_()
        row.zero_()
        second.weight.zero_()
    # one rank holds the whole weight, and the view is of that
    assert first.weight.detach()[0].sum().item() == 0


@on_ranks(1, 2, 3)
def test_one_rank_may_initialise_gathered_parameters(rank: int, world_size: int) -> None:
    """One rank initialises, as DeepSpeed's users write it; the others look on."""
    last = world_size - 1
    with ZeroInitContext():
        model = building.deep(16, 3)
        with GatheredParameters([model[0].weight, model[1].bias], modifier_rank=last):
            if rank == last:
                nn.init.constant_(model[0].weight, 3.0)
                model[1].bias.data[2] = 5.0
    assert torch.equal(model[0].weight.clone(), torch.full((16, 16), 3.0))
    assert model[1].bias.clone()[2] == 5


@on_ranks(1, 2)
@pytest.mark.parametrize("gathered", [False, True])
def test_data_that_lies_in_another_order_is_followed(rank: int, world_size: int, gathered: bool) -> None:
    """What torch draws in place afterwards, and how it adds up, depends on the order of elements in memory."""

    def build(parameters: Any = None) -> nn.Linear:
        layer = nn.Linear(6, 9)
        with parameters(layer.weight, modifier_rank=0) if gathered else nullcontext():
            layer.weight.data = torch.randn(6, 9).t()
        nn.init.normal_(layer.weight)
        return layer

    torch.manual_seed(5)
    plain = build(lambda weight, modifier_rank: nullcontext())
    numbers = torch.rand(3)
    torch.manual_seed(5)
    with ZeroInitContext():
        layer = build(GatheredParameters)
    assert torch.equal(torch.rand(3), numbers)
    assert layer.weight.stride() == plain.weight.stride() == (1, 9)
    assert torch.equal(layer.weight.clone(), plain.weight)
    assert_same_state(ShardedModel(layer), plain)


def test_a_parameter_with_gaps_in_memory_has_none_on_shards() -> None:
    with ZeroInitContext():
        layer = nn.Module()
        layer.weight = nn.Parameter(torch.arange(64.0).view(8, 8)[::2, ::2])
    assert layer.weight.stride() == (4, 1)
    assert torch.equal(layer.weight.clone(), torch.arange(64.0).view(8, 8)[::2, ::2])


def test_the_original_of_a_tied_weight_is_a_copy() -> None:
    with ZeroInitContext():
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        weight_norm(first)
        before = second.weight.clone()
        nn.init.zeros_(first.parametrizations.weight.original1)  # type: ignore[union-attr, arg-type]
    assert torch.equal(second.weight.clone(), before)


@on_ranks(1, 2)
def test_errors_of_the_user_and_the_users_memory_stay_the_users(rank: int, world_size: int) -> None:
    """What fails in the user's hands is the user's; ranks may look at `.data` alone; given tensors stay as they are."""
    table = torch.full((3000, 100), float(rank))
    with ZeroInitContext():
        embedding = nn.Embedding.from_pretrained(table)
        first, second, third = nn.Linear(300, 3), nn.Linear(3, 3), nn.Linear(2, 2)
        expected = first.weight.clone()
        second.weight.norm()
        try:
            first.weight.fill_(1.0)
        except RuntimeError:
            assert torch.equal(first.weight.clone(), expected)
        if rank == 0:
            assert first.weight.data.numel() == 900
        second.weight.norm()
        third.weight.norm()
    assert table.unique().tolist() == [float(rank)], "rank 0's values were written into the user's tensor"
    assert embedding.weight.clone().unique().tolist() == [0.0]


@on_ranks(1, 2)
def test_an_error_that_is_caught_between_micro_batches_changes_no_gradient(rank: int, world_size: int) -> None:
    model = ShardedModel(nn.Linear(4, 4), device="emulated")
    x = torch.ones(1, 4)
    model(x).sum().backward()
    try:
        model.module.weight.numpy()
    except RuntimeError:
        model.module.weight.detach().numpy()
    model(x).sum().backward()
    gradient: torch.Tensor = model.module.bias.grad  # type: ignore[assignment]
    assert gradient[0].item() == 2.0


@on_ranks(2)
def test_a_write_through_a_view_that_comes_too_late_is_an_error(rank: int, world_size: int) -> None:
    def build() -> None:
        with ZeroInitContext(), torch.no_grad():
            first, second = nn.Linear(300, 3), nn.Linear(3, 3)
            nn.Linear(2, 2)
            row = first.weight[0]
            second.weight.zero_()
            row.zero_()
            first.weight.sum()

    with pytest.raises(ReleasedParameterError, match=r"Linear 0\.weight(?s:.*)take the view again"):
        build()
