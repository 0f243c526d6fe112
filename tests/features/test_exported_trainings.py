"""A training of ours goes on in FSDP2 and in DeepSpeed: checkpoints are written as those libraries load them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from typer.testing import CliRunner

from gemini import CheckpointError, ShardedModel, ShardedOptimizer, load_checkpoint, save_checkpoint, state_hash
from gemini.checkpoint.foreign import import_checkpoint
from gemini.checkpoint.outgoing import export_dcp, export_universal
from gemini.cli.app import app
from optim import HybridAdam
from tests.checkpoints.write_deepspeed import Model
from tests.features.test_foreign_checkpoints import TOKENS, groups_of, names_of
from tests.harness.meshes import kept_mesh
from tests.harness.on_ranks import on_ranks
from tests.harness.shared_folder import shared_folder
from tests.zoo import divided

KINDS: dict[str, Any] = {"hybrid": HybridAdam, "adamw": torch.optim.AdamW}
EXPORTS = {"fsdp2": export_dcp, "deepspeed": export_universal}


def trained(kind: str = "hybrid", rank: int = 0, **arguments: Any) -> tuple[ShardedModel, ShardedOptimizer]:
    """Two steps of a model with a tied weight, a frozen one, a buffer, and two param groups."""
    torch.manual_seed(0)
    model = ShardedModel(Model(), device="emulated", chunk_size=64, **arguments)
    optimizer = ShardedOptimizer(model, KINDS[kind](groups_of(model), lr=3e-3))
    for step in range(2):
        update(model, optimizer, TOKENS + rank + step)
    return model, optimizer


def update(model: nn.Module, optimizer: Any, tokens: torch.Tensor) -> None:
    loss = model(tokens)
    optimizer.backward(loss) if isinstance(optimizer, ShardedOptimizer) else loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_fsdp2_goes_on_with_our_weights_and_adam_states(rank: int, world_size: int, kind: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, optimizer = trained(kind, rank)
    with shared_folder() as folder:
        save_checkpoint(folder / "ours", model, optimizer)
        if rank == 0:
            export_dcp(folder / "ours", folder / "theirs")
        dist.barrier()
        torch.manual_seed(1)
        theirs = Model()
        fully_shard(theirs.up, mesh=init_device_mesh("cpu", (2,)))
        fully_shard(theirs, mesh=init_device_mesh("cpu", (2,)))
        own = torch.optim.AdamW(groups_of(theirs), lr=1.0)
        torch.optim.lr_scheduler.LambdaLR(own, lambda step: 1.0)
        state = dict(zip(("model", "optim"), get_state_dict(theirs, own), strict=True))
        dcp.load(state, checkpoint_id=folder / "theirs")
        set_state_dict(theirs, own, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert [(group["lr"], group["weight_decay"]) for group in own.param_groups] == [(3e-3, 0.1), (3e-3, 0.0)]
    weights, states = model.state_dict(), optimizer.state_dict()["state"]
    for key, value in theirs.state_dict().items():
        assert torch.equal(whole(value), weights[key]), key
    for number, parameter in enumerate(each for group in own.param_groups for each in group["params"]):
        for key, value in states[number].items():
            assert torch.equal(whole(own.state[parameter][key]), torch.as_tensor(value)), (number, key)
    update(model, optimizer, TOKENS + rank + 2)
    update(theirs, own, TOKENS + rank + 2)
    weights = model.state_dict()
    # torch's AdamW and ours divide and take roots in another order, and both add two ranks' gradients: a few units of
    # the last place of weights of about 1.
    for key, value in theirs.state_dict().items():
        assert (whole(value) - weights[key]).abs().max() <= 1e-6, key
    model.close()


@on_ranks(1, 2)
@pytest.mark.parametrize("form", EXPORTS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_exported_training_comes_back_as_it_was(
    rank: int, world_size: int, form: str, dtype: torch.dtype | None
) -> None:
    """Masters, moments and steps: also of a 16-bit model, whose weights are its masters, rounded."""
    model, optimizer = trained(rank=rank, dtype=dtype)
    with shared_folder() as folder:
        save_checkpoint(folder / "ours", model, optimizer)
        if rank == 0:
            EXPORTS[form](folder / "ours", folder / "theirs")
            import_checkpoint(folder / "theirs", folder / "again")
        dist.barrier() if world_size > 1 else None
        torch.manual_seed(1)
        again = ShardedModel(Model(), device="emulated", chunk_size=128, dtype=dtype)
        its = ShardedOptimizer(again, HybridAdam(groups_of(again), lr=1.0))
        assert load_checkpoint(folder / "again", again, its).step == 2
    assert state_hash(again, its) == state_hash(model, optimizer)
    assert [group["weight_decay"] for group in its.param_groups] == [0.1, 0.0]
    for each in ((model, optimizer), (again, its)):
        update(*each, TOKENS + rank + 2)
    assert state_hash(again, its) == state_hash(model, optimizer)
    model.close()
    again.close()


def test_files_of_a_universal_checkpoint_are_those_of_deepspeeds(tmp_path: Path) -> None:
    """Names and keys are those of a folder that DeepSpeed's `ds_to_universal` has written of the same model."""
    model, optimizer = trained("adamw")
    save_checkpoint(tmp_path / "ours", model, optimizer, tag="global_step2")
    folder = export_universal(tmp_path / "ours", tmp_path / "theirs") / "global_step2"
    assert (tmp_path / "theirs" / "latest_universal").read_text() == "global_step2"
    written = Path(__file__).resolve().parents[1] / "checkpoints" / "deepspeed" / "universal"
    names = {str(path.relative_to(written)) for path in written.rglob("*.pt") if "rank_1" not in path.name}
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.pt")}
    # DeepSpeed has a file of steps where its optimizer counts them by parameter; below stage 3 it reads mp_rank_00.
    steps = {f"zero/{name}/step.pt" for name in names_of(Model())}
    assert found - names == steps | {"mp_rank_00_model_states.pt"} and not names - found
    state = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=True)
    assert state["optimizer_state_dict"]["state"][0]["step"] == 2 and state["ds_version"]
    assert [group["params"] for group in state["param_groups"]] == [[0], [1]]
    its = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)
    assert [[*group] for group in its["param_shapes"]] == [
        ["table.weight", "up.weight", "down.weight"],
        ["up.bias", "down.bias"],
    ]
    assert its["shared_params"] == {"head.weight": "table.weight"} and its["global_steps"] == 2
    assert torch.equal(its["module"]["frozen.weight"], model.state_dict()["frozen.weight"])


@pytest.mark.parametrize("form", EXPORTS)
def test_a_parameter_without_gradient_so_far_has_zeros_for_moments(form: str, tmp_path: Path) -> None:
    model = ShardedModel(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), device="emulated")
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters()))
    optimizer.backward(model.module[0](torch.ones(2, 4)).sum())
    optimizer.step()
    save_checkpoint(tmp_path / "ours", model, optimizer)
    EXPORTS[form](tmp_path / "ours", tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", tmp_path / "again")
    again = ShardedModel(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), device="emulated")
    its = ShardedOptimizer(again, HybridAdam(again.parameters()))
    load_checkpoint(tmp_path / "again", again, its)
    states = its.state_dict()["state"]
    assert states[0]["exp_avg"].any() and not states[2]["exp_avg"].any()


@pytest.mark.parametrize("form", EXPORTS)
def test_what_no_other_library_could_go_on_with_is_refused_and_nothing_written(form: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    save_checkpoint(tmp_path / "weights", model)
    optimizer.backward(model(TOKENS))
    save_checkpoint(tmp_path / "open", model, optimizer)
    for name, words in (("weights", "has no optimizer"), ("open", "gradients of 1 micro-batches")):
        with pytest.raises(CheckpointError, match=words):
            EXPORTS[form](tmp_path / name, tmp_path / "out")
    optimizer.step()
    save_checkpoint(tmp_path / "ours", model, optimizer, tag="ours")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").touch()
    with pytest.raises(CheckpointError, match="not empty"):
        EXPORTS[form](tmp_path / "ours", taken)
    path = next((tmp_path / "ours" / "ours").glob("states-*"))
    path.write_bytes(path.read_bytes()[:-4] + b"\x00\x01\x02\x03")
    with pytest.raises(CheckpointError, match="not as it was written"):
        EXPORTS[form](tmp_path / "ours", tmp_path / "out")
    assert not [*(tmp_path / "out").glob("*")]


def test_an_optimizer_that_the_other_library_cannot_have_is_refused(tmp_path: Path) -> None:
    model = ShardedModel(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), device="emulated")
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), bias_correction=False))
    for layers in ([model.module[0]], [*model.module]):  # the second layer has one step less
        optimizer.backward(sum(layer(torch.ones(2, 4)).sum() for layer in layers))
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(tmp_path / "ours", model, optimizer)
    with pytest.raises(CheckpointError, match="bias_correction=False has no form"):
        export_dcp(tmp_path / "ours", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"1\.\w+ was updated 1 times and 0\.\w+ 2 times"):
        export_universal(tmp_path / "ours", tmp_path / "out")


@pytest.mark.parametrize("form", EXPORTS)
def test_the_command_line_exports_trainings(form: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    save_checkpoint(tmp_path / "ours", model, optimizer, tag="step_2")
    command = ["checkpoint", "export", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--to", form]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["bytes"] > 0 and (".metadata" in facts["files"] or "latest_universal" in facts["files"])
    done = CliRunner().invoke(app, [*command, "--dtype", "bf16"])
    assert done.exit_code == 2 and "--dtype is for --to huggingface" in done.output


def several(plain: nn.Module) -> list[torch.optim.Optimizer]:
    its = dict(plain.named_parameters())
    rest = [value for name, value in its.items() if name != "0.weight"]
    return [torch.optim.Muon([its["0.weight"]], lr=1e-2), torch.optim.AdamW(rest, lr=1e-3)]


def test_a_training_with_muon_and_adamw_goes_on_in_torch_with_both(tmp_path: Path) -> None:
    """Each param group has the states of its own optimizer; the average of weights has no place there."""

    def built() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    model = ShardedModel(built(), device="emulated")
    optimizer = ShardedOptimizer(model, several(model.module), ema=0.5)
    for _ in range(2):
        optimizer.backward(model(x).square().mean())
        optimizer.step()
    save_checkpoint(tmp_path / "ours", model, optimizer)
    with pytest.warns(UserWarning, match=r"has averages of the weights .* left out"):
        export_dcp(tmp_path / "ours", tmp_path / "theirs")
    theirs = built()
    its = several(theirs)
    state = dict(zip(("model", "optim"), get_state_dict(theirs, its), strict=True))
    dcp.load(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    set_state_dict(theirs, its, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert [*its[0].state[theirs[0].weight]] == ["momentum_buffer"]
    for key, value in theirs.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key
    optimizer.backward(model(x).square().mean())
    optimizer.step()
    theirs(x).square().mean().backward()
    for each in its:
        each.step()
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[key], rtol=1e-5, atol=1e-6)
    with (
        pytest.warns(UserWarning, match="averages"),
        pytest.raises(CheckpointError, match="several optimizers, Muon, AdamW, and DeepSpeed one"),
    ):
        export_universal(tmp_path / "ours", tmp_path / "out")


@pytest.mark.parametrize("form", EXPORTS)
def test_moments_in_8_bits_are_exported_as_they_are_shown(form: str, tmp_path: Path) -> None:
    model = ShardedModel(nn.Linear(64, 64), device="emulated")
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), state_dtype="8bit"))
    optimizer.backward(model(torch.randn(4, 64)).square().mean())
    optimizer.step()
    save_checkpoint(tmp_path / "ours", model, optimizer)
    EXPORTS[form](tmp_path / "ours", tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", tmp_path / "again")
    again = ShardedModel(nn.Linear(64, 64), device="emulated")
    its = ShardedOptimizer(again, HybridAdam(again.parameters()))
    load_checkpoint(tmp_path / "again", again, its)
    assert state_hash(again, its) == state_hash(model, optimizer)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


@on_ranks(2)
@pytest.mark.parametrize("form", EXPORTS)
def test_parts_of_tensors_are_exported_whole(rank: int, world_size: int, form: str) -> None:
    mesh = kept_mesh(1, 2)
    model = ShardedModel(divided.divided(mesh["tp"]), device_mesh=mesh["dp"], device="emulated", chunk_size=1024)
    optimizer = ShardedOptimizer(model, divided.adam(trainable(model)))
    optimizer.backward(divided.loss_of(model, 0, 0))
    optimizer.step()
    before = state_hash(model, optimizer)
    with shared_folder() as folder:
        save_checkpoint(folder / "ours", model, optimizer)
        if rank == 0:
            EXPORTS[form](folder / "ours", folder / "theirs")
            import_checkpoint(folder / "theirs", folder / "again")
        dist.barrier()
        net = divided.build()
        net.double() if form == "fsdp2" else net.float()
        plain = ShardedModel(net, device="emulated")
        its = ShardedOptimizer(plain, divided.adam(trainable(plain)))
        load_checkpoint(folder / "again", plain, its)
    if form == "fsdp2":  # a parameter that no step has come to has states of zeros now
        assert state_hash(plain) == state_hash(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(value.double(), model.state_dict()[name], rtol=1e-6, atol=1e-7)
    assert state_hash(model, optimizer) == before
    plain.close()
    model.close()
