"""What a parameter answers outside its operator, without fetching, and what it refuses."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemini import ReleasedParameterError, ShardedModel, UnsupportedError
from tests.zoo import mlp
from tests.zoo.mlp import assert_same, build, sharded, train_step, weight, weights_of, wrap


def num_fetches(model: ShardedModel) -> int:
    return model.observer.num_fetches


# ---- questions that need no data -------------------------------------------------------------------------------

QUESTIONS: dict[str, Callable[[nn.Parameter], Any]] = {
    "shape": lambda p: (
        p.shape,
        p.size(),
        p.size(0),
        p.ndim,
        p.dim(),
        p.numel(),
        p.nelement(),
        len(p),
        p.shape.numel(),
    ),
    "dtype": lambda p: (p.dtype, p.is_floating_point(), p.is_complex(), p.element_size(), p.itemsize, p.nbytes),
    "device": lambda p: (p.device, p.is_cuda, p.is_cpu, p.is_meta, p.get_device(), p.layout, p.is_sparse),
    "stride": lambda p: (p.stride(), p.stride(0), p.is_contiguous()),
    "autograd": lambda p: (p.requires_grad, p.is_leaf, p.grad_fn, p.grad, p.retains_grad, p.is_inference()),
    "torch": lambda p: (torch.is_tensor(p), torch.numel(p), torch.is_floating_point(p), torch.is_complex(p)),
    "class": lambda p: (isinstance(p, nn.Parameter), isinstance(p, Tensor)),
    "detached": lambda p: (p.detach().shape, p.detach().dtype, p.detach().device, p.detach().requires_grad),
}
QUIET = {
    "hash": lambda p: {p: hash(p)}[p],
    "membership": lambda p: p in {p} and any(q is p for q in [p]),
    "repr": lambda p: f"{p} {p!r} {p!s} {p.detach()!r}",
    "hook": lambda p: p.register_hook(lambda g: g).remove(),
    "requires_grad_": lambda p: p.requires_grad_(True),
    "detach": lambda p: p.detach(),
}


@pytest.mark.parametrize("question", [*QUESTIONS, *QUIET])
def test_questions_about_a_released_parameter_never_fetch(question: str) -> None:
    model, reference = wrap(), build()
    model.chunk_manager.params.release_all()
    for mine, theirs in zip(model.parameters(), reference.parameters()):
        if question in QUESTIONS:
            assert QUESTIONS[question](mine) == QUESTIONS[question](theirs)
        else:
            QUIET[question](mine)
    assert num_fetches(model) == 0


def test_printing_shows_what_there_is_without_fetching() -> None:
    model, optimizer = sharded()
    assert "Linear(in_features=16, out_features=16" in repr(model)
    assert repr(model.module) == repr(build())
    assert "layers.0.weight" in repr(weight(model))
    assert "(16, 16)" in str(weight(model))
    assert "HybridAdam" in repr(optimizer) or "lr: 0.01" in repr(optimizer)
    assert str(list(model.named_parameters()))
    assert num_fetches(model) == 0


@pytest.mark.parametrize("address", ["untyped_storage", "storage_offset", "share_memory_"])
def test_addresses_are_refused_outside_a_step(address: str) -> None:
    model = wrap()
    with pytest.raises(ReleasedParameterError, match=rf"{address} of parameter 'layers\.0\.weight'"):
        getattr(weight(model), address)()


def test_released_parameters_work_in_functions_and_scripts() -> None:
    model, reference = wrap(), build()
    for m in (model, reference):
        x = mlp.inputs(0)
        (F.linear(x, weight(m, 3)).sum() + weight(m, 1).norm() + (weight(m, 0) * weight(m, 5)).sum()).backward()
    for mine, theirs in zip(model.parameters(), reference.parameters()):
        assert (mine.grad is None) == (theirs.grad is None)
        assert theirs.grad is None or torch.equal(mine.grad, theirs.grad)


# ---- copies ----------------------------------------------------------------------------------------------------


PICKLES: list[Callable[[Any], Any]] = [pickle.dumps, lambda x: torch.save(x, io.BytesIO())]
WHAT = ["model", "module", "layer", "parameter", "detached", "optimizer"]
COPIES = [(what, how) for what in WHAT for how in PICKLES]


@pytest.mark.parametrize(("what", "how"), [*COPIES, ("optimizer", copy.deepcopy)])
def test_copying_and_pickling_are_refused_with_the_way_out(what: str, how: Callable[[Any], Any]) -> None:
    """But for copies of the model and its parts: see test_plain_copies.py."""
    model, optimizer = sharded()
    things = {
        "model": model,
        "module": model.module,
        "layer": model.module.layers[2],
        "parameter": weight(model),
        "detached": weight(model).detach(),
        "optimizer": optimizer,
    }
    with pytest.raises((UnsupportedError, ReleasedParameterError), match="state_dict"):
        how(things[what])
    train_step(model, optimizer)


def test_functions_of_lists_return_and_write_what_they_do_on_plain_parameters() -> None:
    model, reference = wrap(), build()
    mine, theirs = list(model.parameters()), list(reference.parameters())
    factors = [1.0 + number for number in range(len(mine))]
    for got, wanted in zip(torch._foreach_mul(mine, factors), torch._foreach_mul(theirs, factors)):
        assert torch.equal(got, wanted)
    assert len(torch._foreach_norm(mine)) == len(mine)
    with torch.no_grad():
        for parameters in (mine, theirs):
            torch._foreach_mul_(parameters, factors)
            torch._foreach_add_(parameters, [torch.ones_like(p) for p in theirs], alpha=0.5)
    with pytest.raises(RuntimeError, match="length"):
        torch._foreach_mul(mine, factors[:-1])
    assert_same(weights_of(model), weights_of(reference))
