"""Weights that are written to outside their operators, and views of weights that are kept."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemini import (
    Demand,
    GeminiError,
    Placement,
    ReleasedParameterError,
    ShardedModel,
    ShardedOptimizer,
    SlotError,
    Tier,
    slots_for,
)
from tests.zoo import mlp
from tests.zoo.mlp import (
    PLACES,
    WIDTH,
    adam,
    assert_same,
    both_dtypes,
    build,
    everywhere,
    loss_of,
    plain,
    sharded,
    train_step,
    weight,
    weights_of,
    wrap,
)

# ---- edits of weights outside their operators ------------------------------------------------------------------


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _assign(p: nn.Parameter) -> None:
    p.data = torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view(p.shape)


def _add_in_place(p: nn.Parameter) -> None:
    p += 0.25


def _through_numpy(p: nn.Parameter) -> None:
    memory = p.detach() if p.dtype is torch.float32 else p.data.view(torch.int16)
    memory.numpy()[0] = 1


def _from_vector(p: nn.Parameter) -> None:
    torch.nn.utils.vector_to_parameters(torch.linspace(-1, 1, p.numel(), dtype=p.dtype), [p])


def _halve_rows(p: nn.Parameter) -> None:
    for row in p:
        if row.dim() or p.dim() == 1:
            row.mul_(0.5)


@torch.enable_grad()
def _zero_row_of_detached(p: nn.Parameter) -> None:
    p.detach()[0].zero_()


def _write_to_view_of_grad_mode(p: nn.Parameter) -> None:
    with torch.enable_grad():
        view = p.view(-1)
    view[2:5].zero_()


def _write_twice(p: nn.Parameter) -> None:
    view = p.view(-1)
    view[:2].zero_()
    p.norm()
    view[4:6].zero_()


EDITS: dict[str, Callable[[nn.Parameter], Any]] = {
    "mul_": lambda p: p.mul_(0.5),
    "data.mul_": lambda p: p.data.mul_(0.5),
    "detach.zero_": lambda p: p.detach().zero_(),
    "setitem": lambda p: p.__setitem__(0, 1),
    "data.setitem": lambda p: p.data.__setitem__(0, 1),
    "init.normal_": lambda p: nn.init.normal_(p, generator=_generator()),
    "init.zeros_": lambda p: nn.init.zeros_(p),
    "data = x": _assign,
    # values of the weight's own dtype: wider ones reach its master unrounded, see tests/features/test_wide_values.py
    "copy_": lambda p: p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape).to(p.dtype)),
    "+=": _add_in_place,
    "out=": lambda p: torch.mul(p, 0.5, out=p),
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
    "view.fill_": lambda p: p.view(-1)[3:9].fill_(0.5),
    "row.zero_": lambda p: p[0].zero_(),
    "chunk.mul_": lambda p: p.chunk(2)[0].mul_(0.5),
    "unbind.fill_": lambda p: p.unbind(0)[1].fill_(0.5),
    "iter.mul_": _halve_rows,
    "data.chunk.mul_": lambda p: p.data.chunk(2)[0].mul_(0.5),
    "inplace=True": lambda p: F.hardtanh(p, -0.05, 0.05, inplace=True),
    "detach.row.zero_, grad mode": _zero_row_of_detached,
    "view of grad mode": _write_to_view_of_grad_mode,
    "view after a write": _write_twice,
    "detach.copy_": lambda p: p.detach().copy_(torch.full(p.shape, 0.125, dtype=p.dtype)),
    "numpy": _through_numpy,
    "vector_to_parameters": _from_vector,
    "clamp_": lambda p: p.clamp_(-0.05, 0.05),
}


IN_TURNS = [  # of the two dtypes each edit has one in `make test`
    pytest.param(
        edit,
        dtype,
        marks=[pytest.mark.soak] * (number % 2 == (dtype is None)),
        id=f"{'bf16' if dtype else 'fp32'}-{edit}",
    )
    for number, edit in enumerate(EDITS)
    for dtype in (None, torch.bfloat16)
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("edit", "dtype"), IN_TURNS)
def test_an_edit_reaches_forward_state_dict_and_master_and_survives_the_step(
    edit: str, dtype: torch.dtype | None
) -> None:
    for place in PLACES:
        model, optimizer = sharded(place, dtype=dtype)
        reference, plain_optimizer = plain(dtype)
        for step in range(3):
            for layer, name in ((step, "weight"), (4, "bias")):
                if name == "weight" or edit not in ("setitem", "data.setitem"):
                    for module in (model.module, reference):
                        with torch.no_grad():
                            EDITS[edit](getattr(module.layers[layer], name))
            assert_same(weights_of(model), weights_of(reference))
            mine, theirs = (loss_of(m, step, dtype) for m in (model, reference))
            assert torch.equal(mine, theirs), f"{place}: the loss of step {step} does not see the edit"
            for loss, its in ((mine, optimizer), (theirs, plain_optimizer)):
                loss.backward()
                its.step()
                its.zero_grad()
            assert_same(weights_of(model), weights_of(reference))
        if dtype is not None:
            masters = optimizer.state_dict()["masters"]
            for number, p in enumerate(reference.parameters()):
                assert torch.equal(masters[number], plain_optimizer.state[p]["master"]), f"{place}: master {number}"


@both_dtypes
@everywhere
def test_an_edit_between_backward_and_step_is_kept(place: str, dtype: torch.dtype | None) -> None:
    model, optimizer = sharded(place, dtype=dtype)
    reference, plain_optimizer = plain(dtype)
    for module, its in ((model, optimizer), (reference, plain_optimizer)):
        train_step(module, its, 0, dtype)
        loss_of(module, 1, dtype).backward()
        with torch.no_grad():
            weight(module, 1).mul_(0.5)
            weight(module, 3).data.add_(0.25)
        its.step()
    assert_same(weights_of(model), weights_of(reference))


@pytest.mark.parametrize("wrong", [torch.zeros(2), torch.zeros(WIDTH, WIDTH, dtype=torch.float64), 3])
def test_data_of_another_shape_or_dtype_is_refused(wrong: Any) -> None:
    model = wrap()
    with pytest.raises(ReleasedParameterError, match=r"layers\.0\.weight.*its \.data cannot be"):
        weight(model).data = wrong
    assert_same(weights_of(model), weights_of(build()))


@pytest.mark.parametrize("place", [*PLACES, "spare slot"])
@pytest.mark.parametrize("take", [lambda p: p.view(-1), lambda p: p.detach(), lambda p: p.data, lambda p: p[0]])
def test_an_edit_through_a_view_that_was_kept_reaches_the_weights_or_raises(place: str, take: Any) -> None:
    """Plain torch writes through such a view; here the weights may have moved on without it."""
    model, reference = _with_spare_slot() if place == "spare slot" else wrap(place), build()
    refused = None
    try:
        for module in (model, reference):
            with torch.no_grad():
                view = take(weight(module))
                loss_of(module)
                view.mul_(2)
        losses = [loss_of(module) for module in (model, reference)]
        assert torch.equal(*losses)
        assert_same(weights_of(model), weights_of(reference))
    except GeminiError as error:
        refused = str(error)
    assert refused is None or ("layers.0.weight" in refused and "view" in refused)


class Decays(nn.Linear):
    """Edits its own weight while it runs."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


@both_dtypes
@everywhere
def test_an_edit_inside_the_operators_own_forward_is_kept(place: str, dtype: torch.dtype | None) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(Decays(WIDTH, WIDTH, bias=False) for _ in range(6)))

    model, optimizer = sharded(place, make=make, chunk_size=256, dtype=dtype)
    reference, plain_optimizer = plain(dtype, make)
    for step in range(2):
        train_step(model, optimizer, step, dtype)
        train_step(reference, plain_optimizer, step, dtype)
    assert_same(weights_of(model), weights_of(reference))


# ---- kept views ------------------------------------------------------------------------------------------------


def test_a_kept_view_that_exhausts_the_slots_names_its_holder_and_the_operator() -> None:
    model, _ = sharded("smallest")
    kept = [weight(model, layer).view(-1) for layer in range(1)]
    with pytest.raises(SlotError, match=r"layers\.\d.*layers\.0\.weight.*view.*model_data_memory="):
        loss_of(model)
    kept.clear()
    gc.collect()
    assert torch.equal(loss_of(model), loss_of(build()))


def test_a_kept_view_with_a_spare_slot_costs_that_slot_until_it_dies() -> None:
    model = _with_spare_slot()
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    reference, plain_optimizer = plain()
    pool = model.chunk_manager.params.slots.pools[0]
    in_use = pool.count
    kept = weight(model).view(-1)
    before = kept.clone()
    for step in range(3):
        assert torch.equal(train_step(model, optimizer, step), train_step(reference, plain_optimizer, step))
    assert len(pool.held) == 1
    assert torch.equal(kept, before), "the memory under a kept view was written to"
    del kept
    train_step(model, optimizer, 3)
    train_step(reference, plain_optimizer, 3)
    assert not pool.held
    assert len(pool.slots) == in_use, "a rank with one more slot than the others would evict other chunks"
    assert_same(weights_of(model), weights_of(reference))


def _with_spare_slot() -> ShardedModel:
    least = mlp.smallest_budget(chunk_size=mlp.CHUNK_NUMEL)
    return ShardedModel(
        build(),
        device="emulated",
        chunk_size=mlp.CHUNK_NUMEL,
        tensor_placement_policy=_SlotsOnly(),
        model_data_memory=least + 4 * mlp.CHUNK_NUMEL,
    )


class _SlotsOnly:
    """The smallest cpu placement; what the budget has beyond it stays free."""

    name = "slots_only"

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        return slots_for(demand, tuple(dict.fromkeys(chunk.home_bytes, Tier.HOST) for chunk in demand.chunks))
