"""More operations of random walks: reads and writes of weights and gradients, state dicts, budgets. See `walks.py`."""

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from gemini import GatheredParameters, ShardedModel
from tests.zoo.walks import Walk, assert_same, of, operation, zero_both


@operation(2)
def edit_a_weight(walk: Walk) -> None:
    (name,), how = walk.names(), walk.chance.randrange(6)

    def do(model: Any, _: Any) -> None:
        weight = of(model, name)
        if how == 0:
            weight.data = torch.full(weight.shape, 0.25, dtype=weight.dtype, device=weight.device)
        elif how == 1:
            weight.data.add_(0.01)
        elif how == 2:
            weight.data[...] = weight.data * 2
        with torch.no_grad():
            if how == 3:
                weight.mul_(0.9)
            elif how == 4:
                weight.view(-1)[:1] = 0.5
            elif how == 5:
                weight.copy_(torch.linspace(-1, 1, weight.numel()).view(weight.shape))

    walk.both(do)


@operation()
def edit_a_gathered_weight(walk: Walk) -> None:
    (name,) = walk.names()

    def do(model: Any, _: Any) -> None:
        gathered = GatheredParameters([of(model, name)], modifier_rank=0)
        with gathered if isinstance(model, ShardedModel) else nullcontext(), torch.no_grad():
            of(model, name).mul_(0.7)

    walk.both(do)


# The edits of gradients round nothing in any dtype: sums of 16-bit gradients rest in fp32, for a whole chunk.


@operation(2)
def edit_a_gradient(walk: Walk) -> None:
    names, how = walk.names(trained=True), walk.chance.randrange(7)
    if not names or (of(walk.plain, names[0]).grad is None and how > 1):
        return

    def do(model: Any, _: Any) -> None:
        weight = of(model, names[0])
        if how == 0:
            weight.grad = None
        elif how == 1:
            weight.grad = torch.full(weight.shape, 0.125, dtype=weight.dtype, device=weight.device)
        else:
            assert weight.grad is not None
            if how == 2:
                weight.grad = weight.grad * 2
            elif how == 3:
                weight.grad.mul_(0.5)
            elif how == 4:
                weight.grad.view(-1)[:1].zero_()
            elif how == 5:
                weight.grad.clamp_(-(2.0**-7), 2.0**-7)
            else:
                weight.grad.data.neg_()

    walk.both(do)


@operation()
def clip_by_value(walk: Walk) -> None:
    if any(parameter.grad is not None for parameter in walk.plain.parameters()):  # torch fails without any
        walk.both(lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 2.0**-6, foreach=False))


@operation()
def read_a_weight(walk: Walk) -> None:
    (name,) = walk.names()
    walk.agree(lambda model, _: of(model, name).square())


@operation(2)
def save(walk: Walk) -> None:
    walk.saved = walk.both(lambda model, optimizer: copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    (ours, _), (its, _) = walk.saved
    assert list(ours) == list(its)
    for name in its:
        assert_same(ours[name], its[name], name)


@operation(2)
def load(walk: Walk) -> None:
    """What was saved, both or one of them, or the plain model's weights."""
    if walk.saved is None or len(walk.saved[1][1]["param_groups"]) != len(walk.its.param_groups):
        return
    which = walk.chance.choice(["both", "model", "optimizer", "plain weights"])
    if walk.has_forgotten:  # states of frozen parameters take no memory while gradients wait for a step
        zero_both(walk)

    def do(model: Any, optimizer: Any) -> None:
        assert walk.saved is not None
        saved = walk.saved[0 if model is walk.model and which != "plain weights" else 1]
        if which != "optimizer":
            model.load_state_dict(copy.deepcopy(saved[0]))
        if which in ("both", "optimizer"):
            optimizer.load_state_dict(copy.deepcopy(saved[1]))

    walk.both(do)


# -- memory


def _between_steps(walk: Walk) -> None:
    """Nothing may move while gradients wait for a step."""
    walk.both(lambda model, optimizer: optimizer.step())
    zero_both(walk)


@operation(3)
def change_the_budget(walk: Walk) -> None:
    _between_steps(walk)
    least, factor = walk.model.plan.packed_minimum_bytes, walk.chance.choice([None, 1.0, 1.1, 1.5, 2.5])
    assert least is not None
    if walk.options["tensor_placement_policy"] in ("cuda", "static"):  # which take all that they need
        factor = None
    walk.model.change_budgets(model_data_memory=None if factor is None else int(least * factor))


@operation()
def offload(walk: Walk) -> None:
    _between_steps(walk)
    walk.model.offload_states()
    if walk.chance.random() < 0.5:
        walk.model.reload_states()
