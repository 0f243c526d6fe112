"""What loops for DeepSpeed ask and tell the engine between steps, beside what `Engine` has."""

import pytest
import torch
from torch import Tensor

from gemini import GeminiError, deepspeed
from gemini.deepspeed.engine import DeepSpeedEngine
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import WIDTH, assert_same, build, weights_of

ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.8, 0.9]}}


def engine_of(micro: int | None = 4, **config: object) -> DeepSpeedEngine:
    its = {"device": "emulated", "rank_timeout": 60.0, "optimizer": ADAM, **config}
    if micro is not None:
        its["train_micro_batch_size_per_gpu"] = micro
    return deepspeed.initialize(model=build(), config=its)[0]


def train(engine: DeepSpeedEngine, rank: int, micro_batch: int) -> Tensor:
    torch.manual_seed(10 * micro_batch + rank)
    loss: Tensor = engine(torch.randn(4, WIDTH)).square().mean()
    engine.backward(loss)
    engine.step()
    return loss


@on_ranks(1, 2)
def test_a_batch_that_grows_in_mid_training_is_that_of_an_engine_made_with_it(rank: int, world_size: int) -> None:
    grows, large = engine_of(), engine_of(gradient_accumulation_steps=3)
    large.load_module_state_dict(grows.module_state_dict())
    assert grows.train_batch_size() == 4 * world_size
    grows.set_train_batch_size(12 * world_size)
    assert (grows.train_batch_size(), grows.gradient_accumulation_steps()) == (12 * world_size, 3)
    for micro_batch in range(6):
        assert torch.equal(train(grows, rank, micro_batch), train(large, rank, micro_batch))
        assert grows.was_step_applied() == large.was_step_applied() == (micro_batch % 3 == 2)
    assert_same(weights_of(grows.model), weights_of(large.model))
    assert grows.global_steps == 2


def test_a_batch_that_cannot_be_is_refused_and_nothing_has_changed() -> None:
    engine = engine_of(gradient_accumulation_steps=2)
    for wrong in (6, 0, -4):
        with pytest.raises(ValueError, match="a multiple of 4"):
            engine.set_train_batch_size(wrong)
    train(engine, 0, 0)
    with pytest.raises(GeminiError, match="inside a window"):
        engine.set_train_batch_size(4)
    train(engine, 0, 1)
    assert engine.was_step_applied() and engine.train_batch_size() == 8
    with pytest.raises(ValueError, match="train_micro_batch_size_per_gpu"):
        engine_of(micro=None).set_train_batch_size(8)


def test_a_step_that_was_skipped_was_not_applied() -> None:
    engine = engine_of(dtype="fp16")
    assert not engine.was_step_applied()
    engine.backward(engine(torch.ones(4, WIDTH).half()).float().sum() * float("inf"))
    with pytest.warns(UserWarning, match="skipped"):
        engine.step()
    assert not engine.was_step_applied()
    engine.backward(engine(torch.ones(4, WIDTH).half()).float().mean())
    engine.step()
    assert engine.was_step_applied()


def test_hyperparameters_are_asked_and_set() -> None:
    engine = engine_of(clip_grad_norm=0.5)
    assert (engine.get_lr(), engine.get_mom(), engine.gradient_clipping()) == ([1e-2], [(0.8, 0.9)], 0.5)
    before = engine.module_state_dict()
    engine.set_lr(0.0)
    train(engine, 0, 0)
    assert engine.get_lr() == [0.0]
    assert_same(engine.module_state_dict(), before)
    plain = engine_of(optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.7}})
    assert (plain.get_mom(), plain.gradient_clipping()) == ([0.7], 0.0)
