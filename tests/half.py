"""Half precision on one rank or several: the same training with gradients in the parameters' homes and beside them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gemini
from gemini import GatheredParameters, ShardedModel, ShardedOptimizer, state_hash
from tests.zoo import mlp
from tests.zoo.mlp import CHUNK_NUMEL, assert_same, build, weights_of

MODEL_DATA = ("param", "grad", "master", "optim")


def state_bytes(model: ShardedModel) -> dict[str, int]:
    """Bytes at rest on this rank, on both tiers, by kind."""
    ledgers = [tier.ledger.bytes_by_kind for tier in model.chunk_manager.memory.tiers]
    return {kind: sum(ledger[kind] for ledger in ledgers) for kind in MODEL_DATA}


class Trained:
    """A perceptron in half precision; ranks see different data."""

    def __init__(self, rank: int, world_size: int, reuse: bool, wrap: dict[str, Any]) -> None:
        wrap = {"chunk_size": CHUNK_NUMEL, "dtype": torch.bfloat16, "reuse_fp16_shard": reuse, **wrap}
        if wrap.get("model_data_memory") == "smallest":
            del wrap["model_data_memory"]
            wrap["model_data_memory"] = mlp.smallest_budget(**wrap)
        self.rank, self.world_size, self.dtype = rank, world_size, wrap["dtype"]
        self.model = ShardedModel(build(), device="emulated", **wrap)
        scaled = {"initial_scale": 2.0**10, "hysteresis": 1} if self.dtype is torch.float16 else {}
        self.optimizer = ShardedOptimizer(self.model, mlp.adam(self.model.parameters()), clip_grad_norm=0.5, **scaled)
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


def detours(rank: int, world_size: int, wrap: dict[str, Any], names: Sequence[str] = ()) -> None:
    """What is done between backward and step has the same end, wherever gradients rest. names: of some, or all."""
    for detour in DETOURS:
        if names and detour.__name__[1:] not in names:
            continue
        if detour is _keeps_views and "model_data_memory" in wrap:
            continue  # a view takes a slot, and there is none to spare
        hashes, losses = zip(*(end_of(Trained(rank, world_size, reuse, wrap), detour) for reuse in (False, True)))
        assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1])), (detour.__name__, wrap)
        assert hashes[0] == hashes[1], (detour.__name__, wrap)


def saved_and_loaded(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """Masters leave and enter whole, from and to either layout, before or after the weights."""
    source = {reuse: Trained(rank, world_size, reuse, wrap) for reuse in (False, True)}
    for trained in source.values():
        trained.step(0)
        trained.step(1)
    states = {reuse: (t.model.state_dict(), t.optimizer.state_dict()) for reuse, t in source.items()}
    for number, master in states[True][1]["masters"].items():
        assert torch.equal(states[False][1]["masters"][number], master), "layouts hold the same masters"
    expected = None
    for reuse in (False, True):
        for weights, states_of_optimizer in (states[reuse], states[not reuse]):
            for optimizer_first in (False, True):
                loaded = Trained(rank, world_size, reuse, wrap)
                if optimizer_first:
                    loaded.optimizer.load_state_dict(states_of_optimizer)
                    loaded.model.load_state_dict(weights)
                else:
                    loaded.model.load_state_dict(weights)
                    loaded.optimizer.load_state_dict(states_of_optimizer)
                loaded.step(2)
                found = state_hash(loaded.model, loaded.optimizer)
                expected = expected or found
                assert found == expected, (reuse, optimizer_first)
                loaded.model.close()
    source[False].step(2)
    assert state_hash(source[False].model, source[False].optimizer) == expected, "as if it had gone on"
    for trained in source.values():
        trained.model.close()


def bytes_per_parameter(rank: int, world_size: int, wrap: dict[str, Any]) -> tuple[float, float]:
    """Of parameters, gradients, masters and moments of all ranks' shares, without and with reuse; after three steps."""
    found = []
    for reuse in (False, True):
        trained = Trained(rank, world_size, reuse, wrap)
        for step in range(3):
            trained.step(step)
        found.append(
            sum(state_bytes(trained.model).values()) / sum(c.numel for c in trained.model.chunk_manager.chunks)
        )
        trained.model.close()
    return found[0], found[1]


def losses_and_scales(
    rank: int, world_size: int, reuse: bool, wrap: dict[str, Any]
) -> tuple[list[Tensor], list[float]]:
    """20 steps of fp16, two of them skipped."""
    trained = Trained(rank, world_size, reuse, {"dtype": torch.float16, **wrap})
    trained.optimizer._scaling.active.growth_interval = 4  # type: ignore[union-attr]
    scales = []
    for step in range(20):
        trained.backward(step, float("inf") if step in (5, 12) and rank == 0 else 1.0)
        trained.optimizer.step()
        scales.append(trained.optimizer.loss_scale)
    losses = trained.losses
    trained.model.close()
    return losses, scales
