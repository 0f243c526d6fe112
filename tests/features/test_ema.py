"""`ShardedOptimizer(..., ema=)`: the bits of torch's `AveragedModel` over the masters, at any placement."""

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from typer.testing import CliRunner

import gemini
from gemini import ConfigError, Ema, GeminiError, ShardedModel, ShardedOptimizer, UnsupportedError, state_hash
from gemini.cli.app import app
from gemini.engine.config import load_config
from gemini.placement.demand import Kind, Tier
from optim import HybridAdam
from tests.harness.on_ranks import on_ranks
from tests.harness.seed import seed
from tests.harness.shared_folder import shared_folder
from tests.zoo import whole
from tests.zoo.hf_trainers import gpt2
from tests.zoo.walks import build, loss_of

PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"tensor_placement_policy": "cpu", "stage": 3},
    "host, deferred": {"tensor_placement_policy": "cpu", "deferred_update": True},
    "in backward": {"model_data_memory": 60_000, "update_in_backward": True},
    "in parts": {"tensor_placement_policy": "cpu", "stage": 2, "chunk_size": 512},
    "disk": {"disk_optim_frac": 1.0},
}
LENT: dict[str, Any] = {"tensor_placement_policy": "static", "offload_optim_frac": 1.0, "reuse_fp16_shard": True}
OPTIMIZERS = {"hybrid": HybridAdam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def wrapped(place: str, module: nn.Module | None = None, **options: Any) -> ShardedModel:
    options = {"rank_timeout": 60, "chunk_size": 1024, **PLACES.get(place, {}), **options}
    if place == "disk":
        options["disk_path"] = tempfile.mkdtemp()
    return ShardedModel(module or build(), **options)


def averages_of(optimizer: ShardedOptimizer, model: ShardedModel) -> dict[str, Tensor]:
    assert optimizer.ema is not None
    with optimizer.ema.weights():
        return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(ours: dict[str, Tensor], its: dict[str, Tensor]) -> None:
    assert list(ours) == list(its)
    for name, value in its.items():
        assert torch.equal(ours[name], value), name


def train(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """A step in which only even ones have the module's `extra`, so that it is idle in others."""
    getattr(model, "module", model).uses_extra = number % 2 == 0
    loss_of(model, number).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("place", [pytest.param(each, marks=pytest.mark.sampled(2)) for each in PLACES])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@on_ranks(1, 2, soak=(4,))
def test_averages_have_the_bits_of_torchs_averaged_model(rank: int, world_size: int, place: str, kind: str) -> None:
    model, plain = wrapped(place), build()
    make = OPTIMIZERS[kind]
    ours = ShardedOptimizer(model, make(model.parameters(), lr=1e-2, weight_decay=0.1), ema=0.9)
    its, averaged = (
        make(plain.parameters(), lr=1e-2, weight_decay=0.1),
        AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    )
    assert ours.ema is not None
    assert_same(averages_of(ours, model), plain.state_dict())  # before the first step
    for number in range(6):
        if place != "in backward":  # which refuses a chunk of which a part is frozen here
            for each in (model.module, plain):
                each.blocks[1].requires_grad_(number not in (2, 3))
        train(model, ours, number)
        train(plain, its, number)
        averaged.update_parameters(plain)
        if number % 2:
            before = state_hash(model, ours)
            assert_same(averages_of(ours, model), averaged.module.state_dict())
            assert state_hash(model, ours) == before
    assert_same(model.state_dict(), plain.state_dict())
    assert ours.ema.num_averaged == int(averaged.n_averaged) == 6
    model.close()


@pytest.mark.parametrize(
    "place", [pytest.param(each, marks=pytest.mark.sampled(2)) for each in (*PLACES, "lent homes")]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks(1, 2, soak=(4,))
def test_averages_of_16_bit_weights_are_those_of_the_masters(
    rank: int, world_size: int, place: str, dtype: torch.dtype
) -> None:
    options = {**PLACES, "lent homes": LENT}[place]
    if dtype is torch.float16 and options.get("update_in_backward"):
        return  # refused: a step may have to be skipped
    module = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 8))
    model = wrapped(place, module, dtype=dtype, **options)
    settings = Ema(decay=0.9, every=2, after=1, warmup=True)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2), ema=settings)
    expected: dict[str, Tensor] = {}
    shares = iter([1.0, 2 ** (-2 / 3), 3 ** (-2 / 3)])
    for number in range(6):
        batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(number)).to(dtype)
        optimizer.backward(model(batch).float().square().mean())
        optimizer.step()
        masters = {name: gemini.safe_get_full_fp32_param(each).clone() for name, each in model.named_parameters()}
        if number % 2:
            share = next(shares)
            old = {name: value.clone() for name, value in (expected or masters).items()}
            expected = {name: old[name].lerp_(value, share) for name, value in masters.items()}
    for name, each in model.named_parameters():
        assert torch.equal(gemini.safe_get_full_optimizer_state(each, "ema"), expected[name]), name
    assert optimizer.ema is not None
    with optimizer.ema.weights():
        for name, each in model.named_parameters():
            assert torch.equal(gemini.safe_get_full_fp32_param(each), expected[name]), name
            assert (each.detach() - expected[name].to(dtype)).abs().max() <= 2.0**-8 * expected[name].abs().max()
    assert_same({name: gemini.safe_get_full_fp32_param(each) for name, each in model.named_parameters()}, masters)
    model.close()


@pytest.mark.parametrize("place", ["device", "host", "in parts"])
@on_ranks(1, 2)
def test_averages_beside_several_optimizers_are_of_all_weights(rank: int, world_size: int, place: str) -> None:
    model = wrapped(place, whole.build(), device="emulated")
    plain = whole.Plain("muon", world_size)
    optimizer = ShardedOptimizer(model, whole.muon_and_adam(model), ema=0.9)
    averaged = AveragedModel(plain.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(3):
        whole.train_step(model, optimizer, rank, step)
        plain.step(step)
        averaged.update_parameters(plain.model)
    assert_same(averages_of(optimizer, model), averaged.module.state_dict())
    assert_same(dict(model.state_dict()), plain.model.state_dict())
    model.close()


@on_ranks(1, 2)
def test_averages_go_on_from_a_state_dict_and_from_a_checkpoint_on_other_ranks(rank: int, world_size: int) -> None:
    def made(place: str, ema: float | None = 0.9) -> tuple[ShardedModel, ShardedOptimizer]:
        model = wrapped(place)
        return model, ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2), ema=ema)

    with shared_folder() as folder:
        model, optimizer = made("host")
        for number in range(3):
            train(model, optimizer, number)
        gemini.save_checkpoint(folder, model, optimizer)
        saved = optimizer.state_dict(), model.state_dict()
        for number in range(3, 5):
            train(model, optimizer, number)
        wanted = state_hash(model, optimizer)
        model.close()
        for place in ("device", "disk", "in parts"):
            model, optimizer = made(place)
            gemini.load_checkpoint(folder, model, optimizer)
            for number in range(3, 5):
                train(model, optimizer, number)
            assert optimizer.ema is not None and optimizer.ema.num_averaged == 5
            assert state_hash(model, optimizer) == wanted
            model.close()
        model, optimizer = made("device")
        model.load_state_dict(saved[1])
        optimizer.load_state_dict(saved[0])
        for number in range(3, 5):
            train(model, optimizer, number)
        assert state_hash(model, optimizer) == wanted
        model.close()
        model, optimizer = made("device", ema=None)
        with pytest.warns(UserWarning, match="without ema: they are lost"):
            gemini.load_checkpoint(folder, model, optimizer)
        train(model, optimizer, 3)
        model.close()


@on_ranks(1, 2)
def test_averages_of_a_checkpoint_are_exported_for_from_pretrained(rank: int, world_size: int) -> None:
    """In the dtype of the weights, rounded as `optimizer.ema.weights()` does, or in fp32. Frozen weights stay."""
    with shared_folder() as folder:
        module = gpt2()
        module.transformer.ln_f.requires_grad_(False)
        model = wrapped("host", module, dtype=torch.bfloat16)
        optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2), ema=Ema(decay=0.5, after=1))
        ids = torch.arange(16).view(1, 16) + 1
        for number in range(3):
            optimizer.backward(model(input_ids=ids, labels=ids).loss)
            optimizer.step()
            if number != 1:
                gemini.save_checkpoint(folder, model, optimizer)
        wanted = averages_of(optimizer, model)
        masters = {name: value.float() for name, value in model.state_dict().items()}
        if rank == 0:
            assert export(folder, folder / "out", "--ema")[0] == 0
            assert export(folder, folder / "whole", "--ema", "--dtype", "fp32")[0] == 0
            module.config.save_pretrained(folder / "out")
            back = type(module).from_pretrained(folder / "out", dtype=torch.bfloat16).state_dict()
            assert_same({name: back[name] for name in wanted}, wanted)
            precise = load_file(folder / "whole" / "model.safetensors")
            assert all(torch.equal(value.bfloat16(), wanted[name]) for name, value in precise.items())
            assert any((value != wanted[name].float()).any() for name, value in precise.items())
            assert not torch.equal(precise["transformer.wpe.weight"], masters["transformer.wpe.weight"])
            code, said = export(folder, folder / "early", "--ema", "--tag", "step_1")
            assert code == 2 and "was saved after 1 steps, before the first averaging" in said
        model.close()


@pytest.mark.parametrize("form", ["deepspeed", "fsdp2"])
def test_averages_are_no_state_of_a_training_that_goes_on_in_another_library(form: str, tmp_path: Path) -> None:
    model = wrapped("device")
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2), ema=0.5)
    for number in (0, 2):
        train(model, optimizer, number)
    gemini.save_checkpoint(tmp_path / "saved", model, optimizer)
    assert export(tmp_path / "saved", tmp_path / "out", "--to", form)[0] == 0
    names = {path.name for path in tmp_path.glob("out/**/*.pt")}
    if form == "fsdp2":
        keys = FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
        names = {f"{key.rpartition('.')[2]}.pt" for key in keys}
    assert "exp_avg.pt" in names and "ema.pt" not in names
    model.close()


def test_averages_that_a_checkpoint_has_not_are_not_exported(tmp_path: Path) -> None:
    model = wrapped("device")
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2))
    gemini.save_checkpoint(tmp_path / "saved", model, optimizer)
    code, said = export(tmp_path / "saved", tmp_path / "out", "--ema")
    assert code == 2 and "has no averages of weights: save one with" in said and not any((tmp_path / "out").glob("*"))
    assert "--ema is for --to huggingface" in export(tmp_path / "saved", tmp_path / "out", "--ema", "--to", "fsdp2")[1]


def export(*arguments: Any) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["checkpoint", "export", *map(str, arguments)])
    return done.exit_code, " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@on_ranks(1, 2)
def test_averages_of_weights_that_no_step_has_updated_go_on_too(
    rank: int, world_size: int, dtype: torch.dtype | None
) -> None:
    """One weight has never had a gradient, and one is in no param group: both were edited by hand since."""

    def made(place: str) -> tuple[ShardedModel, ShardedOptimizer]:
        module = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("used", "idle", "other")})
        for parameter in module.parameters():
            nn.init.constant_(parameter, 0.25)
        model = wrapped(place, module, device="emulated", dtype=dtype)
        grouped = [each for name, each in model.named_parameters() if "other" not in name]
        return model, ShardedOptimizer(model, HybridAdam(grouped, lr=1e-2), ema=0.5)

    def edit_and_step(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
        for name in ("idle", "other"):
            model.module[name].weight.data.add_(1.0)
        model.module["used"](torch.ones(2, 16, dtype=dtype or torch.float32)).sum().backward()
        optimizer.step()

    with shared_folder() as folder:
        model, optimizer = made("host")
        edit_and_step(model, optimizer)
        edit_and_step(model, optimizer)
        gemini.save_checkpoint(folder, model, optimizer)
        saved = optimizer.state_dict(), model.state_dict()
        assert {key for key in saved[0]["ema"]["averages"] if isinstance(key, str)} == {"other.weight", "other.bias"}
        edit_and_step(model, optimizer)
        wanted = averages_of(optimizer, model)
        # 1.25 at first; after two more steps half of the way to 2.25, then half of that to 3.25.
        for name in ("idle", "other"):
            assert torch.equal(wanted[f"{name}.weight"].float(), torch.full((16, 16), 2.5))
        model.close()
        for from_file, had_others in ((True, False), (True, True), (False, False), (False, True)):
            model, optimizer = made("in parts")
            if had_others:
                edit_and_step(model, optimizer)
            if from_file:
                gemini.load_checkpoint(folder, model, optimizer)
            else:
                model.load_state_dict(saved[1])
                optimizer.load_state_dict(saved[0])
            edit_and_step(model, optimizer)
            assert_same(averages_of(optimizer, model), wanted)
            model.close()


@on_ranks(1, 2)
def test_an_average_stays_when_the_states_of_its_weight_are_reset(rank: int, world_size: int) -> None:
    model = wrapped("device", whole.build(), device="emulated")
    optimizer = ShardedOptimizer(model, whole.muon_and_adam(model), ema=0.5)
    whole.train_step(model, optimizer, rank, 0)
    whole.train_step(model, optimizer, rank, 1)
    before = averages_of(optimizer, model)
    # To another optimizer, which has no states of it; and by hand.
    moved = optimizer.param_groups[0]["params"].pop(0)
    optimizer.param_groups[1]["params"].append(moved)
    optimizer.follow_param_groups()
    optimizer.state.pop(optimizer.param_groups[1]["params"][0])
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {}
    assert_same(averages_of(optimizer, model), before)
    model.close()


@pytest.mark.parametrize("options", [{}, LENT])
@on_ranks(1, 2)
def test_a_look_at_the_averages_between_backward_and_step_changes_nothing(
    rank: int, world_size: int, options: dict[str, Any]
) -> None:
    ends = []
    for looks in (False, True):
        seed(3)
        model = wrapped("device", nn.Sequential(nn.Linear(16, 40), nn.Linear(40, 8)), dtype=torch.bfloat16, **options)
        optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2), ema=0.9)
        for number in range(3):
            batch = torch.full((4, 16), 0.1 * number + 0.1, dtype=torch.bfloat16)
            model(batch).float().square().mean().backward()
            if looks:
                assert optimizer.ema is not None
                with optimizer.ema.weights():
                    assert model(batch).float().isfinite().all()
            optimizer.step()
        ends.append(state_hash(model, optimizer))
        model.close()
    assert ends[0] == ends[1]


@on_ranks(1, 2)
def test_what_would_mix_averages_and_weights_is_refused_inside_the_block(rank: int, world_size: int) -> None:
    model = wrapped("host")
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2), ema=0.5)
    train(model, optimizer, 0)
    train(model, optimizer, 2)
    model.eval()  # its batch norm would count batches
    before = state_hash(model, optimizer)
    assert optimizer.ema is not None
    with pytest.raises(ZeroDivisionError), optimizer.ema.weights():  # noqa: PT012
        for refused in (
            optimizer.step,
            optimizer.state_dict,
            optimizer.close,
            lambda: optimizer.clip_grad_norm_(1.0),
            lambda: optimizer.load_state_dict({}),
            lambda: gemini.save_checkpoint("unused", model, optimizer),
            lambda: optimizer.ema.weights().__enter__(),  # type: ignore[union-attr]
        ):
            with pytest.raises(GeminiError, match=r"inside optimizer\.ema\.weights\(\)"):
                refused()
        loss_of(model, 1).backward()  # as in plain PyTorch: a gradient at the averages
        1 / 0  # noqa: B018
    optimizer.zero_grad()
    assert state_hash(model, optimizer) == before
    weight = next(model.parameters())
    with optimizer.ema.weights():
        for read in (
            lambda: optimizer.state[weight]["ema"],
            lambda: gemini.safe_get_full_optimizer_state(weight, "ema"),
        ):
            with pytest.raises(GeminiError, match=r"the state 'ema' inside optimizer\.ema\.weights\(\)"):
                read()
    with pytest.raises(UnsupportedError, match=r"optimizer\.ema cannot be pickled or copied"):
        copy.deepcopy(optimizer.ema)
    optimizer.close()
    with pytest.raises(GeminiError, match="of an optimizer that was closed"):
        optimizer.ema.weights().__enter__()
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2), ema=0.5)
    assert optimizer.ema is not None
    with optimizer.ema.weights():
        model.close()
    with pytest.raises(GeminiError, match="the model is closed"):
        optimizer.ema.weights().__enter__()


def test_an_average_takes_as_many_bytes_as_the_masters_and_the_plan_counts_them() -> None:
    held = {}
    for ema in (None, 0.999):
        model = wrapped("host")
        ShardedOptimizer(model, HybridAdam(model.parameters()), ema=ema)
        host = model.chunk_manager.memory.host.ledger.bytes_by_kind
        planned = model.plan.placement.bytes_by_kind(model.plan.demand, Tier.HOST)
        held[ema] = host[Kind.OPTIM]
        assert planned[Kind.OPTIM] == host[Kind.OPTIM]
        assert held[ema] == (8 if ema is None else 12) * host[Kind.PARAM] // 4
        model.close()


def test_bad_settings_of_an_average_are_refused() -> None:
    for bad in ({"decay": 1.5}, {"every": 0}, {"after": -1}, {"warmup": 1}, {"warmup_power": 0.0}, {"decay": True}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} of an Ema must be"):
            Ema(**bad)
    model = wrapped("device")
    with pytest.raises(ValueError, match="ema must be a decay"):
        ShardedOptimizer(model, HybridAdam(model.parameters()), ema="0.9")  # type: ignore[arg-type]
    model.close()


def test_a_config_asks_for_averages_by_a_decay_or_a_table() -> None:
    for ema, wanted in ((0.99, Ema(decay=0.99)), ({"decay": 0.5, "every": 2}, Ema(decay=0.5, every=2))):
        config: dict[str, Any] = {"optimizer": {"type": "HybridAdam"}, "ema": ema}
        assert load_config(config).optimizer_options()["ema"] == wanted
    engine, *_ = gemini.initialize(build(), config={**config, "chunk_size": 1024})
    loss = loss_of(engine, 2)
    engine.backward(loss)
    engine.step()
    assert engine.optimizer.ema is not None and engine.optimizer.ema.num_averaged == 0
    engine.close()
    with pytest.raises(ConfigError, match="ema has no decai; it has decay, every"):
        load_config({"ema": {"decai": 0.9}})
