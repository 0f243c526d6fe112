"""`ZeroInitContext` on one rank: the same weights as without it, and nothing of torch changed after it."""

import copy
import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from gemini import (
    GatheredParameters,
    GeminiError,
    ShardedModel,
    ShardedOptimizer,
    UnsupportedError,
    ZeroInitContext,
)
from optim import HybridAdam, to_bfloat16_half_up
from tests import building
from tests.harness.live_storages import LiveStorages


def built(name: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """(plain, built in the context), and the random numbers after both are equal."""
    torch.manual_seed(5)
    plain = building.MODELS[name]()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    with ZeroInitContext(**options):
        model = building.MODELS[name]()
    assert torch.equal(torch.get_rng_state(), after)
    return plain, model


def assert_same_state(model: nn.Module, plain: nn.Module) -> None:
    state = model.state_dict()
    expected = plain.state_dict()
    assert list(state) == list(expected)
    for key, value in expected.items():
        assert state[key].dtype is value.dtype and state[key].shape == value.shape, key
        assert torch.equal(state[key].clone(), value), key


@pytest.mark.parametrize("strategy", [None, "tensor", "chunk"])
@pytest.mark.parametrize("name", list(building.MODELS))
def test_weights_and_random_numbers_are_those_of_a_plain_build(name: str, strategy: str | None) -> None:
    plain, model = built(name, shard_strategy=strategy)
    assert_same_state(model, plain)
    for (key, parameter), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert isinstance(parameter, nn.Parameter) and parameter.requires_grad is expected.requires_grad, key
        assert parameter.stride() == expected.stride() or not expected.is_contiguous(), key
    assert_same_state(ShardedModel(model), plain)


def test_a_wrapped_model_trains_like_one_that_was_built_plain() -> None:
    plain, model = built("edited")
    models = [ShardedModel(each, chunk_size=512) for each in (plain, model)]
    tokens = torch.arange(26).view(2, 13) % 13
    for sharded in models:
        optimizer = ShardedOptimizer(sharded, HybridAdam(sharded.parameters(), lr=0.01))
        for _ in range(3):
            sharded(tokens).logsumexp(-1).mean().backward()
            optimizer.step()
    assert_same_state(models[1], models[0])


def test_what_was_tied_is_tied_and_what_was_replaced_is_gone() -> None:
    with ZeroInitContext() as context:
        model = building.EditedByParent()
        assert model.head.weight is model.embed.weight
    store = context._store
    assert store is not None and store.num_parameters == len(list(model.parameters()))
    del model
    assert store.num_parameters == 0 and not store._chunks, "shards outlive their model"


_OWNERS = (nn, nn.init, nn.Module, nn.Parameter, nn.Linear, nn.functional, torch, Tensor)


def _members() -> list[tuple[str, Any]]:
    return [
        (f"{owner.__name__}.{name}", value) for owner in _OWNERS for name, value in inspect.getmembers_static(owner)
    ]


def _fail_inside() -> None:
    def build() -> None:
        with ZeroInitContext():
            nn.Linear(3, 3)
            raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        build()


def test_torch_is_the_same_objects_after_it() -> None:
    building.gpt2()  # what its library changes has nothing to do with us
    before = _members()
    with ZeroInitContext():
        building.gpt2()
        building.Copied()
    _fail_inside()
    for (path, value), (_, now) in zip(before, _members(), strict=True):
        assert now is value or path.endswith("__"), path
    assert nn.Parameter.__dict__["__new__"] is dict(before)["Parameter.__new__"]
    assert nn.Module.__dict__["__init__"] is dict(before)["Module.__init__"]
    assert nn.Linear.__dict__["__init__"] is dict(before)["Linear.__init__"]
    assert not torch_module._global_parameter_registration_hooks
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ
    layer = nn.Linear(3, 3)
    assert type(layer.weight) is nn.Parameter and "_gemini" not in layer.weight.__dict__


def test_modules_may_be_defined_inside() -> None:
    with ZeroInitContext():

        class Inside(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(3))

        model = Inside()
    assert model.weight.sum().item() == 3
    assert type(Inside().weight) is nn.Parameter


def test_contexts_nest_and_the_innermost_takes_the_parameters() -> None:
    with ZeroInitContext() as outer:
        first = nn.Linear(3, 3)
        with ZeroInitContext() as inner:
            second = nn.Linear(4, 4)
        third = nn.Linear(5, 5)
    assert outer._store is not None and inner._store is not None
    assert outer._store.num_parameters == 4 and inner._store.num_parameters == 2
    model = nn.Sequential(first, second, third)
    expected = [p.detach().clone() for p in model.parameters()]
    sharded = ShardedModel(model)
    assert all(torch.equal(a, b) for a, b in zip(sharded.state_dict().values(), expected, strict=True))
    assert outer._store.num_parameters == inner._store.num_parameters == 0


def test_an_exception_ends_it_and_the_next_one_works() -> None:
    _fail_inside()
    plain, model = built("applied")
    assert_same_state(model, plain)


def test_it_may_be_switched_off() -> None:
    with ZeroInitContext(enabled=False):
        layer = nn.Linear(3, 3)
    assert type(layer.weight) is nn.Parameter and "_gemini" not in layer.weight.__dict__


def test_without_sharding_parameters_stay_ordinary_and_are_cast() -> None:
    plain, model = built("applied", shard_param=False, dtype=torch.bfloat16)
    for (name, parameter), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert type(parameter) is nn.Parameter and "_gemini" not in parameter.__dict__, name
        assert torch.equal(parameter, to_bfloat16_half_up(expected.detach())), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_dtype_is_that_of_a_cast_after_building(dtype: torch.dtype) -> None:
    plain, model = built("applied", dtype=dtype)
    for (name, parameter), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        values = expected.detach()
        assert parameter.dtype is dtype, name
        cast = to_bfloat16_half_up(values) if dtype is torch.bfloat16 else values.to(dtype)
        assert torch.equal(parameter.detach().clone(), cast), name
    assert {p.dtype for p in ShardedModel(model).state_dict().values()} == {dtype}


def test_a_module_that_exists_can_be_converted() -> None:
    torch.manual_seed(1)
    plain = building.EditedByParent()
    model = copy.deepcopy(plain)
    with ZeroInitContext() as context:
        assert context.convert(model) is model
    assert model.head.weight is model.embed.weight
    assert_same_state(ShardedModel(model), plain)


def test_gathered_parameters_work_inside_and_undo_what_no_rank_answers_for() -> None:
    with ZeroInitContext():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        with GatheredParameters(model, modifier_rank=0):
            nn.init.ones_(model[0].weight)
        before = model[1].weight.clone()
        with pytest.raises(UnsupportedError, match=r"Linear 1\.weight"), GatheredParameters(model[1].weight):
            nn.init.ones_(model[1].weight)
    state = ShardedModel(model).state_dict()
    assert torch.equal(state["0.weight"], torch.ones(3, 3))
    assert torch.equal(state["1.weight"], before)


@pytest.mark.parametrize("inside", [True, False])
def test_embeddings_are_resized_and_modules_are_cast_before_wrapping(inside: bool) -> None:
    torch.manual_seed(5)
    plain = building.gpt2()
    torch.manual_seed(6)
    plain.resize_token_embeddings(101)
    plain.transformer.h[0].half()
    torch.manual_seed(5)
    with ZeroInitContext() as context:
        model = building.gpt2()
        if inside:
            _resize_and_cast(model)
    if not inside:
        _resize_and_cast(model)
    assert context._store is not None
    assert model.to("cpu").transformer.wte.weight.shape == (101, 32)
    assert_same_state(model, plain)
    assert_same_state(ShardedModel(model), plain)


def _resize_and_cast(model: Any) -> None:
    torch.manual_seed(6)
    model.resize_token_embeddings(101)
    model.transformer.h[0].half()


@pytest.mark.parametrize("inside", [True, False])
def test_adapters_join_a_model_that_is_built(inside: bool) -> None:
    import peft

    def adapted(module: nn.Module) -> nn.Module:
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
        return peft.get_peft_model(module, config)

    torch.manual_seed(5)
    plain = adapted(building.gpt2())
    torch.manual_seed(5)
    with ZeroInitContext():
        module = building.gpt2()
        if inside:
            module = adapted(module)
    if not inside:
        module = adapted(module)
    model = ShardedModel(module)
    assert_same_state(model, plain)
    optimizer = ShardedOptimizer(model, HybridAdam([p for p in model.parameters() if p.requires_grad], lr=0.01))
    tokens = torch.arange(20).view(2, 10)
    losses = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_state_dicts_load_inside() -> None:
    torch.manual_seed(1)
    plain = building.EditedByParent()
    with ZeroInitContext():
        model = building.EditedByParent()
        model.load_state_dict(plain.state_dict())
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})
    model.load_state_dict({key: value.clone() for key, value in plain.state_dict().items()})  # and after it
    assert_same_state(ShardedModel(model), plain)


@pytest.mark.parametrize("streams", [True, False])
def test_a_saved_model_is_loaded_by_from_pretrained(tmp_path: Path, streams: bool, monkeypatch: Any) -> None:
    import transformers

    if not streams:  # the user's own choice stands
        monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "0")
    torch.manual_seed(1)
    plain = building.gpt2().eval()
    plain.save_pretrained(tmp_path)
    with ZeroInitContext() as context:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert context._store is not None and context._store.num_parameters == len(list(plain.parameters()))
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        expected = plain(tokens).logits
        assert torch.equal(model(tokens).logits, expected), "before it is wrapped it reads its parameters one by one"
        assert torch.equal(ShardedModel(model)(tokens).logits, expected)


def test_parameters_on_meta_are_left_alone_until_they_have_values() -> None:
    with ZeroInitContext() as context:
        with torch.device("meta"):
            layer = nn.Linear(3, 3)
        assert context._store is not None and context._store.num_parameters == 0
        layer.weight = nn.Parameter(torch.ones(3, 3))
        layer.bias = nn.Parameter(torch.zeros(3))
    assert context._store.num_parameters == 2
    assert torch.equal(ShardedModel(layer)(torch.ones(1, 3)), torch.full((1, 3), 3.0))


def test_building_holds_no_more_than_the_model_an_operator_and_a_chunk() -> None:
    for build in (building.deep, building.top_heavy):
        whole = sum(p.numel() * 4 for p in build().parameters())
        operator = max(sum(p.numel() * 4 for p in module.parameters(recurse=False)) for module in build().modules())
        with LiveStorages() as live:
            with ZeroInitContext():
                module = build()
            model = ShardedModel(module, chunk_size=8192, device="emulated", tensor_placement_policy="cpu")
            optimizer = ShardedOptimizer(model, HybridAdam(model.parameters()))
            rest = sum(tier.ledger.total_bytes for tier in model.chunk_manager.memory.tiers)
        assert rest >= 4 * whole and optimizer is not None
        assert live.peak_bytes <= rest + operator + 8192 * 4 + 2048


# -- bad input


def test_gradients_before_wrapping_are_an_error() -> None:
    with ZeroInitContext():
        model = nn.Linear(3, 3)
    loss = model(torch.ones(1, 3)).sum()
    with pytest.raises(GeminiError, match="wrap the model in ShardedModel"):
        loss.backward()
    sharded = ShardedModel(model)
    sharded(torch.ones(1, 3)).sum().backward()
    assert torch.equal(model.bias.grad.clone(), torch.ones(3))


def test_gradients_that_pass_through_unwrapped_weights_are_an_error_too() -> None:
    with ZeroInitContext():
        model = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4)).requires_grad_(False)
    x = torch.randn(2, 4, requires_grad=True)
    loss = model(x).square().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x)


def test_what_was_detached_before_wrapping_reads_the_wrapped_weights() -> None:
    with ZeroInitContext() as context:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    detached, state = model[0].weight.detach(), model.state_dict()
    sharded = ShardedModel(model, tensor_placement_policy="cpu")
    assert context._store is not None and context._store.is_closed
    optimizer = ShardedOptimizer(sharded, HybridAdam(sharded.parameters()))
    for _ in range(2):
        loss = sharded(torch.ones(1, 3)).sum()
        assert all(value.isfinite().all() for value in state.values())
        loss.backward()
        optimizer.step()
        assert torch.equal(detached.clone(), sharded.state_dict()["0.weight"])
        assert torch.equal(detached.clone(), state["0.weight"].clone())
    assert sharded(torch.ones(1, 3)).isfinite().all()


def test_on_one_rank_a_late_write_through_a_view_reaches_the_weight() -> None:
    with ZeroInitContext(), torch.no_grad():
        first, second = nn.Linear(300, 3), nn.Linear(3, 3)
        row = first.weight[0]
        nn.Linear(2, 2)
        second.weight.zero_()
        row.zero_()
        second.weight.zero_()
    # one rank holds the whole weight, and the view is of that
    assert first.weight.detach()[0].sum().item() == 0


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"target_device": "nowhere"}, ValueError, "target_device"),
        ({"target_device": 1.5}, TypeError, "target_device"),
        ({"shard_strategy": "rows"}, ValueError, "shard_strategy"),
        ({"shard_param": 1}, TypeError, "shard_param"),
        ({"enabled": "yes"}, TypeError, "enabled"),
        ({"dtype": torch.int8}, ValueError, "dtype"),
        ({"home": "disk"}, ValueError, "home"),
        ({"process_group": "all"}, TypeError, "process_group"),
        ({"shard_params": True}, TypeError, "shard_param"),
    ],
)
def test_bad_arguments_name_themselves(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ZeroInitContext(**options)


def test_misuse_is_refused() -> None:
    context = ZeroInitContext()
    with pytest.raises(UnsupportedError, match="inside its ZeroInitContext"):
        context.convert(nn.Linear(2, 2))
    with context:
        with pytest.raises(TypeError, match="module"):
            context.convert([nn.Linear(2, 2)])
        with pytest.raises(UnsupportedError, match="entered once"):
            context.__enter__()
    with pytest.raises(UnsupportedError, match="entered once"):
        context.__enter__()
