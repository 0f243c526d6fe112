"""`torch.autograd.grad` on several ranks, each with a batch of its own."""

from typing import Any

import torch

from gemini import ShardedModel, ShardedOptimizer
from tests import mlp
from tests.mlp import CHUNK_NUMEL, build, inputs
from tests.transforms import ANYWHERE, REVERSE


def gradients_of_own_batch(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """A rank gets the plain gradients of its batch, and the step after it is as if nobody had asked."""
    wrap = {"chunk_size": CHUNK_NUMEL, **wrap}
    if wrap.get("model_data_memory") == "smallest":
        del wrap["model_data_memory"]
        wrap["model_data_memory"] = mlp.smallest_budget(**wrap)
    reference = build()
    weights = []
    for asks in (True, False):
        model = ShardedModel(build(), device="emulated", **wrap)
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        for step in range(2):
            if asks:
                loss, wanted = (each(inputs(rank)).square().mean() for each in (model, reference))
                found = torch.autograd.grad(loss, list(model.parameters()))
                its = torch.autograd.grad(wanted, list(reference.parameters()))
                assert step or all(torch.equal(a, b) for a, b in zip(found, its, strict=True))
                assert all(parameter.grad is None for parameter in model.parameters())
            model(inputs(step + 10 * rank)).square().mean().backward()
            optimizer.step()
        weights.append(mlp.weights_of(model))
        model.close()
    mlp.assert_same(*weights)


def transforms(rank: int, world_size: int, stage: int) -> None:
    """Without a budget, weights stay where they are until a step; then a rank transforms its own function."""
    model, reference = ShardedModel(build(), device="emulated", stage=stage, chunk_size=CHUNK_NUMEL), build()
    for name, transform in {**REVERSE, **ANYWHERE}.items():
        found, wanted = (torch.utils._pytree.tree_leaves(transform(each)) for each in (model, reference))
        assert len(found) == len(wanted) and all(map(torch.equal, found, wanted)), name
    model(inputs(rank)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.close()
