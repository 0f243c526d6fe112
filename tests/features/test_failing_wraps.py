"""Wrapping that fails wherever memory is taken, and elsewhere: the module is as it was, and can be wrapped again."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from gemini import BudgetError, RemoteRankError, ShardedModel, ShardedOptimizer, ZeroInitContext
from gemini.access import link
from gemini.access.weights import StateHooks
from gemini.building.store import BuildBinding, BuildStore
from gemini.memory.arena import HostTier
from gemini.memory.memory import EmulatedTier
from gemini.model import sharded_model, wrap
from gemini.model.hooks import OperatorTable
from gemini.ranks import watchdog
from tests.harness.on_ranks import in_soak, on_ranks, on_ranks_with
from tests.zoo.mlp import CHUNK_NUMEL, Mlp, adam, assert_same, build, loss_of, train_step, weights_of

LAYERS = 3


class NoMemory(MemoryError):
    """What the machine says at one moment."""


def net() -> nn.Module:
    module = Mlp(LAYERS)
    module.register_buffer("table", torch.arange(4.0))
    return module


@contextmanager
def failing_at(number: int) -> Iterator[list[int]]:
    """The take, of either tier, that fails; yields how many there were."""
    count = [0]

    def counting(take: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            count[0] += 1
            if count[0] == number + 1:
                raise NoMemory(f"take number {number}")
            return take(*args)

        return wrapper

    with (
        mock.patch.object(EmulatedTier, "allocate", counting(EmulatedTier.allocate)),
        mock.patch.object(HostTier, "allocate", counting(HostTier.allocate)),
    ):
        yield count


@contextmanager
def failing_in(owner: Any, name: str, number: int = 0) -> Iterator[None]:
    """The call of `owner.name` that fails."""
    original, count = getattr(owner, name), [0]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == number + 1:
            raise NoMemory(f"wrapping at {name}")
        return original(*args, **kwargs)

    with mock.patch.object(owner, name, wrapper):
        yield


@contextmanager
def interrupted_in(functions: tuple[Callable[..., Any], ...], number: int) -> Iterator[list[int]]:
    """Ctrl-C before a line of one of these functions, counted over all their calls; yields how many there were."""
    codes = {inspect.unwrap(function).__code__ for function in functions}
    count = [0]

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code not in codes:
            return None
        if event == "line":
            count[0] += 1
            if count[0] == number + 1:
                sys.settrace(None)
                raise KeyboardInterrupt(f"wrapping at {frame.f_code.co_name}")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def num_takes(**options: Any) -> int:
    with failing_at(-1) as count:
        ShardedModel(build(net), device="emulated", **options).close()
    return count[0]


def plain() -> nn.Module:
    module: nn.Module = build(net)
    return module


def wholly_built() -> nn.Module:
    with ZeroInitContext():
        module = plain()
    return module


def partly_built() -> nn.Module:
    """Built on shards, but for the second layer and the biases of the others."""
    module, others = wholly_built(), plain()
    for number, (layer, other) in enumerate(zip(module.layers, others.layers, strict=True)):  # type: ignore[arg-type]
        layer.bias = other.bias
        if number == 1:
            layer.weight = other.weight
    return module


def fails_and_wraps_again(
    rank: int, failing_rank: int, failure: Any, make: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    """One rank fails; then the module is as it was, has its weights, trains, and can be wrapped with equal bits."""
    module = make()
    if make is plain:
        loss_of(module).backward()  # the gradient of a backward that came too early
    gradients = [parameter.grad for parameter in module.parameters()]
    kinds = [type(parameter) for parameter in module.parameters()]
    expected = weights_of(build(net))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(watchdog, "POLL_S", 0.05))  # the others look sooner for what has happened
        if rank == failing_rank:
            stack.enter_context(failure)
        expects = (NoMemory, KeyboardInterrupt) if rank == failing_rank else RemoteRankError
        with pytest.raises(expects, match=r"take number|wrapping at") as found:
            ShardedModel(module, device="emulated", **options)
        notes = getattr(found.value, "__notes__", ())
        assert not notes, notes
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())
    assert_same(weights_of(module), expected)
    assert [type(parameter) for parameter in module.parameters()] == kinds
    assert all(parameter.grad is grad for parameter, grad in zip(module.parameters(), gradients, strict=True))
    module.zero_grad()
    again = build(net)
    if make is plain:
        for _ in range(2):
            for each in (module, again):
                train_step(each, torch.optim.SGD(each.parameters(), lr=0.1))
        assert_same(weights_of(module), weights_of(again))
    results = []
    for each in (module, again):
        model = ShardedModel(each, device="emulated", **options)
        optimizer = ShardedOptimizer(model, adam(model.parameters()))
        for step in range(2):
            train_step(model, optimizer, step, options.get("dtype"))
        results.append(weights_of(model))
        model.close()
    assert_same(results[0], results[1])


OPTIONS: list[dict[str, Any]] = [
    {"chunk_size": CHUNK_NUMEL, "tensor_placement_policy": "cpu"},
    {"chunk_size": CHUNK_NUMEL, "dtype": torch.bfloat16},
    {"chunk_size": CHUNK_NUMEL, "stage": 1, "shard_strategy": "tensor"},
]


@on_ranks_with("every", {1: [1], 2: [16]}, soak={3: [1]}, timeout_s=600.0)
def test_wrapping_that_runs_out_of_memory_at_any_time_leaves_the_module_as_it_was(
    rank: int, world_size: int, every: int
) -> None:
    """On the last rank. every: only each so-manieth allocation."""
    combinations = [(options, make) for options in OPTIONS for make in (plain, wholly_built)]
    for start, (options, make) in enumerate(combinations):
        for number in range((3 * start + 1) % every, num_takes(**options), every):
            fails_and_wraps_again(rank, world_size - 1, failing_at(number), make, options)


@on_ranks(1, 2)
def test_wrapping_that_fails_anywhere_else_does_too(rank: int, world_size: int) -> None:
    """On rank 0, which the others look at: in the middle of a chunk, and when everything has moved."""
    places: list[tuple[Any, str, int]] = [
        (wrap, "set_weights", 3),
        (sharded_model, "watch_gradients", 0),
        (OperatorTable, "_attach", 0),
        (StateHooks, "install", 0),
        (link, "hook_last", 2),
    ]
    for owner, name, number in places:
        fails_and_wraps_again(rank, 0, failing_in(owner, name, number), plain, OPTIONS[1])


@on_ranks_with("every", {2: [3]}, soak={3: [1]}, timeout_s=600.0)
def test_wrapping_that_fails_late_leaves_a_module_that_was_built_in_part(
    rank: int, world_size: int, every: int
) -> None:
    """On the last rank, in each chunk of a module that was built in part, and when all has moved; and on rank 0."""
    options = {"chunk_size": 2 * CHUNK_NUMEL, "tensor_placement_policy": "cpu"}
    last = num_takes(**options) - 1
    for failing_rank in dict.fromkeys((world_size - 1, 0)):
        failures = [failing_in(wrap, "set_weights", number) for number in range(0, 2 * LAYERS, every)]
        for failure in (*failures, failing_at(last), failing_in(sharded_model, "watch_gradients")):
            fails_and_wraps_again(rank, failing_rank, failure, partly_built, options)
    # meanwhile the others gather the next operator
    fails_and_wraps_again(rank, 0, failing_in(wrap, "set_weights"), wholly_built, options)


@on_ranks(1, 2)
def test_an_edit_of_a_built_module_survives_a_wrap_that_is_refused(rank: int, world_size: int) -> None:
    """It was not brought home yet when the plan refused the budget, before any rank had moved anything."""
    module: Any = wholly_built()
    with torch.no_grad():
        module.layers[0].weight.fill_(3.0)
    with pytest.raises(BudgetError):
        ShardedModel(module, device="emulated", model_data_memory=16)
    assert module.layers[0].weight.unique().tolist() == [3.0]
    model = ShardedModel(module, device="emulated")
    assert model.state_dict()["layers.0.weight"].unique().tolist() == [3.0]


# where a parameter changes hands while a module that was built on shards is wrapped
HANDING_OVER: tuple[Callable[..., Any], ...] = (
    BuildStore._fetch,
    BuildStore.let_go,
    BuildBinding.open,
    BuildBinding.close,
    BuildBinding.part_with,
    wrap._fill,
    wrap._fill_given,
)


@on_ranks(1)
@pytest.mark.parametrize("every", [41, *in_soak(1)])
def test_ctrl_c_while_weights_move_leaves_them_whole(rank: int, world_size: int, every: int) -> None:
    """Ctrl-C at every so-manieth line of what moves parameters, of built modules and others."""
    makes = (wholly_built, plain, partly_built)
    for start, (options, make) in enumerate((options, make) for options in OPTIONS[:2] for make in makes):
        module = make()
        with interrupted_in(HANDING_OVER, -1) as count:
            ShardedModel(module, device="emulated", **options).close()
        for number in range(start, count[0], every):
            fails_and_wraps_again(rank, 0, interrupted_in(HANDING_OVER, number), make, options)


@on_ranks(2)
def test_ctrl_c_on_one_rank_leaves_the_weights_of_a_built_module_on_all(rank: int, world_size: int) -> None:
    """On rank 0, before a chunk is gathered and after its values have moved; the other rank finds them all."""
    for function, number in ((BuildBinding.open, 25), (BuildStore.let_go, 6)):
        fails_and_wraps_again(rank, 0, interrupted_in((function,), number), wholly_built, OPTIONS[0])
