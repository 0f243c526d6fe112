"""What is left of gradients after a step and zero_grad(), beside the plain loop."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini
from gemini import BudgetError, ShardedOptimizer, state_hash
from gemini.runtime.grad_places import GradPlaces
from gemini.runtime.gradient import ChunkGradient
from tests.harness.on_ranks import in_soak, on_ranks
from tests.zoo import mlp
from tests.zoo.mlp import CHUNK_NUMEL, LAYERS, assert_same, weights_of
from tests.zoo.parts import Pair

WRAPS: list[dict[str, Any]] = [
    {"stage": 0},
    {"tensor_placement_policy": "cpu", "chunk_size": 2 * CHUNK_NUMEL},
    {"model_data_memory": "smallest", "chunk_size": 2 * CHUNK_NUMEL},
    {"stage": 3, "dtype": torch.bfloat16, "chunk_size": 4 * CHUNK_NUMEL},
    {"dtype": torch.bfloat16, "reuse_fp16_shard": True, "chunk_size": 2 * CHUNK_NUMEL},
]
MORE: list[dict[str, Any]] = [
    {"stage": 1},
    {"chunk_size": 100 * CHUNK_NUMEL},
    {"stage": 2, "shard_strategy": "tensor"},
    {"stage": 0, "dtype": torch.bfloat16, "chunk_size": 4 * CHUNK_NUMEL},
    {"dtype": torch.bfloat16, "tensor_placement_policy": "cpu"},
]

everywhere = pytest.mark.parametrize("wrap", [*WRAPS, *in_soak(*MORE)], ids=str)


class Chosen(mlp.Mlp):
    """Uses the layers that the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.uses = tuple(range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for number in self.uses:
            x = x + torch.tanh(self.layers[number](x))
        return x


class Zeroing(Pair):
    """A plain loop that never sets gradients to None, beside ours."""

    def __init__(self, rank: int, world_size: int, wrap: dict[str, Any]) -> None:
        super().__init__(rank, world_size, wrap, Chosen)

    def uses(self, *layers: int) -> None:
        self.model.module.uses = self.plain.uses = layers

    def step(self) -> None:
        self.optimizer.step()
        self.its.step()
        assert_same(weights_of(self.model), weights_of(self.plain))

    def zero(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.its.zero_grad(set_to_none=False)


@pytest.mark.sampled(2)
@on_ranks(1, 2, soak=(3,))
@everywhere
def test_zeros_that_zero_grad_leaves_move_idle_parameters_by_their_moments(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    """After zero_grad(set_to_none=False) what a backward does not reach moves by its moments, as in plain PyTorch."""
    pair = Zeroing(rank, world_size, wrap)
    pair.uses(0, 1, 2, 3)  # the last two never have a gradient
    pair.backward(0)
    pair.zero()  # before any step
    assert [p.grad is None for p in pair.model.parameters()] == [p.grad is None for p in pair.plain.parameters()]
    pair.step()
    for step in range(1, 4):
        pair.zero()
        for parameter in pair.model.parameters():
            assert parameter.grad is None or not parameter.grad.any()
        pair.uses(*((0, 1), (0, 2, 3), ())[step - 1])
        if pair.plain.uses:
            pair.backward(step)
        pair.step()
    assert torch.equal(pair.model.state_dict()["layers.5.weight"], mlp.build(Chosen).layers[5].weight)
    pair.zero()
    pair.model.layers[0].weight.grad = pair.plain.layers[0].weight.grad = None
    pair.model.zero_grad(set_to_none=False)
    pair.plain.zero_grad(set_to_none=False)
    pair.uses(1)
    pair.backward(4)
    pair.step()
    pair.zero_grad()  # all are None again: what is idle stays
    pair.backward(5)
    pair.step()
    pair.model.close()


def test_zeros_that_find_no_memory_are_written_when_the_step_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Zeroing(0, 1, {"tensor_placement_policy": "cpu", "chunk_size": 2 * CHUNK_NUMEL})
    pair.backward(0)
    pair.step()
    pair.zero()
    fill, calls = GradPlaces.fill, []

    def fail_once(places: GradPlaces, gradient: ChunkGradient, backward: int) -> None:
        calls.append(gradient)
        if len(calls) == 2:
            raise BudgetError("host: no memory", tier="host")
        fill(places, gradient, backward)

    monkeypatch.setattr(GradPlaces, "fill", fail_once)
    with pytest.raises(BudgetError, match="no memory"):
        pair.optimizer.step()
    pair.step()
    pair.model.close()


@on_ranks(2)
@pytest.mark.parametrize("wrap", WRAPS[:2], ids=str)
def test_ranks_agree_on_zeros_of_gradients_under_no_sync(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """Ranks agree on what each of them had a gradient of under no_sync() before it became zero."""
    pair = Zeroing(rank, world_size, {**wrap, "stage": 2})
    pair.model.module.uses = (rank,)
    with pair.model.no_sync():
        pair.loss(pair.model, 0, rank).backward()
    pair.optimizer.zero_grad(set_to_none=False)
    pair.optimizer.step()
    steps = [int(entry["step"]) for entry in pair.optimizer.state_dict()["state"].values()]
    assert steps == [1] * 2 * world_size
    pair.model.close()


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("wrap", WRAPS[:3], ids=str)
def test_a_step_without_a_gradient_reports_and_changes_nothing(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    """A step without a gradient reports, returns what its closure does, and changes nothing."""
    pair = Pair(rank, world_size, wrap, mlp.Mlp)
    for number in (1, 3):
        before = state_hash(pair.model, pair.optimizer)
        assert float(pair.optimizer.clip_grad_norm_(1.0)) == 0.0
        result = pair.optimizer.step(lambda: 7.0) if number == 3 else pair.optimizer.step()
        assert result == (7.0 if number == 3 else None)
        report = pair.optimizer.last_step
        assert report is not None
        assert (report.number, report.grad_norm, report.clip, report.skipped) == (number, 0.0, 1.0, None)
        assert state_hash(pair.model, pair.optimizer) == before
        pair.steps(number)
    pair.model.close()


class Others(Pair):
    """Our optimizer has the weights of the layers; the biases are somebody else's, and the third layer."""

    def __init__(self, rank: int, world_size: int, wrap: dict[str, Any]) -> None:
        super().__init__(rank, world_size, wrap, mlp.Mlp)
        self.others = [n for n, _ in self.plain.named_parameters() if self.is_other(n)]

    @staticmethod
    def is_other(name: str) -> bool:
        return name.endswith("bias") or name.startswith("layers.2")

    def made(self) -> tuple[ShardedOptimizer, torch.optim.Optimizer]:
        ours, plain = (
            mlp.adam(parameter for name, parameter in model.named_parameters() if not self.is_other(name))
            for model in (self.model, self.plain)
        )
        return ShardedOptimizer(self.model, ours), plain

    def of_others(self, model: nn.Module) -> list[nn.Parameter]:
        its = dict(model.named_parameters())
        return [its[name] for name in self.others]

    def step(self) -> None:
        mine = [p.grad for n, p in self.plain.named_parameters() if not self.is_other(n)]
        norm = torch.linalg.vector_norm(torch.stack([g.float().norm() for g in mine if g is not None]))
        self.optimizer.step()
        torch.testing.assert_close(self.optimizer.grad_norm, norm)
        self.its.step()
        self.its.zero_grad()
        self.same_grads()

    def same_grads(self) -> None:
        plain = dict(self.plain.named_parameters())
        for name, parameter in self.model.named_parameters():
            wanted, found = plain[name].grad, parameter.grad
            assert (found is None) == (wanted is None), name
            if found is not None and wanted is not None:
                assert torch.equal(found.float(), wanted.float()), name

    def add_up(self, step: int) -> None:
        """Gradients that stay are added to, in fp32."""
        before = [p.grad for p in self.of_others(self.plain)]
        self.plain.zero_grad()
        self.backward(step)
        for parameter, grad in zip(self.of_others(self.plain), before, strict=True):
            if grad is not None:
                total = parameter.grad.float() + grad.float()  # type: ignore[union-attr]
                parameter.grad = None
                parameter.grad_dtype = None
                parameter.grad = total


@pytest.mark.sampled(2)
@on_ranks(1, 2, soak=(3,))
@everywhere
def test_gradients_of_parameters_in_no_group_stay_for_another_optimizer(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    """What no group has keeps its gradient after the step: an update by hand, or another optimizer, uses it."""
    pair = Others(rank, world_size, wrap)
    for step in range(2):
        pair.backward(step)
        pair.step()
        for model in (pair.model, pair.plain):
            with torch.no_grad():
                for parameter in pair.of_others(model):
                    assert parameter.grad is not None
                    parameter.add_(parameter.grad, alpha=-0.125)
        assert_same(weights_of(pair.model), weights_of(pair.plain))
        pair.model.zero_grad()
        pair.plain.zero_grad()
        pair.same_grads()
    seconds = [torch.optim.SGD(pair.of_others(model), lr=0.125, foreach=False) for model in (pair.model, pair.plain)]
    for step in range(2, 4):
        pair.backward(step)
        pair.step()
        pair.optimizer.zero_grad()  # its own gradients, and no others
        pair.same_grads()
        for second in seconds:
            second.step()
            second.zero_grad()
        pair.same_grads()
        assert_same(weights_of(pair.model), weights_of(pair.plain))
    pair.backward(4)
    pair.step()
    pair.add_up(5)
    pair.step()
    assert_same(weights_of(pair.model), weights_of(pair.plain))
    pair.model.close()


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("wrap", [*WRAPS[:3], WRAPS[4]], ids=str)
def test_gradients_of_another_optimizer_outlive_a_change_of_plan(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    """What no step has used is there after states have moved, and later gradients are added to it."""
    pair = Others(rank, world_size, wrap)
    with contextlib.nullcontext() if "reuse_fp16_shard" in wrap else pair.model.no_sync():
        pair.backward(0)
    for optimizer in (pair.optimizer, pair.its):
        optimizer.zero_grad()  # before any step: ours are discarded, the others wait, unreduced on several ranks
    pair.model.offload_states()
    pair.model.reload_states()
    pair.same_grads()
    pair.add_up(1)
    pair.step()
    pair.model.offload_states()
    pair.same_grads()
    pair.add_up(2)  # the states come back
    pair.step()
    assert_same(weights_of(pair.model), weights_of(pair.plain))
    pair.model.close()


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("wrap", WRAPS[:3], ids=str)
def test_a_bad_gradient_of_another_optimizer_neither_skips_the_step_nor_enters_its_norm(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    """A gradient of somebody else that is not finite neither skips our step nor enters its norm."""
    pair = Others(rank, world_size, wrap)
    pair.backward(0)
    value = torch.full(pair.plain.layers[2].weight.shape, float("nan"))
    gemini.safe_set_full_grad(pair.model.layers[2].weight, value)
    pair.optimizer.step()
    pair.its.step()
    report = pair.optimizer.last_step
    assert report is not None and report.skipped is None and report.grad_norm < 1e6
    assert_same(weights_of(pair.model), weights_of(pair.plain))
    pair.model.close()


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("wrap", WRAPS[:3], ids=str)
def test_a_clip_is_of_the_optimizers_own_parameters_also_when_it_takes_effect_early(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    """A clip is of our groups, also when it takes effect early, as before a gradient is changed by hand."""
    pair = Others(rank, world_size, wrap)
    pair.backward(0)
    norm = float(pair.optimizer.clip_grad_norm_(1e-3))
    plain = dict(pair.plain.named_parameters())
    for name, parameter in plain.items():
        if not pair.is_other(name):
            parameter.grad.mul_(1e-3 / norm)  # type: ignore[union-attr]
    for writes in (False, True):
        if writes:
            pair.model.layers[0].weight.grad *= 1.0
        for name, parameter in pair.model.named_parameters():
            torch.testing.assert_close(parameter.grad, plain[name].grad, msg=name, rtol=1e-4, atol=0.0)
            assert torch.equal(parameter.grad, plain[name].grad) or not pair.is_other(name)
    pair.optimizer.step()
    pair.model.close()


def test_gradients_and_zeros_that_no_step_used_end_when_other_parameters_are_trained() -> None:
    pair = Others(0, 1, {})
    pair.backward(0)
    pair.optimizer.step()
    pair.optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad is not None for parameter in pair.model.parameters())
    pair.model.layers[0].weight.requires_grad_(False)
    mlp.loss_of(pair.model)
    assert all(parameter.grad is None for parameter in pair.model.parameters())


def test_the_same_gradient_moves_no_weight_twice() -> None:
    """Here a step leaves None, where plain PyTorch leaves the gradients that it has used."""
    model, optimizer = mlp.sharded()
    mlp.train_step(model, optimizer)
    mlp.loss_of(model, 1).backward()
    optimizer.step()
    before = weights_of(model)
    optimizer.step()
    assert_same(weights_of(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(optimizer.grad_norm, torch.zeros(()))
