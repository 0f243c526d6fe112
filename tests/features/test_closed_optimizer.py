"""An optimizer that is closed gives its model up: another one trains it from fresh states."""

from typing import Any

import pytest
import torch

from gemini import GeminiError, ShardedOptimizer
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import assert_same, both_dtypes, plain, sharded, train_step, weights_of


@on_ranks(1, 2)
@both_dtypes
@pytest.mark.parametrize("place", ["cuda", "cpu", "smallest"])
def test_another_optimizer_begins_anew(rank: int, world_size: int, place: str, dtype: torch.dtype | None) -> None:
    model, first = sharded(place, dtype=dtype)
    reference, its = plain(dtype) if dtype is None else (None, None)
    for step in range(3):
        train_step(model, first, step, dtype)
        if reference is not None:
            train_step(reference, its, step)
    host, device = model.chunk_manager.memory.host.ledger, model.chunk_manager.memory.device.ledger
    held = [dict(ledger.bytes_by_kind).get("optim", 0) for ledger in (host, device)]
    first.close()
    first.close()
    assert sum(held) and not any(dict(ledger.bytes_by_kind).get("optim", 0) for ledger in (host, device))
    for what in (
        first.step,
        first.zero_grad,
        first.state_dict,
        first.discard_state,
        first.follow_param_groups,
        lambda: first.load_state_dict({}),
        lambda: first.add_param_group({"params": []}),
        lambda: first.backward(torch.zeros((), requires_grad=True)),
    ):
        with pytest.raises(GeminiError, match="of an optimizer that was closed: use the model's present one"):
            what()
    second = ShardedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    other: Any = None if reference is None else torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        train_step(model, second, step, dtype)
        if reference is not None:
            train_step(reference, other, step)
    if reference is not None:
        assert_same(weights_of(model), weights_of(reference))
