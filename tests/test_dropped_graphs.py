"""Graphs that a user drops without a complete backward, and tensors that are modified after autograd saved them."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.dropped_graphs import KINDS, TwoHeads, assert_dropped_graphs_keep_nothing
from tests.mlp import WIDTH, build, inputs, wrap


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["cuda", "smallest"])
def test_a_graph_that_is_dropped_without_a_complete_backward_keeps_nothing(place: str, kind: str) -> None:
    assert_dropped_graphs_keep_nothing(wrap(place, TwoHeads), kind, 200 if kind == "evaluate" else 30)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["cuda", "cpu", "auto", "smallest"])
def test_two_thousand_dropped_graphs_keep_nothing(place: str, kind: str) -> None:
    assert_dropped_graphs_keep_nothing(wrap(place, TwoHeads), kind, 2000)


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
    assert sharded.executor.is_resident == (place == "cuda")  # else autograd keeps what it saves, and checks it
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
