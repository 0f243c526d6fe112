"""Parameters outside of their operators, at the edges: copies, gathered blocks, frozen parameters, meta tensors."""

import contextlib
import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from gemini import (
    BudgetError,
    GatheredParameters,
    GeminiError,
    Kind,
    ReleasedParameterError,
    RemoteRankError,
    ShardedModel,
    ShardedOptimizer,
    UnsupportedError,
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_set_full_grad,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    state_hash,
)
from gemini.runtime.binding import Binding
from gemini.runtime.calls import Underway
from gemini.runtime.chunk import Chunk
from gemini.runtime.params import ParamStore
from optim import HybridAdam
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import CHUNK_NUMEL, PLACES, adam, assert_same, build, layer_of, loss_of, placed, weight, weights_of


def wrapped(**options: Any) -> ShardedModel:
    return ShardedModel(build(), device="emulated", **{"chunk_size": CHUNK_NUMEL, "rank_timeout": 30, **options})


@on_ranks(2)
def test_what_one_rank_reads_inside_a_gathered_block_parts_no_ranks(rank: int, world_size: int) -> None:
    model = wrapped()
    with GatheredParameters(weight(model, 1), modifier_rank=0), torch.no_grad():
        if rank == 0:
            safe_get_local_fp32_param(weight(model, 4))
            weight(model, 1).fill_(2.0)
    assert torch.equal(weights_of(model)["layers.1.weight"], torch.full_like(build().layers[1].weight, 2.0))
    model.close()


@on_ranks(1, 2)
def test_a_block_that_gave_a_parameter_other_memory_leaves_everything_as_it_was(rank: int, world_size: int) -> None:
    model = wrapped()
    one, other = weight(model, 1), weight(model, 2)

    def edit() -> None:
        with GatheredParameters([one, other], modifier_rank=0):
            if rank == 0:
                one.data = torch.ones(3)
            other.data.fill_(1.0)

    with pytest.raises(ReleasedParameterError if rank == 0 else RemoteRankError):
        edit()
    found = weights_of(model)  # where ranks start together again
    if world_size == 1:
        assert_same(found, weights_of(build()))
    model.close()


def test_a_frozen_parameter_is_given_no_gradient() -> None:
    model = wrapped()
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    weight(model, 1).requires_grad_(False)
    optimizer.backward(loss_of(model))
    with pytest.raises(GeminiError, match="is frozen: nothing would use its gradient"):
        safe_set_full_grad(weight(model, 1), torch.ones(weight(model, 1).shape))
    optimizer.step()
    assert torch.equal(weights_of(model)["layers.1.weight"], build().layers[1].weight)


def test_a_part_of_a_master_is_set_as_exactly_as_a_whole_one_after_an_unfreeze() -> None:
    module = build()
    layer_of(module, 0).requires_grad_(False)
    model = ShardedModel(module, device="emulated", chunk_size=CHUNK_NUMEL, dtype=torch.bfloat16)
    ShardedOptimizer(model, adam(model.parameters()))
    parameter = weight(model, 0)
    parameter.requires_grad_(True)
    safe_set_local_fp32_param(parameter, torch.full((parameter.numel(),), 1.0001))
    assert torch.equal(safe_get_full_fp32_param(parameter), torch.full(parameter.shape, 1.0001))


def test_a_shallow_copy_of_a_wrapped_module_is_refused() -> None:
    model = wrapped()
    with pytest.raises(UnsupportedError, match=r"use copy\.deepcopy"):
        copy.copy(layer_of(model, 0))
    assert type(copy.deepcopy(layer_of(model, 0))) is nn.Linear


def test_values_on_meta_load_nothing() -> None:
    model = wrapped()
    state = {name: torch.zeros_like(value) for name, value in build().state_dict().items()}
    state["layers.3.weight"] = state["layers.3.weight"].to("meta")
    with pytest.raises(RuntimeError, match=r"changed nothing: layers\.3\.weight is on the device meta"):
        model.load_state_dict(state)
    assert_same(weights_of(model), weights_of(build()))


class Language(nn.Module):
    def __init__(self, embedding: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.embedding, self.head = embedding, head
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Scaled(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(16, 8)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        (lambda: nn.Embedding(16, 8), lambda: spectral_norm(nn.Linear(8, 16))),
        (Scaled, lambda: nn.Linear(8, 16)),
    ],
    ids=["parametrized head", "scaled embedding"],
)
def test_the_bound_of_a_first_batch_reads_shapes_alone(embedding: Any, head: Any) -> None:
    torch.manual_seed(0)
    plain = Language(embedding(), head())
    model = ShardedModel(copy.deepcopy(plain), device="emulated", device_memory="4MB")
    ids = torch.arange(8).view(2, 4)
    assert torch.equal(plain(ids), model(ids))


def test_a_parameter_is_ignored_by_its_name_also_where_it_shares_its_memory() -> None:
    module = Language(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))
    module.head.weight.data = module.embedding.weight.data  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match="share their memory"):
        model = ShardedModel(module, device="emulated", ignored_parameters=["head.*"])
    assert type(model.module.head.weight) is type(model.module.embedding.weight) is nn.Parameter


def test_a_refused_backward_leaves_nothing_in_the_next_ones_gradients() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(layer for _ in range(40) for layer in (nn.Linear(4, 4), nn.LayerNorm(4))))

    found = []
    for is_refused in (True, False):
        dtypes = {nn.LayerNorm: torch.float32, "*": torch.float16}
        model = ShardedModel(make(), device="emulated", dtype=dtypes)
        optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-3), initial_scale=1.0)
        x = torch.linspace(-1, 1, 8).view(2, 4).half()
        optimizer.backward(model(x).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if is_refused:
            norms = [each for each in model.parameters() if each.dtype is torch.float32]
            with pytest.raises(GeminiError, match="without the loss scale"):
                sum(each.square().sum() for each in norms).backward()  # type: ignore[union-attr]
            optimizer.zero_grad()
        optimizer.backward(model(x).float().square().mean())
        found.append([each.grad.clone() for each in model.parameters()])
    assert all(map(torch.equal, *found))


def _reads(parameter: nn.Parameter) -> None:
    safe_get_full_fp32_param(parameter)


def _nests(parameter: nn.Parameter) -> None:
    with GatheredParameters(parameter):
        pass


@pytest.mark.sampled(3)
@on_ranks(1, 2)
@pytest.mark.parametrize("is_tight", [False, True], ids=["resident", "tight"])
@pytest.mark.parametrize("inner", [_reads, _nests])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_an_edit_that_was_undone_leaves_nothing_where_it_was_brought_home_meanwhile(
    rank: int, world_size: int, dtype: torch.dtype | None, inner: Any, is_tight: bool
) -> None:
    options: dict[str, Any] = {"dtype": dtype}
    if is_tight:
        options["model_data_memory"] = wrapped(**options).plan.packed_minimum_bytes
    model = wrapped(**options)
    optimizer = ShardedOptimizer(model, adam(model.parameters()), initial_scale=1.0)
    for step in range(2):
        optimizer.backward(loss_of(model, step, dtype))
        optimizer.step()
        optimizer.zero_grad()
    before = state_hash(model, optimizer)
    parameter = weight(model, 1)

    def edit() -> None:
        with GatheredParameters(parameter), torch.no_grad():
            parameter.zero_()
            inner(parameter)
            raise KeyError

    with pytest.raises(KeyError):
        edit()
    loss_of(model, 3, dtype)
    assert state_hash(model, optimizer) == before
    model.close()


def test_a_backward_that_fails_at_its_end_leaves_no_gradient() -> None:
    model = wrapped()
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    reductions = type(model.chunk_manager.step.reductions)
    refused = BudgetError("no room for a sum", tier="host")
    with mock.patch.object(reductions, "end", side_effect=refused), pytest.raises(BudgetError):
        loss_of(model).backward()
    with pytest.warns(UserWarning, match="a backward ended with an exception"):
        optimizer.step()
    assert_same(weights_of(model), weights_of(build()))
    assert optimizer.last_step is not None and optimizer.last_step.grad_norm == 0


def test_an_optimizer_whose_making_was_interrupted_is_made_again_with_the_masters_of_the_weights() -> None:
    model = ShardedModel(build().half(), device="emulated", dtype=torch.float16)
    values = {name: value.half().float() for name, value in build().state_dict().items()}
    allocate, interrupted = Chunk.allocate_home, []

    def interrupt(chunk: Chunk, kind: Kind, *rest: Any) -> None:
        allocate(chunk, kind, *rest)
        if kind is Kind.MASTER and not interrupted:
            interrupted.append(chunk)
            raise KeyboardInterrupt

    with mock.patch.object(Chunk, "allocate_home", interrupt), pytest.raises(KeyboardInterrupt):
        ShardedOptimizer(model, adam(model.parameters()))
    ShardedOptimizer(model, adam(model.parameters()))
    for name, parameter in model.named_parameters():
        assert torch.equal(safe_get_full_fp32_param(parameter), values[name]), name


@pytest.mark.parametrize("where", [(ParamStore, "arrive"), (Underway, "end_touch"), (Binding, "bind")], ids=str)
def test_uses_of_parameters_that_were_interrupted_leave_slots_and_pins(where: tuple[Any, str]) -> None:
    """Every slot that there is could be lost so."""
    model, reference = wrapped(model_data_memory=wrapped().plan.packed_minimum_bytes), build()
    optimizers: list[Any] = [adam(each.parameters()) for each in (model, reference)]
    optimizers[0] = ShardedOptimizer(model, optimizers[0])
    for number in range(4):
        with mock.patch.object(*where, side_effect=KeyboardInterrupt), torch.no_grad():
            with contextlib.suppress(KeyboardInterrupt):
                weight(model, number).norm()
        assert torch.equal(weight(model, number).norm(), weight(reference, number).norm())
    for module, optimizer in zip((model, reference), optimizers, strict=True):
        loss_of(module).backward()
        optimizer.step()
    assert_same(weights_of(model), dict(reference.named_parameters()))


def test_a_modules_own_loading_runs_where_the_module_loads() -> None:
    """Batch norms fill in a key that old state dicts lack; `model.load_state_dict` compares keys and runs no hook."""

    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    saved = make().state_dict()
    old = {name: torch.zeros_like(value) for name, value in saved.items() if name != "1.num_batches_tracked"}
    model = ShardedModel(make(), device="emulated")
    with pytest.raises(RuntimeError, match=r"missing keys: 1\.num_batches_tracked.*model\.module\.load_state_dict"):
        model.load_state_dict(old)
    model.module.load_state_dict(old)
    assert not weights_of(model)["0.weight"].any()


@pytest.mark.parametrize("how", ["grad", "full", "local"])
def test_a_gradient_that_is_set_leaves_the_others_clipped(how: str) -> None:
    """As in plain PyTorch, where a clip changes the gradients at once."""
    model, plain = wrapped(), build()
    optimizers: list[Any] = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (model, plain)]
    optimizers[0] = ShardedOptimizer(model, optimizers[0])
    for module in (model, plain):
        (100 * loss_of(module)).backward()
    optimizers[0].clip_grad_norm_(1.0)
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    value = torch.full(weight(plain, 1).shape, 0.5)
    weight(plain, 1).grad = value
    if how == "grad":
        weight(model, 1).grad = value
    elif how == "full":
        safe_set_full_grad(weight(model, 1), value)
    else:
        safe_set_local_grad(weight(model, 1), value.flatten())
    for optimizer in optimizers:
        optimizer.step()
    for name, found in weights_of(model).items():
        torch.testing.assert_close(found, plain.state_dict()[name], rtol=1e-5, atol=1e-6)  # torch's norm is in fp32


@pytest.mark.parametrize("place", ["cuda", "smallest"])
def test_a_gradient_from_before_the_wrap_is_dropped_and_said(place: str) -> None:
    module, reference = build(), build()
    loss_of(module, 5).backward()
    with pytest.warns(UserWarning, match="12 parameters have a gradient of a backward before ShardedModel") as told:
        model = ShardedModel(module, **placed(**PLACES[place]))
    assert told[0].filename == __file__
    assert all(parameter.grad is None for parameter in model.parameters())
    for each in (model, reference):
        loss_of(each).backward()
    for mine, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, wanted.grad)
