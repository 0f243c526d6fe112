"""Bad arguments, budgets, state dicts and modules get an error that names what is wrong and changes nothing."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gemini import (
    BudgetError,
    GeminiError,
    ReleasedParameterError,
    ShardedModel,
    ShardedOptimizer,
    UnsupportedError,
    ZeroInitContext,
    estimate_memory,
    state_hash,
)
from optim import HybridAdam
from tests.zoo import mlp
from tests.zoo.mlp import (
    WIDTH,
    adam,
    assert_same,
    both_dtypes,
    build,
    plain,
    sharded,
    train_step,
    weight,
    weights_of,
    wrap,
)

# ---- arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"module": 3}, TypeError, "module must be a torch.nn.Module, found int"),
        ({"shard_strategy": "rows"}, ValueError, "shard_strategy='rows'.*'tensor', 'bucket', 'chunk'"),
        ({"shard_strategy": 3.5}, TypeError, "shard_strategy must be"),
        ({"process_group": "gloo"}, TypeError, "process_group must be a ProcessGroup or None, found str"),
        ({"stage": 4}, ValueError, "stage must be 0, 1, 2 or 3, found 4"),
        ({"stage": "3"}, ValueError, "stage must be 0, 1, 2 or 3, found '3'"),
        ({"stage": True}, ValueError, "stage must be"),
        ({"tensor_placement_policy": "gpu"}, ValueError, "tensor_placement_policy='gpu'.*auto.*cpu.*cuda"),
        ({"tensor_placement_policy": 1}, TypeError, "tensor_placement_policy must be a name"),
        ({"dtype": "int8"}, ValueError, "dtype must be None or one of .*bfloat16.*found 'int8'"),
        ({"dtype": torch.int8}, ValueError, "dtype must be None or one of"),
        ({"chunk_size": 1.5}, TypeError, "chunk_size must be an int"),
        ({"chunk_size": True}, TypeError, "chunk_size must be an int"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1 element, found 0"),
        ({"device": 1.5}, TypeError, "device must be"),
        ({"device": "nowhere"}, ValueError, "device='nowhere' is not a device"),
        ({"device": "meta"}, ValueError, "device='meta' is not here"),
        ({"device_memory": "2 gigs"}, ValueError, "device_memory='2 gigs' is not a size.*GB.*GiB"),
        ({"device_memory": []}, TypeError, "device_memory must be bytes"),
        ({"model_data_memory": -1}, ValueError, "model_data_memory must be a finite number of bytes"),
        ({"model_data_memory": float("nan")}, ValueError, "model_data_memory=nan is a fraction of a byte"),
        ({"model_data_memory": 2000, "device_memory": 1000}, ValueError, "model_data_memory=2000 is more than"),
        ({"host_memory": True}, TypeError, "host_memory must be bytes"),
        ({"host_memory": "much"}, ValueError, "host_memory='much' is not a size"),
        ({"rank_timeout": 0}, ValueError, "rank_timeout must be a number of seconds above 0"),
        ({"rank_timeout": float("nan")}, ValueError, "rank_timeout must be"),
        ({"rank_timeout": "long"}, ValueError, "rank_timeout must be"),
        ({"chunksize": 512}, TypeError, "no argument 'chunksize'; the nearest valid name is 'chunk_size'"),
        ({"placement_policy": "cpu"}, TypeError, "the nearest valid name is 'tensor_placement_policy'"),
    ],
    ids=str,
)
def test_a_wrong_argument_of_the_model_is_named(arguments: dict[str, Any], kind: type, message: str) -> None:
    module = build()
    before, classes = weights_of(module), [type(p) for p in module.parameters()]
    with pytest.raises(kind, match=message):
        ShardedModel(**{"module": module, "device": "emulated", **arguments})
    assert_same(weights_of(module), before)
    assert [type(p) for p in module.parameters()] == classes


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"model": nn.Linear(2, 2)}, TypeError, "model must be a ShardedModel, found Linear"),
        ({"optimizer": 3}, TypeError, "optimizer must be a plain torch optimizer, found int"),
        ({"optimizer": HybridAdam}, TypeError, "optimizer must be a plain torch optimizer"),
        ({"clip_grad_norm": "1"}, ValueError, "clip_grad_norm must be a number above 0 or None, found '1'"),
        ({"clip_grad_norm": 0.0}, ValueError, "clip_grad_norm must be a number above 0"),
        ({"clip_grad_norm": float("nan")}, ValueError, "clip_grad_norm must be a number above 0"),
        ({"elementwise": "yes"}, TypeError, "elementwise must be True or False, found 'yes'"),
        ({"clip_gradnorm": 1.0}, TypeError, "no argument 'clip_gradnorm'; the nearest valid name is 'clip_grad_norm'"),
    ],
    ids=str,
)
def test_a_wrong_argument_of_the_optimizer_is_named(arguments: dict[str, Any], kind: type, message: str) -> None:
    model = wrap()
    optimizer = adam(model.parameters())
    with pytest.raises(kind, match=message):
        ShardedOptimizer(**{"model": model, "optimizer": optimizer, **arguments})
    train_step(model, ShardedOptimizer(model, optimizer))  # the model has no optimizer yet


@pytest.mark.parametrize("policy", ["cpu", "auto", "cuda"])
def test_a_budget_below_the_minimum_names_tier_bytes_and_knob_and_leaves_the_module_alone(policy: str) -> None:
    module = build()
    before = weights_of(module)
    with pytest.raises(
        BudgetError, match=r"device: .*needs ([0-9]+) bytes.*budget is 1000 bytes.*model_data_memory="
    ) as e:
        ShardedModel(
            module,
            device="emulated",
            tensor_placement_policy=policy,
            model_data_memory=1000,
            chunk_size=mlp.CHUNK_NUMEL,
        )
    assert_same(weights_of(module), before)
    assert all(type(p) is nn.Parameter for p in module.parameters())
    needed = e.value.needed_bytes
    assert (e.value.tier, e.value.budget_bytes) == ("device", 1000) and f"needs {needed} bytes" in str(e.value)
    ShardedModel(
        module, device="emulated", tensor_placement_policy=policy, model_data_memory=needed, chunk_size=mlp.CHUNK_NUMEL
    )


def test_too_little_host_memory_names_host_memory_and_leaves_the_module_alone() -> None:
    module = build()
    before = weights_of(module)
    with pytest.raises(BudgetError, match=r"host: [0-9]+ bytes.*of 100 bytes.*Allow more with host_memory="):
        ShardedModel(module, device="emulated", tensor_placement_policy="cpu", host_memory=100)
    assert_same(weights_of(module), before)
    assert all(type(p) is nn.Parameter for p in module.parameters())


@pytest.mark.parametrize("num_chunks", [0, 1.5])
@pytest.mark.parametrize("make", [adam, torch.optim.AdamW, torch.optim.RMSprop], ids=lambda make: make.__name__)
def test_host_memory_that_ends_at_the_optimizer_state_is_refused_there(make: Any, num_chunks: float) -> None:
    """Before a step is half done; and what was taken until then is there for an optimizer that needs less."""
    state_bytes = 4 * mlp.CHUNK_NUMEL * mlp.LAYERS
    room = int(4 * mlp.CHUNK_NUMEL * num_chunks)
    model = wrap("cpu", host_memory=2 * state_bytes + room)  # parameters and gradients
    with pytest.raises(BudgetError, match=r"host: .*optim.*host_memory=") as e:
        ShardedOptimizer(model, make(model.parameters()))
    assert e.value.tier == "host" and e.value.budget_bytes == 2 * state_bytes + room < e.value.needed_bytes
    assert model.chunk_manager.memory.tiers[1].ledger.bytes_by_kind["optim"] == 0
    assert_same(weights_of(model), weights_of(build()))
    optimizer = ShardedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    reference = build()
    for _ in range(2):
        train_step(model, optimizer, 0)
        train_step(reference, torch.optim.SGD(reference.parameters(), lr=0.1), 0)
    assert_same(weights_of(model), weights_of(reference))


def test_a_step_that_fails_half_way_is_final() -> None:
    """Momentum that is raised from 0 takes memory in the step, and there is some for the first chunks only."""
    homes_bytes = 2 * 4 * mlp.CHUNK_NUMEL * mlp.LAYERS  # parameters and gradients
    model = wrap("cpu", host_memory=homes_bytes + 10 * mlp.CHUNK_NUMEL)
    optimizer = ShardedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train_step(model, optimizer, 0)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(BudgetError, match="host_memory="):
        train_step(model, optimizer, 1)
    optimizer.param_groups[0]["momentum"] = 0.0
    going_on: list[Any] = [lambda: train_step(model, optimizer, 2), lambda: weights_of(model)]
    for goes_on in (*going_on, lambda: weight(model, 0).sum()):
        with pytest.raises(GeminiError, match=r"failed half way \(BudgetError: .*Build model and optimizer again"):
            goes_on()
    model.close()


def test_a_host_that_is_too_small_leaves_the_module_as_it_was() -> None:
    module = torch.nn.Linear(64, 64)
    before = module.weight.detach().clone()
    with pytest.raises(BudgetError, match="host_memory="):
        ShardedModel(module, tensor_placement_policy="cpu", host_memory="10KiB")
    assert type(module.weight) is torch.nn.Parameter and torch.equal(module.weight, before)
    assert torch.equal(ShardedModel(module).state_dict()["weight"], before)


# ---- state dicts -----------------------------------------------------------------------------------------------


def _without_first(state: dict[str, Any]) -> dict[str, Any]:
    return dict(list(state.items())[1:])


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (_without_first, RuntimeError, r"missing keys: layers\.0\.weight"),
        (lambda s: {**s, "extra": torch.zeros(1)}, RuntimeError, "unexpected keys: extra"),
        (lambda s: {**s, "layers.5.bias": torch.zeros(3)}, RuntimeError, r"layers\.5\.bias has shape \(3,\)"),
        (lambda s: {**s, "layers.5.bias": [1.0]}, RuntimeError, r"layers\.5\.bias is a list"),
        (lambda s: list(s), TypeError, "takes a dict"),
    ],
)
def test_a_wrong_model_state_dict_changes_nothing(change: Any, kind: type, message: str) -> None:
    model, optimizer = sharded()
    train_step(model, optimizer)
    before = state_hash(model, optimizer)
    wrong = change({name: value + 1 for name, value in model.state_dict().items()})
    with pytest.raises(kind, match=message):
        model.load_state_dict(wrong)
    assert state_hash(model, optimizer) == before


def test_a_state_dict_that_is_not_strict_loads_what_is_there() -> None:
    model = wrap()
    reference = build()
    part = {"layers.2.weight": torch.ones(WIDTH, WIDTH), "extra": torch.zeros(1)}
    mine, theirs = (m.load_state_dict(part, strict=False) for m in (model, reference))
    assert mine.missing_keys == theirs.missing_keys
    assert mine.unexpected_keys == theirs.unexpected_keys
    assert_same(weights_of(model), weights_of(reference))


def _with_state(state: dict[str, Any], number: int, **entries: Any) -> dict[str, Any]:
    states = dict(state["state"])
    states[number] = {**states.get(number, {}), **entries}
    return {**state, "state": states}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"state": s["state"]}, "no 'param_groups'"),
        (lambda s: {"param_groups": s["param_groups"]}, "no 'state'"),
        (lambda s: {}, "not an optimizer state dict"),
        (lambda s: {**s, "param_groups": s["param_groups"] * 2}, "param groups"),
        (lambda s: {**s, "param_groups": [{**s["param_groups"][0], "params": [0]}]}, "param groups of \\[1\\]"),
        (lambda s: _with_state(s, 99, step=1), "parameter 99"),
        (lambda s: _with_state(s, 11, exp_avg=torch.zeros(3)), r"exp_avg of parameter 11 \(layers\.5\.bias\)"),
        (lambda s: {**s, "masters": {**s["masters"], 0: torch.zeros(2)}}, "master of parameter 0"),
        (lambda s: {**s, "masters": {**s["masters"], 77: torch.zeros(2)}}, "masters of parameter 77"),
        (lambda s: _with_state(s, 11, exp_avg=None), "exp_avg"),
        (lambda s: _with_state(s, 11, step="three"), "step"),
        (lambda s: {**s, "state": 3}, "state"),
    ],
    ids=range(12),
)
@both_dtypes
def test_a_wrong_optimizer_state_dict_changes_nothing(change: Any, message: str, dtype: torch.dtype | None) -> None:
    model, optimizer = sharded(dtype=dtype)
    train_step(model, optimizer, dtype=dtype)
    before, groups = state_hash(model, optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    good = optimizer.state_dict()
    for entry in good["state"].values():
        entry["exp_avg"] += 1
    good["param_groups"] = [{**group, "lr": 0.5} for group in good["param_groups"]]
    with pytest.raises((ValueError, KeyError, TypeError), match=message):
        optimizer.load_state_dict(change(good))
    assert state_hash(model, optimizer) == before
    assert optimizer.state_dict()["param_groups"] == groups


# ---- modules that change ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.share_memory(),
        lambda m: m.module.half(),
        lambda m: m.module.double(),
    ],
    ids=range(6),
)
def test_moving_and_casting_are_refused(move: Callable[[ShardedModel], Any]) -> None:
    model, optimizer = sharded()
    with pytest.raises((UnsupportedError, ReleasedParameterError)):
        move(model)
    reference, plain_optimizer = plain()
    train_step(model, optimizer)
    train_step(reference, plain_optimizer)
    assert_same(weights_of(model), weights_of(reference))


def _replace(m: ShardedModel) -> None:
    m.module.layers[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))


@pytest.mark.parametrize(
    "replace",
    [
        _replace,
        lambda m: m.module.layers[0].register_parameter("late", nn.Parameter(torch.zeros(3))),
        lambda m: setattr(m, "layers", nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))),
        lambda m: setattr(m, "late", nn.Parameter(torch.zeros(3))),
    ],
    ids=["setattr", "registered", "module of the model itself", "parameter of the model itself"],
)
def test_a_parameter_that_is_replaced_or_added_behind_the_models_back_is_noticed(
    replace: Callable[[ShardedModel], Any],
) -> None:
    """Steps would go on training the ones that the module does not use any more."""
    model, optimizer = sharded()
    train_step(model, optimizer)
    with pytest.raises(GeminiError, match=r"parameter '.*' was added or replaced after ShardedModel"):
        _replaced(model, optimizer, replace)


def _replaced(model: ShardedModel, optimizer: ShardedOptimizer, replace: Callable[[ShardedModel], Any]) -> None:
    replace(model)
    train_step(model, optimizer, 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.LazyLinear(3), "call the plain module once"),
        (lambda: nn.Linear(2, 2, device="meta"), "'meta'.*ZeroInitContext"),
    ],
)
def test_parameters_without_data_are_refused(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(UnsupportedError, match=f"has no data yet: .*{words}"):
        ShardedModel(nn.Sequential(make()), device="emulated")


def test_an_adapter_that_is_added_after_wrapping_is_told_where_it_belongs() -> None:
    model, optimizer = sharded()
    adapter = nn.Linear(WIDTH, WIDTH)
    model.module.layers[0].adapter = adapter
    with pytest.raises(ValueError, match=r"adapter .* is in the module before it is wrapped"):
        optimizer.add_param_group({"params": adapter.parameters()})
    with pytest.raises(GeminiError, match=r"'layers.0.adapter.weight' was added .*peft.get_peft_model.* for adapters"):
        train_step(model, optimizer)


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.turn).abs().sum()


def test_a_complex_parameter_is_refused_by_name_before_it_is_trained() -> None:
    model = ShardedModel(_Complex(), device="emulated")
    with pytest.raises(UnsupportedError, match=r"'turn' is torch\.complex64.*ignored_parameters="):
        ShardedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.module.turn.requires_grad_(False)
    optimizer = ShardedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.module.layer.weight.detach().clone()
    model(torch.ones(2, 4)).backward()
    optimizer.step()
    assert not torch.equal(model.module.layer.weight.detach(), before)
    ignoring = ShardedModel(_Complex(), device="emulated", ignored_parameters=["turn"])
    model, optimizer = (
        ignoring,
        ShardedOptimizer(ignoring, torch.optim.SGD([*ignoring.module.layer.parameters()], lr=0.1)),
    )
    model(torch.ones(2, 4)).backward()
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: nn.Sequential(nn.LayerNorm(4), nn.GRU(4, 4))])
def test_float_inputs_of_a_16_bit_model_are_told_what_to_do(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    model = ShardedModel(make(), device="emulated", dtype=dtype)
    with pytest.raises((RuntimeError, ValueError), match="type") as caught:
        model(torch.ones(2, 3, 4))
    (note,) = caught.value.__notes__
    assert f"weights are {dtype} and an input is torch.float32" in note and "cast_inputs=True" in note
    assert ShardedModel(make(), device="emulated", dtype=dtype, cast_inputs=True)(torch.ones(2, 3, 4)) is not None
    with pytest.raises((RuntimeError, ValueError), match="type") as caught:
        model(torch.ones(2, 3, 4, dtype=torch.float64))
    assert caught.value.__notes__[0].endswith(f"Cast the batch, x.to({dtype})")  # no cast of ours is of these
    assert (
        ShardedModel(make(), device="emulated", dtype={"": dtype, "*": torch.float32})(torch.ones(2, 3, 4)) is not None
    )
    with pytest.raises(RuntimeError) as caught:
        ShardedModel(nn.Linear(4, 4), device="emulated")(torch.ones(2, 4, dtype=dtype))
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "torch.bfloat16"])
def test_a_dtype_may_be_named_wherever_one_is_taken(name: str) -> None:
    assert ShardedModel(nn.Linear(4, 4), dtype=name).module.weight.dtype is torch.bfloat16
    model = ShardedModel(
        nn.Linear(4, 4), dtype={nn.Linear: name}, reduce_dtype="fp32", accumulate_dtype="float32", output_dtype="fp32"
    )
    assert model.module.weight.dtype is torch.bfloat16 and model(torch.ones(2, 4).bfloat16()).dtype is torch.float32
    assert estimate_memory(nn.Linear(4, 4), dtype=name) == estimate_memory(nn.Linear(4, 4), dtype=torch.bfloat16)
    with ZeroInitContext(dtype=name):
        built = nn.Linear(4, 4)
    assert built.weight.dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["bf17", ""])
def test_a_word_that_names_no_dtype_of_weights_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"dtype must be None or one of torch.float32, .*, found '{name}'"):
        ShardedModel(nn.Linear(4, 4), dtype=name)


def test_a_budget_of_some_bytes_is_told_that_its_number_has_no_unit() -> None:
    with pytest.raises(BudgetError, match=r"the budget is 7 bytes, as a number without a unit is bytes\. Allow more"):
        ShardedModel(nn.Linear(64, 64), device="emulated", device_memory=8)
    with pytest.raises(BudgetError, match=r"the budget is [0-9]+ bytes\. Allow more"):
        ShardedModel(nn.Linear(64, 64), device="emulated", device_memory=2000)
