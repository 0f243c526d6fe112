"""Training in half precision, with detours between backward and step that users take."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gemini
from gemini import GatheredParameters, ShardedModel, ShardedOptimizer, state_hash
from tests.zoo import mlp
from tests.zoo.mlp import assert_same, build, weights_of

# where the state lies on one rank: arguments of ShardedModel
PLACES: dict[str, dict[str, Any]] = {
    "cuda": {"tensor_placement_policy": "cuda"},
    "cpu": {"tensor_placement_policy": "cpu"},
    "auto": {"tensor_placement_policy": "auto"},
    "smallest": {"model_data_memory": "smallest"},
}
MODEL_DATA = ("param", "grad", "master", "optim")


def state_bytes(model: ShardedModel) -> dict[str, int]:
    """Bytes at rest on this rank, on both tiers, by kind."""
    ledgers = [tier.ledger.bytes_by_kind for tier in model.chunk_manager.memory.tiers]
    return {kind: sum(ledger[kind] for ledger in ledgers) for kind in MODEL_DATA}


class Trained:
    """A perceptron in half precision; ranks see different data."""

    def __init__(self, rank: int, world_size: int, reuse: bool, wrap: dict[str, Any], clip: float | None = 0.5) -> None:
        wrap = mlp.placed(**{"dtype": torch.bfloat16, "reuse_fp16_shard": reuse, **wrap})
        self.rank, self.world_size, self.dtype = rank, world_size, wrap["dtype"]
        self.model = ShardedModel(build(), **wrap)
        scaled = {"initial_scale": 2.0**10, "hysteresis": 1} if self.dtype is torch.float16 else {}
        self.optimizer = ShardedOptimizer(self.model, mlp.adam(self.model.parameters()), clip_grad_norm=clip, **scaled)
        self.losses: list[Tensor] = []

    def backward(self, step: int, factor: float = 1.0) -> None:
        loss = mlp.loss_of(self.model, step * self.world_size + self.rank, self.dtype).float()
        self.losses.append(loss.detach())
        self.optimizer.backward(loss * factor)

    def step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()

    @property
    def weight(self) -> nn.Parameter:
        return self.model.layers[2].weight  # type: ignore[no-any-return]


def _values(trained: Trained, seed: int) -> Tensor:
    return torch.randn(trained.weight.shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def _nothing(trained: Trained) -> None:
    pass


def _saves(trained: Trained) -> None:
    assert all(bool(value.isfinite().all()) for value in weights_of(trained.model).values())


def _reads_gradients(trained: Trained) -> None:
    grads = [parameter.grad for parameter in trained.model.parameters()]
    assert all(grad is not None and bool(grad.isfinite().all()) for grad in grads)
    trained.losses += [grad.float().sum() for grad in grads if grad is not None]


def _evaluates(trained: Trained) -> None:
    with torch.no_grad():
        trained.losses.append(mlp.loss_of(trained.model, 7, trained.dtype).float())


def _adds_another(trained: Trained) -> None:
    trained.backward(8)


def _adds_before_reducing(trained: Trained) -> None:
    with trained.model.no_sync():
        trained.backward(12)
    trained.backward(13)


def _starts_again(trained: Trained) -> None:
    trained.optimizer.zero_grad()
    trained.backward(9)


def _skips(trained: Trained) -> None:
    """The second micro-batch overflows; nothing may change."""
    trained.optimizer.zero_grad()
    before = weights_of(trained.model)
    trained.backward(3)
    trained.backward(4, float("inf"))
    trained.optimizer.step()
    report = trained.optimizer.last_step
    assert report is not None and report.skipped is not None
    assert_same(weights_of(trained.model), before)
    trained.backward(5, float("inf"))
    trained.optimizer.step()
    assert_same(weights_of(trained.model), before)
    trained.backward(6)


def _looks(trained: Trained) -> None:
    with GatheredParameters(trained.model.layers[1]):
        trained.losses.append(trained.model.layers[1].weight.detach().float().sum())


def _changes(trained: Trained) -> None:
    with GatheredParameters(trained.weight, modifier_rank=0):
        trained.weight.data.copy_(_values(trained, 1))


def _sets_weights(trained: Trained) -> None:
    gemini.safe_set_full_fp32_param(trained.weight, _values(trained, 2))
    assert torch.equal(gemini.safe_get_full_fp32_param(trained.weight), _values(trained, 2))


def _sets_gradients(trained: Trained) -> None:
    gemini.safe_set_full_grad(trained.weight, _values(trained, 3))
    assert torch.equal(gemini.safe_get_full_grad(trained.weight), _values(trained, 3))


def _writes_gradients(trained: Trained) -> None:
    trained.weight.grad.mul_(0.5)  # type: ignore[union-attr]
    trained.weight.grad[:3].zero_()  # type: ignore[index]
    trained.model.layers[3].bias.grad = _values(trained, 4)[0]
    trained.losses.append(torch.nn.utils.clip_grad_norm_(trained.model.parameters(), 0.25))


def _gives_gradients(trained: Trained) -> None:
    trained.optimizer.zero_grad()
    trained.weight.grad = _values(trained, 5)
    trained.losses.append(trained.weight.grad.float().sum())


def _edits(trained: Trained) -> None:
    with torch.no_grad():
        trained.weight.mul_(2.0)
        trained.weight.data.add_(1.0)


def _loads(trained: Trained) -> None:
    trained.model.load_state_dict({name: value.float() * 0.5 for name, value in weights_of(trained.model).items()})


def _resumes(trained: Trained) -> None:
    trained.optimizer.load_state_dict(trained.optimizer.state_dict())


def _drops_one(trained: Trained) -> None:
    trained.weight.grad = None


def _drops_all(trained: Trained) -> None:
    for parameter in trained.model.parameters():
        parameter.grad = None
    _saves(trained)
    trained.backward(10)


def _keeps_views(trained: Trained) -> None:
    """A view that a hook took of a payload never shows a gradient."""
    views: list[Tensor] = []
    layer = trained.model.layers[3]
    handle = layer.register_forward_hook(lambda module, args, output: views.append(module.weight.detach()))
    trained.optimizer.zero_grad()
    before = weights_of(trained.model)["layers.3.weight"]
    trained.backward(11)
    handle.remove()
    assert torch.equal(views[0], before)


DETOURS: list[Callable[[Trained], None]] = [
    *(_nothing, _saves, _reads_gradients, _evaluates, _adds_another, _adds_before_reducing, _starts_again),
    *(_skips, _looks, _changes, _sets_weights, _sets_gradients, _edits, _loads, _resumes, _drops_one),
    *(_drops_all, _keeps_views, _writes_gradients, _gives_gradients),
]


def end_of(trained: Trained, detour: Callable[[Trained], None]) -> tuple[str, list[Tensor]]:
    trained.step(0)
    trained.backward(1)
    detour(trained)
    trained.optimizer.step()
    trained.losses.append(trained.optimizer.grad_norm)
    trained.step(2)
    result = state_hash(trained.model, trained.optimizer), trained.losses
    trained.model.close()
    return result
