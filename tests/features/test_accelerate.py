"""An ordinary Accelerate script with another import: it trains sharded, saves whole files and goes on from them."""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gemini import RemoteRankError, ShardedModel, ShardedOptimizer, UnsupportedError
from gemini.integrations.accelerate import Accelerator
from gemini.ranks import watchdog
from optim import HybridAdam
from tests.harness.on_ranks import on_ranks
from tests.harness.shared_folder import shared_folder
from tests.zoo.hf_models import gpt2
from tests.zoo.hf_trainers import on_a_machine_without_gpus
from tests.zoo.mlp import CHUNK_NUMEL, assert_same, build, inputs
from tests.zoo.whole import matrices_and_rest

SMALL = {"device": "emulated", "chunk_size": CHUNK_NUMEL, "tensor_placement_policy": "cpu"}


def _loader() -> DataLoader[Any]:
    """18 samples in batches of 2, in an order that is shuffled and the same on all ranks."""
    data = TensorDataset(torch.cat([inputs(step) for step in range(3)])[:18])
    return DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.flip(-1)).square().mean()


class Script:
    """A user's script, up to its accelerator."""

    def __init__(self, accelerator: Any, make_optimizer: Callable[..., Any] = HybridAdam) -> None:
        self.accelerator = accelerator
        model = build()
        optimizer = make_optimizer(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        prepared = accelerator.prepare(model, optimizer, _loader(), schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared

    def epoch(self, clip: float | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's batch, and the losses of all ranks."""
        accelerator = self.accelerator
        for (x,) in self.loader:
            with accelerator.accumulate(self.model):
                loss = _loss(self.model, x)
                accelerator.backward(loss)
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), clip)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                yield x, accelerator.gather_for_metrics(loss.detach()[None])

    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.accelerator.unwrap_model(self.model).state_dict().items()}

    def close(self) -> None:
        if isinstance(self.model, ShardedModel):
            self.model.close()


def _ours(**arguments: Any) -> Any:
    return Accelerator(cpu=True, **{"gemini": SMALL, **arguments})


def _muon_and_adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, rest = matrices_and_rest(model)
    return [torch.optim.Muon(matrices, lr=0.02), HybridAdam(rest, lr=1e-2)]


@on_ranks(1, 2)
def test_a_list_of_optimizers_is_prepared_as_one_and_each_schedule_drives_its_own(rank: int, world_size: int) -> None:
    module = build()
    optimizers = _muon_and_adam(module)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, gamma) for each, gamma in zip(optimizers, (0.5, 0.25))]
    accelerator = _ours(step_scheduler_with_optimizer=False)
    model, optimizer, *schedules = accelerator.prepare(module, optimizers, *schedules)
    reference = ShardedModel(build(), **SMALL)
    by_hand = ShardedOptimizer(reference, _muon_and_adam(reference))
    for step in range(3):
        accelerator.backward(_loss(model, inputs(step)))
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        by_hand.backward(_loss(reference, inputs(step)))
        by_hand.clip_grad_norm_(0.1)
        by_hand.step()
        for schedule in schedules:
            schedule.step()
        for group, (rate, gamma) in zip(by_hand.param_groups, [(0.02, 0.5), (1e-2, 0.25)], strict=True):
            group["lr"] = rate * gamma ** (step + 1)
    assert_same(dict(model.state_dict()), dict(reference.state_dict()))
    model.close()
    reference.close()


@pytest.mark.sampled(2)
@on_ranks(1, 2, soak=(3,))
@pytest.mark.parametrize("mixed", ["no", "bf16", "fp16"])
def test_a_script_trains_as_the_low_level_api_by_hand(rank: int, world_size: int, mixed: str) -> None:
    """Accumulation, clipping and the schedule too, bit for bit; batches are this rank's."""
    script = Script(_ours(mixed_precision=mixed, gradient_accumulation_steps=2))
    batches, losses = zip(*script.epoch(clip=0.1), strict=True)
    assert script.accelerator.mixed_precision == mixed

    dtype = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}[mixed]
    casts = None if dtype is None else {"": dtype, "*": torch.float32}
    model = ShardedModel(build(), dtype=casts, **SMALL)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for number, x in enumerate(batches):
        loss = _loss(model, x)
        assert loss.dtype == torch.float32
        optimizer.backward(loss / 2)
        if number % 2 == 1 or number == len(batches) - 1:
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            for _ in range(world_size):  # Accelerate's schedules count the steps of one process
                schedule.step()
        mine = losses[number][rank if len(losses[number]) > rank else 0]
        assert torch.equal(mine, loss.detach())
    assert script.schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    assert_same(script.weights(), dict(model.state_dict()))
    script.close()
    model.close()


@pytest.mark.parametrize("steps", [1, 2])
def test_one_rank_has_the_bits_of_plain_accelerate(steps: int) -> None:
    runs = []
    for accelerator in (_ours, lambda **arguments: accelerate.Accelerator(cpu=True, **arguments)):
        script = Script(accelerator(gradient_accumulation_steps=steps))
        losses = torch.cat([loss for _ in range(2) for _, loss in script.epoch()])
        runs.append(script.weights() | {"losses": losses, "lr": torch.tensor(script.schedule.get_last_lr())})
        script.close()
    assert_same(*runs)


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("whole", [False, True], ids=["parts", "whole"])
@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_training_goes_on_from_a_saved_state(rank: int, world_size: int, mixed: str, whole: bool) -> None:
    """In new objects with other weights, as a new process would make them."""
    with shared_folder() as folder:
        first = Script(_ours(mixed_precision=mixed, save_whole_state=whole))
        second = Script(_ours(mixed_precision=mixed))
        list(first.epoch())
        written: list[dict[str, Any]] = []
        first.accelerator.register_save_state_pre_hook(lambda *_: written.append(first.optimizer.state_dict()))
        first.accelerator.save_state(folder)
        assert bool(written[0]) == (whole and rank == 0)  # the others spare their hosts
        assert first.optimizer.state_dict()["state"]
        next(iter(second.epoch()))
        second.accelerator.load_state(folder)
        assert (folder / "gemini_0").is_dir() is not whole
        if whole:
            wanted = {name: value.shape for name, value in build().state_dict().items()}
            saved = safetensors.torch.load_file(folder / "model.safetensors")
            assert {name: value.shape for name, value in saved.items()} == wanted
    runs = []
    for each in (first, second):
        each.accelerator.backward(_loss(each.model, inputs(9 + rank)))
        each.optimizer.step()
        runs.append(each.weights() | {"exp_avg": each.optimizer.state_dict()["state"][0]["exp_avg"]})
        each.close()
    assert_same(*runs)


@pytest.mark.parametrize("saved_by_us", [True, False])
def test_a_saved_state_loads_with_and_without_us(saved_by_us: bool, tmp_path: Path) -> None:
    makers: list[Callable[[], Any]] = [partial(_ours, save_whole_state=True), partial(accelerate.Accelerator, cpu=True)]
    saver, loader = (Script(make()) for make in (makers if saved_by_us else makers[::-1]))
    list(saver.epoch())
    saver.accelerator.save_state(tmp_path)
    loader.accelerator.load_state(tmp_path)
    for each in (saver, loader):
        each.accelerator.backward(_loss(each.model, inputs(9)))
        each.optimizer.step()
    assert_same(saver.weights(), loader.weights())


def test_two_models_with_two_optimizers_have_the_bits_of_plain_accelerate() -> None:
    """As for a generator and its critic: each optimizer becomes that of its model."""
    runs = []
    for accelerator in (_ours(), accelerate.Accelerator(cpu=True)):
        models = [build(), build()]
        optimizers = [HybridAdam(model.parameters(), lr=rate) for model, rate in zip(models, (1e-2, 1e-3))]
        schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
        prepared = accelerator.prepare(*optimizers, *models, *schedules)  # in whatever order
        for number in (0, 1):
            optimizer, model, schedule = prepared[number::2]
            for step in range(2):
                accelerator.backward(_loss(model, inputs(step)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        runs.append({f"{n}.{name}": value for n in (2, 3) for name, value in prepared[n].state_dict().items()})
    assert_same(*runs)


def test_param_groups_stay_and_a_model_may_be_prepared_before_its_optimizer() -> None:
    runs = []
    for accelerator in (_ours(), accelerate.Accelerator(cpu=True)):
        model = accelerator.prepare(build())
        halves = [{"params": list(model.parameters())[:6], "lr": 1e-3}, {"params": list(model.parameters())[6:]}]
        optimizer = accelerator.prepare(HybridAdam(halves, lr=1e-2, weight_decay=0.1))
        accelerator.backward(_loss(model, inputs(0)))
        optimizer.step()
        assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(1e-3, 0.1), (1e-2, 0.1)]
        runs.append(dict(model.state_dict()))
    assert_same(*runs)


@pytest.mark.filterwarnings("ignore:step 1 skipped")
def test_a_skipped_step_leaves_the_schedule_where_it_is() -> None:
    script = Script(_ours(mixed_precision="fp16"))
    for factor, skipped, rate in ((1e30, True, 1e-2), (1.0, False, 1e-2), (1.0, False, 5e-3)):
        script.accelerator.backward(_loss(script.model, inputs(0)) * factor)
        script.optimizer.step()
        script.schedule.step()
        assert script.accelerator.optimizer_step_was_skipped is skipped
        assert script.schedule.get_last_lr() == [rate]


@pytest.mark.filterwarnings("ignore:step 1 skipped")
def test_a_schedule_follows_its_own_optimizer() -> None:
    accelerator = _ours(mixed_precision="fp16")
    models = [build(), build()]
    optimizers = [HybridAdam(model.parameters(), lr=1e-2) for model in models]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    prepared = accelerator.prepare(*models, *optimizers, *schedules)
    for number, factor in enumerate((1e30, 1.0)):
        model, optimizer, schedule = prepared[number::2]
        optimizer.optimizer.scale(_loss(model, inputs(0)) * factor).backward()
        optimizer.step()
        schedule.step()
    assert [schedule.get_last_lr() for schedule in prepared[4:]] == [[1e-2], [5e-3]]


@on_ranks(1, 2)
def test_whole_models_are_saved_as_their_own_class_and_tied_weights_once(rank: int, world_size: int) -> None:
    accelerator = _ours(gemini={**SMALL, "chunk_size": 16384}, save_whole_state=True)
    plain: Any = gpt2().model
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    model = accelerator.prepare(plain)
    unwrapped = accelerator.unwrap_model(model)
    assert unwrapped is plain
    state = accelerator.get_state_dict(model)
    assert list(state) == (list(before) if rank == 0 else [])
    with shared_folder() as folder:
        accelerator.save_model(model, folder / "model")
        unwrapped.save_pretrained(
            folder / "pretrained", is_main_process=accelerator.is_main_process, save_function=accelerator.save
        )
        accelerator.save_state(folder / "state")
        for name in ("model", "pretrained", "state"):
            saved = safetensors.torch.load_file(folder / name / "model.safetensors")
            assert_same(saved, {name: value for name, value in before.items() if name != "lm_head.weight"})
    model.close()


@on_ranks(1, 2)
def test_one_rank_alone_samples_with_gathered_weights(rank: int, world_size: int) -> None:
    accelerator = Accelerator(cpu=True)
    plain = build()
    module, wanted = build(), plain(inputs(0)).detach()
    model, head = accelerator.prepare(module, nn.Linear(2, 2))
    for given in (model, module):
        with accelerator.gathered_for_generation(given) as whole, torch.no_grad():
            assert whole is module
            if accelerator.is_main_process:
                assert torch.equal(whole(inputs(0)), wanted)
    model.close()
    head.close()


@on_ranks(2)
def test_who_cannot_write_a_state_tells_every_rank(rank: int, world_size: int) -> None:
    script = Script(_ours())
    with shared_folder() as folder:
        if rank == 0:
            (folder / "optimizer.bin").mkdir()
        dist.barrier()
        with pytest.raises(RuntimeError if rank == 0 else RemoteRankError, match="Is a directory"):
            script.accelerator.save_state(folder)
        if rank == 0:
            (folder / "optimizer.bin").rmdir()
        dist.barrier()
        assert len(list(script.epoch())) == 5
        script.accelerator.save_state(folder)
        assert (folder / "optimizer.bin").exists()  # on every rank as soon as it returns
    script.close()


@on_ranks(2)
def test_who_cannot_write_the_state_of_one_of_two_models_tells_those_that_wait_in_the_other(
    rank: int, world_size: int
) -> None:
    accelerator = _ours(gemini={**SMALL, "rank_timeout": 20})
    models = [build(), build()]
    prepared = accelerator.prepare(*models, *(HybridAdam(model.parameters()) for model in models))
    with shared_folder() as folder, mock.patch.object(watchdog, "POLL_S", 0.05):
        if rank == 0:
            (folder / "optimizer.bin").mkdir()
        dist.barrier()
        with pytest.raises(RuntimeError if rank == 0 else RemoteRankError, match="Is a directory"):
            accelerator.save_state(folder)
        if rank == 0:
            (folder / "optimizer.bin").rmdir()
        dist.barrier()
        accelerator.save_state(folder)  # both models have started together again
    for model in prepared[:2]:
        model.close()


@on_ranks(2)
@pytest.mark.parametrize("missing", ["model.safetensors", "scheduler.bin"])
def test_who_cannot_read_a_state_tells_every_rank(rank: int, world_size: int, missing: str) -> None:
    """Each rank has a folder of its own, as on hosts without a shared disk."""
    script = Script(_ours(save_whole_state=True))
    with shared_folder() as folder:
        script.accelerator.save_state(folder / "saved")
        mine = Path(shutil.copytree(folder / "saved", folder / str(rank)))
        if rank == 1:
            (mine / missing).unlink()
        with pytest.raises(FileNotFoundError if rank == 1 else RemoteRankError, match="No such file"):
            script.accelerator.load_state(mine)
        script.accelerator.load_state(folder / "saved")
    assert len(list(script.epoch())) == 5
    script.close()


@on_ranks(2)
def test_no_sync_adds_micro_batches_up_before_they_travel(rank: int, world_size: int) -> None:
    script = Script(_ours())
    reference = build()
    with script.accelerator.no_sync(script.model):
        script.accelerator.backward(_loss(script.model, inputs(rank)))
    script.accelerator.backward(_loss(script.model, inputs(2 + rank)))
    for number in range(4):
        (_loss(reference, inputs(number)) / 2).backward()
    wanted = dict(reference.named_parameters())
    for name, parameter in script.model.named_parameters():
        torch.testing.assert_close(parameter.grad.clone(), wanted[name].grad, rtol=0, atol=1e-7)  # fp32 sums of 1e-2
    script.close()


def test_a_deepspeed_json_says_what_to_shard(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    auto = {"gradient_accumulation_steps": 3, "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 0.5}
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, **auto}))
    accelerator = Accelerator(cpu=True, gemini=path, mixed_precision="bf16")
    model, optimizer = accelerator.prepare(model := build(), HybridAdam(model.parameters()))
    assert (model.settings.stage, accelerator.gradient_accumulation_steps) == (2, 3)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    accelerator.backward(_loss(model, inputs(0)) * 1e3)
    optimizer.step()
    assert optimizer.optimizer.last_step.clip < 1
    assert AcceleratorState().mixed_precision == "no"


@on_ranks(2)
def test_ranks_that_accelerate_does_not_know_are_told_what_to_say(rank: int, world_size: int) -> None:
    """Without a GPU and without cpu=True each rank would be the first of one, and train on all of the data."""
    with on_a_machine_without_gpus():
        with pytest.raises(UnsupportedError, match=r"2 ranks, of which Accelerate knows 1: .*Accelerator\(cpu=True\)"):
            Accelerator(gemini=SMALL)


@on_ranks(1, 2)
@pytest.mark.parametrize("whole", [False, True], ids=["parts", "whole"])
def test_a_saving_hook_may_take_a_model_off_the_list(rank: int, world_size: int, whole: bool) -> None:
    """As in diffusers' scripts, which write the model themselves."""
    with shared_folder() as folder:
        accelerator = Accelerator(cpu=True, gemini={}, save_whole_state=whole)
        module = torch.nn.Linear(4, 4)
        model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters()))
        taken = []

        def saving(models: list[Any], weights: list[Any], output_dir: str) -> None:
            assert len(models) == len(weights)
            for _ in models:
                taken.append(weights.pop())

        accelerator.register_save_state_pre_hook(saving)
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        expected = model.state_dict()
        accelerator.save_state(str(folder / "state"))
        assert len(taken) == 1 and not list((folder / "state").glob("*.safetensors"))
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        if not whole:
            accelerator.load_state(str(folder / "state"))
            assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@on_ranks(4)
def test_a_parallelism_config_says_how_many_ranks_share_the_shards(rank: int, world_size: int) -> None:
    """HSDP of 2 x 2, as FSDP2 has it of the same sizes; and all ranks where there are no replicas."""
    found = []
    for sizes, config in (
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, {}),
        ({}, {"shard_group_size": 2}),
        ({"dp_shard_size": 4}, {}),
    ):
        AcceleratorState._reset_state(True)
        parallelism = ParallelismConfig(**sizes) if sizes else None
        script = Script(_ours(parallelism_config=parallelism, gemini={**SMALL, **config}))
        losses = torch.cat([losses for _, losses in script.epoch()])
        found.append((losses, script.weights(), script.model.chunk_manager.chunks[0].layout))
        script.close()
    assert [layout.world_size for *_, layout in found] == [2, 2, 4]
    assert torch.equal(found[0][0], found[1][0])
    assert_same(found[0][1], found[1][1])
    for name, value in found[2][1].items():
        torch.testing.assert_close(value, found[0][1][name])
