"""Graphs that a user drops without a complete backward, and tensors that are modified after autograd saved them."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness.live_storages import LiveStorages
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import WIDTH, build, inputs, wrap


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
    net = getattr(model, "module", model)
    net.fails = True
    with pytest.raises(RuntimeError, match="a forward that fails"):
        model(inputs(0))
    net.fails = False


def fail_in_backward(model: Any) -> None:
    first, second = model(inputs(0))

    def fail(grad: Tensor) -> None:
        raise ValueError("a backward that fails")

    first.register_hook(fail)
    with pytest.raises(ValueError, match="a backward that fails"):
        (first + second).sum().backward()


def penalise_a_weight(model: Any) -> None:
    getattr(model, "module", model).first.weight.square().tanh().sum()


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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["cuda", "smallest"])
def test_a_graph_that_is_dropped_without_a_complete_backward_keeps_nothing(place: str, kind: str) -> None:
    assert_dropped_graphs_keep_nothing(wrap(place, TwoHeads), kind, 200 if kind == "evaluate" else 30)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_dropped_graphs_leave_as_little_to_the_collector_of_cycles_as_plain_ones(kind: str) -> None:
    found = []
    for model in (build(TwoHeads), wrap("smallest", TwoHeads)):
        for _ in range(3):
            KINDS[kind](model)
        with without_collector():
            for _ in range(5):
                KINDS[kind](model)
            found.append(gc.collect())
    assert found[0] == found[1]


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["cuda", "cpu", "auto", "smallest"])
def test_two_thousand_dropped_graphs_keep_nothing(place: str, kind: str) -> None:
    assert_dropped_graphs_keep_nothing(wrap(place, TwoHeads), kind, 2000)


@on_ranks(2)
@pytest.mark.parametrize("place", ["cuda", "smallest"])
def test_a_graph_that_every_rank_drops_keeps_nothing(rank: int, world_size: int, place: str) -> None:
    """The model has a leaf of which ranks may use different parts; its outputs are tied to its inputs."""
    model = wrap(place, TwoHeads)
    for kind in ("evaluate", "leave_a_head_unused", "checkpoint_it"):
        model.train()
        assert_dropped_graphs_keep_nothing(model, kind, 8)
    model.close()


class Modifies(nn.Module):
    """Writes to a tensor after an operation has used it: `which` says where autograd has it from."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.which = which

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        out: Tensor = self.third(self.second(hidden.tanh()))
        if self.which == "an operator's input":
            x.add_(1)
        elif self.which == "an operation's input":
            out = out * hidden
            hidden.add_(1)
        elif self.which == "an operation's output":
            out = out.sigmoid()
            other = out * 2
            out.mul_(2)
            out = other + out
        elif self.which == "a view":
            out = out * hidden
            hidden[0].zero_()
        elif self.which == "a buffer":
            out = out * self.scale
            self.scale.mul_(2)
        return out


@pytest.mark.parametrize("place", ["cuda", "smallest"])
@pytest.mark.parametrize(
    "which", ["an operator's input", "an operation's input", "an operation's output", "a view", "a buffer"]
)
def test_a_tensor_that_was_modified_after_it_was_saved_is_autograds_error(which: str, place: str) -> None:
    """Never a gradient of other values than those that forward used."""
    make = partial(Modifies, which)
    sharded = wrap(place, make)
    assert sharded.chunk_manager.step.payloads.is_resident == (
        place == "cuda"
    )  # else autograd keeps what it saves, and checks it
    said = []
    for model in (build(make), sharded):
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as found:
            model(inputs(0)).sum().backward()
        said.append(str(found.value))
    at_versions = [words[words.index("is at version") :].split(" Hint")[0] for words in said]
    assert at_versions[0] == at_versions[1]
    assert f"[torch.FloatTensor [{WIDTH if which == 'a buffer' else f'8, {WIDTH}'}]]" in said[1]


def test_a_tensor_may_be_modified_before_it_is_saved_or_where_nothing_needs_it() -> None:
    make = partial(Modifies, "nothing")
    grads = []
    for model in (build(make), wrap("smallest", make)):
        x = inputs(0).add_(1).requires_grad_()
        out = model(x).add_(1).mul_(2)
        out.sum().backward()
        grads.append([x.grad, *(parameter.grad.clone() for parameter in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
