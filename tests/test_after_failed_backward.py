"""What a script does after a backward that ended with an exception, which it has caught."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from gemini import ShardedModel
from tests.harness.on_ranks import on_ranks
from tests.zoo import mlp


@pytest.mark.parametrize("use", ["close", "read a gradient", "clip"])
def test_after_a_backward_that_failed_the_model_is_not_inside_of_it(use: str) -> None:
    """A script that closes the model in `finally` sees its own error; gradients of that backward are None."""
    model, _ = mlp.sharded("cuda")

    def fail(grad: Tensor) -> None:
        raise KeyboardInterrupt

    x = mlp.inputs(0).requires_grad_()
    x.register_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(x).square().sum().backward()
    uses: dict[str, Callable[[], Any]] = {
        "close": model.close,
        "read a gradient": lambda: mlp.weight(model, 0).grad,
        "clip": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    }
    with pytest.warns(UserWarning, match="a backward ended with an exception") as told:
        found = uses[use]()
    assert found in (None, 0)
    assert told[0].filename == __file__, "where the script uses the model"


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_all_caught_a_failed_backward_may_close_the_model(rank: int, world_size: int, stage: int) -> None:
    model = ShardedModel(mlp.build(), device="emulated", stage=stage, chunk_size=mlp.CHUNK_NUMEL)

    def fail(grad: Tensor) -> None:
        raise ValueError("stopped")

    loss_input = mlp.inputs(rank).requires_grad_()
    loss_input.register_hook(fail)
    with pytest.raises(ValueError, match="stopped"):
        model(loss_input).square().sum().backward()
    model.close()
