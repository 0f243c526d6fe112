"""Saved and loaded, here, elsewhere or by a plain optimizer, training continues with the same bits."""

import copy
import io
import itertools
from typing import Any

import pytest
import torch

from gemini import ShardedOptimizer, state_hash
from gemini.optimizer.elementwise import TESTED
from optim import HybridAdam
from tests.zoo.mlp import (
    CHUNK_NUMEL,
    PLACES,
    assert_same,
    both_dtypes,
    build,
    layer_of,
    sharded,
    train_step,
    weights_of,
    wrap,
)
from tests.zoo.torch_optimizers import SCHEDULERS, make_torch_optimizer


@pytest.mark.sampled(2)
@both_dtypes
@pytest.mark.parametrize(("here", "there"), list(itertools.product(["smallest", "cuda"], ["auto", "cpu"])))
def test_saving_and_loading_continues_with_the_same_bits(here: str, there: str, dtype: torch.dtype | None) -> None:
    model, optimizer = sharded(here, dtype=dtype)
    scheduler = SCHEDULERS["one_cycle"](optimizer)
    for step in range(2):
        train_step(model, optimizer, step, dtype)
        scheduler.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    restored, restored_optimizer = sharded(there, dtype=dtype, chunk_size=2 * CHUNK_NUMEL)
    train_step(restored, restored_optimizer, 30, dtype)  # whatever it did before
    restored_scheduler = SCHEDULERS["one_cycle"](restored_optimizer)
    restored.load_state_dict(saved[0])
    restored_optimizer.load_state_dict(saved[1])
    restored_scheduler.load_state_dict(saved[2])
    assert state_hash(restored, restored_optimizer) == state_hash(model, optimizer)
    for step in range(2, 5):
        losses = []
        for m, its, schedule in (
            (model, optimizer, scheduler),
            (restored, restored_optimizer, restored_scheduler),
        ):
            losses.append(train_step(m, its, step, dtype))
            schedule.step()
        assert torch.equal(*losses)
    assert state_hash(restored, restored_optimizer) == state_hash(model, optimizer)


@pytest.mark.parametrize("optimizer_first", [False, True])
def test_the_order_of_loading_model_and_optimizer_does_not_matter(optimizer_first: bool) -> None:
    model, optimizer = sharded(dtype=torch.bfloat16)
    for step in range(2):
        train_step(model, optimizer, step, torch.bfloat16)
    restored, restored_optimizer = sharded("cuda", dtype=torch.bfloat16)
    if optimizer_first:
        restored_optimizer.load_state_dict(optimizer.state_dict())
    restored.load_state_dict(model.state_dict())
    if not optimizer_first:
        restored_optimizer.load_state_dict(optimizer.state_dict())
    assert state_hash(restored, restored_optimizer) == state_hash(model, optimizer)


@pytest.mark.parametrize("kind", TESTED, ids=lambda kind: kind.__name__)
def test_every_tested_optimizer_continues_after_loading(kind: type[torch.optim.Optimizer]) -> None:
    model, reference = wrap(), build()
    optimizer = ShardedOptimizer(model, make_torch_optimizer(kind, model.parameters(), 1))
    plain_optimizer = make_torch_optimizer(kind, reference.parameters(), 1)
    for step in range(2):
        train_step(model, optimizer, step)
        train_step(reference, plain_optimizer, step)
    restored = wrap("cpu", chunk_size=2 * CHUNK_NUMEL)
    restored_optimizer = ShardedOptimizer(restored, make_torch_optimizer(kind, restored.parameters(), 1))
    restored.load_state_dict(model.state_dict())
    restored_optimizer.load_state_dict(optimizer.state_dict())
    for step in range(2, 4):
        train_step(restored, restored_optimizer, step)
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(restored), weights_of(reference))


@pytest.mark.parametrize("plain_kind", ["adamw", "hybrid_adam"])
def test_a_plain_optimizers_state_dict_loads_here(plain_kind: str) -> None:
    reference = build()
    parameters = reference.parameters()
    options = {"lr": 1e-2, "weight_decay": 0.01}
    plain_optimizer: Any = (
        torch.optim.AdamW(parameters, foreach=False, **options)
        if plain_kind == "adamw"
        else HybridAdam(parameters, **options)
    )
    for step in range(2):
        train_step(reference, plain_optimizer, step)
    model, optimizer = sharded()
    model.load_state_dict(reference.state_dict())
    optimizer.load_state_dict(plain_optimizer.state_dict())
    mine, theirs = optimizer.state_dict()["state"], plain_optimizer.state_dict()["state"]
    for number, entry in theirs.items():
        for name, value in entry.items():
            assert torch.equal(mine[number][name], value), (number, name)
    continued = HybridAdam(reference.parameters(), **options)
    continued.load_state_dict(plain_optimizer.state_dict())
    for step in range(2, 4):
        train_step(model, optimizer, step)
        train_step(reference, continued, step)
    assert_same(weights_of(model), weights_of(reference))


@pytest.mark.parametrize("plain_kind", [HybridAdam, torch.optim.AdamW])
def test_our_state_dict_loads_into_a_plain_optimizer(plain_kind: Any) -> None:
    model, optimizer = sharded()
    for step in range(2):
        train_step(model, optimizer, step)
    reference = build()
    reference.load_state_dict(model.state_dict())
    plain_optimizer = plain_kind(reference.parameters(), lr=1e-2, weight_decay=0.01)
    saved = optimizer.state_dict()
    plain_optimizer.load_state_dict({"state": saved["state"], "param_groups": saved["param_groups"]})
    for step in range(2, 4):
        mine = train_step(model, optimizer, step)
        theirs = train_step(reference, plain_optimizer, step)
        assert torch.allclose(mine, theirs, rtol=1e-5)
    if plain_kind is HybridAdam:
        assert_same(weights_of(model), weights_of(reference))


def test_a_state_dict_goes_through_a_file() -> None:
    model, optimizer = sharded(dtype=torch.bfloat16)
    train_step(model, optimizer, 0, torch.bfloat16)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    restored, restored_optimizer = sharded("cuda", dtype=torch.bfloat16)
    restored.load_state_dict(loaded["model"])
    restored_optimizer.load_state_dict(loaded["optimizer"])
    assert state_hash(restored, restored_optimizer) == state_hash(model, optimizer)


def test_the_state_hash_sees_bits_and_not_places() -> None:
    hashes = {place: state_hash(*sharded(place)) for place in PLACES}
    assert len(set(hashes.values())) == 1
    model, optimizer = sharded()
    assert state_hash(model) == state_hash(build())
    with torch.no_grad():
        layer_of(model, 0).bias[3] += 1e-7
    assert state_hash(model, optimizer) != hashes["smallest"]
