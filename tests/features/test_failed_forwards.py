"""Which forwards have failed, as the other ranks and gradients of before see it."""

import re
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from gemini import GeminiError, RemoteRankError, ShardedModel
from tests.harness.on_ranks import on_ranks
from tests.zoo import mlp
from tests.zoo.mlp import CHUNK_NUMEL, build, loss_of, weight


class Silent(mlp.Mlp):
    """Keeps its output and returns None, as a model does whose loss is an attribute of it."""

    def forward(self, x: Tensor) -> None:  # type: ignore[override]
        self.output = super().forward(x)


@on_ranks(1, 2)
def test_a_model_that_returns_none_has_not_failed_inside_an_except_block(rank: int, world_size: int) -> None:
    model, reference = ShardedModel(build(Silent), **mlp.placed(chunk_size=CHUNK_NUMEL)), build(Silent)
    for each in (model, reference):
        for step in range(2):
            try:
                raise KeyError("of the script")
            except KeyError:
                each(mlp.inputs(step))
                each.output.square().mean().backward()
    assert torch.equal(weight(model).grad, weight(reference).grad)
    model.close()


@on_ranks(2)
@pytest.mark.parametrize("when", ["before wrapping", "on the model", "on its module"])
def test_the_other_ranks_hear_of_a_hook_that_raises_after_the_forward(rank: int, world_size: int, when: str) -> None:
    """The script of the one rank catches it, and all train on."""

    def fail(*_: Any) -> None:
        if rank == 1 and step == 1:
            raise ValueError("not today")

    module = build()
    if when == "before wrapping":
        module.register_forward_hook(fail)
    model = ShardedModel(module, **mlp.placed(chunk_size=CHUNK_NUMEL, rank_timeout=10))
    called = model.module if when == "on its module" else model
    if when != "before wrapping":
        called.register_forward_hook(fail)
    for step in range(3):
        if step == 1:
            with pytest.raises(ValueError if rank == 1 else RemoteRankError, match="not today"):
                loss_of(called, step).backward()
        else:
            loss_of(called, step).backward()
            assert weight(model).grad is not None
            model.zero_grad()
    model.close()


@on_ranks(2)
@pytest.mark.parametrize("has_failed", [False, True])
def test_a_closed_model_says_that_it_is_closed(rank: int, world_size: int, has_failed: bool) -> None:
    """Also after a failure, when ranks would start together again."""

    def fail(*_: Any) -> None:
        if rank == 1 and has_failed:
            raise ValueError("not today")

    model = ShardedModel(build(), device="emulated", rank_timeout=10)
    model.register_forward_hook(fail)
    with suppress(ValueError, RemoteRankError):
        loss_of(model, 0).backward()
    parameter = weight(model)
    model.close()
    for use in (parameter.norm, model.state_dict, lambda: model(mlp.inputs(0))):
        with pytest.raises(GeminiError, match=re.escape("the model is closed: close() comes after the last use")):
            use()
