"""Checkpoints of Lightning's own kind, and what a sharded LightningModule is between and after Lightning's loops."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from gemini import RemoteRankError, UnsupportedError
from gemini.integrations.lightning import GeminiStrategy
from tests.harness.on_ranks import on_ranks
from tests.harness.shared_folder import shared_folder
from tests.zoo.lightning_modules import Plain, loader, trainer
from tests.zoo.mlp import CHUNK_NUMEL, assert_same, build, inputs

SMALL: dict[str, Any] = {"device": "emulated", "chunk_size": CHUNK_NUMEL, "tensor_placement_policy": "cpu"}


def _ours(**fields: Any) -> GeminiStrategy:
    return GeminiStrategy(**{**SMALL, **fields})


def _weights(module: pl.LightningModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_fit_that_is_resumed_is_the_one_that_went_on(rank: int, world_size: int, precision: Any) -> None:
    """In a new module with other weights, as a new process would make it. Rank 0 writes whole weights and states."""
    with shared_folder() as folder:
        whole, first, second = Plain(), Plain(), Plain()
        trainer(folder / "whole", _ours(), precision=precision, max_epochs=2).fit(whole, loader())
        keeping = ModelCheckpoint(folder / "kept", filename="first")
        trainer(folder, _ours(), precision=precision, callbacks=[keeping]).fit(first, loader())
        saved = torch.load(folder / "kept" / "first.ckpt", weights_only=True)
        assert {name: value.shape for name, value in saved["state_dict"].items()} == {
            f"net.{name}": value.shape for name, value in build().state_dict().items()
        }
        assert saved["optimizer_states"][0]["state"][0]["exp_avg"].shape == (16, 16)
        with torch.no_grad():
            second.net.layers[0].weight.zero_()
        path = str(folder / "kept" / "first.ckpt")
        trainer(folder, _ours(), precision=precision, max_epochs=2).fit(second, loader(), ckpt_path=path)
        assert_same(_weights(second), _weights(whole))
        assert torch.equal(torch.stack(first.losses + second.losses), torch.stack(whole.losses))


@on_ranks(1, 2)
@pytest.mark.parametrize("precision", ["bf16-mixed"])
def test_a_fit_goes_on_from_a_folder_of_parts(rank: int, world_size: int, precision: Any) -> None:
    """The last of two checkpoints, as `save_last` overwrites it; the best one is tested without an optimizer."""
    with shared_folder() as folder:
        whole, first, second, third = (Plain() for _ in range(4))
        trainer(folder / "whole", _ours(), precision=precision, max_epochs=3).fit(whole, loader())
        keeping = ModelCheckpoint(folder / "kept", filename="{epoch}", monitor="epoch", mode="max", save_last=True)
        parts = {"strategy": _ours(state_dict_type="sharded"), "precision": precision}
        trainer(folder, max_epochs=2, callbacks=[keeping], **parts).fit(first, loader())
        dist.barrier() if world_size > 1 else None
        assert sorted(each.name for each in (folder / "kept").iterdir()) == ["epoch=1.ckpt", "last.ckpt"]
        last = folder / "kept" / "last.ckpt"
        assert sorted(each.name for each in last.iterdir()) == ["latest", "lightning.ckpt", "state"]
        assert not torch.load(last / "lightning.ckpt", weights_only=True)["state_dict"]
        with torch.no_grad():
            second.net.layers[0].weight.zero_()
        again = {"strategy": _ours(state_dict_type="sharded"), "precision": precision, "enable_checkpointing": False}
        trainer(folder, max_epochs=3, **again).fit(second, loader(), ckpt_path=str(last))
        assert_same(_weights(second), _weights(whole))
        assert torch.equal(torch.stack(first.losses + second.losses), torch.stack(whole.losses))
        tested = trainer(folder, _ours(), precision=precision, enable_checkpointing=False)
        tested.validate(third, loader(8), ckpt_path=str(last), verbose=False)
        assert_same(_weights(third), _weights(first))


@pytest.mark.parametrize("saved_by_us", [True, False])
def test_plain_lightning_goes_on_from_ours_and_we_from_its_checkpoint(saved_by_us: bool, tmp_path: Path) -> None:
    strategies: list[Callable[[], Any]] = [_ours, lambda: "auto"]
    runs = []
    for strategy in strategies if saved_by_us else strategies[::-1]:
        module = Plain()
        ours = trainer(tmp_path, strategy(), max_epochs=1 + len(runs), enable_checkpointing=False)
        ours.fit(module, loader(), ckpt_path=str(tmp_path / "one.ckpt") if runs else None)
        ours.save_checkpoint(tmp_path / "one.ckpt")  # after the fit, as scripts do
        runs.append(module)
    whole = Plain()
    trainer(tmp_path, max_epochs=2, enable_checkpointing=False).fit(whole, loader())
    assert_same(_weights(runs[1]), _weights(whole))
    loaded = Plain.load_from_checkpoint(tmp_path / "one.ckpt", map_location="cpu", weights_only=False)
    assert_same(_weights(loaded), _weights(whole))


@on_ranks(1, 2)
def test_a_module_is_evaluated_before_and_after_its_fit(rank: int, world_size: int) -> None:
    with shared_folder() as folder:
        module, reference = Plain(), build()
        first = trainer(folder, _ours(), enable_checkpointing=False)
        before = first.validate(module, loader(8), verbose=False)
        x = inputs(0)
        wanted = torch.stack(
            [(reference(x[n : n + 2]) - x[n : n + 2].flip(-1)).square().mean() for n in range(0, 8, 2)]
        )
        # ranks add four fp32 values up in another order: three sums each way, off by half of eps or less each
        rtol = 3 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(before[0]["val"], wanted.mean().item(), rtol=rtol, atol=0.0)
        first.fit(module, loader())
        after = first.test(module, loader(8), verbose=False)
        other = trainer(folder, _ours(), enable_checkpointing=False)
        assert other.test(module, loader(8), verbose=False) == after
        torch.testing.assert_close(module(x), torch.cat([module(x[:4]), module(x[4:])]))
        with pytest.raises(UnsupportedError, match=r"has been sharded by another Trainer: make a new one"):
            other.fit(module, loader())
        again = Plain()
        again.load_state_dict(module.state_dict())
        assert other.test(again, loader(8), verbose=False) == after


@on_ranks(2)
def test_who_cannot_write_a_checkpoint_tells_every_rank(rank: int, world_size: int) -> None:
    module = Plain()
    fit = trainer("", _ours(), enable_checkpointing=False)
    fit.fit(module, loader())
    with shared_folder() as folder:
        if rank == 0:
            (folder / "taken").touch()
        dist.barrier()
        with pytest.raises(OSError if rank == 0 else RemoteRankError, match="taken"):
            fit.save_checkpoint(folder / "taken" / "it.ckpt")
        fit.save_checkpoint(folder / "free")
        assert (folder / "free").exists()  # on every rank as soon as it returns


@on_ranks(2)
def test_who_cannot_read_a_checkpoint_tells_every_rank(rank: int, world_size: int) -> None:
    """Rank 1 looks for it in a folder of its own, as on hosts without a shared disk."""
    with shared_folder() as folder:
        fit = trainer(folder, _ours(), enable_checkpointing=False)
        fit.fit(Plain(), loader())
        fit.save_checkpoint(folder / "0.ckpt")
        module = Plain()
        again = trainer(folder, _ours(), enable_checkpointing=False, max_epochs=2)
        with pytest.raises(FileNotFoundError if rank == 1 else RemoteRankError, match=r"1\.ckpt"):
            again.fit(module, loader(), ckpt_path=str(folder / f"{rank}.ckpt"))
        assert_same(_weights(module), _weights(Plain()))


class Large(Plain):
    """Makes its weights where they are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(7)
            self.net = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
            self.built = {type(parameter).__name__ for parameter in self.net.parameters()}


@on_ranks(1, 2)
def test_a_model_is_built_where_it_is_sharded(rank: int, world_size: int) -> None:
    module = Large()
    trainer("", _ours(), enable_checkpointing=False).fit(module, loader())
    assert module.built != {"Parameter"}  # chunks had them as soon as they were made
    plain = Large()
    plain.configure_model()
    assert torch.equal(plain.loss(module.batches[0]).detach(), module.losses[0])


class ByHand(Plain):
    """Manual optimization, with accumulation and clipping of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], number: int) -> None:
        (x,) = batch
        optimizer: Any = self.optimizers()
        loss = (self.net(x) - x.flip(-1)).square().mean()  # a part, and not self(x)
        self.losses.append(loss.detach().clone())
        self.manual_backward(loss / 2)
        if number % 2 == 1:
            self.clip_gradients(optimizer, gradient_clip_val=1e3, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()  # type: ignore[union-attr,call-arg]


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_optimization_by_hand_has_the_bits_of_lightnings_own(rank: int, world_size: int, precision: Any) -> None:
    runs = []
    for module, arguments in ((ByHand(), {}), (Plain(), {"accumulate_grad_batches": 2, "gradient_clip_val": 1e3})):
        fit = trainer("", _ours(), precision=precision, enable_checkpointing=False, **arguments)
        fit.fit(module, loader())
        runs.append(_weights(module) | {"losses": torch.stack(module.losses)})
    assert_same(*runs)


class Norms(Callback):
    """Reads gradients where Lightning shows them."""

    def __init__(self) -> None:
        self.norms: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.norms.append(next(pl_module.parameters()).grad.norm().clone())


def test_callbacks_see_gradients_and_clipping_by_value_is_plain_lightnings(tmp_path: Path) -> None:
    runs = []
    for strategy in (_ours(), "auto"):
        module, norms = Plain(), Norms()
        clipped: Any = {"gradient_clip_val": 1e-2, "gradient_clip_algorithm": "value", "callbacks": [norms]}
        trainer(tmp_path, strategy, enable_checkpointing=False, **clipped).fit(module, loader())
        runs.append(_weights(module) | {"norms": torch.stack(norms.norms)})
    assert_same(*runs)


def test_no_process_group_is_made_for_one_rank() -> None:
    assert not dist.is_initialized()
