"""Ways in which a user drops a graph without a complete backward, and what stays alive afterwards."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.live_storages import LiveStorages
from tests.mlp import WIDTH, inputs


class Routed(nn.Module):
    """Two experts of which each row of a batch takes one; on several ranks a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x[:4]).repeat(2, 1) + self.experts[1](x[4:]).repeat(2, 1)


class TwoHeads(nn.Module):
    """An operator, a leaf, a weight that is borrowed from another operator, two heads, and functions between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.routed = Routed()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.fails = False

    def body(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x))) * 2
        return self.routed(x) + x @ self.heads[1].weight

    def forward(self, x: Tensor, reentrant: bool | None = None) -> tuple[Tensor, Tensor]:
        if reentrant is None:
            x = self.body(x)
        else:
            x = checkpoint(self.body, x, use_reentrant=reentrant)
        if self.fails:
            raise RuntimeError("a forward that fails")
        return torch.tanh(self.heads[0](x)), torch.tanh(self.heads[1](x))


def evaluate(model: Any) -> None:
    model.eval()
    model(inputs(0))


def skip_a_batch(model: Any) -> None:
    first, second = model(inputs(0))
    (first + second).square().mean()


def leave_a_head_unused(model: Any) -> None:
    first, _ = model(inputs(0))
    first.sum().backward()
    model.zero_grad()


def retain_the_graph(model: Any) -> None:
    first, second = model(inputs(0))
    (first + second).sum().backward(retain_graph=True)
    model.zero_grad()


def differentiate_by_inputs_only(model: Any) -> None:
    x = inputs(0).requires_grad_()
    first, second = model(x)
    torch.autograd.grad((first + second).sum(), x)


def fail_in_forward(model: Any) -> None:
    model.module.fails = True
    with pytest.raises(RuntimeError, match="a forward that fails"):
        model(inputs(0))
    model.module.fails = False


def fail_in_backward(model: Any) -> None:
    first, second = model(inputs(0))

    def fail(grad: Tensor) -> None:
        raise ValueError("a backward that fails")

    first.register_hook(fail)
    with pytest.raises(ValueError, match="a backward that fails"):
        (first + second).sum().backward()


def penalise_a_weight(model: Any) -> None:
    model.module.first.weight.square().tanh().sum()


def checkpoint_it(model: Any) -> None:
    model(inputs(0), reentrant=False)


def checkpoint_it_reentrantly(model: Any) -> None:
    model(inputs(0).requires_grad_(), reentrant=True)


def offload(model: Any) -> None:
    """As `save_on_cpu` does where the device is another one; on the CPU that one keeps the tensor itself."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda packed: packed):
        model(inputs(0))


def cast_automatically(model: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model(inputs(0))


KINDS: dict[str, Callable[[Any], None]] = {
    kind.__name__: kind
    for kind in (
        *(evaluate, skip_a_batch, leave_a_head_unused, retain_the_graph, differentiate_by_inputs_only),
        *(fail_in_forward, fail_in_backward, penalise_a_weight, offload, cast_automatically),
        *(checkpoint_it, checkpoint_it_reentrantly),
    )
}


@contextmanager
def without_collector() -> Iterator[None]:
    """Memory has to go when its last reference goes, not when the collector of cycles comes by."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def assert_dropped_graphs_keep_nothing(model: Any, kind: str, count: int) -> None:
    """`count` graphs leave no more alive than the first few did."""
    with without_collector(), LiveStorages() as live:
        for _ in range(3):
            KINDS[kind](model)
        before = live.num_now, live.bytes_now
        for _ in range(count - 3):
            KINDS[kind](model)
        deadline = time.monotonic() + 2
        while live.bytes_now > before[1] and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread of gloo's drops a collective's tensors some ms after its end
        after = live.num_now, live.bytes_now
    assert after <= before, f"{kind}: (storages, bytes) grew from {before} to {after} over {count} graphs"
