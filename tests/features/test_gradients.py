"""What `.grad` is after backward, beside a plain model with the mean of all gradients."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini
from gemini import DivergenceError, GeminiError, ShardedModel, ShardedOptimizer, UnsupportedError
from tests import access
from tests.access import WRAPS, wrapped
from tests.harness.on_ranks import on_ranks, on_ranks_with
from tests.zoo import mlp
from tests.zoo.mlp import CHUNK_NUMEL, WIDTH, build

FP16: list[dict[str, Any]] = [
    {"dtype": torch.float16, "reuse_fp16_shard": reuse, "tensor_placement_policy": policy}
    for reuse, policy in ((False, "cuda"), (True, "cuda"), (True, "cpu"))
]
SCALE = 2.0**10
ALL = [*WRAPS, {"chunk_size": 2048}]


class Chooses(nn.Module):
    """A leaf: the ranks that `uses` names use its first layer, none uses the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.uses: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return x + torch.tanh(self.first(x)) if rank in self.uses else x + 0


class Branches(mlp.Mlp):
    """Three layers, of which the last is no one's, and a leaf between the first two."""

    def __init__(self) -> None:
        super().__init__(layers=3)
        self.leaf = Chooses()
        gemini.set_leaf_module(self, Chooses)

    def forward(self, x: Tensor) -> Tensor:
        x = self.leaf(x + torch.tanh(self.layers[0](x)))
        return x + torch.tanh(self.layers[1](x))


def names_with_gradient(model: ShardedModel) -> list[str]:
    """Every answer to `.grad is None` is local: ranks that ask in different orders do not meet."""
    names = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    for name, parameter in model.named_parameters():
        assert (gemini.safe_get_full_grad(parameter) is None) == (name not in names), name
        assert (gemini.safe_get_local_grad(parameter) is None) == (name not in names), name
    return names


def of(*modules: str) -> list[str]:
    return [f"{module}.{name}" for module in modules for name in ("weight", "bias")]


@pytest.mark.sampled(2)
@on_ranks_with("wrap", {1: WRAPS, 2: WRAPS[::5], 3: WRAPS[2:3]}, soak={2: ALL, 3: ALL}, timeout_s=120)
def test_a_parameter_without_a_gradient_on_any_rank_has_none_on_every_rank(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    """Who has no gradient on any rank answers None on every rank, whatever its chunk holds."""
    model, optimizer = wrapped(Branches, {"chunk_size": 3 * CHUNK_NUMEL, **wrap})
    net = model.module
    assert names_with_gradient(model) == []
    for step in range(2):
        net.leaf.uses = ()
        mlp.loss_of(model, step).backward()
        assert names_with_gradient(model) == of("layers.0", "layers.1")
        net.leaf.uses = (world_size - 1,)
        mlp.loss_of(model, step).backward()
        assert names_with_gradient(model) == of("layers.0", "layers.1", "leaf.first")
        optimizer.step()
        assert names_with_gradient(model) == []
    net.layers[1].requires_grad_(False)
    mlp.loss_of(model).backward()
    assert names_with_gradient(model) == of("layers.0", "leaf.first")
    net.layers[0].weight.grad = None
    assert names_with_gradient(model) == ["layers.0.bias", *of("leaf.first")]
    optimizer.zero_grad()
    net.layers[1].requires_grad_(True)
    x = mlp.inputs(0).requires_grad_()
    torch.autograd.grad(model(x).square().mean(), x)
    assert names_with_gradient(model) == []
    mlp.loss_of(model).backward()
    assert names_with_gradient(model) == of("layers.0", "layers.1", "leaf.first")
    optimizer.step()
    model.close()


@on_ranks(1, 2)
def test_one_rank_may_ask_what_a_gradient_is_without_reading_it(rank: int, world_size: int) -> None:
    """`.grad is None` and the metadata of a gradient are no collective: one rank may look at them alone."""
    model, optimizer = wrapped(Branches, {})
    mlp.loss_of(model).backward()
    if rank == world_size - 1:
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == (name not in of("layers.0", "layers.1"))
            if parameter.grad is not None:
                gradient = parameter.grad
                assert gradient.shape == parameter.shape
                assert gradient.numel() == parameter.numel()
                assert (gradient.dtype, gradient.device) == (parameter.dtype, parameter.device)
                assert (gradient.stride(), gradient.dim()) == (parameter.stride(), parameter.dim())
                assert gradient.is_contiguous()
                assert len({gradient}) == 1
    optimizer.step()
    model.close()


@pytest.mark.sampled(2)
@on_ranks_with("wrap", {1: ALL[2:], 2: [WRAPS[0], WRAPS[5]]}, soak={2: ALL, 3: ALL}, timeout_s=120)
def test_functions_that_only_read_a_gradient(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """Functions that only read; what was read of a view is there on the rank that looks at it alone."""
    pair = access.Pair(world_size, wrap)
    pair.backward(0)
    before = gemini.state_hash(pair.model, pair.optimizer)
    for parameter, wanted in pair.both():
        mine, its = parameter.grad, wanted.grad
        assert mine is not None
        assert its is not None
        assert torch.equal(torch.norm(mine), torch.norm(its))
        for read in (
            lambda g: nn.functional.normalize(g.view(1, -1) if g.is_contiguous() else g, dim=0),
            lambda g: g.T if g.dim() == 2 else g,
            lambda g: torch.stack([g, g * 2]),
            lambda g: torch.cat([row.unsqueeze(0) for row in g]) if g.dim() else g,
            lambda g: torch.from_numpy(g.numpy().copy()),
            lambda g: torch.tensor(g.tolist()),
            copy.deepcopy,
        ):
            assert torch.equal(read(mine), read(its))  # type: ignore[no-untyped-call]
        assert repr(mine) == repr(its)
        with pytest.raises(ValueError, match="read-only"):
            mine.numpy().fill(0.0)
        row = mine.float().unsqueeze(-1)[:1]
        if rank == world_size - 1:
            assert torch.equal(row.sum(), its.unsqueeze(-1)[:1].sum())
    assert gemini.state_hash(pair.model, pair.optimizer) == before
    kept = pair.model.first.weight.grad
    pair.step()
    with pytest.raises(GeminiError, match=r"'first\.weight' was used by a step or discarded.*keep a clone"):
        kept.sum()
    pair.model.close()


@on_ranks(1)
def test_what_cannot_be_written_is_refused_and_changes_nothing(rank: int, world_size: int) -> None:
    pair = access.Pair(world_size, {})
    first, bias = pair.model.first.weight, pair.model.first.bias
    bias.requires_grad_(False)
    pair.backward(0)
    before = first.grad.clone()
    for write, words in (
        (lambda: first.grad.t_(), r"t_ would change the shape.*'first\.weight'"),
        (lambda: first.grad.resize_(3), "resize_ of the gradient"),
        (lambda: first.grad.data_ptr(), "data_ptr of the gradient"),
        (lambda: first.grad.requires_grad_(), "carries no graph"),
        (lambda: setattr(first, "grad", torch.zeros(3)), r"must be \(13, 7\) torch.float32, found \(3,\)"),
        (lambda: setattr(first.grad, "data", torch.zeros(3)), r"its \.data cannot be \(3,\)"),
        (lambda: setattr(bias, "grad", torch.zeros(13)), r"'first\.bias' is frozen"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            write()  # type: ignore[no-untyped-call]
    with pytest.raises(TypeError, match="must be a tensor or None, found float"):
        first.grad = 1.0
    with pytest.raises(RuntimeError, match="must match the size"):
        first.grad.add_(torch.zeros(3))
    assert torch.equal(first.grad, before)
    pair.model.close()


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("wrap", FP16, ids=str)
def test_fp16_gradients_are_seen_and_set_without_the_loss_scale(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    """fp16: gradients are seen and set without the loss scale, in fp32, so that torch's clipping clips to its norm."""
    (model, optimizer), plain = wrapped(mlp.Mlp, wrap, initial_scale=SCALE), build(mlp.Mlp).half()
    assert optimizer.loss_scale == SCALE
    loss = mlp.loss_of(plain, 0, torch.float16).float()
    (loss * SCALE).backward()
    optimizer.backward(mlp.loss_of(model, 0, torch.float16).float())
    for parameter, its in zip(model.parameters(), plain.parameters(), strict=True):
        wanted = its.grad.float() / SCALE
        assert torch.equal(parameter.grad, wanted)
        assert torch.equal(gemini.safe_get_full_grad(parameter), wanted)
        assert gemini.safe_get_local_grad(parameter).abs().sum() <= wanted.abs().sum() * 1.001
        gemini.safe_set_full_grad(parameter, wanted * 2)
        assert torch.equal(gemini.safe_get_full_grad(parameter), wanted * 2)
        gemini.safe_set_local_grad(parameter, gemini.safe_get_local_grad(parameter) / 2)
        parameter.grad[..., :1].mul_(1.0)
        assert torch.equal(parameter.grad, wanted), "all of it powers of two"
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    assert optimizer.grad_norm is not None
    torch.testing.assert_close(optimizer.grad_norm, torch.tensor(1e-3), rtol=1e-3, atol=0.0)  # rounded to fp16
    model.close()


@on_ranks(2)
def test_a_gradient_that_one_rank_alone_gives_is_an_error_on_all(rank: int, world_size: int) -> None:
    model, optimizer = wrapped(Branches, {})
    mlp.loss_of(model).backward()

    def gives_and_steps() -> None:
        if rank == 1:
            model.layers[2].weight.grad = torch.ones(WIDTH, WIDTH)
        optimizer.step()

    with pytest.raises(DivergenceError, match="ranks took different ways"):
        gives_and_steps()


def test_a_function_may_return_the_parameter_beside_its_gradient() -> None:
    pair = access.Pair(1, {})
    pair.backward(0)
    parameter, wanted = pair.both()[0]
    both = torch.broadcast_tensors(parameter.grad, parameter)
    for found, its in zip(both, torch.broadcast_tensors(wanted.grad, wanted), strict=True):
        assert torch.equal(found, its)


def test_the_gradient_of_a_parameter_without_elements() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none, self.layer = nn.Parameter(torch.zeros(0, 3)), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + self.none.sum()

    model, optimizer = wrapped(Empty, {})
    model(torch.ones(1, 4)).sum().backward()
    assert model.none.grad.shape == (0, 3)
    assert model.none.grad.mul_(2).sum() == 0
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert norm == torch.tensor(20.0).sqrt(), "16 weights and 4 biases, each with a gradient of 1"
    optimizer.step()


@on_ranks(1, 2, 3)
def test_the_largest_gradient_is_that_of_all_ranks(rank: int, world_size: int) -> None:
    """The infinity norm over ranks: exact, infinite, and NaN wherever the NaN lies; such steps are skipped."""
    model = ShardedModel(build(), device="emulated", chunk_size=CHUNK_NUMEL)
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
    weights = dict(model.named_parameters())
    for name, element, value in [
        *((name, element, math.nan) for name in ("layers.0.weight", "layers.5.bias") for element in (0, -1)),
        ("layers.3.weight", 5, math.inf),
        ("layers.3.weight", -5, 2.0**20),
    ]:
        mlp.loss_of(model).backward()
        gradient = torch.zeros(weights[name].shape)
        gradient.view(-1)[element] = -value
        gemini.safe_set_full_grad(weights[name], gradient)
        norm = float(optimizer.clip_grad_norm_(1.0, math.inf))
        assert norm == value or (math.isnan(norm) and math.isnan(value)), (norm, name, element, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        assert optimizer.last_step is not None
        assert optimizer.last_step.skipped == (None if math.isfinite(value) else name)
    model.close()


def test_what_was_detached_has_a_gradient_of_its_own() -> None:
    model = mlp.wrap("smallest")
    mlp.loss_of(model).backward()
    parameter = mlp.weight(model, 1)
    before, given = parameter.grad.clone(), torch.ones(parameter.shape)
    for detached in (parameter.detach(), parameter.data):
        assert detached.grad is None
        detached.grad = given
        assert detached.grad is given
    assert torch.equal(parameter.grad, before)


@pytest.mark.parametrize("settings", [{}, {"accumulate_dtype": torch.float32}, {"dtype": torch.float16}], ids=str)
def test_a_16_bit_weights_gradient_says_the_dtype_that_a_copy_of_it_has(settings: dict[str, Any]) -> None:
    """A buffer of that dtype holds it without rounding: micro-batches add up in fp32."""
    settings = {"dtype": torch.bfloat16, **settings}
    model = ShardedModel(build(), device="emulated", chunk_size=CHUNK_NUMEL, **settings)
    scaled = {"initial_scale": 8.0} if settings["dtype"] is torch.float16 else {}
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()), **scaled)
    for step in range(2):
        optimizer.backward(mlp.loss_of(model, step, settings["dtype"]))
        gradient: Any = mlp.weight(model).grad
        copy = gradient.clone()
        is_wide = step > 0 or len(settings) > 1 or settings["dtype"] is torch.float16
        assert copy.dtype is (torch.float32 if is_wide else torch.bfloat16)
        for its in (gradient, gradient.detach(), gradient[:2]):
            assert its.dtype is copy.dtype
            assert its.element_size() == its.itemsize == copy.itemsize
            assert its.nbytes == its.numel() * copy.itemsize
        buffer = torch.empty(gradient.shape, dtype=gradient.dtype)
        assert torch.equal(buffer.copy_(gradient), copy)
