"""Half-precision weights that are written to: what becomes of their fp32 masters."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import (
    GatheredParameters,
    ShardedModel,
    ShardedOptimizer,
    safe_get_full_fp32_param,
    safe_set_full_fp32_param,
    state_hash,
)
from gemini.errors import ReleasedParameterError
from optim import HALF_DTYPES, HybridAdam
from tests.zoo import mlp
from tests.zoo.half import PLACES, Trained


class _Shrinking(nn.Linear):
    """Writes to its weight in its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight[0].mul_(0.5)
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:parameter .* was written to where")
def test_a_weight_that_its_own_operator_changes_is_the_same_at_every_budget() -> None:
    """All of the parameter counts as edited: its master is the weight."""
    runs = []
    for place in PLACES.values():
        torch.manual_seed(0)
        module = nn.Sequential(*(_Shrinking(48, 48) for _ in range(6)))
        wrap: dict[str, Any] = {"dtype": torch.bfloat16, "chunk_size": 48 * 48 + 256, **place}
        if wrap.get("model_data_memory") == "smallest":
            wrap["model_data_memory"] = 90_000
        model = ShardedModel(module, device="emulated", **wrap)
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        for _ in range(3):
            optimizer.backward(model(torch.ones(4, 48, dtype=torch.bfloat16)).float().square().mean())
            optimizer.step()
        runs.append(state_hash(model, optimizer))
    assert len(set(runs)) == 1


@pytest.mark.parametrize("place", PLACES)
def test_data_assigned_inside_gathered_parameters_counts(place: str) -> None:
    trained = Trained(0, 1, False, PLACES[place])
    trained.step(0)
    value = torch.full_like(trained.weight.detach(), 0.5)
    with GatheredParameters([trained.weight], modifier_rank=0):
        trained.weight.data = value
    name = "layers.2.weight"
    assert torch.equal(trained.model.state_dict()[name], value)
    assert torch.equal(safe_get_full_fp32_param(trained.weight), value.float())
    trained.step(1)
    assert torch.equal(trained.weight.detach(), trained.model.state_dict()[name])
    with pytest.raises(ReleasedParameterError), GatheredParameters([trained.weight], modifier_rank=0):
        trained.weight.data = value.float()
    trained.step(2)


class _Renormalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16, max_norm=100.0)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embedding(x))  # type: ignore[no-any-return]


def test_embeddings_that_renormalise_keep_their_masters() -> None:
    moved = []
    for reuse in (False, True):
        torch.manual_seed(0)
        wrap: dict[str, Any] = {"dtype": torch.bfloat16, "reuse_fp16_shard": reuse, "chunk_size": 1024}
        model = ShardedModel(_Renormalised(), device="emulated", tensor_placement_policy="cuda", **wrap)
        optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-5, weight_decay=0.0))
        before = safe_get_full_fp32_param(model.module.embedding.weight)
        for _ in range(5):
            optimizer.backward(model(torch.arange(64)).float().square().mean())
            optimizer.step()
        moved.append(safe_get_full_fp32_param(model.module.embedding.weight) - before)
    assert torch.equal(moved[0], moved[1])
    assert moved[0].abs().max() > 4e-5, "five steps of 1e-5, each below bf16's precision"


def test_weights_from_before_edits_are_counted_and_freed_by_the_step() -> None:
    trained = Trained(0, 1, False, PLACES["cuda"])
    trained.step(0)
    ledger = trained.model.chunk_manager.memory.tiers[1].ledger.bytes_by_kind
    with torch.no_grad():
        trained.weight.norm()
        trained.weight.data.norm()
        torch.zeros(trained.weight.shape).lerp_(trained.weight.float(), 0.1)
        assert ledger["weights before edits"] == 0, "reading keeps nothing"
        trained.weight[0].zero_()
    assert ledger["weights before edits"] == 2 * trained.weight.numel()
    trained.step(1)
    assert ledger["weights before edits"] == 0


def test_fractions_that_are_lost_are_said() -> None:
    model = ShardedModel(nn.Sequential(_Shrinking(48, 48), nn.Linear(48, 4)), device="emulated", dtype=torch.bfloat16)
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
    optimizer.backward(model(torch.ones(4, 48, dtype=torch.bfloat16)).float().square().mean())
    with pytest.warns(UserWarning, match=r"'0.weight' was written to where that shows only afterwards") as told:
        optimizer.step()
    assert told[0].filename == __file__


def test_a_frozen_half_weight_is_set_as_a_trained_one_rounds() -> None:
    tie = 1 + 2.0**-8
    found = []
    for trained in (True, False):
        module = nn.Linear(4, 4).requires_grad_(trained)
        ShardedModel(module, dtype=torch.bfloat16)
        safe_set_full_fp32_param(module.weight, torch.full((4, 4), tie))
        found.append(module.weight.detach().clone())
    assert torch.equal(*found) and found[0][0, 0].item() == 1 + 2.0**-7


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("loads", [False, True], ids=["by a write", "by a state dict"])
def test_weights_that_are_edited_and_put_back_are_the_same_at_every_budget(loads: bool, dtype: torch.dtype) -> None:
    """The edit counts, though nobody has read the weights meanwhile: their masters have no fractions afterwards."""
    found = []
    for place in mlp.PLACES:
        model, optimizer = mlp.sharded(place, dtype=dtype)
        optimizer.backward(mlp.loss_of(model, 0, dtype).float() / 256)  # so that no scaled gradient overflows
        optimizer.step()
        saved, weight = model.state_dict(), mlp.layer_of(model, 2).weight
        with torch.no_grad():
            weight.mul_(0.9)
            if loads:
                model.load_state_dict(saved)
            else:
                weight.copy_(saved["layers.2.weight"])
        assert torch.equal(model.state_dict()["layers.2.weight"], saved["layers.2.weight"])
        found.append(safe_get_full_fp32_param(weight))
        assert torch.equal(found[-1], saved["layers.2.weight"].float())
    assert all(torch.equal(found[0], each) for each in found)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("reuse", [False, True], ids=["", "reuse"])
def test_masters_of_an_optimizers_state_dict_bring_their_weights(reuse: bool, dtype: torch.dtype) -> None:
    """Also where the next step passes over a parameter, which would show its old weight or the loaded one."""
    for place in mlp.PLACES:
        model, optimizer = mlp.sharded(place, dtype=dtype, reuse_fp16_shard=reuse)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.backward(mlp.loss_of(model, 0, dtype).float() / 256)  # so that no scaled gradient overflows
        optimizer.step()
        assert not torch.equal(model.state_dict()["layers.2.weight"], saved[0]["layers.2.weight"])
        optimizer.load_state_dict(saved[1])
        mlp.assert_same(mlp.weights_of(model), saved[0])
