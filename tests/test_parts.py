"""Parts that are frozen, unfrozen, added to the optimizer later, unused, or not sharded at all: one rank."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gemini import BudgetError, ShardedModel, ShardedOptimizer, UnsupportedError, state_hash
from tests import parts
from tests.zoo import mlp


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("wrap", parts.WRAPS, ids=str)
@pytest.mark.parametrize("case", parts.PARITY + parts.REFUSALS, ids=lambda case: case.__name__)
def test_one_rank(case: Callable[[int, int, dict[str, Any]], None], wrap: dict[str, Any]) -> None:
    case(0, 1, wrap)


def test_what_does_not_fit_when_it_is_unfrozen_changes_nothing() -> None:
    parts.too_tight(0, 1)


@pytest.mark.parametrize("wrap", parts.WRAPS, ids=str)
def test_a_flag_counts_for_graphs_that_are_built_after_it_changed(wrap: dict[str, Any]) -> None:
    pair = parts.Pair(0, 1, wrap)
    pair.steps(0)
    for step, trains in ((1, True), (2, False), (3, True)):
        early = [pair.loss(model, 2 * step, 0) for model in (pair.model, pair.plain)]
        pair.flag(trains, "layers.2.", "layers.4.")
        late = [pair.loss(model, 2 * step + 1, 0) for model in (pair.model, pair.plain)]
        for one, other in zip(early, late):
            (one + other).backward()
        pair.step()


@pytest.mark.parametrize("wrap", parts.WRAPS[-4:], ids=str)
def test_unfreezing_while_a_forward_runs_is_an_error_and_counts_from_the_next_one(wrap: dict[str, Any]) -> None:
    pair = parts.Pair(0, 1, wrap)
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


def test_what_is_loaded_right_after_unfreezing_reaches_masters_and_state() -> None:
    """As one resumes: wrapped frozen, unfrozen, loaded."""
    weights = {name: torch.randn_like(value) for name, value in mlp.Mlp().state_dict().items()}
    states = []
    for frozen_at_first in (True, False):
        model = ShardedModel(mlp.build(parts.Trunk if frozen_at_first else mlp.Mlp), dtype=torch.bfloat16)
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        model.load_state_dict(weights)
        states.append(optimizer.state_dict())
    assert all(torch.equal(master, states[1]["masters"][key]) for key, master in states[0]["masters"].items())
    assert states[0]["masters"].keys() == states[1]["masters"].keys()
    optimizer.load_state_dict(states[0])


@pytest.mark.parametrize("wrap", parts.WRAPS, ids=str)
def test_a_parameter_that_is_trained_again_before_the_next_forward_has_lost_nothing(wrap: dict[str, Any]) -> None:
    """As one edits weights; outside no_grad, where the edit of an indexed row is refused unless it is frozen."""
    pair = parts.Pair(0, 1, wrap)
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
    pair = parts.Pair(0, 1, {} if dtype is None else {"dtype": dtype})
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


@pytest.mark.parametrize("wrap", parts.WRAPS, ids=str)
def test_models_that_are_trained_in_turns_train_as_in_plain_pytorch(wrap: dict[str, Any]) -> None:
    """A generator through a critic that is frozen meanwhile, whichever is the first to be stepped."""
    dtype = wrap.get("dtype")
    for first in (0, 1):
        ours, plain, optimizers, its = [], [], [], []
        for _ in range(2):
            pair = parts.Pair(0, 1, wrap, mlp.Mlp)
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


def test_state_of_what_is_frozen_rests_on_the_host_where_the_device_is_full() -> None:
    """Two halves in turns, under a budget that lacks a byte: the state that no step reads moves out and in again."""
    everything = {"chunk_size": mlp.CHUNK_NUMEL, "device": "emulated", "tensor_placement_policy": "auto"}
    unbounded = ShardedModel(mlp.build(), **everything)
    gradient_bytes = 4 * mlp.CHUNK_NUMEL
    budget = unbounded.plan.placement.device_bytes(unbounded.plan.demand) - 3 * gradient_bytes - 1
    model, plain = ShardedModel(mlp.build(), model_data_memory=budget, **everything), mlp.build()
    optimizers = [ShardedOptimizer(model, mlp.adam(model.parameters())), mlp.adam(plain.parameters())]
    for step in range(6):
        for module, optimizer in zip((model, plain), optimizers):
            for number, layer in enumerate(module.layers):
                layer.requires_grad_((number < 3) == (step % 2 == 0))
            mlp.train_step(module, optimizer, step)
        mlp.assert_same(mlp.weights_of(model), mlp.weights_of(plain))
    device, host = model.chunk_manager.memory.tiers
    assert device.ledger.peak_bytes <= budget
    placed = zip(model.plan.demand.chunks, model.plan.placement.homes, strict=True)
    tiers = {(chunk.is_frozen, homes["optim"]) for chunk, homes in placed}
    assert tiers == {(True, "host"), (False, "device")}, tiers
    assert host.ledger.bytes_by_kind["optim"] == device.ledger.bytes_by_kind["optim"] > 0


def test_a_state_dict_of_another_optimizer_or_with_a_part_missing_is_refused() -> None:
    model, optimizer = mlp.sharded()
    mlp.train_step(model, optimizer)
    before = state_hash(model, optimizer)
    plain = mlp.build()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    mlp.train_step(plain, sgd)
    unstepped = torch.optim.SGD(mlp.build().parameters(), lr=0.1, momentum=0.9).state_dict()
    mixed = {**optimizer.state_dict(), "state": sgd.state_dict()["state"]}
    incomplete = optimizer.state_dict()
    del incomplete["state"][3]["exp_avg"]
    for saved, said in (
        (mixed, r"state of parameter 0 \(layers\.0\.weight\) has momentum_buffer; .* keeps step, exp_avg"),
        (unstepped, r"a param group of the state dict has no betas, eps, found .*'momentum'.* another optimizer's"),
        (incomplete, r"state of parameter 3 \(layers\.1\.bias\) has step, exp_avg_sq; .*leave it out"),
    ):
        with pytest.raises(ValueError, match=said):
            optimizer.load_state_dict(saved)
        assert state_hash(model, optimizer) == before
    mlp.train_step(model, optimizer, 1)


def test_state_that_groups_need_later_is_there_or_comes_with_the_step() -> None:
    """One group with momentum beside one without, a third one that is added, and momentum that is raised from 0."""
    model, plain = ShardedModel(mlp.build(), device="emulated", chunk_size=mlp.CHUNK_NUMEL), mlp.build()
    optimizers: list[torch.optim.Optimizer] = []
    for module in (model, plain):
        weights = list(module.parameters())
        sgd = torch.optim.SGD([{"params": weights[:2], "momentum": 0.9}, {"params": weights[2:4]}], lr=0.1)
        optimizers.append(ShardedOptimizer(model, sgd) if module is model else sgd)
        optimizers[-1].add_param_group({"params": weights[4:6], "momentum": 0.5})
    held = [tier.ledger.bytes_by_kind["optim"] for tier in model.chunk_manager.memory.tiers]
    assert sum(held) == 4 * 2 * mlp.CHUNK_NUMEL, "of the two chunks whose groups have momentum"
    for step in range(4):
        for module, optimizer in zip((model, plain), optimizers):
            for parameter in list(module.parameters())[6:]:
                parameter.requires_grad_(False)
            if step == 2:
                optimizer.param_groups[1]["momentum"] = 0.9
            mlp.loss_of(module, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        mlp.assert_same(mlp.weights_of(model), mlp.weights_of(plain))
    assert (
        sum(tier.ledger.bytes_by_kind["optim"] for tier in model.chunk_manager.memory.tiers) == 4 * 3 * mlp.CHUNK_NUMEL
    )


@pytest.mark.parametrize("model_data_memory", [None, 24000, 30000, 40000])
@pytest.mark.parametrize("options", [{"amsgrad": True}, {}], ids=str)
def test_state_beyond_what_was_planned_takes_no_room_of_others(
    options: dict[str, Any], model_data_memory: int | None
) -> None:
    """A third state per element goes to the host with the others, before and after what is trained changes."""
    wrap: dict[str, Any] = {"chunk_size": mlp.CHUNK_NUMEL, "device": "emulated", "model_data_memory": model_data_memory}
    model, plain = ShardedModel(mlp.build(), **wrap), mlp.build()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False, **options) for m in (model, plain)]
    optimizers[0] = ShardedOptimizer(model, optimizers[0])
    frozen = {2: ("layers.0.", "layers.4."), 3: ("layers.0.", "layers.3."), 5: ()}
    for step in range(7):
        for module, optimizer in zip((model, plain), optimizers):
            for name, parameter in module.named_parameters():
                if step in frozen:
                    parameter.requires_grad_(not name.startswith(frozen[step]))
            mlp.loss_of(module, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        mlp.assert_same(mlp.weights_of(model), mlp.weights_of(plain))


def test_a_param_group_that_finds_no_room_leaves_the_state_of_others_alone() -> None:
    """The device is full, so all states would have to go to the host, which is full too."""
    module = mlp.build()
    state_bytes = 4 * mlp.CHUNK_NUMEL
    room = {"model_data_memory": 7 * 2 * state_bytes + 1000, "host_memory": 5 * 2 * state_bytes}
    model = ShardedModel(module, chunk_size=mlp.CHUNK_NUMEL, device="emulated", **room)
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    optimizer = ShardedOptimizer(model, torch.optim.AdamW(weights, lr=1e-2))
    for bias in biases:
        bias.requires_grad_(False)
    mlp.train_step(model, optimizer, 0)
    before = state_hash(model, optimizer)
    with pytest.raises(BudgetError):
        optimizer.add_param_group({"params": biases, "amsgrad": True})
    assert state_hash(model, optimizer) == before
    mlp.train_step(model, optimizer, 1)


def test_momentum_that_is_raised_in_a_chunk_where_others_have_it_starts_afresh() -> None:
    results = []
    for sharded in (True, False):
        module: Any = mlp.build()
        if sharded:
            module = ShardedModel(module, device="emulated", chunk_size=mlp.CHUNK_NUMEL)
        named = list(module.named_parameters())
        groups = [{"params": [p for n, p in named if n.endswith(end)]} for end in ("weight", "bias")]
        optimizer: Any = torch.optim.SGD(groups, lr=0.1)
        groups = optimizer.param_groups
        groups[1]["momentum"] = 0.9
        optimizer = ShardedOptimizer(module, optimizer) if sharded else optimizer
        for step in range(4):
            if step == 2:
                optimizer.param_groups[0].update(momentum=0.9, dampening=0.5)
            mlp.train_step(module, optimizer, step)
            saved = optimizer.state_dict()["state"]
            kept = {n for n, state in saved.items() if state.get("momentum_buffer") is not None}
            results.append((mlp.weights_of(module), kept))
    for (mine, its), (wanted, wanted_its) in zip(results[:4], results[4:], strict=True):
        mlp.assert_same(mine, wanted)
        assert its == wanted_its


def test_the_largest_gradient() -> None:
    parts.largest_gradients(0, 1)
