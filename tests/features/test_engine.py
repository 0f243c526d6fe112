"""The engine beside the same training by hand: `ShardedModel`, `ShardedOptimizer`, a scheduler, a loop."""

import json
import tempfile
import unittest
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gemini
from gemini import ConfigError, DivergenceError, Engine, ShardedModel, ShardedOptimizer, deepspeed, state_hash
from optim import HybridAdam
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import CHUNK_NUMEL, WIDTH, Mlp, assert_same, build, weights_of

MODEL: dict[str, Any] = {"device": "emulated", "chunk_size": CHUNK_NUMEL, "rank_timeout": 60.0}
ADAM = {"type": "HybridAdam", "params": {"lr": 1e-2, "weight_decay": 0.1}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3}}
FULL = {
    **MODEL,
    "stage": 2,
    "optimizer": ADAM,
    "scheduler": WARMUP,
    "clip_grad_norm": 0.05,
    "gradient_accumulation_steps": 3,
}


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (run(x) - x.flip(-1)).square().mean()


def engine_of(config: dict[str, Any], make: Callable[[], nn.Module] = Mlp, **arguments: Any) -> Engine:
    return gemini.initialize(build(make), config=config, verbose=False, **arguments)[0]


def rate(step: int) -> float:
    """The documented warmup of 3 steps to 1e-2, before optimizer step `step`."""
    return [0.0, 0.0, 0.006309297535714575, 0.01][min(step, 3)]


def by_hand(rank: int, windows: int) -> tuple[ShardedModel, list[float]]:
    """What `FULL` says, in the low-level API."""
    model = ShardedModel(build(), stage=2, **MODEL)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2, weight_decay=0.1), clip_grad_norm=0.05)
    norms = []
    for window in range(windows):
        for group in optimizer.param_groups:
            group["lr"] = rate(window)
        for micro in range(3):
            optimizer.backward(loss_of(model, inputs(rank, 3 * window + micro)) / 3)
        optimizer.step()
        norms.append(float(optimizer.grad_norm))
    return model, norms


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("form", ["colossal", "deepspeed"])
def test_an_engine_trains_as_the_same_settings_by_hand(rank: int, world_size: int, form: str) -> None:
    if form == "colossal":
        engine, _, _, schedule = gemini.initialize(build(), config=FULL, verbose=False)
    else:
        engine, optimizer, _, schedule = deepspeed.initialize(model=build(), config=FULL)
        assert optimizer is engine.optimizer
    norms = []
    for step in range(12):
        engine.zero_grad()  # in the middle of a window it must not touch gradients
        assert schedule.get_last_lr() == pytest.approx([rate(step // 3)])
        engine.backward(loss_of(engine, inputs(rank, step)))
        assert engine.is_gradient_accumulation_boundary() == (step % 3 == 2)
        engine.step()
        if step % 3 == 2:
            norms.append(engine.grad_norm)
    model, its = by_hand(rank, 4)
    assert norms == its
    assert state_hash(engine.model) == state_hash(model)
    assert (engine.global_steps, engine.skipped_steps, engine.micro_steps) == (4, 0, 12)


def test_one_rank_trains_as_plain_pytorch_does() -> None:
    engine = engine_of({**MODEL, "optimizer": ADAM, "gradient_accumulation_steps": 2})
    plain = build()
    its = HybridAdam(plain.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(6):
        engine.backward(loss_of(engine, inputs(0, step)))
        engine.step()
        (loss_of(plain, inputs(0, step)) / 2).backward()
        if step % 2:
            its.step()
            its.zero_grad()
    assert_same(weights_of(engine.model), weights_of(plain))


@on_ranks(1, 2)
def test_a_skipped_step_does_not_move_the_schedule(rank: int, world_size: int) -> None:
    engine = engine_of({**MODEL, "dtype": "fp16", "optimizer": ADAM, "scheduler": WARMUP})
    before = weights_of(engine.model)
    engine.backward(engine(inputs(rank, 0).half()).sum() * float("inf"))
    with pytest.warns(UserWarning, match="skipped on all ranks"):
        engine.step()
    assert (engine.global_steps, engine.skipped_steps) == (1, 1)
    assert engine.lr_scheduler.last_epoch == 0
    assert_same(weights_of(engine.model), before)
    engine.backward(engine(inputs(rank, 1).half()).float().square().mean())
    engine.step()
    assert (engine.global_steps, engine.skipped_steps) == (2, 1)
    assert engine.lr_scheduler.last_epoch == 1


def test_a_graph_may_be_used_by_two_backwards() -> None:
    engine, its = (engine_of({**MODEL, "optimizer": ADAM, "gradient_accumulation_steps": 2}) for _ in range(2))
    loss = loss_of(engine, inputs(0, 0))
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    for _ in range(2):
        its.backward(loss_of(its, inputs(0, 0)))
    for each in (engine, its):
        each.step()
    assert engine.global_steps == 1
    assert state_hash(engine.model) == state_hash(its.model)


def test_the_last_window_may_be_closed_before_it_is_full() -> None:
    engine = engine_of({**MODEL, "optimizer": ADAM, "gradient_accumulation_steps": 4})
    before = weights_of(engine.model)
    engine.step(last=True)  # nothing is open
    engine.backward(loss_of(engine, inputs(0, 0)))
    engine.step()
    assert engine.global_steps == 0
    assert_same(weights_of(engine.model), before)
    engine.step(last=True)
    assert engine.global_steps == 1
    plain = build()
    (loss_of(plain, inputs(0, 0)) / 4).backward()
    HybridAdam(plain.parameters(), lr=1e-2, weight_decay=0.1).step()
    assert_same(weights_of(engine.model), weights_of(plain))


@pytest.mark.parametrize("given", ["object", "class", "callable", "config"])
def test_an_optimizer_is_an_object_a_class_a_callable_or_in_the_config(given: str) -> None:
    module, config, optimizer = build(), dict(MODEL), None
    if given == "object":
        optimizer = HybridAdam(module.parameters(), lr=1e-2, weight_decay=0.1)
    elif given == "callable":
        optimizer = partial(HybridAdam, lr=1e-2, weight_decay=0.1)
    else:
        config["optimizer"], optimizer = ADAM, HybridAdam if given == "class" else None
    engine = gemini.initialize(module, optimizer, config=config, verbose=False)[0]
    plain = build()
    its = HybridAdam(plain.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(2):
        engine.backward(loss_of(engine, inputs(0, step)))
        engine.step()
        loss_of(plain, inputs(0, step)).backward()
        its.step()
        its.zero_grad()
    assert_same(weights_of(engine.model), weights_of(plain))


@pytest.mark.filterwarnings("error")
def test_a_schedule_of_the_plain_optimizer_goes_on() -> None:
    module = build()
    optimizer = HybridAdam(module.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine, _, _, its = deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=schedule, config=MODEL)
    assert its is schedule
    rates = []
    for step in range(3):
        rates.append(engine.optimizer.param_groups[0]["lr"])
        engine.backward(loss_of(engine, inputs(0, step)))
        engine.step()
    assert rates == [1.0, 0.5, 0.25]


def test_a_loader_gives_whole_windows_only() -> None:
    loader = DataLoader(TensorDataset(torch.arange(11.0)), batch_size=1)
    config = {**MODEL, "optimizer": ADAM, "gradient_accumulation_steps": 4}
    _, train, test, _ = gemini.initialize(build(), None, None, loader, loader, config=config, verbose=False)
    assert [float(batch) for (batch,) in train] == list(range(8))
    assert len(train) == 8
    assert train.dataset is loader.dataset
    assert test is loader


@on_ranks(2)
def test_a_dataset_becomes_a_loader_of_this_ranks_part(rank: int, world_size: int) -> None:
    config = {**FULL, "train_batch_size": 12}  # 3 windows of 2 ranks: micro-batches of 2
    data = TensorDataset(torch.arange(8.0))
    engine, _, loader, _ = deepspeed.initialize(model=build(), training_data=data, config=config)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (12, 2)
    own = torch.cat([batch for (batch,) in loader])
    assert len(loader) == 2
    every = [torch.empty(4) for _ in range(2)]
    torch.distributed.all_gather(every, own)
    assert sorted(torch.cat(every).tolist()) == list(range(8))


@on_ranks(2)
@pytest.mark.parametrize(
    ("configs", "error", "words"),
    [
        ([{"stage": 1}, {"stage": 2}], DivergenceError, "stage=1 against stage=2"),
        ([{"clip_grad_norm": 1.0}, {}], DivergenceError, "clip_grad_norm is 1.0 against None"),
        ([{}, {"stage": 7}], ConfigError, "stage must be 0, 1, 2 or 3"),
        ([{"stagee": 1}, {}], ConfigError, "stagee"),
    ],
    ids=["stage", "clip", "bad-on-1", "bad-on-0"],
)
def test_ranks_with_other_configs_are_refused_before_a_model_is_made(
    rank: int, world_size: int, configs: list[dict[str, Any]], error: type[Exception], words: str
) -> None:
    module = build()
    with pytest.raises(error, match=words):
        gemini.initialize(module, config={**MODEL, **configs[rank]}, verbose=False)
    assert type(next(module.parameters())) is nn.Parameter


def test_a_scheduler_without_an_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="a scheduler needs an optimizer"):
        gemini.initialize(build(), verbose=False, config={"scheduler": WARMUP})


@pytest.mark.parametrize("form", ["colossal", "deepspeed"])
@pytest.mark.parametrize("kind", ["object", "callable"])
def test_an_optimizer_and_a_schedule_that_are_given_win_over_the_configs(form: str, kind: str) -> None:
    """As in DeepSpeed; the table at the start says what the config has in vain."""
    module = build()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.5)
    if kind == "callable":
        optimizer = partial(torch.optim.SGD, lr=0.5)
    initialize = gemini.initialize if form == "colossal" else deepspeed.initialize
    engine, *_, schedule = initialize(
        model=module,
        optimizer=optimizer,
        lr_scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1),
        config={**MODEL, "optimizer": ADAM, "scheduler": WARMUP},
    )
    assert isinstance(schedule, torch.optim.lr_scheduler.StepLR)
    assert [name for name, _ in engine.config.ignored] == ["optimizer", "scheduler"]
    engine.backward(loss_of(engine, inputs(0, 0)))
    engine.step()
    plain = build()
    loss_of(plain, inputs(0, 0)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    assert_same(weights_of(engine.model), weights_of(plain))


def test_without_an_optimizer_an_engine_evaluates() -> None:
    engine = engine_of(MODEL).eval()
    with torch.no_grad():
        loss = loss_of(engine, inputs(0, 0))
    assert torch.equal(loss, loss_of(build(), inputs(0, 0)))
    for call in (lambda: engine.backward(loss), engine.step):
        with pytest.raises(gemini.UnsupportedError, match="needs an optimizer"):
            call()
    with pytest.raises(gemini.UnsupportedError, match="no criterion"):
        engine.criterion(loss, loss)


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("name", ["weights.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_are_saved_whole_by_one_rank(rank: int, world_size: int, dtype: str, name: str) -> None:
    engine = deepspeed.initialize(model=build(), config={**MODEL, "dtype": dtype})[0]
    folder = [tempfile.mkdtemp()]
    if world_size > 1:
        torch.distributed.broadcast_object_list(folder)
    path = Path(folder[0]) / "new" / name
    assert engine.save_16bit_model(path.parent, name)
    found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    whole = build() if dtype == "fp32" else build().bfloat16()
    assert_same(found, dict(whole.named_parameters()))
    assert {each.dtype for each in found.values()} == {each.dtype for each in whole.parameters()}
    assert [each.name for each in path.parent.iterdir()] == [name]


@on_ranks(1, 2)
def test_weights_are_whole_for_generation_and_gone_after_the_cache_is_emptied(rank: int, world_size: int) -> None:
    engine, its = (engine_of({**MODEL, "stage": 3, "optimizer": ADAM}) for _ in range(2))
    with engine.gathered_for_generation() as module, torch.no_grad():
        assert module is engine.module
        assert torch.equal(module(inputs(0, 0)), build()(inputs(0, 0)))
    loss_of(engine, inputs(rank, 0))
    engine.empty_partition_cache()
    if world_size > 1:
        assert all(chunk.slot is None for chunk in engine.model.chunk_manager.chunks)
    for each in (engine, its):
        each.backward(loss_of(each, inputs(rank, 1)))
        each.step()
    assert state_hash(engine.model, engine.optimizer) == state_hash(its.model, its.optimizer)


@on_ranks(1, 2)
def test_steps_are_told_as_the_config_asks(rank: int, world_size: int) -> None:
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        if world_size > 1:
            torch.distributed.broadcast_object_list(shared)
        folder = shared[0]
        monitors = {name: {"output_path": folder, "job_name": name} for name in ("tensorboard", "json_lines")}
        config = {**FULL, "scheduler": WARMUP, "steps_per_print": 2, "monitors": monitors}
        engine, losses = engine_of(config), []
        with unittest.TestCase().assertLogs("gemini") as told:
            gemini.get_dist_logger().info("started")  # assertLogs wants a line on every rank
            for step in range(9):
                losses.append(float(loss_of(engine, inputs(rank, step)).detach()))
                engine.backward(loss_of(engine, inputs(rank, step)))
                engine.step()
        engine.close()
        lines = [line for line in told.output if "step 2: loss" in line]
        assert len(told.output) - 1 == len(lines) == (1 if rank == 0 else 0)
        if rank == 0:
            written = [json.loads(line) for line in (Path(folder) / "json_lines.jsonl").read_text().splitlines()]
            assert [line["step"] for line in written] == [1, 2, 3]
            assert [line["lr"] for line in written] == pytest.approx([rate(0), rate(1), rate(2)])
            assert written[0]["loss"] == pytest.approx(sum(losses[:3]) / 3, rel=1e-6)
            assert sorted(each.name for each in Path(folder).iterdir()) == ["json_lines.jsonl", "tensorboard"]
            assert len(list((Path(folder) / "tensorboard").iterdir())) == 1, "one rank writes"
        if world_size > 1:
            torch.distributed.barrier()
