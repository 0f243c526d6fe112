"""State dicts are whole wherever they are taken: of the model, of the module that it wraps, by libraries."""

import copy
import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import GeminiError, ShardedModel, ShardedOptimizer, state_hash
from tests.harness.on_ranks import on_ranks
from tests.zoo import lora
from tests.zoo.mlp import Mlp, adam, assert_same, both_dtypes, build, inputs, sharded, train_step, weights_of, wrap
from tests.zoo.plain_copies import Parts, are_whole, everywhere


@everywhere
def test_state_dicts_of_the_wrapped_module_itself_are_whole(
    rank: int, world_size: int, arguments: dict[str, Any]
) -> None:
    """Whole copies of the module, of a part of it and of a plain module around it; loading goes the same ways."""
    model = wrap(make=Parts, **arguments)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    train_step(model, optimizer)
    wanted = weights_of(model)
    state = model.module.state_dict()
    assert are_whole(state)
    assert_same(dict(state), wanted)
    assert state["tied.weight"] is state["layers.0.weight"]
    assert state["tied.weight"] is not model.module.state_dict()["tied.weight"], "a copy of its own for every call"
    plain = build(Parts)
    assert state._metadata == plain.state_dict()._metadata == model.state_dict()._metadata
    plain.load_state_dict(state)
    part = model.module.layers[2].state_dict(prefix="a.")
    assert_same(dict(part), {f"a.{name}": wanted[f"layers.2.{name}"] for name in ("weight", "bias")})
    outer = nn.ModuleDict({"trunk": model.module})
    assert_same(dict(outer.state_dict()), {f"trunk.{name}": value for name, value in wanted.items()})
    train_step(model, optimizer, 1)
    assert_same(dict(state), wanted)
    for assign in (False, True):
        train_step(model, optimizer, 2)
        model.module.load_state_dict(wanted, assign=assign)
        assert_same(weights_of(model), wanted)
    model.module.layers[2].load_state_dict({name: value + 1 for name, value in build().layers[3].state_dict().items()})
    assert torch.equal(model.state_dict()["layers.2.bias"], build().layers[3].bias + 1)
    train_step(model, optimizer, 3)  # the parameters are still those that the optimizer has
    model.close()


@everywhere
def test_fp32_values_loaded_into_16_bits_are_the_masters(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    """Weights loaded into the wrapped module make masters as those that the model itself loads do."""
    hashes = []
    for through_module in (False, True):
        model = wrap(dtype=torch.bfloat16, **arguments)
        optimizer = ShardedOptimizer(model, adam(model.parameters()))
        train_step(model, optimizer, dtype=torch.bfloat16)
        exact = {name: value / 3 for name, value in build().state_dict().items()}
        assert not torch.equal(exact["layers.0.weight"], exact["layers.0.weight"].bfloat16())
        (model.module if through_module else model).load_state_dict(exact)
        masters = optimizer.state_dict()["masters"]
        assert torch.equal(masters[0], exact["layers.0.weight"])
        train_step(model, optimizer, 1, dtype=torch.bfloat16)
        hashes.append(state_hash(model, optimizer))
        model.close()
    assert hashes[0] == hashes[1]


def test_parts_of_one_chunk_are_copied_alone() -> None:
    model = wrap(make=Parts, chunk_size=8192)
    part = model.module.layers[3].state_dict()
    assert_same(dict(part), dict(build(Parts).layers[3].state_dict()))
    assert {value.untyped_storage().nbytes() for value in part.values()} == {16 * 16 * 4, 16 * 4}


def test_a_saved_state_dict_of_the_module_holds_tensors_that_load_anywhere() -> None:
    model, file = wrap(make=Parts), io.BytesIO()
    torch.save(model.module.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    build(Parts).load_state_dict(loaded, strict=True)


def test_the_users_state_dict_hooks_see_whole_tensors() -> None:
    seen: list[type] = []

    def hook(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        seen.append(type(state[f"{prefix}weight"]))
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")

    module = build()
    module.layers[0].register_state_dict_post_hook(hook)
    model = ShardedModel(module, device="emulated")
    assert torch.equal(model.module.state_dict()["layers.0.kernel"], build().layers[0].weight)
    assert seen == [Tensor]


def test_a_module_that_writes_its_own_state_has_whole_tensors_in_it() -> None:
    class Renames(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            destination[f"{prefix}kernel"] = self.weight if keep_vars else self.weight.detach()

    module = nn.Sequential(Renames(4, 4, bias=False))
    wanted = module[0].weight.detach().clone()
    model = ShardedModel(module, device="emulated")
    state = model.module.state_dict()
    assert are_whole(state)
    assert torch.equal(state["0.kernel"], wanted)


def test_extra_state_is_loaded() -> None:
    class Counts(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"count": self.count}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    model, other = wrap(make=Counts), wrap(make=Counts)
    model.module.count = 3
    other.load_state_dict(model.state_dict())
    assert other.module.count == 3
    model.module.count = 4
    other.module.load_state_dict(model.module.state_dict())
    assert other.module.count == 4


def test_state_dict_takes_its_arguments_by_position_and_by_name() -> None:
    model, reference = wrap(make=Parts), build(Parts)
    by_position: OrderedDict[str, Any] = OrderedDict()
    with pytest.warns(FutureWarning, match="by keyword") as told:
        assert model.state_dict(by_position, "a.") is by_position
    assert told[0].filename == __file__
    assert_same(dict(by_position), dict(reference.state_dict(prefix="a.")))
    by_name: dict[str, Any] = {}
    assert model.state_dict(destination=by_name, prefix="a.") is by_name
    assert_same(by_name, dict(by_position))
    variables = model.state_dict(keep_vars=True)
    assert list(variables) == list(reference.state_dict())
    assert variables["layers.0.weight"] is model.layers[0].weight
    with pytest.warns(FutureWarning):
        assert model.state_dict(OrderedDict(), "", True)["norm.weight"] is model.norm.weight
    assert model.module.state_dict(keep_vars=True)["tied.weight"] is model.tied.weight


def test_what_does_not_fit_the_module_is_torchs_own_error() -> None:
    model = wrap()
    state = dict(build().state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*layers\.0\.weight"):
        model.module.load_state_dict({name: value for name, value in state.items() if name != "layers.0.weight"})
    with pytest.raises(RuntimeError, match=r"size mismatch for layers\.5\.bias"):
        model.module.load_state_dict({**state, "layers.5.bias": torch.zeros(3)})
    assert_same(weights_of(model), state)


@pytest.mark.parametrize("load", [False, True])
def test_a_state_dict_of_the_module_is_refused_inside_a_forward(load: bool) -> None:
    class Saves(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            if load:
                self.layers[1].load_state_dict(build().layers[1].state_dict())
            else:
                self.state_dict()
            return super().forward(x)

    model = wrap(make=Saves)
    with pytest.raises(GeminiError, match=r"state_dict\(\) inside a forward"):
        model(inputs(0))


def test_the_module_is_plain_again_after_close() -> None:
    model = wrap()
    model.close()
    for module in model.module.modules():
        assert not module._state_dict_hooks
        assert not module._state_dict_pre_hooks
        assert not module._load_state_dict_pre_hooks


def test_adapters_are_merged_on_a_copy() -> None:
    model, reference = ShardedModel(lora.make(), device="emulated"), lora.make()
    optimizer = ShardedOptimizer(model, adam(p for p in model.parameters() if p.requires_grad))
    for step in range(2):
        lora.loss_of(model, step, 0).backward()
        optimizer.step()
    reference.load_state_dict(model.state_dict())
    merged: Any = copy.deepcopy(model)
    merged = merged.merge_and_unload()
    assert_same(dict(merged.state_dict()), dict(reference.merge_and_unload().state_dict()))  # type: ignore[operator]


def test_the_step_after_loading_into_the_module_is_that_of_plain_pytorch() -> None:
    model, reference = wrap(), build()
    optimizer, plain_optimizer = ShardedOptimizer(model, adam(model.parameters())), adam(reference.parameters())
    other = {name: value.flip(0) for name, value in build().state_dict().items()}
    for step in range(3):
        for each in (model.module, reference):
            each.load_state_dict(other) if step == 1 else None
        train_step(model, optimizer, step)
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), weights_of(reference))


def test_an_optimizers_state_is_a_view_by_parameter() -> None:
    model = wrap()
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    weight = model.layers[0].weight
    assert not optimizer.state
    assert dict(optimizer.state[weight]) == {}
    train_step(model, optimizer)
    assert list(optimizer.state) == list(model.parameters())
    saved = optimizer.state_dict()["state"][0]
    assert optimizer.state[weight].keys() == saved.keys()
    assert all(torch.equal(optimizer.state[weight][name], value) for name, value in saved.items())
    weight.requires_grad_(False)
    assert all(torch.equal(optimizer.state[weight][name], value) for name, value in saved.items()), "kept while frozen"
    with pytest.raises(KeyError):
        optimizer.state[nn.Parameter(torch.zeros(2))]
    with pytest.raises(KeyError):
        optimizer.state[weight]["momentum"]


def test_an_optimizers_state_has_no_parameter_of_another_model_and_none_without_state() -> None:
    """The other model has a parameter at the same place of the same chunk."""
    (model, optimizer), (other, _) = sharded(), sharded()
    weight, foreign = next(model.parameters()), next(other.parameters())
    assert weight not in optimizer.state
    train_step(model, optimizer)
    assert weight in optimizer.state
    assert foreign not in optimizer.state
    assert optimizer.state.get(foreign) is None
    with pytest.raises(KeyError):
        optimizer.state[foreign]


class _Idle(Mlp):
    """Some of its parameters are frozen, others are used by no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)
        self.unused = nn.Linear(4, 4)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_has_state_of_the_parameters_that_plain_pytorch_has_state_of(momentum: float) -> None:
    found: list[Any] = []
    for module in (build(_Idle), wrap(make=_Idle)):
        sgd: Any = torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum)
        optimizer = ShardedOptimizer(module, sgd) if isinstance(module, ShardedModel) else sgd
        names = {parameter: name for name, parameter in module.named_parameters()}
        seen = []
        for step in range(2):
            view = optimizer.state
            its = {names[parameter]: list(view[parameter]) for parameter in view}
            seen.append((len(view), bool(view), its, [each in view for each in names], optimizer.state_dict()["state"]))
            train_step(module, optimizer, step)
        found.append(seen)
    for plain, ours in zip(*found, strict=True):
        assert ours[:4] == plain[:4]
        assert ours[4].keys() == plain[4].keys()
    assert found[0][1][0] == (10 if momentum else 0)


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@both_dtypes
def test_rank_0_alone_has_the_optimizers_state_where_it_alone_writes(
    rank: int, world_size: int, dtype: torch.dtype | None
) -> None:
    model = wrap(dtype=dtype)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    train_step(model, optimizer, dtype=dtype)
    whole = optimizer.state_dict()
    alone = optimizer.state_dict(rank0_only=True)
    if rank > 0:
        assert alone == {}
    else:
        assert alone.keys() == whole.keys()
        assert alone["param_groups"] == whole["param_groups"]
        assert_same(alone["masters"], whole["masters"])
        assert alone["state"].keys() == whole["state"].keys()
        for number, entry in whole["state"].items():
            assert_same(alone["state"][number], entry)
    model.close()
