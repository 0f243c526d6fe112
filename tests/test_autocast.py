"""A sharded model under autocast has the bits of the plain one, and autograd keeps no cast of a weight."""

import pytest
import torch
from torch import Tensor, nn

from tests.zoo import mlp
from tests.zoo.mlp import assert_same, everywhere, plain, sharded, weights_of, wrap


@everywhere
def test_autocast_equals_the_plain_module_under_autocast(place: str) -> None:
    model, optimizer = sharded(place)
    reference, plain_optimizer = plain()
    for step in range(3):
        losses = []
        for module, its in ((model, optimizer), (reference, plain_optimizer)):
            x = mlp.inputs(step)
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=module is model):
                loss = (module(x) - x.flip(-1)).square().mean()
            loss.backward()
            its.step()
            its.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    assert_same(weights_of(model), weights_of(reference))
    assert (
        model.plan.budget_bytes is None
        or model.chunk_manager.memory.tiers[0].ledger.peak_bytes <= model.plan.budget_bytes
    )


def test_a_weight_that_is_used_twice_is_cast_twice() -> None:
    """Plain autocast casts it once by default, and adds the gradients of both uses in 16 bits."""
    grads = []
    for cache_enabled, make in ((True, mlp.build), (False, mlp.build), (True, lambda: sharded("cuda")[0])):
        module = make()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
            loss = module(module(mlp.inputs(0))).square().mean()
        loss.backward()
        grads.append(mlp.weight(module, 0).grad.clone())
    cached, twice, ours = grads
    assert torch.equal(ours, twice) and not torch.equal(cached, twice)
    assert torch.allclose(cached, twice, rtol=0, atol=cached.abs().max().item() * 2**-7), "some roundings to 16 bits"


@everywhere
def test_autograd_does_not_keep_autocasts_casts_of_weights(place: str) -> None:
    """Seen by hooks below ours, which get all that is not a handle. Convolutions and transposed views too."""

    def make() -> nn.Module:
        return nn.Sequential(
            *(nn.Conv1d(4, 4, 3, padding=1) for _ in range(3)), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        )

    model, reference = wrap(place, make=make, chunk_size=256), mlp.build(make)
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))
    weights = {tuple(p.shape) for p in reference.parameters() if p.dim() > 1}
    kept: dict[bool, list[tuple[int, ...]]] = {}
    grads = []
    for module in (model, reference):
        seen: list[Tensor] = []

        def pack(tensor: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                loss = module(x).square().mean()
        loss.backward()
        kept[module is model] = [tuple(t.shape) for t in seen if t.dtype is torch.bfloat16]
        grads.append([p.grad.clone() for p in module.parameters()])  # type: ignore[union-attr]
    assert weights & set(kept[False]), "plain autograd keeps the casts"
    assert not weights & set(kept[True])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_cast_of_a_weight_that_is_edited_afterwards_is_kept_as_it_was() -> None:
    class Edits(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            cast = self.weight.to(torch.bfloat16)
            with torch.no_grad():
                self.weight.mul_(0.5)
            return nn.functional.linear(x, cast, self.bias)

    def make() -> nn.Module:
        return nn.Sequential(*(Edits(8, 8) for _ in range(4)))

    model, reference = wrap("smallest", make=make, chunk_size=256), mlp.build(make)
    grads = []
    for module in (model, reference):
        x = torch.ones(2, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = module(x).square().mean()
        loss.backward()
        grads.append(x.grad)
    assert torch.equal(*grads)  # type: ignore[misc]


def test_autocasts_cache_is_as_the_user_left_it() -> None:
    model = wrap()
    with torch.autocast("cpu", torch.bfloat16):
        model(mlp.inputs(0))
        assert torch.is_autocast_cache_enabled()
        with pytest.raises(RuntimeError):
            model(torch.zeros(3, 5))
        assert torch.is_autocast_cache_enabled()
