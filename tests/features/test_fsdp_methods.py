"""What a script for FSDP2 calls on its model: `unshard`, gradient sync, hints, dtypes, and modules on "meta"."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from gemini import ShardedModel, ShardedOptimizer, SlotError, UnsupportedError, ZeroInitContext, state_hash
from gemini.elsewhere import instead_of_torchs
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import WIDTH, adam, assert_same, build, inputs, loss_of, sharded, train_step, weights_of, wrap


def test_every_name_of_fsdp2s_is_there_or_says_what_to_use() -> None:
    names = [name for name in vars(FSDPModule) if not name.startswith("_")]
    assert "unshard" in names and "set_gradient_divide_factor" in names
    model = wrap()
    for name in names:
        if not hasattr(model, name):
            assert instead_of_torchs(name), name
            with pytest.raises(AttributeError, match=f"a ShardedModel has no '{name}': "):
                getattr(model, name)


@on_ranks(1, 2)
def test_weights_are_whole_between_unshard_and_reshard(rank: int, world_size: int) -> None:
    model, optimizer = sharded("cuda")
    train_step(model, optimizer, rank)
    before = weights_of(model)
    model.unshard()
    handle = model.unshard(async_op=True)
    assert handle is not None
    handle.wait()
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter and torch.equal(parameter.detach(), before[name])
    with torch.no_grad():
        assert torch.equal(model(inputs(0)), model.module(inputs(0)))
    model.reshard()
    model.reshard()
    assert type(next(model.parameters())) is not nn.Parameter
    assert_same(weights_of(model), before)


@on_ranks(1, 2)
def test_a_forward_that_trains_reshards_and_training_goes_on_as_without(rank: int, world_size: int) -> None:
    hashes = []
    for unshards in (True, False):
        model, optimizer = sharded("cuda")
        for step in range(3):
            if unshards:
                model.unshard()
            train_step(model, optimizer, 2 * step + rank)
        hashes.append(state_hash(model, optimizer))
    assert hashes[0] == hashes[1]


def test_a_change_of_an_unsharded_weight_is_refused_and_undone() -> None:
    model, _ = sharded("cuda")
    before = weights_of(model)
    model.unshard()
    with torch.no_grad():
        next(model.parameters()).zero_()
    with pytest.raises(UnsupportedError, match=r"layers\.0\.weight"):
        model.reshard()
    assert_same(weights_of(model), before)
    model.unshard()
    model.reshard()


def test_unshard_without_room_is_refused_and_training_goes_on() -> None:
    model, optimizer = sharded("smallest")
    with pytest.raises(SlotError):
        model.unshard()
    assert not model._forward_pre_hooks
    train_step(model, optimizer)


@on_ranks(1, 2)
def test_gradients_wait_as_in_no_sync_until_they_are_synchronized_again(rank: int, world_size: int) -> None:
    hashes, moves = [], []
    for by_flag in (True, False):
        model, optimizer = sharded("smallest")
        for step in range(2):
            for micro in range(3):
                if by_flag:
                    model.set_requires_gradient_sync(micro == 2)
                    loss_of(model, 4 * step + micro + rank).backward()
                elif micro == 2:
                    loss_of(model, 4 * step + micro + rank).backward()
                else:
                    with model.no_sync():
                        loss_of(model, 4 * step + micro + rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        hashes.append(state_hash(model, optimizer))
        moves.append(dict(model.observer.counts))
    assert hashes[0] == hashes[1] and moves[0] == moves[1]
    assert world_size == 1 or "reduce" not in moves[0], "every micro-batch was reduced by itself"
    with pytest.raises(ValueError, match="chunks span modules"):
        model.set_requires_gradient_sync(False, recurse=False)


def test_hints_of_what_to_prefetch_change_nothing_and_name_modules_of_the_model() -> None:
    model, optimizer = sharded()
    other, its = sharded()
    for set_modules in (model.set_modules_to_forward_prefetch, model.set_modules_to_backward_prefetch):
        set_modules([*model.module.layers])
        with pytest.raises(ValueError, match="Linear is not a module of this model"):
            set_modules([nn.Linear(2, 2)])
    for each in ((model, optimizer), (other, its)):
        train_step(*each)
    assert state_hash(model, optimizer) == state_hash(other, its)


class Several(nn.Module):
    """Returns tensors of several dtypes in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"logits": self.layer(x), "index": torch.arange(3), "pair": (x, None)}


@on_ranks(1, 2)
def test_inputs_and_outputs_are_cast_as_a_mixed_precision_policy_says(rank: int, world_size: int) -> None:
    """`MixedPrecisionPolicy(param_dtype=bf16, cast_forward_inputs=True, output_dtype=fp32)`."""
    x = inputs(rank)
    plain = build(Several).bfloat16()
    model = ShardedModel(
        build(Several), device="emulated", dtype=torch.bfloat16, cast_inputs=True, output_dtype=torch.float32
    )
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    found, wanted = model(x), plain(x.bfloat16())
    assert found["logits"].dtype is torch.float32 and torch.equal(found["logits"], wanted["logits"].float())
    assert found["index"].dtype is torch.int64 and found["pair"][1] is None
    loss = found["logits"].square().mean()
    optimizer.backward(loss)
    optimizer.step()
    assert float(model(x)["logits"].square().mean()) < float(loss)


def test_a_dtype_that_outputs_cannot_have_is_refused() -> None:
    with pytest.raises(ValueError, match="output_dtype must be None or one of"):
        ShardedModel(build(), output_dtype=torch.int64)  # type: ignore[arg-type]


# ---- modules on the device "meta" ---------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.table(ids))).square().mean()


@on_ranks(1, 2)
def test_a_module_on_meta_is_initialised_part_by_part_as_by_hand(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        module = Tied()
    plain = copy.deepcopy(module)
    torch.manual_seed(rank)  # rank 0's values count
    with ZeroInitContext() as context:
        assert context.materialize(module) is module
    assert module.head.weight is module.table.weight
    torch.manual_seed(0)
    plain.to_empty(device="cpu")
    plain.head.weight = plain.table.weight
    for part in plain.modules():
        if hasattr(part, "reset_parameters") and part is not plain.head:
            part.reset_parameters()
    model = ShardedModel(module, device="emulated", model_data_memory="60KB")
    assert_same(weights_of(model), weights_of(plain))
    assert torch.equal(module.layers[1].running_var, torch.ones(WIDTH))
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    optimizer.backward(model(torch.arange(8)))
    optimizer.step()


def test_a_part_on_meta_that_cannot_initialise_itself_is_named() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 3), Scale())
    with ZeroInitContext() as context, pytest.raises(UnsupportedError, match=r"1 \(Scale\) has tensors on the device"):
        context.materialize(module)
    assert all(parameter.is_meta for parameter in module.parameters())
    with pytest.raises(UnsupportedError, match="materialize"):
        ShardedModel(module)
    with pytest.raises(UnsupportedError, match="inside its ZeroInitContext only"):
        ZeroInitContext().materialize(module)


@on_ranks(1, 2)
def test_another_divide_factor_is_a_factor_of_the_loss_as_its_refusal_says(rank: int, world_size: int) -> None:
    model, _ = sharded("cpu")
    with pytest.raises(AttributeError, match="a sum / factor, multiply the loss by number / factor"):
        model.set_gradient_divide_factor(8.0)
    (loss_of(model, rank) * (world_size / 8.0)).backward()
    plain = build()
    for each in range(world_size):
        loss_of(plain, each).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad.clone(), plain.get_parameter(name).grad / 8.0), name
    model.close()
