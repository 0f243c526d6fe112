"""Backwards under no_sync() on several ranks, against sums and means that are written out in plain PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import GeminiError, ShardedModel, ShardedOptimizer, safe_get_full_grad, safe_get_local_grad, state_hash
from tests.harness.on_ranks import gathered, on_ranks
from tests.zoo import mlp
from tests.zoo.mlp import CHUNK_NUMEL, adam, build, loss_of

MICROS = 3
BF16 = {"dtype": torch.bfloat16}
WRAPS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1, "tensor_placement_policy": "cpu"},
    {"stage": 2, "shard_strategy": "tensor", "chunk_size": 2048},
    {"stage": 3, "model_data_memory": "smallest"},
    {"stage": 0, "shard_strategy": "tensor", "chunk_size": 2048, **BF16},
    {"stage": 1, **BF16},
    {"stage": 2, "tensor_placement_policy": "cpu", "accumulate_dtype": torch.float32, **BF16},
    {"stage": 3, "model_data_memory": "smallest", "shard_strategy": "tensor", "chunk_size": 2048, **BF16},
    {"stage": 3, "reuse_fp16_shard": True, **BF16},
]


def _wrap(wrap: dict[str, Any]) -> tuple[ShardedModel, ShardedOptimizer]:
    model = ShardedModel(build(), **mlp.placed(**wrap))
    return model, ShardedOptimizer(model, adam(model.parameters()))


def _means(reference: nn.Module, step: int, world_size: int, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """fp32: every rank adds its micro-batches up, the mean over ranks is made in rank order."""
    totals: dict[str, Tensor] = {}
    for rank in range(world_size):
        sums: dict[str, Tensor] = {}
        for micro in range(MICROS):
            plain = build()
            plain.load_state_dict(reference.state_dict())
            plain.to(dtype)
            loss_of(plain, (step * MICROS + micro) * world_size + rank, dtype).backward()
            for name, parameter in plain.named_parameters():
                grad = parameter.grad.float()
                sums[name] = sums[name] + grad if name in sums else grad
        totals = {name: totals[name] + each if name in totals else each for name, each in sums.items()}
    return {name: total / world_size for name, total in totals.items()}


def _steps(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    pass


def _clips(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    optimizer.clip_grad_norm_(1e9)


def _reads(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())  # type: ignore[union-attr]


def _gets(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    if model.chunk_manager.grads.books.awaits_reduction:
        with pytest.raises(GeminiError, match=r"no_sync\(\).*safe_get_full_grad"):  # it launches nothing
            safe_get_local_grad(model.layers[1].weight)
    for parameter in model.parameters():
        assert safe_get_full_grad(parameter) is not None
    assert safe_get_local_grad(model.layers[1].weight) is not None


WAYS: list[Callable[[ShardedModel, ShardedOptimizer], None]] = [_steps, _clips, _reads, _gets]


@pytest.mark.sampled(4)
@on_ranks(2, soak=(3, 4))
@pytest.mark.parametrize("synced", [0, 1])
@pytest.mark.parametrize("number", range(len(WRAPS)))
def test_what_backwards_under_no_sync_left_is_reduced_when_it_is_needed(
    rank: int, world_size: int, number: int, synced: int
) -> None:
    """The last `synced` micro-batches are outside no_sync(); the mean is that of all, for whoever asks first."""
    wrap = WRAPS[number]
    model, optimizer = _wrap(wrap)
    dtype = wrap.get("dtype")
    reference = build()
    plain = adam(reference.parameters())
    for step in range(2):
        wanted = _means(reference, step, world_size, dtype)
        for micro in range(MICROS):
            loss = (step * MICROS + micro) * world_size + rank
            if micro < MICROS - synced:
                with model.no_sync():
                    loss_of(model, loss, dtype).backward()
            else:
                loss_of(model, loss, dtype).backward()
        WAYS[(number + step) % len(WAYS)](model, optimizer)
        for name, parameter in reference.named_parameters():
            parameter.grad = wanted[name]
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
        optimizer.step()
        plain.step()
        torch.testing.assert_close(optimizer.grad_norm, norm, msg=str(wrap))
        state = optimizer.state_dict()
        moments = {name: state["state"][number]["exp_avg"] for number, (name, _) in _numbered(reference)}
        for name, parameter in reference.named_parameters():
            assert torch.equal(moments[name], plain.state[parameter]["exp_avg"]), (wrap, step, name)
    assert len(set(gathered(state_hash(model, optimizer)))) == 1, wrap
    model.close()


def _numbered(module: nn.Module) -> Any:
    return enumerate(module.named_parameters())


class Scaled(nn.Module):
    """The gradient of every weight is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


@pytest.mark.sampled(2)
@on_ranks(2)
@pytest.mark.parametrize(
    ("wrap", "wanted"),
    [
        ({}, 257.0),
        ({"stage": 0, "tensor_placement_policy": "cpu"}, 257.0),
        ({"reduce_dtype": torch.float32, "accumulate_dtype": torch.float32}, 257.0),
        ({"reduce_dtype": torch.bfloat16}, 256.0),  # as was asked for
        ({"accumulate_dtype": torch.bfloat16, "stage": 2, "reuse_fp16_shard": True}, 256.0),
    ],
)
def test_a_sum_of_16_bit_micro_batches_is_not_rounded_on_its_way(
    rank: int, world_size: int, wrap: dict[str, Any], wanted: float
) -> None:
    """256 and 1 have a sum that 16 bits cannot hold."""
    model = ShardedModel(Scaled(), device="emulated", dtype=torch.bfloat16, **wrap)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    for _ in range(2):
        for gradient in (256.0, 1.0):
            with model.no_sync():
                model(torch.full((40,), gradient, dtype=torch.bfloat16)).backward()
        found = safe_get_full_grad(model.weight)
        assert found is not None
        assert found.tolist() == [wanted] * 40, wrap
        optimizer.step()
        assert float(optimizer.grad_norm) == pytest.approx(wanted * 40**0.5)
    model.close()


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_under_no_sync_can_be_discarded(rank: int, world_size: int, stage: int) -> None:
    """`.grad = None` and zero_grad() under no_sync() discard what waits to be reduced."""
    model, optimizer = _wrap({"stage": stage})
    reference = build()
    for rank_ in range(world_size):
        (loss_of(reference, 2 + rank_) / world_size).backward()
    with model.no_sync():
        loss_of(model, 7).backward()
        optimizer.zero_grad()
        loss_of(model, 7).backward()
        for parameter in model.parameters():
            parameter.grad = None
        loss_of(model, 2 + rank).backward()
    for name, parameter in reference.named_parameters():
        found = safe_get_full_grad(dict(model.named_parameters())[name])
        torch.testing.assert_close(found, parameter.grad, msg=name)  # the sum over ranks before or after dividing
    model.close()


class Alternating(mlp.Mlp):
    """Uses one layer only, which the caller chooses."""

    chosen = 0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers[self.chosen](x)
        return result


class Scheduled(mlp.Mlp):
    """The step, not the data, chooses the layers and their order."""

    step = 0
    orders = ((0, 3, 4), (1, 4, 5), (2, 5, 0), (5, 2, 0, 4), (5, 1, 2, 0, 4), (4, 3, 0, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.orders[self.step]:
            x = x + torch.tanh(self.layers[each](x))
        return x


@pytest.mark.sampled(2)
@on_ranks(2)
@pytest.mark.parametrize(
    "wrap",
    [{}, {"shard_strategy": "tensor"}, {"chunk_size": 2 * CHUNK_NUMEL}],
    ids=["a layer a chunk", "tensors", "two layers a chunk"],
)
def test_a_rank_adds_up_what_no_sync_left_though_each_step_uses_other_operators(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    """Micro-batches are added up before they are reduced, though each step uses other layers than the last."""
    model = ShardedModel(build(Scheduled), **mlp.placed(Scheduled, stage=3, model_data_memory="smallest", **wrap))
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    reference = build(Scheduled)
    plain = adam(reference.parameters())
    for step in range(len(Scheduled.orders)):
        model.module.step = reference.step = step
        with model.no_sync():
            loss_of(model, 10 * step + rank).backward()
        loss_of(model, 10 * step + 5 + rank).backward()
        optimizer.step()
        totals: dict[nn.Parameter, Tensor] = {}
        for each in range(world_size):
            loss_of(reference, 10 * step + each).backward()
            loss_of(reference, 10 * step + 5 + each).backward()
            for parameter in reference.parameters():
                if parameter.grad is not None:
                    totals[parameter] = totals[parameter] + parameter.grad if each else parameter.grad
                    parameter.grad = None
        for parameter, total in totals.items():
            parameter.grad = total / world_size
        plain.step()
        plain.zero_grad()
        mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))
    model.close()


@on_ranks(2)
def test_what_one_rank_alone_used_under_no_sync_reaches_all(rank: int, world_size: int) -> None:
    """A layer that one rank alone used under no_sync() is reduced on all; one that nobody used does not move."""
    model = ShardedModel(build(Alternating), device="emulated", chunk_size=CHUNK_NUMEL, stage=2)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    reference = build(Alternating)
    reference.chosen = 1
    (loss_of(reference, 1) / world_size).backward()
    before = mlp.weights_of(model)
    model.module.chosen = rank
    with model.no_sync():
        loss_of(model, rank).backward()
    found = safe_get_full_grad(model.layers[1].weight)
    torch.testing.assert_close(found, reference.layers[1].weight.grad)
    optimizer.step()
    after = mlp.weights_of(model)
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert moved == [f"layers.{number}.{kind}" for number in range(world_size) for kind in ("weight", "bias")]
    model.close()
