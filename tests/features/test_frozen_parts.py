"""Parameters that are frozen and unfrozen between steps: the bits of the plain loop, and what is refused."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import (
    BudgetError,
    DivergenceError,
    GatheredParameters,
    GeminiError,
    RemoteRankError,
    ShardedModel,
    ShardedOptimizer,
    UnsupportedError,
    state_hash,
)
from tests.harness.on_ranks import on_ranks
from tests.harness.ranks import RankPool
from tests.zoo import mlp
from tests.zoo.mlp import CHUNK_NUMEL, build, weights_of
from tests.zoo.parts import WRAPS, Pair, Trunk, at_some_places, everywhere, everywhere_and_on_three


@pytest.mark.sampled(4)
@everywhere_and_on_three
def test_unfreezing_step_by_step_has_the_bits_of_the_plain_loop(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    """Gradual unfreezing, then freezing, then unfreezing of what was trained before: the bits of the plain loop."""
    pair = Pair(rank, world_size, wrap)
    pair.steps(0, 1)
    pair.flag(True, "layers.2", "layers.1.bias")
    assert all(parameter.requires_grad for parameter in pair.both("layers.2.weight"))
    pair.steps(2, 3)
    before = weights_of(pair.model)
    assert not torch.equal(before["layers.2.weight"], build().layers[2].weight), "it trains"
    pair.flag(False, "layers.5", "layers.4.bias")
    pair.steps(4, 5)
    assert torch.equal(weights_of(pair.model)["layers.5.weight"], before["layers.5.weight"])
    pair.flag(True, "layers.3", "layers.4", "layers.5.weight")
    pair.flag(False, "layers.2.weight")
    pair.steps(6, 7)
    pair.flag(True, "layers")
    pair.steps(8, 9)
    state = pair.optimizer.state_dict()["state"]
    assert [int(state[number]["step"]) for number in (0, 2, 4, 10)] == [2, 2, 6, 8], "what is frozen keeps its count"
    pair.model.close()


@pytest.mark.sampled(4)
@everywhere
def test_what_was_just_unfrozen_or_frozen_is_used_outside_of_a_forward(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    """Parameters that are used outside of a forward, right after they were unfrozen or frozen."""
    pair = Pair(rank, world_size, wrap)
    pair.steps(0)
    plain_loss = pair.loss
    for step, trains in enumerate((True, False, True), start=1):
        pair.flag(trains, "layers.2.")

        def loss(model: nn.Module, step: int, rank: int, trains: bool = trains) -> Tensor:
            weight = dict(model.named_parameters())["layers.2.weight"]
            penalty = (weight * weight).sum() * 0.01
            assert penalty.requires_grad == trains
            return plain_loss(model, step, rank) + penalty

        pair.loss = loss  # type: ignore[method-assign]
        pair.steps(step)
    pair.model.close()


@pytest.mark.sampled(4)
@everywhere
def test_for_a_while_nothing_is_trained_but_inputs_have_gradients(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    """For a while nothing at all is trained, but inputs have gradients; they are no reason to wait for a step."""
    pair = Pair(rank, world_size, wrap)
    pair.steps(0)
    pair.flag(False, "layers")
    inputs = [mlp.inputs(1, pair.dtype).requires_grad_() for _ in range(2)]
    for model, x in zip((pair.model, pair.plain), inputs):
        model(x).sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert not pair.held("grad") and pair.held("optim")
    pair.flag(True, "layers.5")
    pair.steps(2, 3)
    pair.flag(False, "layers")
    pair.discard()
    assert not pair.held("grad") and not pair.held("optim") and not pair.held("master")
    pair.flag(True, "layers.4")
    pair.steps(4)
    pair.model.close()


@pytest.mark.sampled(2)
@at_some_places
def test_unfreezing_in_the_middle_of_a_step_is_refused_and_changes_nothing(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    """What cannot be is an error that changes nothing, and training goes on."""
    pair = Pair(rank, world_size, wrap)
    pair.steps(0)
    pair.backward(1)
    pair.flag(True, "layers.2.")
    with pytest.raises(GeminiError, match=r"layers\.2\.weight, layers\.2\.bias were unfrozen between the micro-ba"):
        pair.loss(pair.model, 2, rank)
    pair.flag(False, "layers.2.")
    pair.zero_grad()
    pair.steps(2)
    before = state_hash(pair.model, pair.optimizer)
    with GatheredParameters(pair.both("layers.2.weight")[0]):
        pair.flag(True, "layers.2.")
        with pytest.raises(GeminiError, match="inside GatheredParameters"):
            pair.loss(pair.model, 2, rank)
    assert state_hash(pair.model, pair.optimizer) == before
    pair.steps(3)  # outside, it counts
    pair.flag(False, "layers.4.")
    pair.backward(4)
    pair.flag(False, "layers.5.weight")  # its gradient is there already: it waits for the step
    pair.zero_grad()
    pair.steps(5)
    pair.model.close()


@on_ranks(1, 2)
def test_what_does_not_fit_when_it_is_unfrozen_changes_nothing_on_any_rank(rank: int, world_size: int) -> None:
    """Unfreezing more than there is room for is an error, and freezing it again mends it."""
    least = mlp.smallest_budget(Trunk, chunk_size=CHUNK_NUMEL, tensor_placement_policy="cuda")
    wrap = {"tensor_placement_policy": "cuda", "model_data_memory": least}
    pair = Pair(rank, world_size, wrap)
    pair.steps(0)
    before = state_hash(pair.model, pair.optimizer)
    held = [pair.held(kind) for kind in ("param", "grad", "optim")]
    pair.flag(True, "layers.1.", "layers.2.")
    for _ in range(2):
        refusal = r"unfrozen: layers\.1\.weight, .*does not fit: device: .*model_data_mem"
        with pytest.raises(BudgetError, match=refusal) as e:
            pair.loss(pair.model, 1, rank)
        assert e.value.tier == "device" and e.value.needed_bytes > e.value.budget_bytes == least, "in other words"
    assert [pair.held(kind) for kind in ("param", "grad", "optim")] == held
    assert state_hash(pair.model, pair.optimizer) == before
    pair.flag(False, "layers.1.", "layers.2.")
    pair.steps(1)
    pair.flag(False, "layers.4.")
    pair.flag(True, "layers.2.")  # the gradients fit, and the state of what is frozen goes to the host
    pair.steps(2, 3)
    pair.model.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrap", WRAPS, ids=str)
def test_a_flag_counts_for_graphs_that_are_built_after_it_changed(wrap: dict[str, Any]) -> None:
    pair = Pair(0, 1, wrap)
    pair.steps(0)
    for step, trains in ((1, True), (2, False), (3, True)):
        early = [pair.loss(model, 2 * step, 0) for model in (pair.model, pair.plain)]
        pair.flag(trains, "layers.2.", "layers.4.")
        late = [pair.loss(model, 2 * step + 1, 0) for model in (pair.model, pair.plain)]
        for one, other in zip(early, late):
            (one + other).backward()
        pair.step()


@pytest.mark.parametrize("wrap", WRAPS[-4:], ids=str)
def test_unfreezing_while_a_forward_runs_is_an_error_and_counts_from_the_next_one(wrap: dict[str, Any]) -> None:
    pair = Pair(0, 1, wrap)
    pair.steps(0)
    handle = pair.model.module.layers[1].register_forward_hook(lambda *_: pair.flag(True, "layers.2."))
    loss = pair.loss(pair.model, 1, 0)
    handle.remove()
    with pytest.raises(UnsupportedError, match=r"layers\.2\..* was unfrozen while a forward ran"):
        loss.backward()
    pair.zero_grad()
    pair.steps(2, 3)


def test_fp16_weights_that_are_unfrozen_get_a_loss_scale_and_the_same_bits_everywhere() -> None:
    hashes = set()
    for wrap in ({"tensor_placement_policy": "cuda"}, {"tensor_placement_policy": "cpu"}, {"chunk_size": 51200}):
        frozen = mlp.build()
        frozen.requires_grad_(False)
        wrap = {"chunk_size": mlp.CHUNK_NUMEL, "dtype": torch.float16, **wrap}
        model = ShardedModel(frozen, device="emulated", **wrap)
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()), initial_scale=64.0)
        assert optimizer.loss_scale == 1.0
        for step, names in enumerate((("layers.2", "layers.4"), ("layers.2",), ("layers.1", "layers.2.weight"))):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.startswith(names))
            loss = mlp.loss_of(model, step, torch.float16)
            assert optimizer.loss_scale == 64.0
            optimizer.backward(loss)
            optimizer.step()
        hashes.add(state_hash(model, optimizer))
    assert len(hashes) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrap", WRAPS, ids=str)
def test_a_parameter_that_is_trained_again_before_the_next_forward_has_lost_nothing(wrap: dict[str, Any]) -> None:
    """As one edits weights; outside no_grad, where the edit of an indexed row is refused unless it is frozen."""
    pair = Pair(0, 1, wrap)
    pair.steps(0, 1)
    before = pair.optimizer.state_dict()
    for weight in pair.both("layers.4.weight"):
        weight.requires_grad_(False)
        weight[0].zero_()
        assert not weight[0].any()
        weight.requires_grad_(True)
    after = pair.optimizer.state_dict()
    number = [name for name, _ in pair.model.named_parameters()].index("layers.4.weight")
    assert torch.equal(after["state"][number]["exp_avg"], before["state"][number]["exp_avg"])
    for masters in (before["masters"], after["masters"]):
        if number in masters:
            masters[number][0].zero_()
    mlp.assert_same(after["masters"], before["masters"])
    pair.steps(2, 3)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_freezing_says_nothing_and_loses_nothing(dtype: torch.dtype | None) -> None:
    pair = Pair(0, 1, {} if dtype is None else {"dtype": dtype})
    pair.steps(0)
    before = pair.optimizer.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.flag(False, "layers.4.", "layers.5.")
        pair.flag(True, "layers.2.")
        pair.steps(1)
        after = pair.optimizer.state_dict()
        for number in (8, 9, 10, 11):
            mlp.assert_same(after["state"][number], before["state"][number])
        pair.flag(True, "layers.")
        pair.steps(2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("wrap", WRAPS, ids=str)
def test_models_that_are_trained_in_turns_train_as_in_plain_pytorch(wrap: dict[str, Any]) -> None:
    """A generator through a critic that is frozen meanwhile, whichever is the first to be stepped."""
    dtype = wrap.get("dtype")
    for first in (0, 1):
        ours, plain, optimizers, its = [], [], [], []
        for _ in range(2):
            pair = Pair(0, 1, wrap, mlp.Mlp)
            ours.append(pair.model)
            plain.append(pair.plain)
            optimizers.append(pair.optimizer)
            its.append(pair.its)
        for turn in range(5):
            trained = (first + turn) % 2
            for models, both in ((ours, optimizers), (plain, its)):
                models[trained].requires_grad_(True)
                models[1 - trained].requires_grad_(False)
                models[1](models[0](mlp.inputs(turn, dtype))).square().mean().backward()
                both[trained].step()
                both[trained].zero_grad()
            for mine, wanted in zip(ours, plain):
                mlp.assert_same(mlp.weights_of(mine), mlp.weights_of(wanted))


def diverges(rank: int, world_size: int, what: str, wrap: dict[str, Any]) -> str:
    """Rank 1 does something else after a common step, or before the first one. What every rank is told."""
    pair = Pair(rank, world_size, wrap)
    if what != "first":
        pair.steps(0, 1)
    try:
        if rank == 1 or what == "other":
            pair.model.layers[2 if rank == 1 else 3].weight.requires_grad_(True)
        if what == "group":
            pair.model.layers[2].weight.requires_grad_(False)
            if rank == 1:
                pair.optimizer.param_groups[0]["params"].clear()
                pair.optimizer.add_param_group({"params": [pair.model.layers[5].weight]})
        loss = pair.loss(pair.model, 2, rank)
        loss.backward()
        pair.optimizer.step()
    except (DivergenceError, RemoteRankError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "stage", "said"),
    [
        pytest.param("one", 3, "change of what is trained", marks=pytest.mark.soak),
        pytest.param("one", 0, "change of what is trained", marks=pytest.mark.soak),
        pytest.param("first", 3, "change of what is trained", marks=pytest.mark.soak),
        ("other", 2, "unfrozen: layers.2.weight"),
        ("group", 3, "new param group"),
    ],
)
def test_ranks_that_do_not_do_alike_are_told(ranks: RankPool, what: str, stage: int, said: str) -> None:
    exits = ranks(2).run(diverges, what, {"stage": stage}, fresh=True, forked=True, timeout_s=60)
    assert all(said in one.result for one in exits), exits


@pytest.mark.parametrize("evaluates", [False, True], ids=["at once", "after an evaluation"])
def test_what_is_unfrozen_may_be_used_outside_of_a_forward_before_anything_was_trained(evaluates: bool) -> None:
    module, plain = build(), build()
    mlp.layer_of(module, 0).requires_grad_(False)
    model = ShardedModel(module, device="emulated", chunk_size=CHUNK_NUMEL)
    if evaluates:
        with torch.no_grad():
            model(mlp.inputs(0))
    mlp.layer_of(model, 0).requires_grad_(True)
    for each in (model, plain):
        mlp.layer_of(each, 0)(mlp.inputs(0)).square().sum().backward()
    assert torch.equal(mlp.layer_of(model, 0).weight.grad, mlp.layer_of(plain, 0).weight.grad)
