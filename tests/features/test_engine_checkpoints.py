"""Engines and Trainers that are saved, stopped and started again."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gemini
from gemini import deepspeed, state_hash
from gemini.engine.trainer import CheckpointHook, Hook
from tests.harness.on_ranks import gathered, on_ranks
from tests.harness.shared_folder import shared_folder

CONFIG: dict[str, Any] = {
    "device": "emulated",
    "chunk_size": 512,
    "gradient_accumulation_steps": 2,
    "clip_grad_norm": 1.0,
    "optimizer": {"type": "HybridAdam", "params": {"lr": 1e-2}},
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 4))


def make_engine() -> gemini.Engine:
    schedule = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # noqa: E731
    model = net()
    return gemini.initialize(model, criterion=nn.MSELoss(), lr_scheduler=schedule, config=CONFIG, verbose=False)[0]


def data(rank: int, shuffle: bool = True) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(20, 16, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4] * 0.5), batch_size=2, shuffle=shuffle)


def micro_batch(engine: gemini.Engine, number: int) -> float:
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(10 * number + engine.model.rank))
    loss = engine.criterion(engine(x), x[:, :4])
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


@on_ranks(1, 2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_engine_goes_on_with_the_same_bits(rank: int, world_size: int, asynchronous: bool) -> None:
    with shared_folder() as folder:
        engine = make_engine()
        for number in range(5):  # a window is open
            micro_batch(engine, number)
        engine.save_checkpoint(folder, client_state={"seen": 5}, asynchronous=asynchronous)
        expected = [micro_batch(engine, number) for number in range(5, 10)]
        if asynchronous:
            engine.save_checkpoint(folder, "later")
        resumed = make_engine()
        micro_batch(resumed, 77)
        path, state = resumed.load_checkpoint(folder, "global_step2")
        assert state == {"seen": 5} and path == str(folder / "global_step2")
        assert (resumed.global_steps, resumed.micro_steps, resumed.is_window_open()) == (2, 5, True)
        assert [micro_batch(resumed, number) for number in range(5, 10)] == expected
        assert resumed.lr_scheduler.state_dict() == engine.lr_scheduler.state_dict()
        assert state_hash(resumed.model, resumed.optimizer) == state_hash(engine.model, engine.optimizer)


def test_a_deepspeed_script_finds_no_checkpoint_and_begins_anew(tmp_path: Path) -> None:
    engine = deepspeed.initialize(model=net(), config=CONFIG)[0]
    with pytest.warns(UserWarning, match="there is no checkpoint"):
        assert engine.load_checkpoint(tmp_path) == (None, {})
    assert engine.save_checkpoint(tmp_path, client_state={"epoch": 1})
    assert (tmp_path / "latest").read_text() == "global_step0\n"
    assert engine.load_checkpoint(tmp_path)[1] == {"epoch": 1}
    with pytest.raises(gemini.UnsupportedError, match="save_latest"):
        engine.save_checkpoint(tmp_path, save_latest=False)


class Losses(Hook):
    def __init__(self, stop_after: int | None = None) -> None:
        self.losses: list[float] = []
        self.stop_after = stop_after

    def after_micro_batch(self, trainer: Any, batch: Any, outcome: Any) -> None:
        loss: Tensor = outcome.loss
        self.losses.append(float(loss.detach()))

    def after_step(self, trainer: Any) -> None:
        if trainer.engine.global_steps == self.stop_after and trainer.engine.model.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)


@on_ranks(1, 2)
@pytest.mark.parametrize("every", [{"every_steps": 3}, {"every_minutes": 1e-9}, {}], ids=["steps", "minutes", "end"])
def test_a_stopped_training_goes_on_in_the_middle_of_an_epoch(
    rank: int, world_size: int, every: dict[str, Any]
) -> None:
    """SIGTERM on one rank stops all behind a step; random numbers, the shuffle and dropout go on."""
    torch.manual_seed(3 + rank)
    whole = Losses()
    trainer = gemini.Trainer(make_engine())
    trainer.fit(data(rank), epochs=3, hooks=[whole])
    expected = state_hash(trainer.engine.model, trainer.engine.optimizer)
    with shared_folder() as folder:
        torch.manual_seed(3 + rank)
        first, second = Losses(stop_after=7), Losses()
        trainer = gemini.Trainer(make_engine())
        trainer.fit(data(rank), epochs=3, hooks=[first, CheckpointHook(folder, resume="latest", **every)])
        assert len(first.losses) == 14
        torch.manual_seed(99)
        trainer = gemini.Trainer(make_engine())
        trainer.fit(data(rank), epochs=3, hooks=[second, CheckpointHook(folder, resume="latest", **every)])
        assert first.losses + second.losses == whole.losses
        assert set(gathered(state_hash(trainer.engine.model, trainer.engine.optimizer))) == {expected}
        assert (folder / "latest").read_text() == "global_step15\n"
        third = Losses()
        trainer = gemini.Trainer(make_engine())
        trainer.fit(data(rank), epochs=3, hooks=[third, CheckpointHook(folder, resume="latest")])
        assert not third.losses, "nothing was left to train"


def rounded(master: Tensor) -> Tensor:
    """Half up on the bit pattern, as every step rounds a master to bf16."""
    return ((master.view(torch.int32) + 0x8000) & ~0xFFFF).view(torch.float32)


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [1, 3])
def test_masters_are_the_files_or_made_of_the_weights_again_as_asked(rank: int, world_size: int, stage: int) -> None:
    with shared_folder() as folder:
        masters = {}
        for asked in (None, True, False):
            how = {"dtype": "bf16", "cast_inputs": True, "stage": stage, "load_from_fp32_weights": asked is not False}
            config = {**CONFIG, **how}
            engine = gemini.initialize(net(), criterion=nn.MSELoss(), config=config, verbose=False)[0]
            if asked is None:
                for number in range(4):
                    micro_batch(engine, number)
                engine.save_checkpoint(folder)
            else:
                engine.load_checkpoint(folder)
            masters[asked] = {
                name: deepspeed.utils.safe_get_full_fp32_param(parameter)
                for name, parameter in engine.module.named_parameters()
            }
        assert all(torch.equal(masters[True][name], its) for name, its in masters[None].items())
        assert all(torch.equal(masters[False][name], rounded(its)) for name, its in masters[None].items())
        assert any(not torch.equal(masters[False][name], its) for name, its in masters[None].items())
