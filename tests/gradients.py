"""What `.grad` is after backward, on one rank or several, beside a plain model with the mean of all gradients."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini
from gemini import DivergenceError, GeminiError, ShardedModel, ShardedOptimizer, UnsupportedError
from tests import access, mlp
from tests.mlp import CHUNK_NUMEL, WIDTH, build

STAGES: list[dict[str, Any]] = [
    {"stage": stage, "tensor_placement_policy": policy}
    for stage, policy in ((0, "cuda"), (1, "cpu"), (2, "cuda"), (3, "cuda"), (3, "cpu"))
]
WRAPS: list[dict[str, Any]] = [*STAGES, {"model_data_memory": "smallest"}, {"shard_strategy": "tensor"}]
FP16: list[dict[str, Any]] = [
    {"dtype": torch.float16, "reuse_fp16_shard": reuse, "tensor_placement_policy": policy}
    for reuse, policy in ((False, "cuda"), (True, "cuda"), (True, "cpu"))
]
SCALE = 2.0**10


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


def wrapped(make: Any, wrap: dict[str, Any], **arguments: Any) -> tuple[ShardedModel, ShardedOptimizer]:
    wrap = {"chunk_size": CHUNK_NUMEL, **wrap}
    if wrap.get("model_data_memory") == "smallest":
        del wrap["model_data_memory"]
        wrap["model_data_memory"] = mlp.smallest_budget(make, **wrap)
    model = ShardedModel(build(make), device="emulated", **wrap)
    return model, ShardedOptimizer(model, mlp.adam(model.parameters()), **arguments)


def names_with_gradient(model: ShardedModel) -> list[str]:
    """Every answer to `.grad is None` is local: ranks that ask in different orders do not meet."""
    names = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    for name, parameter in model.named_parameters():
        assert (gemini.safe_get_full_grad(parameter) is None) == (name not in names), name
        assert (gemini.safe_get_local_grad(parameter) is None) == (name not in names), name
    return names


def of(*modules: str) -> list[str]:
    return [f"{module}.{name}" for module in modules for name in ("weight", "bias")]


def idle(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
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


def asked_on_one_rank(rank: int, world_size: int) -> None:
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


# -- writes


def _set_data(p: Any) -> None:
    p.grad.data = torch.ones_like(p) * 0.25


def _assign(p: Any) -> None:
    p.grad = p.grad * 0.5


def _augmented(p: Any) -> None:
    p.grad *= 0.5
    p.grad += 0.125


def _rows(p: Any) -> None:
    for number, row in enumerate(p.grad) if p.dim() else ():
        row.mul_(number)


def _two_views(p: Any) -> None:
    head, tail = p.grad.unsqueeze(-1)[:1], p.grad.unsqueeze(-1)[1:]
    head.zero_()
    tail.neg_()
    head.add_(2.0)


def _others(p: Any) -> None:
    p.grad.unsqueeze(0)[0].add_(p.grad).sub_(torch.ones_like(p), alpha=0.5)


WRITES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda p: p.grad.mul_(0.5),
    "tensor factor": lambda p: p.grad.mul_(torch.tensor(0.5)),
    "augmented": _augmented,
    "a view": lambda p: p.grad.unsqueeze(-1)[:1].zero_(),
    "a view of a view": lambda p: p.grad.unsqueeze(0).transpose(0, -1)[:2].clamp_(-0.01, 0.01),
    "rows": _rows,
    "two views": _two_views,
    "setitem": lambda p: p.grad.__setitem__(..., 1.0),
    "mask": lambda p: p.grad.__setitem__(p.grad > 0, 0.0),
    "data": lambda p: p.grad.data.clamp_(-0.01, 0.01),
    "detach": lambda p: p.grad.detach().mul_(2.0),
    "set data": _set_data,
    "assign": _assign,
    "out": lambda p: torch.mul(p.grad, 2, out=p.grad),
    "nan_to_num_": lambda p: p.grad.div_(0.0).nan_to_num_(nan=1.0, posinf=2.0, neginf=-2.0),
    "itself": lambda p: p.grad.add_(p.grad),
    "others": _others,
    "bits": lambda p: p.grad.view(torch.int32).bitwise_and_(-65536),
    "apply_": lambda p: p.grad.apply_(lambda value: value * 2),
    "in place": lambda p: nn.functional.relu(p.grad, inplace=True),
    "weight decay": lambda p: p.grad.add_(p.detach(), alpha=0.1),
}
ALL_AT_ONCE: dict[str, Callable[[list[Any]], Any]] = {
    "foreach": lambda ps: torch._foreach_mul_([p.grad for p in ps], 0.5),
    "foreach of two lists": lambda ps: torch._foreach_add_([p.grad for p in ps], [p.grad * 2 for p in ps]),
    "values": lambda ps: torch.nn.utils.clip_grad_value_(ps, 0.01),
    "values, foreach": lambda ps: torch.nn.utils.clip_grad_value_(ps, 0.01, foreach=True),
    "values, no foreach": lambda ps: torch.nn.utils.clip_grad_value_(ps, 0.01, foreach=False),
}


def same_gradients(pair: access.Pair, what: str) -> None:
    for parameter, wanted in pair.both():
        assert torch.equal(parameter.grad, wanted.grad), what
        assert parameter.grad.stride() == wanted.grad.stride(), what


def writes(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """What a loop does to gradients between backward and step it does to those that the step uses."""
    pair = access.Pair(world_size, wrap)
    for step, (what, write) in enumerate(WRITES.items()):
        pair.backward(step)
        for both in pair.both():
            with torch.no_grad():
                for parameter in both:
                    write(parameter)
        same_gradients(pair, what)
        if step % 4 == 0:
            pair.step()
        else:
            pair.optimizer.zero_grad()
            pair.its.zero_grad()
    for what, write in ALL_AT_ONCE.items():
        pair.backward(len(what))
        write(list(pair.model.parameters()))
        write(list(pair.plain.parameters()))
        same_gradients(pair, what)
        pair.step()
    pair.model.close()


def micro_batches(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """A write between two backwards is added to; gradients that no backward made are stepped with."""
    pair = access.Pair(world_size, wrap)
    pair.backward(0)
    kept = {wanted: wanted.grad.mul_(0.5) for _, wanted in pair.both()}
    for parameter, wanted in pair.both():
        parameter.grad.mul_(0.5)
        wanted.grad = None
    pair.backward(1)
    for _, wanted in pair.both():
        wanted.grad = kept[wanted] + wanted.grad
    same_gradients(pair, "added")
    pair.step()
    for seed, both in enumerate(pair.both()[:-1]):
        for parameter in both:
            assert parameter.grad is None
            parameter.grad = access.value_like(both[1], seed)
    assert pair.both()[-1][0].grad is None
    pair.step()
    for seed, both in enumerate(pair.both()):
        for parameter in both[: 2 * (seed == 2)]:
            parameter.grad = access.value_like(both[1], seed)
    pair.backward(2)
    pair.step()
    pair.model.close()


def clips(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """torch's own clipping. Its norm is a sum in fp32, whose order torch may choose: a few units of 2**-24."""
    pair = access.Pair(world_size, wrap)
    close = {"rtol": 1e-6, "atol": 0.0}
    for step, foreach in enumerate((None, True, False)):
        pair.backward(step)
        models = pair.model, pair.plain
        norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.01, foreach=foreach) for each in models]
        torch.testing.assert_close(*norms, **close)
        for parameter, wanted in pair.both():
            torch.testing.assert_close(parameter.grad.clone(), wanted.grad, **close)
            wanted.grad.copy_(parameter.grad)
        pair.step()
        assert pair.optimizer.grad_norm is not None
        torch.testing.assert_close(pair.optimizer.grad_norm, torch.tensor(0.01), rtol=1e-4, atol=0.0)
    pair.model.close()


def after_our_clip(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """What optimizer.clip_grad_norm_() clipped is shown clipped, and is not clipped by another norm after a write."""
    pair = access.Pair(world_size, wrap)
    for step in range(3):
        pair.backward(step)
        norm = pair.optimizer.clip_grad_norm_(0.01)
        assert torch.equal(norm, gemini.clip_grad_norm_(pair.plain.parameters(), 0.01))
        same_gradients(pair, "clipped")
        for both in pair.both()[step:]:
            for parameter in both:
                if step < 2:
                    parameter.grad.mul_(3.0)
                else:
                    parameter.grad = None
        pair.step()
    pair.model.close()


def each_rank_its_own(rank: int, world_size: int, wrap: dict[str, Any]) -> dict[str, Tensor]:
    """Ranks that write different values (noise) keep one model: each one's part of the gradient counts."""
    model, optimizer = wrapped(access.Odd, wrap)
    model(torch.ones(2, 7)).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad.add_(torch.full_like(parameter, float(1 + rank)))  # type: ignore[union-attr]
    optimizer.step()
    weights = mlp.weights_of(model)
    model.close()
    return weights


def reads(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
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


def refused(rank: int, world_size: int) -> None:
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


def unscaled(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
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


def one_gives_a_gradient(rank: int, world_size: int) -> str:
    """Rank 1 alone gives a parameter a gradient. What every rank is told."""
    model, optimizer = wrapped(Branches, {})
    mlp.loss_of(model).backward()
    try:
        if rank == 1:
            model.layers[2].weight.grad = torch.ones(WIDTH, WIDTH)
        optimizer.step()
    except DivergenceError as error:
        return str(error)
    return ""
