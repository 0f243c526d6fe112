"""Writes to `.grad` between backward and step, beside the same writes in plain PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from tests import access
from tests.access import STAGES, WRAPS, wrapped
from tests.harness.live_storages import LiveStorages
from tests.harness.on_ranks import gathered, on_ranks, on_ranks_with
from tests.zoo import mlp

# Of each world size a sample, and all of them in the long run.
ALL = [*WRAPS, {"chunk_size": 2048}]
SAMPLES = {1: ALL[2:], 2: [WRAPS[0], WRAPS[5]]}
on_two = on_ranks_with("wrap", SAMPLES, soak={2: ALL, 3: ALL}, timeout_s=120)
on_three = on_ranks_with("wrap", {**SAMPLES, 3: WRAPS[3:4]}, soak={2: ALL, 3: ALL}, timeout_s=120)


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


@pytest.mark.sampled(4)
@on_two
def test_writes_reach_the_step(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
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


@pytest.mark.sampled(2)
@on_three
def test_writes_between_micro_batches_and_gradients_that_no_backward_made(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
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


@pytest.mark.sampled(2)
@on_three
def test_torchs_clipping(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
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


@on_ranks(1, 2)
def test_torchs_clipping_holds_one_gradient_at_a_time(rank: int, world_size: int) -> None:
    """torch's clipping needs room for one whole gradient and for what is made of it, not for all of the model's."""
    model, optimizer = wrapped(lambda: mlp.Mlp(layers=16), {})
    mlp.loss_of(model).backward()
    largest = max(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    for foreach in (True, False):
        with LiveStorages() as live:
            for _ in range(2):  # in the first round it meets the memory in which gradients rest
                resting, live.peak_bytes = live.bytes_now, 0
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=foreach)
                torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4, foreach=foreach)
        assert all(float(p.grad.abs().max()) <= 1e-4 for p in model.parameters()), "also inside a dispatch mode"
        assert live.peak_bytes - resting < 10 * largest, f"{live.peak_bytes - resting} bytes with foreach={foreach}"
    optimizer.step()
    model.close()


@pytest.mark.sampled(2)
@on_three
def test_writes_after_the_optimizers_own_clip(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
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


@on_ranks(2)
def test_ranks_that_write_different_values_keep_one_model(rank: int, world_size: int) -> None:
    """As noise does: each rank's part of the gradient counts. Equal on all ranks, and at all stages."""
    weights = []
    for wrap in STAGES[:4]:
        model, optimizer = wrapped(access.Odd, wrap)
        model(torch.ones(2, 7)).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad.add_(torch.full_like(parameter, float(1 + rank)))  # type: ignore[union-attr]
        optimizer.step()
        weights.append(mlp.weights_of(model))
        model.close()
    for each in (each for of_rank in gathered(weights) for each in of_rank):
        mlp.assert_same(each, weights[0])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_writes_in_every_grad_mode(mode: Any) -> None:
    pair = access.Pair(1, {})
    pair.backward(0)
    factor = torch.tensor(2.0, requires_grad=True)
    with mode():
        for parameter, wanted in pair.both():
            parameter.grad.mul_(factor)
            parameter.grad.unsqueeze(-1)[:1].zero_()
            wanted.grad = wanted.grad * 2
            wanted.grad.unsqueeze(-1)[:1].zero_()
    same_gradients(pair, mode.__name__)
    pair.step()
