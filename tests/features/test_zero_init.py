"""`ZeroInitContext`: the same weights as without it, those of rank 0, and nothing of torch changed after it."""

import copy
import inspect
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from gemini import DivergenceError, RemoteRankError, ShardedModel, ShardedOptimizer, UnsupportedError, ZeroInitContext
from gemini.placement.demand import Kind
from optim import HybridAdam, to_bfloat16_half_up
from tests.harness.on_ranks import on_ranks, on_ranks_with
from tests.harness.ranks import RankPool
from tests.zoo import building
from tests.zoo.building import assert_same_state, built
from tests.zoo.mlp import weights_of

FP32 = 4
# (model, strategy while it is built, strategy and chunk size when it is wrapped)
Setting = tuple[str, str | None, str | None, int | None]
STRATEGIES = ("tensor", "bucket", "chunk")
ONE_RANK: list[Setting] = [
    (name, strategy, None, None) for name in building.MODELS for strategy in (None, "tensor", "chunk")
]
RANKS: list[Setting] = [
    (name, STRATEGIES[n % 3], STRATEGIES[(n + 1) % 3], 1024) for n, name in enumerate(building.MODELS)
]


@pytest.mark.sampled(2)
@on_ranks_with(
    "setting",
    {1: ONE_RANK[::2], 2: RANKS, 3: RANKS[::3]},
    soak={1: ONE_RANK, 3: RANKS},
    ids=lambda setting: "-".join(map(str, setting)),
)
def test_weights_and_random_numbers_are_those_of_a_plain_build(rank: int, world_size: int, setting: Setting) -> None:
    """Random numbers stay each rank's own; weights are rank 0's, before and after wrapping."""
    name, strategy, then, chunk_size = setting
    torch.manual_seed(5)
    plain = building.MODELS[name]()
    torch.manual_seed(5 + 100 * rank)
    building.MODELS[name]()
    random_numbers = torch.get_rng_state()
    torch.manual_seed(5 + 100 * rank)
    with ZeroInitContext(shard_strategy=strategy) as context:
        model = building.MODELS[name]()
    assert torch.equal(torch.get_rng_state(), random_numbers)
    store = context._store
    assert store is not None and len(store.chunks.links()) == len(list(model.parameters()))
    shards = sum(chunk.homes[Kind.PARAM].flat.nbytes for chunk in store.chunks.in_order())
    numel = sum(p.numel() for p in model.parameters() if p.dtype is torch.float32)
    padding = 256 * FP32 * sum(2 + len(chunk.parameters) for chunk in store.chunks.in_order())
    assert shards <= numel * FP32 // world_size + padding, (shards, numel)
    for (key, parameter), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert isinstance(parameter, nn.Parameter) and parameter.requires_grad is expected.requires_grad, key
        assert parameter.stride() == expected.stride() or not expected.is_contiguous(), key
        assert torch.equal(parameter.detach().clone(), expected), key
    if world_size == 1:  # buffers are each rank's own until the model is wrapped
        assert_same_state(model, plain)
    assert_same_state(ShardedModel(model, then, chunk_size=chunk_size), plain)


WRAPS: list[dict[str, Any]] = [
    {},
    {"stage": 0},
    {"stage": 1, "shard_strategy": "tensor"},
    {"stage": 2, "tensor_placement_policy": "cpu"},
    {"shard_strategy": "bucket", "tensor_placement_policy": "cpu"},
    {"dtype": torch.bfloat16, "tensor_placement_policy": "cpu"},
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("wrap", WRAPS, ids=str)
@on_ranks(1, 2)
def test_a_wrapped_model_trains_like_one_that_was_built_plain(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    results = []
    for build_sharded in (True, False):
        torch.manual_seed(3)
        with ZeroInitContext(enabled=build_sharded):
            module = building.EditedByParent()
        model = ShardedModel(module, chunk_size=512, **wrap)
        optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=0.01))
        for step in range(3):
            tokens = (torch.arange(26).view(2, 13) + rank + step) % 13
            model(tokens).logsumexp(-1).mean().backward()
            optimizer.step()
        results.append((weights_of(model), optimizer.state_dict()["masters"]))
    for key, value in results[0][0].items():
        assert torch.equal(value, results[1][0][key]), key
    for number, master in results[0][1].items():
        assert torch.equal(master, results[1][1][number]), number


def test_what_was_tied_is_tied_and_what_was_replaced_is_gone() -> None:
    with ZeroInitContext() as context:
        model = building.EditedByParent()
        assert model.head.weight is model.embed.weight
    store = context._store
    assert store is not None and len(store.chunks.links()) == len(list(model.parameters()))
    del model
    assert len(store.chunks.links()) == 0 and not store.chunks.in_order(), "shards outlive their model"


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
    assert len(outer._store.chunks.links()) == 4 and len(inner._store.chunks.links()) == 2
    model = nn.Sequential(first, second, third)
    expected = [p.detach().clone() for p in model.parameters()]
    sharded = ShardedModel(model)
    assert all(torch.equal(a, b) for a, b in zip(sharded.state_dict().values(), expected, strict=True))
    assert len(outer._store.chunks.links()) == len(inner._store.chunks.links()) == 0


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


@pytest.mark.parametrize("shard_param", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_keeps_the_order_of_elements_in_memory(dtype: torch.dtype, shard_param: bool) -> None:
    torch.manual_seed(1)
    plain = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    torch.manual_seed(1)
    with ZeroInitContext(shard_param=shard_param, dtype=dtype):
        model = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    values = plain.weight.detach().contiguous()
    assert model.weight.stride() == plain.weight.stride() != values.stride()
    cast = to_bfloat16_half_up(values) if dtype is torch.bfloat16 else values.to(dtype)
    assert torch.equal(model.weight.detach().clone(), cast)


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


def test_parameters_on_meta_are_left_alone_until_they_have_values() -> None:
    with ZeroInitContext() as context:
        with torch.device("meta"):
            layer = nn.Linear(3, 3)
        assert context._store is not None and len(context._store.chunks.links()) == 0
        layer.weight = nn.Parameter(torch.ones(3, 3))
        layer.bias = nn.Parameter(torch.zeros(3))
    assert len(context._store.chunks.links()) == 2
    assert torch.equal(ShardedModel(layer)(torch.ones(1, 3)), torch.full((1, 3), 3.0))


# -- bad input


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


@on_ranks(3)
def test_a_model_of_some_ranks_may_come_before_one_of_all(rank: int, world_size: int) -> None:
    some = torch.distributed.new_group([0, 1])
    if rank < 2:
        with ZeroInitContext(process_group=some):
            module = nn.Linear(3, 3)
        of_some = ShardedModel(module, process_group=some, device="emulated", rank_timeout=20)
        of_some(torch.ones(1, 3)).sum().backward()
    model = ShardedModel(nn.Linear(3, 3), device="emulated", rank_timeout=20)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=0.5))
    (rank * model(torch.ones(1, 3)).sum()).backward()  # the mean of 0, 1 and 2 is 1
    assert torch.equal(model.module.weight.grad, torch.ones(3, 3))
    optimizer.step()
    if rank < 2:
        assert torch.equal(of_some.module.weight.grad, torch.ones(3, 3)), "is this model's own"


def _one_raises(rank: int, world_size: int) -> str:
    try:
        with ZeroInitContext():
            layers = [nn.Linear(3, 3) for _ in range(3)]
            if rank == 1:
                raise ValueError("no such layer on rank 1")
            layers += [nn.Linear(3, 3) for _ in range(3)]
    except (ValueError, RemoteRankError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _another_operator(rank: int, world_size: int) -> str:
    try:
        with ZeroInitContext():
            nn.Linear(3, 3 + rank)
            nn.LayerNorm(3)
    except DivergenceError as error:
        return str(error)
    return "nothing"


def _another_use(rank: int, world_size: int) -> str:
    """Both gather, but other parameters."""
    try:
        with ZeroInitContext(), torch.no_grad():
            layers = [nn.Linear(3, 3) for _ in range(3)]
            layers[rank].weight.sum().item()
    except DivergenceError as error:
        return str(error)
    return "nothing"


def test_an_exception_on_one_rank_ends_all(ranks: RankPool) -> None:
    said = [found.result for found in ranks(2).run(_one_raises, fresh=True, forked=True, timeout_s=60)]
    assert said[1] == "ValueError: no such layer on rank 1"
    assert said[0].startswith("RemoteRankError: rank 1") and "no such layer" in said[0]


@pytest.mark.parametrize(
    ("case", "words"), [(_another_operator, "Linear 0"), (_another_use, "use of a parameter of Linear")]
)
def test_ranks_that_build_otherwise_are_told(ranks: RankPool, case: Any, words: str) -> None:
    for found in ranks(2).run(case, fresh=True, forked=True, timeout_s=60):
        assert words in found.result, found
