"""`update_in_backward`: what a script does between `backward()` and `step()` is as without it, or refused by name."""

import contextlib
import copy
import math
import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini import GatheredParameters, GeminiError, ShardedModel, ShardedOptimizer, UpdatedInBackwardError, state_hash
from optim import HybridAdam
from tests.harness.on_ranks import gathered, on_ranks
from tests.zoo import mlp

Does = Callable[[ShardedModel, ShardedOptimizer], Any]


def _clips(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def _clips_by_value(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def _scales_gradients(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 0.5


def _scales_lists_of_gradients(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if grads:
        torch._foreach_mul_(grads, 0.5)


def _reads_gradients(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    sum(float(each.grad.norm()) for each in model.parameters() if each.grad is not None)


def _reads_a_gradient_by_name(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    gemini.safe_get_full_grad(model.layers[2].weight)


def _decays(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def _decays_lists(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)


def _writes_data(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    model.layers[2].weight.data[0] = 0.5


def _assigns_data(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    weight = model.layers[2].weight
    weight.data = torch.zeros(weight.shape, dtype=weight.dtype)


def _initialises(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    nn.init.zeros_(model.layers[2].bias)


def _writes_by_numpy(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    model.layers[2].weight.detach().numpy()[0] = 0.5


def _sets_gathered(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    with GatheredParameters(model.layers[2].weight, modifier_rank=0):
        model.layers[2].weight.data.fill_(0.01)


def _sets_weights(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    gemini.safe_set_full_fp32_param(model.layers[2].weight, torch.ones(mlp.WIDTH, mlp.WIDTH))


def _sets_states(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    gemini.safe_set_full_optimizer_state(model.layers[2].weight, torch.ones(mlp.WIDTH, mlp.WIDTH), "exp_avg")


def _loads(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    model.load_state_dict(mlp.build().state_dict())


def _loads_a_part(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    model.layers[2].load_state_dict(mlp.build().layers[2].state_dict())


def _loads_the_optimizer(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    optimizer.load_state_dict({"state": {}, "param_groups": optimizer.param_groups})


def _saves(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    model.state_dict()


def _saves_a_part(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    model.layers[2].state_dict()


def _saves_the_optimizer(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    optimizer.state_dict()


def _saves_a_checkpoint(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    gemini.save_checkpoint(tempfile.gettempdir(), model, optimizer)


def _evaluates(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    with torch.no_grad():
        mlp.loss_of(model, 9)


def _evaluates_the_module(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    with torch.no_grad():
        model.module(mlp.inputs(9))


def _evaluates_a_part(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    with torch.no_grad():
        model.layers[2](mlp.inputs(9))


def _reads_weights(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    float(model.layers[2].weight.norm())


def _reads_states(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    optimizer.state[model.layers[2].weight]["exp_avg"]


def _reads_its_part(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    gemini.safe_get_local_fp32_param(model.layers[2].weight)


def _copies(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    copy.deepcopy(model)


def _closes_the_optimizer(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    optimizer.close()


ACTIONS: list[Does] = [
    *(_clips, _clips_by_value, _scales_gradients, _scales_lists_of_gradients, _reads_gradients),
    *(_reads_a_gradient_by_name, _decays, _decays_lists, _writes_data, _assigns_data, _initialises, _writes_by_numpy),
    *(_sets_gathered, _sets_weights, _sets_states, _loads, _loads_a_part, _loads_the_optimizer, _saves, _saves_a_part),
    *(_saves_the_optimizer, _saves_a_checkpoint, _evaluates, _evaluates_the_module, _evaluates_a_part, _reads_weights),
    *(_reads_states, _reads_its_part, _copies, _closes_the_optimizer),
]


@on_ranks(1, 2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_what_needs_weights_or_gradients_from_before_is_refused_and_loses_nothing(
    rank: int, world_size: int, place: str, dtype: torch.dtype | None
) -> None:
    found = []
    for in_backward in (False, True):
        model, optimizer = mlp.sharded(place, dtype=dtype, update_in_backward=in_backward)
        for step, does in enumerate([None, *ACTIONS]):
            mlp.loss_of(model, step, dtype).backward()
            if in_backward and does is not None:
                with pytest.raises(
                    UpdatedInBackwardError, match=r"update_in_backward=True has updated layers\.\d"
                ) as info:
                    does(model, optimizer)
                assert "step()" in str(info.value), does
            optimizer.step()
            assert optimizer.grad_norm is not None and float(optimizer.grad_norm) > 0, does
        found.append(state_hash(model, optimizer))
        model.close()
    assert found[0] == found[1]


@on_ranks(1, 2)
@pytest.mark.parametrize("place", ["cuda", "cpu", "smallest"])
def test_the_norm_can_be_asked_for(rank: int, world_size: int, place: str) -> None:
    found = []
    for in_backward in (False, True):
        model, optimizer = mlp.sharded(place, update_in_backward=in_backward)
        norms = []
        for step in range(3):
            mlp.loss_of(model, 2 * step + rank).backward()
            norms.append(float(optimizer.clip_grad_norm_(math.inf)))
            optimizer.step()
            assert optimizer.last_step is not None
            norms += [optimizer.last_step.grad_norm, optimizer.last_step.clip]
        found.append((state_hash(model, optimizer), norms))
        model.close()
    assert found[0] == found[1]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_hooks_see_and_change_gradients(place: str) -> None:
    """The form that works in place of edits of `.grad`."""

    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    found = []
    for in_backward in (False, True):
        model, optimizer = mlp.sharded(place, update_in_backward=in_backward)
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
            parameter.register_post_accumulate_grad_hook(halve)
        for step in range(3):
            mlp.train_step(model, optimizer, step)
        found.append(state_hash(model, optimizer))
    assert found[0] == found[1]


@pytest.mark.parametrize("take", [lambda weight: weight.view(-1), lambda weight: weight.detach().view(-1)])
def test_a_write_through_a_view_from_before_is_found_at_the_step(take: Callable[[nn.Parameter], torch.Tensor]) -> None:
    model, optimizer = mlp.sharded("cuda", update_in_backward=True)
    mlp.train_step(model, optimizer, 0)
    view = take(model.layers[2].weight)
    mlp.loss_of(model, 1).backward()
    with torch.no_grad():
        view.mul_(0.5)
    for _ in range(2):
        with pytest.raises(GeminiError, match=r"layers.2.weight: written to through a view.*update_in_backward=True"):
            optimizer.step()


@on_ranks(1, 2)
def test_a_checkpoint_may_be_loaded_between_backward_and_step(rank: int, world_size: int) -> None:
    """It sets weights, states and step counts, and drops gradients: nothing of the backward remains."""
    found = []
    with tempfile.TemporaryDirectory() as directory:
        folder = gathered(directory)[0]
        for in_backward in (False, True):
            model, optimizer = mlp.sharded("cpu", update_in_backward=in_backward)
            mlp.train_step(model, optimizer, 0)
            gemini.save_checkpoint(folder, model, optimizer, tag=f"in backward {in_backward}")
            mlp.loss_of(model, 1).backward()
            if in_backward:
                with pytest.raises(UpdatedInBackwardError, match="load_checkpoint"):
                    gemini.load_checkpoint(folder, model, optimizer, weights_only=True)
            gemini.load_checkpoint(folder, model, optimizer)
            mlp.train_step(model, optimizer, 2)
            found.append(state_hash(model, optimizer))
            model.close()
        gathered("all ranks have read it")
    assert found[0] == found[1]


@on_ranks(1, 2)
def test_freezing_between_backward_and_step_is_as_without_it(rank: int, world_size: int) -> None:
    found = []
    for in_backward in (False, True):
        model, optimizer = mlp.sharded("cpu", update_in_backward=in_backward)
        for step in range(4):
            mlp.loss_of(model, step).backward()
            model.layers[2].requires_grad_(step == 2)
            model.layers[4].weight.requires_grad_(step != 1)
            optimizer.step()
        found.append(state_hash(model, optimizer))
        model.close()
    assert found[0] == found[1]


def test_a_script_that_fails_in_between_goes_on_with_the_step() -> None:
    model, optimizer = mlp.sharded("cpu", update_in_backward=True)
    reference, its = mlp.plain()
    for step in range(3):
        try:
            mlp.loss_of(model, step).backward()
            raise ValueError("the script has failed")
        except ValueError:
            optimizer.step()
        mlp.train_step(reference, its, step)
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_is_refused_the_same() -> None:
    model, _ = mlp.sharded("cpu", update_in_backward=True)
    mlp.loss_of(model, 0).backward()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            try:
                model.state_dict()
            except UpdatedInBackwardError:
                os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


class Sometimes(nn.Module):
    """A branch that some passes leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(mlp.WIDTH, mlp.WIDTH) for _ in range(3))
        self.takes_branch = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        y: torch.Tensor = self.layers[2](x + self.layers[1](x) if self.takes_branch else x)
        return y


@on_ranks(1, 2)
@pytest.mark.parametrize("policy", ["cuda", "cpu"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("chunk_numel", [mlp.CHUNK_NUMEL, 2048])  # a layer each, all in one
def test_a_branch_that_all_ranks_leave_out_for_once_is_trained_as_without_it(
    rank: int, world_size: int, policy: str, stage: int, chunk_numel: int
) -> None:
    found = []
    for in_backward in (False, True):
        options = {"tensor_placement_policy": policy, "stage": stage, "chunk_size": chunk_numel}
        model = ShardedModel(
            mlp.build(Sometimes), device="emulated", **options, update_in_backward=in_backward, rank_timeout=60
        )
        optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2))
        norms = []
        for step in range(6):
            model.module.takes_branch = step not in (2, 4)
            mlp.loss_of(model, 2 * step + rank).backward()
            optimizer.step()
            norms.append(float(optimizer.grad_norm or 0))
        found.append((state_hash(model, optimizer), norms))
        model.close()
    assert found[0] == found[1]


def test_a_chunk_of_its_own_that_was_left_out_is_updated_in_the_backward_again() -> None:
    """See below for several ranks."""
    _updated_again(0, 1)


@on_ranks(2)
def test_so_it_is_on_several_ranks(rank: int, world_size: int) -> None:
    _updated_again(rank, world_size)


def _updated_again(rank: int, world_size: int) -> None:
    model = ShardedModel(mlp.build(Sometimes), **mlp.placed(stage=0, update_in_backward=True))
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2))
    for step in range(4):
        model.module.takes_branch = step != 2
        mlp.loss_of(model, 2 * step + rank).backward()
        with pytest.raises(UpdatedInBackwardError) if model.module.takes_branch else contextlib.nullcontext():
            float(model.layers[1].weight.norm())
        optimizer.step()


@pytest.mark.parametrize("host_memory", [40_000, 80_000])
def test_a_parameter_of_a_chunk_on_the_disk_may_be_frozen(host_memory: int) -> None:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for options in ({}, {"update_in_backward": True, "disk_path": folder, "host_memory": host_memory}):
            model = ShardedModel(mlp.build(), **mlp.placed(tensor_placement_policy="cpu", **options))
            optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
            for step in range(5):
                model.layers[5].bias.requires_grad_(step in (0, 3))
                model.layers[1].requires_grad_(step != 2)
                mlp.train_step(model, optimizer, step)
            found.append(state_hash(model, optimizer))
            model.close()
    assert found[0] == found[1]
