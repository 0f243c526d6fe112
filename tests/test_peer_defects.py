"""Defects that were reproduced in peers do not occur here: stale gradients, edits that are lost, unfreezing that never
trains, empty state dicts, masters taken after the cast, overflows that stay, clipping that offloading ignores. Ranks
that take other branches, which hang in peers, are in features/test_leaves.py and dist/test_divergence.py, leftover
patches in test_nothing_left.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from gemini import ShardedModel, ShardedOptimizer, clip_grad_norm_, state_hash
from optim import HybridAdam
from tests.zoo.mlp import (
    LAYERS,
    PLACES,
    WIDTH,
    Mlp,
    adam,
    assert_same,
    both_dtypes,
    build,
    everywhere,
    loss_of,
    plain,
    sharded,
    smallest_budget,
    train_step,
    weights_of,
    wrap,
)


class Routed(Mlp):
    """Layer 3 takes part only when the caller says so."""

    uses_all = True

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if self.uses_all or number != 3:
                x = x + torch.tanh(layer(x))
        return x


def routed(model: Any, uses_all: bool) -> None:
    (model.module if isinstance(model, ShardedModel) else model).uses_all = uses_all


# ---- 1: an unused parameter moves again by its previous gradient -----------------------------------------------


@both_dtypes
@everywhere
def test_a_parameter_that_a_step_does_not_use_stays_as_it_is(place: str, dtype: torch.dtype | None) -> None:
    model, optimizer = sharded(place, make=Routed, dtype=dtype)
    reference, plain_optimizer = plain(dtype, Routed)
    for step, uses_all in enumerate([True, False, False, True, False]):
        before = weights_of(model)["layers.3.weight"]
        for m, its in ((model, optimizer), (reference, plain_optimizer)):
            routed(m, uses_all)
            train_step(m, its, step, dtype)
        moved = not torch.equal(weights_of(model)["layers.3.weight"], before)
        assert moved == uses_all
        assert_same(weights_of(model), weights_of(reference))
    state = optimizer.state_dict()["state"]
    assert [int(state[n]["step"]) for n in (0, 6)] == [5, 2], "a step without a gradient is not counted"


@everywhere
def test_a_stale_gradient_is_not_added_to_the_next_micro_batches(place: str) -> None:
    """Step 1: used. Step 2: used by its second micro-batch only. Step 3: by its first only."""
    model, optimizer = sharded(place, make=Routed)
    reference, plain_optimizer = plain(make=Routed)
    for step, uses in enumerate([(True, True), (False, True), (True, False), (False, False)]):
        for m in (model, reference):
            for micro, uses_all in enumerate(uses):
                routed(m, uses_all)
                (loss_of(m, 10 * step + micro) / 2).backward()
        for mine, theirs in zip(model.parameters(), reference.parameters()):
            assert (mine.grad is None) == (theirs.grad is None)
            assert theirs.grad is None or torch.equal(mine.grad, theirs.grad)
        for its in (optimizer, plain_optimizer):
            its.step()
            its.zero_grad()
        assert_same(weights_of(model), weights_of(reference))


@pytest.mark.sampled(2)
@both_dtypes
@pytest.mark.parametrize("how", ["optimizer", "model", "grad_is_none"])
@everywhere
def test_discarded_gradients_leave_nothing_behind(place: str, how: str, dtype: torch.dtype | None) -> None:
    model, optimizer = sharded(place, make=Routed, dtype=dtype)
    reference, plain_optimizer = plain(dtype, Routed)
    for m, its in ((model, optimizer), (reference, plain_optimizer)):
        loss_of(m, 7, dtype).backward()
        if how == "optimizer":
            its.zero_grad()
        elif how == "model":
            m.zero_grad()
        else:
            for p in m.parameters():
                p.grad = None
        routed(m, False)
        train_step(m, its, 1, dtype)
        routed(m, True)
        train_step(m, its, 2, dtype)
    assert_same(weights_of(model), weights_of(reference))


@everywhere
def test_discarding_one_parameters_gradient_leaves_the_others(place: str) -> None:
    model, optimizer = sharded(place)
    reference, plain_optimizer = plain()
    for m, its in ((model, optimizer), (reference, plain_optimizer)):
        loss_of(m, 1).backward()
        (m.module if m is model else m).layers[2].weight.grad = None
        loss_of(m, 2).backward()
        (m.module if m is model else m).layers[4].bias.grad = None
        its.step()
    assert_same(weights_of(model), weights_of(reference))


# ---- 2: edits never reach the master, or the next forward: see tests/features/test_access.py ---------------------


# ---- 4: unfreezing after initialisation silently never trains ----------------------------------------------------


class HeadOnly(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.layers[:-1].requires_grad_(False)


@both_dtypes
@everywhere
def test_what_is_unfrozen_after_wrapping_trains(place: str, dtype: torch.dtype | None) -> None:
    if place == "smallest":  # of the unfrozen model: that of the frozen one has no room for its gradients
        options = {"chunk_size": 512, "dtype": dtype}
        least = smallest_budget(Mlp, **options)
        model = ShardedModel(build(HeadOnly), device="emulated", model_data_memory=least, **options)
    else:
        model = wrap(place, make=HeadOnly, dtype=dtype)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    reference, plain_optimizer = plain(dtype, HeadOnly)
    for step in range(6):
        if step == 2:
            for m in (model, reference):
                m.requires_grad_(True)
        before = weights_of(model)
        train_step(model, optimizer, step, dtype)
        train_step(reference, plain_optimizer, step, dtype)
        moved = [name for name, value in weights_of(model).items() if not torch.equal(value, before[name])]
        assert len(moved) == (2 if step < 2 else 2 * LAYERS)
        assert_same(weights_of(model), weights_of(reference))
    state = optimizer.state_dict()["state"]
    assert [int(state[number]["step"]) for number in (0, 2 * LAYERS - 1)] == [4, 6]


# ---- 6: state dicts with empty tensors; what wrapping leaves patched: see test_nothing_left.py ---


@both_dtypes
@everywhere
def test_the_state_dict_is_whole_before_and_after_training(place: str, dtype: torch.dtype | None) -> None:
    model, optimizer = sharded(place, dtype=dtype)
    reference, plain_optimizer = plain(dtype)
    for step in range(2):
        state, wanted = model.state_dict(), reference.state_dict()
        assert list(state) == list(wanted)
        for name, value in wanted.items():
            assert state[name].shape == value.shape
            assert state[name].dtype == value.dtype
            assert state[name].device.type == "cpu"
            assert type(state[name]) is Tensor
            assert torch.equal(state[name], value)
        kept = {name: value.clone() for name, value in state.items()}
        train_step(model, optimizer, step, dtype)
        train_step(reference, plain_optimizer, step, dtype)
        assert_same(dict(state), kept)  # copies: training does not reach them


# ---- 8: masters, overflows, clipping ---------------------------------------------------------------------------


@everywhere
def test_masters_are_the_weights_as_given_before_any_cast(place: str) -> None:
    given = build()
    with torch.no_grad():  # weights that bf16 cannot hold
        for number, p in enumerate(given.parameters()):
            p.add_(torch.linspace(1e-5, 2e-5, p.numel()).view(p.shape) * (number + 1))
    wanted = [p.detach().clone() for p in given.parameters()]
    assert any(not torch.equal(w, w.bfloat16().float()) for w in wanted)
    where = {k: v for k, v in PLACES[place].items() if k == "tensor_placement_policy"}
    model = ShardedModel(given, device="emulated", dtype=torch.bfloat16, chunk_size=512, **where)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    masters = optimizer.state_dict()["masters"]
    assert all(torch.equal(masters[number], w) for number, w in enumerate(wanted))
    loss_of(model, 0, torch.bfloat16)  # nor does a forward round them
    assert all(torch.equal(optimizer.state_dict()["masters"][n], w) for n, w in enumerate(wanted))


@pytest.mark.sampled(2)
@both_dtypes
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@everywhere
def test_an_overflow_while_accumulating_leaves_nothing_behind(
    place: str, poison: float, dtype: torch.dtype | None
) -> None:
    def run(overflows: bool) -> str:
        model, optimizer = sharded(place, dtype=dtype)

        def accumulate(step: int, factors: tuple[float, ...]) -> None:
            for micro, factor in enumerate(factors):
                (loss_of(model, 10 * step + micro, dtype) * factor).backward()
            optimizer.step()
            optimizer.zero_grad()

        accumulate(0, (0.5, 0.5))
        if overflows:
            before = state_hash(model, optimizer)
            with pytest.warns(UserWarning, match="skipped"):
                accumulate(1, (0.5, poison, 0.5))
            assert optimizer.last_step is not None
            assert optimizer.last_step.skipped is not None
            assert not torch.isfinite(optimizer.grad_norm)
            assert state_hash(model, optimizer) == before
        accumulate(2, (0.5, 0.5))
        assert optimizer.last_step is not None
        assert optimizer.last_step.skipped is None
        accumulate(3, (1.0,))
        return state_hash(model, optimizer)

    assert run(overflows=True) == run(overflows=False)


@pytest.mark.parametrize("micro_batches", [1, 3])
@everywhere
def test_bf16_with_offload_obeys_clipping(place: str, micro_batches: int) -> None:
    hashes = {}
    for max_norm in (None, 1e-3):
        model = wrap(place, dtype=torch.bfloat16)
        # adam's step does not depend on the gradients' scale: eps makes it so
        optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2, eps=1e-3), clip_grad_norm=max_norm)
        for step in range(2):
            for micro in range(micro_batches):
                loss_of(model, 10 * step + micro, torch.bfloat16).backward()
            optimizer.step()
            assert optimizer.grad_norm is not None
            assert optimizer.grad_norm > 1e-2, "the true norm, before clipping"
            assert optimizer.last_step is not None
            assert (optimizer.last_step.clip < 1) == (max_norm is not None)
        hashes[max_norm] = state_hash(model, optimizer)
    assert hashes[None] != hashes[1e-3]


@everywhere
def test_bf16_clipping_has_the_same_bits_offloaded_and_resident(place: str) -> None:
    model, optimizer = sharded(place, dtype=torch.bfloat16)
    twin, twin_optimizer = sharded("cuda", dtype=torch.bfloat16)
    for step in range(3):
        for m, its in ((model, optimizer), (twin, twin_optimizer)):
            loss_of(m, step, torch.bfloat16).backward()
            its.clip_grad_norm_(0.1)
            its.step()
        assert torch.equal(optimizer.grad_norm, twin_optimizer.grad_norm)
    assert state_hash(model, optimizer) == state_hash(twin, twin_optimizer)


@everywhere
def test_fp32_clipping_equals_the_plain_loop(place: str) -> None:
    model, optimizer = sharded(place)
    reference, plain_optimizer = plain()
    for step in range(3):
        loss_of(model, step).backward()
        loss_of(reference, step).backward()
        mine = optimizer.clip_grad_norm_(0.1)
        theirs = clip_grad_norm_(reference.parameters(), 0.1)
        assert torch.equal(mine, theirs)
        optimizer.step()
        plain_optimizer.step()
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
    assert_same(weights_of(model), weights_of(reference))


def test_the_model_has_the_layers_that_the_cases_mean() -> None:
    assert len(Routed().layers) == LAYERS > 4
    assert next(Mlp().parameters()).shape == (WIDTH, WIDTH)
