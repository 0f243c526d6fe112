"""What loops for DeepSpeed ask and tell the engine between steps, beside what `Engine` has."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from gemini import GeminiError, deepspeed
from gemini.deepspeed.engine import DeepSpeedEngine
from optim import HybridAdam
from tests.harness.on_ranks import gathered, on_ranks
from tests.zoo.mlp import WIDTH, Mlp, assert_same, build, weights_of

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


BOUNDARIES = {
    # By micro-batch, what the script says of the boundary; None: nothing. `step()` follows each of them.
    "every one": [None] * 6,
    "an end that is early": [None, True, None, None, None, None],
    "all by hand": [False, False, True, False, True, False],
    "more than a window": [False, False, False, False, False, True],
}


class Plain:
    """A plain module that is updated where DeepSpeed would, every loss divided by the window's size."""

    def __init__(self, window: int) -> None:
        self.module: nn.Module = build()
        self.optimizer = HybridAdam(self.module.parameters(), lr=1e-2)
        self.window = window

    def train(self, micro_batch: int, updates: bool) -> None:
        (self.loss(micro_batch) / self.window).backward()
        if updates:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def loss(self, micro_batch: int) -> Tensor:
        torch.manual_seed(10 * micro_batch)
        loss: Tensor = self.module(torch.randn(4, WIDTH)).square().mean()
        return loss


@on_ranks(1, 2)
@pytest.mark.parametrize("script", BOUNDARIES)
def test_a_script_may_say_which_micro_batch_is_the_last_of_a_window(rank: int, world_size: int, script: str) -> None:
    adam = {"type": "HybridAdam", "params": {"lr": 1e-2}}
    engine, plain, came, updates = engine_of(gradient_accumulation_steps=3, optimizer=adam), Plain(3), 0, []
    for micro_batch, boundary in enumerate(BOUNDARIES[script]):
        engine.set_gradient_accumulation_boundary(boundary)
        came += 1
        due = came >= 3 if boundary is None else boundary
        # It may be asked before the forward, between backward and step, and there only.
        assert engine.is_gradient_accumulation_boundary() == due
        loss = loss_of(engine, 0, micro_batch)
        assert torch.equal(loss, plain.loss(micro_batch))
        engine.backward(loss)
        assert engine.is_gradient_accumulation_boundary() == due
        engine.step()
        assert engine.was_step_applied() == due
        plain.train(micro_batch, due)
        updates.append(due)
        came = 0 if due else came
    assert engine.global_steps == sum(updates)
    assert_same(weights_of(engine.model), weights_of(plain.module))


@on_ranks(1, 2)
def test_one_step_may_follow_all_micro_batches_of_a_window(rank: int, world_size: int) -> None:
    """DeepSpeed's own example of `set_gradient_accumulation_boundary`, and of `coalesce_grad_reduction`."""
    by_hand, coalesced, its = (engine_of(gradient_accumulation_steps=3) for _ in range(3))
    for window in range(2):
        micro_batches = range(3 * window, 3 * window + 3)
        for micro_batch in micro_batches:
            by_hand.set_gradient_accumulation_boundary(micro_batch == micro_batches[-1])
            by_hand.backward(loss_of(by_hand, rank, micro_batch))
        by_hand.step()
        with coalesced.coalesce_grad_reduction():
            for micro_batch in micro_batches:
                coalesced.backward(loss_of(coalesced, rank, micro_batch))
            with pytest.raises(GeminiError, match="call it after the block"):
                coalesced.step()
            with pytest.raises(GeminiError, match="inside another one"), coalesced.coalesce_grad_reduction():
                pass
        coalesced.step()
        for micro_batch in micro_batches:
            train(its, rank, micro_batch)
    for engine in (by_hand, coalesced):
        assert engine.global_steps == 2
    assert_same(weights_of(by_hand.model), weights_of(its.model))
    for name, value in weights_of(its.model).items():
        # Under `no_sync()` each rank adds before the ranks do: another order of the same sums.
        torch.testing.assert_close(coalesced.state_dict()[name], value, rtol=0, atol=0 if world_size == 1 else 1e-6)


def loss_of(engine: DeepSpeedEngine, rank: int, micro_batch: int) -> Tensor:
    torch.manual_seed(10 * micro_batch + rank)
    loss: Tensor = engine.forward(torch.randn(4, WIDTH)).square().mean()
    return loss


def test_coalesced_micro_batches_are_a_window_however_many_they_are() -> None:
    engine = engine_of(gradient_accumulation_steps=3)
    for num_steps in (1, 2):
        with engine.coalesce_grad_reduction():
            engine.backward(loss_of(engine, 0, num_steps))
        engine.step()
        assert engine.global_steps == num_steps
    with engine.coalesce_grad_reduction():
        pass
    train(engine, 0, 5)  # the first of three
    assert engine.global_steps == 2 and engine.is_window_open()


def test_a_step_too_many_does_not_use_half_a_window() -> None:
    engine = engine_of(gradient_accumulation_steps=2)
    train(engine, 0, 0)
    engine.step()
    engine.set_gradient_accumulation_boundary(True)
    train(engine, 0, 1)
    engine.step()
    assert engine.global_steps == 1


def test_the_script_may_divide_the_loss_itself() -> None:
    divided, plain = (engine_of(gradient_accumulation_steps=2) for _ in range(2))
    for micro_batch in range(2):
        loss = divided.backward(loss_of(divided, 0, micro_batch) / 2, scale_wrt_gas=False)
        assert torch.equal(loss, plain.backward(loss_of(plain, 0, micro_batch)))
        divided.step()
        plain.step()
    assert_same(weights_of(divided.model), weights_of(plain.model))


def test_the_number_of_micro_batches_is_set() -> None:
    engine = engine_of()
    engine.set_gradient_accumulation_steps(2)
    assert engine.get_batch_info() == (8, 4, 2)
    train(engine, 0, 0)
    assert not engine.was_step_applied()
    with pytest.raises(GeminiError, match=r"set_gradient_accumulation_steps\(\) inside a window"):
        engine.set_gradient_accumulation_steps(1)
    train(engine, 0, 1)
    assert engine.was_step_applied()
    for wrong in (0, True, 1.5):
        with pytest.raises(ValueError, match="an integer of at least 1"):
            engine.set_gradient_accumulation_steps(wrong)  # type: ignore[arg-type]


class Regression(Mlp):
    """Returns its loss first, as models of loops with `train_batch` do."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        out = super().forward(x)
        return (out - y).square().mean(), out


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= len(self):
            raise IndexError
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), torch.randn(WIDTH, generator=generator)


def micro_batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        for first in range(2):
            samples = [Pairs()[8 * first + 4 * rank + number] for number in range(4)]
            yield torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


@on_ranks(1, 2)
def test_a_whole_window_is_trained_by_one_call(rank: int, world_size: int) -> None:
    config = {"device": "emulated", "rank_timeout": 60.0, "optimizer": ADAM}
    config |= {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    engine, its = (deepspeed.initialize(model=build(Regression), config=config)[0] for _ in range(2))
    batches, same = micro_batches(rank), micro_batches(rank)
    for step in range(2):
        mean = engine.train_batch(batches)
        losses = []
        for _ in range(2):
            loss, _ = its(*next(same))
            its.backward(loss)
            its.step()
            losses.append(float(loss))
        assert float(mean) == pytest.approx(sum(sum(each) for each in gathered(losses)) / 2 / world_size)
        assert engine.global_steps == its.global_steps == step + 1
    assert_same(weights_of(engine.model), weights_of(its.model))
    with pytest.raises(ValueError, match="give data_iter="):
        engine.train_batch()


@on_ranks(1, 2)
def test_loaders_give_each_rank_its_part(rank: int, world_size: int) -> None:
    config = {"device": "emulated", "rank_timeout": 60.0, "optimizer": ADAM, "train_micro_batch_size_per_gpu": 4}
    engine, _, loader, _ = deepspeed.initialize(model=build(Regression), training_data=Pairs(), config=config)
    assert engine.training_dataloader is loader
    assert len(loader) == 4 // world_size
    for _ in range(5):  # more than an epoch
        assert bool(engine.train_batch().isfinite())
    assert engine.global_steps == 5
    seen = [x for batch in engine.deepspeed_io(Pairs(), batch_size=2, route="eval") for x in batch[0][:, 0].tolist()]
    everyone = sorted(x for each in gathered(seen) for x in each)
    assert everyone == sorted(float(x[0]) for x, _ in Pairs())
    assert (engine.data_parallel_group is None) == (world_size == 1)
    if world_size > 1:
        count = torch.ones(1)
        dist.all_reduce(count, group=engine.data_parallel_group)
        assert int(count) == engine.world_size == world_size


def test_what_a_script_asks_of_stage_and_scale() -> None:
    engine = engine_of(stage=2, steps_per_print=7)
    assert engine.zero_optimization() and engine.zero_optimization_stage() == 2
    assert engine.zero_optimization_partition_gradients() and not engine.zero_optimization_partition_weights()
    assert not engine_of(stage=0).zero_optimization()
    assert engine.steps_per_print() == 7 and engine_of().steps_per_print() is None
    assert (engine.cur_scale, engine.dynamic_loss_scale()) == (1.0, False)
    half = engine_of(dtype="fp16", loss_scale={"initial_scale": 4.0})
    assert (half.cur_scale, half.dynamic_loss_scale()) == (4.0, True)
    scaled = half.scale(torch.ones(()))
    assert float(scaled) == 4.0
    static = {"initial_scale": 8.0, "min_scale": 8.0, "max_scale": 8.0}
    assert not engine_of(dtype="fp16", loss_scale=static).dynamic_loss_scale()


@on_ranks(1, 2)
def test_whole_weights_are_on_rank_0(rank: int, world_size: int) -> None:
    engine = engine_of(stage=3)
    whole = weights_of(engine.model)
    found = engine._zero3_consolidated_16bit_state_dict()
    assert (found is None) == (rank > 0)
    next(engine.module.parameters()).requires_grad_(False)
    trained = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    if found is not None and trained is not None:
        assert_same(found, whole)
        assert whole.keys() - trained.keys() == {next(iter(whole))}


def test_a_script_writes_values_of_its_own_beside_the_engines(tmp_path: Path) -> None:
    files = {"json_lines": {"output_path": str(tmp_path), "job_name": "run"}}
    engine = engine_of(monitors=files)
    assert engine.monitor.enabled and not engine_of().monitor.enabled
    engine_of().monitor.write_events([("accuracy", 0.5, 1)])
    engine.monitor.write_events([("accuracy", 0.25, 3), ("tokens", 7, 3)])
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [(line["step"], line.get("accuracy"), line.get("tokens")) for line in lines] == [
        (3, 0.25, None),
        (3, None, 7),
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("eval_batch", r"call engine\(batch\) under torch.no_grad\(\)"),
        ("zero_reduce_bucket_size", "engine.model.settings"),
        ("random_ltd_enabled", "in the script's own dataset"),
        ("get_wall_clock_timers", "torch.profiler"),
    ],
)
def test_a_name_of_deepspeeds_engine_that_is_not_here_says_what_to_use(name: str, words: str) -> None:
    engine: Any = engine_of()
    with pytest.raises(AttributeError, match=f"DeepSpeedEngine has no '{name}': .*{words}"):
        getattr(engine, name)
    assert not hasattr(engine, name)


def test_an_attribute_of_the_module_comes_before_advice() -> None:
    module = build()
    module.timers = "mine"
    config = {"device": "emulated", "optimizer": ADAM}
    assert deepspeed.initialize(model=module, config=config)[0].timers == "mine"
