"""What users copy from the pages of DeepSpeed and Colossal-AI, with imports changed, on two ranks.

`docs/coming_from.md` has the table of all examples of five pages; `test_reference_loops.py` has the other three.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini
from gemini import ConfigError, ShardedModel, ShardedOptimizer, deepspeed, state_hash
from gemini.deepspeed.ops.adam import DeepSpeedCPUAdam
from gemini.deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from optim import HybridAdam
from tests.harness.on_ranks import average_gradients, on_ranks
from tests.zoo.mlp import WIDTH, assert_same, build, weights_of

CONFIGS = Path(__file__).resolve().parents[1] / "configs"  # as on the page, where "..." stands for the user's own keys
OPTIMIZER = '"optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.8, 0.999], "weight_decay": 3e-7}}'
COMMA = {"zero3_offload_param": 6, "zero3_nvme": 7}  # the line that lacks one at its end
BY_HAND: dict[str, dict[str, Any]] = {
    "zero3": {"stage": 3, "dtype": torch.float16},
    "zero3_offload_optimizer": {"stage": 3, "tensor_placement_policy": "cpu"},
    "zero3_offload_param": {"stage": 3, "tensor_placement_policy": "cpu"},
    "zero3_nvme": {"stage": 3, "tensor_placement_policy": "disk", "disk_path": tempfile.gettempdir()},
}


@contextmanager
def config_of_the_page(name: str, mended: bool = True) -> Iterator[str]:
    """The path of an example with an optimizer for its dots, if it has none, and with its commas."""
    text = (CONFIGS / f"{name}.json").read_text()
    lines = text.replace("...", "" if '"optimizer"' in text else OPTIMIZER).splitlines()
    if mended and name in COMMA:
        lines[COMMA[name] - 1] += ","
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds_config.json"
        path.write_text("\n".join(lines).replace("/nvme_data", tempfile.gettempdir()))
        yield str(path)


def batch(rank: int, step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


@on_ranks(2)
@pytest.mark.parametrize("name", BY_HAND)
def test_a_zero_config_of_deepspeeds_page_trains_as_the_same_settings_by_hand(
    rank: int, world_size: int, name: str
) -> None:
    with config_of_the_page(name) as config:
        engine, _, _, _ = deepspeed.initialize(model=build(), config=config)
    model = ShardedModel(build(), device="emulated", **BY_HAND[name])
    its = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=0.001, betas=(0.8, 0.999), weight_decay=3e-7))
    dtype = BY_HAND[name].get("dtype", torch.float32)
    assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (dtype is torch.float16, False)
    assert (engine.dp_world_size, engine.global_rank, engine.local_rank) == (2, rank, rank)
    for step in range(3):
        loss = loss_of(engine(batch(rank, step, dtype)))
        engine.backward(loss)
        engine.step()
        other = loss_of(model(batch(rank, step, dtype)))
        its.backward(other)
        its.step()
        assert torch.equal(loss, other)
    assert state_hash(engine.model) == state_hash(model)
    disks = [each.chunk_manager.memory.disk for each in (engine.model, model)]
    assert [0 if disk is None else disk.ledger.total_bytes for disk in disks].count(0) == 2 * (name != "zero3_nvme")
    engine.empty_partition_cache()


@pytest.mark.sampled(2)
@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "mended", "words"),
    [
        ("zero3_offload_param", False, "line 6: a comma is missing"),
        ("zero3_nvme", False, "line 7: a comma is missing"),
        ("mics", True, "line 4: .*shard_group_size=8 does not divide 2 ranks into groups"),
    ],
)
def test_what_the_page_shows_and_is_not_here_is_refused_on_all_ranks(
    rank: int, world_size: int, name: str, mended: bool, words: str
) -> None:
    with config_of_the_page(name, mended) as config, pytest.raises(ConfigError, match=words):
        deepspeed.initialize(model=build(), config=config)


@on_ranks(soak=(8,), timeout_s=180)
def test_the_mics_config_of_the_page_trains_where_eight_ranks_hold_the_shards(rank: int, world_size: int) -> None:
    with config_of_the_page("mics") as config:
        engine, *_ = deepspeed.initialize(model=build(), config=config)
    model = ShardedModel(build(), device="emulated", stage=3)
    its = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=0.001, betas=(0.8, 0.999), weight_decay=3e-7))
    for step in range(2):
        for each in (engine, its):
            each.backward(loss_of((engine if each is engine else model)(batch(rank, step, torch.float32))))
            each.step()
    assert {chunk.layout.world_size for chunk in engine.model.chunk_manager.chunks} == {8}
    assert state_hash(engine.model) == state_hash(model)


class PageModel(nn.Module):
    """The ways in which the page uses a weight outside of its own module, and `Module.apply` over them."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(WIDTH, WIDTH)
        self.layer1 = nn.Linear(WIDTH, WIDTH)
        self.layer2 = TakesWeight()
        self.layer3 = ReturnsBias(WIDTH, WIDTH)
        deepspeed.zero.register_external_parameter(self, self.layer1.weight)
        deepspeed.zero.register_external_parameter(self.layer2, self.layer1.weight)
        self.apply(lambda part: nn.init.normal_(part.bias) if isinstance(part, nn.Linear) else None)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.layer2(self.layer1(self.embeddings(ids)), self.layer1.weight))
        x, bias = self.layer3(x)
        return nn.functional.cross_entropy((x - bias) @ self.embeddings.weight.t(), ids)


class TakesWeight(nn.Module):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight


class ReturnsBias(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.bias


@on_ranks(2)
def test_deepspeeds_loop_trains_weights_that_are_used_outside_of_their_modules(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)  # rank 0's weights count
    with deepspeed.zero.Init():
        model = PageModel()
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    ds_engine, _, _, _ = deepspeed.initialize(model, optimizer=optimizer, config={"zero_optimization": {"stage": 3}})
    torch.manual_seed(0)
    plain = PageModel()
    its = HybridAdam(plain.parameters(), lr=1e-2)
    for step in range(3):
        ids = torch.randint(0, WIDTH, (8,), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = ds_engine(ids)
        ds_engine.backward(loss)
        ds_engine.step()
        other = plain(ids)
        other.backward()
        average_gradients(plain)
        its.step()
        its.zero_grad()
        assert torch.equal(loss, other)
    ds_engine.empty_partition_cache()
    assert_same(weights_of(ds_engine), weights_of(plain))


@on_ranks(2)
def test_deepspeeds_snippets_on_parameters_run(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    with deepspeed.zero.Init():
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with deepspeed.zero.GatheredParameters(module[0].weight, modifier_rank=0), torch.no_grad():
        if rank == 0:
            module[0].weight.zero_()
    config = {"zero_optimization": {"stage": 3}}
    optimizer = DeepSpeedCPUAdam(module.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    engine.backward(loss_of(engine(batch(rank, 0, torch.float32))))
    for _, parameter in engine.module.named_parameters():
        assert safe_get_full_grad(parameter).shape == parameter.shape
        assert safe_get_local_grad(parameter).shape == safe_get_local_fp32_param(parameter).shape
    engine.step()
    for _, parameter in engine.module.named_parameters():
        assert safe_get_full_fp32_param(parameter).shape == parameter.shape
        assert safe_get_full_optimizer_state(parameter, "exp_avg").shape == parameter.shape
        local = safe_get_local_fp32_param(parameter)
        safe_set_full_fp32_param(parameter, torch.ones_like(parameter))
        safe_set_local_fp32_param(parameter, torch.zeros_like(local))
        for state in ("exp_avg", "exp_avg_sq"):
            assert safe_get_full_optimizer_state(parameter, state).shape == parameter.shape
            assert safe_get_local_optimizer_state(parameter, state).shape == local.shape
            safe_set_full_optimizer_state(parameter, torch.ones_like(parameter), state)
            assert safe_get_full_optimizer_state(parameter, state).all()
            safe_set_local_optimizer_state(parameter, torch.zeros_like(local), state)
            assert not safe_get_full_optimizer_state(parameter, state).any()
    with torch.no_grad():
        assert not engine(batch(rank, 1, torch.float32)).any()


@on_ranks(2)
def test_deepspeeds_tiled_linear_takes_the_values_of_a_layer_and_trains(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    other = nn.Linear(WIDTH, WIDTH)
    with deepspeed.zero.Init():
        module = deepspeed.zero.TiledLinear(WIDTH, WIDTH, bias=True, in_splits=2, out_splits=3, init_linear=None)
        module.copy_params_from(other)
    config = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine, *_ = deepspeed.initialize(model=module, config=config)
    x = batch(rank, 0, torch.float32)
    # Two partial sums of 8 products each: |w x| is below 1, and the order of addition is another one.
    assert (engine(x) - other(x)).abs().max() <= WIDTH * torch.finfo(torch.float32).eps
    loss = loss_of(engine(x))
    engine.backward(loss)
    engine.step()
    assert not torch.equal(loss_of(engine(x)), loss)


COLOSSAL = """
from gemini import TensorShardStrategy

BATCH_SIZE = 4
zero = dict(
    model_config=dict(
        shard_strategy=TensorShardStrategy(),
        tensor_placement_policy="auto",
        reuse_fp16_shard=False,
    ),
    optimizer_config=dict(initial_scale=2**5, gpu_margin_mem_ratio=0.0),
)
gradient_accumulation = 2
clip_grad_norm = 1.0
"""


@on_ranks(2)
def test_a_python_config_of_colossalais_page_trains_as_the_same_settings_by_hand(rank: int, world_size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.py"
        path.write_text(COLOSSAL)
        module = build()
        optimizer = HybridAdam(module.parameters(), lr=1e-3)
        engine, *_ = gemini.initialize(module, optimizer, nn.MSELoss(), config=path, verbose=False)
    assert engine.config.constants["BATCH_SIZE"] == 4
    engine.train()
    model = ShardedModel(build(), "tensor", device="emulated", tensor_placement_policy="cpu", dtype=torch.float16)
    its = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-3), initial_scale=2**5, clip_grad_norm=1.0)
    for step in range(4):
        data = batch(rank, step, torch.float32)  # the model casts it to fp16, as Colossal-AI's does
        engine.zero_grad()
        # torch before 2.13 has no backward of this loss for two dtypes
        loss = engine.criterion(engine(data), data.half())
        engine.backward(loss)
        engine.step()
        other = nn.MSELoss()(model(data.half()), data.half())
        its.backward(other / 2)
        assert torch.equal(loss, other)
        if step % 2:
            its.step()
    assert engine.global_steps == 2
    assert state_hash(engine.model) == state_hash(model)
