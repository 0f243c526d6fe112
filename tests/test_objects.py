"""The objects of a wrapped model refer downwards only, as docs/architecture.md draws them."""

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from tempfile import TemporaryDirectory
from types import FunctionType, MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import ChunkManager, Observer, ShardedModel, ShardedOptimizer, UnsupportedError, ZeroInitContext
from tests.harness.on_ranks import on_ranks
from tests.zoo import mlp

ENDS = (Tensor, torch.dtype, torch.device, ModuleType, type, str, bytes, int, float, weakref.ref)


def parts_of(thing: Any) -> Iterator[Any]:
    """What an object refers to. Modules and tensors are the user's; what they refer to is not looked at."""
    if isinstance(thing, (*ENDS, nn.Module)):
        return
    if isinstance(thing, Mapping):
        yield from [*thing.keys(), *thing.values()]
    elif isinstance(thing, (list, tuple, set, frozenset, deque)):
        yield from list(thing)
    elif isinstance(thing, MethodType):
        yield thing.__self__
    elif isinstance(thing, partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, FunctionType):
        yield from (cell.cell_contents for cell in thing.__closure__ or ())
    elif type(thing).__module__.startswith(("gemini.", "sharding.", "optim.", "torch.optim")):
        yield from vars(thing).values() if hasattr(thing, "__dict__") else ()
        slots = (name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()))
        yield from (getattr(thing, name) for name in slots if hasattr(thing, name))


def reached_from(start: Any) -> dict[int, Any]:
    """Everything below an object, by id."""
    found: dict[int, Any] = {}
    waiting = [start]
    while waiting:
        for part in parts_of(waiting.pop()):
            if id(part) not in found:
                found[id(part)] = part
                waiting.append(part)
    return found


@pytest.mark.parametrize("place", ["cuda", "smallest"])
def test_nothing_refers_to_what_is_above_it(place: str) -> None:
    model, optimizer = mlp.sharded(place)
    for step in range(2):
        mlp.train_step(model, optimizer, step)
    manager = model.chunk_manager
    downwards: dict[str, Any] = {
        "optimizer": optimizer,
        "model": model,
        "hooks": model._hooks,
        "trainability": model.trainability,
        "chunk manager": manager,
        "step": manager.step,
        "gradients": manager.grads,
        "parameters": manager.params,
        "memory": manager.memory,
        "communicator": manager.communicator,
    }
    above: list[str] = []
    for name, thing in downwards.items():
        below = reached_from(thing)
        wrong = [other for other in above if id(downwards[other]) in below]
        assert not wrong, f"{name} reaches {wrong}"
        above.append(name)
    assert id(manager.memory) in reached_from(manager), "the walk goes through our objects"
    assert id(manager.step) in reached_from(model._hooks)


def circles(starts: Iterable[Any]) -> list[list[Any]]:
    """Groups of objects of which each reaches all others of its group: strongly connected components, by Tarjan."""
    order: dict[int, int] = {}
    lowest: dict[int, int] = {}
    stack: list[Any] = []
    on_stack: set[int] = set()
    found = []
    alive = list(starts)  # an id stays that of one object while the object lives
    walk: list[tuple[Any, Iterator[Any]]] = []

    def enter(thing: Any) -> None:
        order[id(thing)] = lowest[id(thing)] = len(order)
        alive.append(thing)
        stack.append(thing)
        on_stack.add(id(thing))
        walk.append((thing, iter([*parts_of(thing)])))

    for start in [*alive]:
        if id(start) not in order:
            enter(start)
        while walk:
            thing, parts = walk[-1]
            for part in parts:
                if id(part) not in order:
                    enter(part)
                    break
                if id(part) in on_stack:
                    lowest[id(thing)] = min(lowest[id(thing)], order[id(part)])
            else:  # all that it refers to has been seen
                walk.pop()
                for above, _ in walk[-1:]:
                    lowest[id(above)] = min(lowest[id(above)], lowest[id(thing)])
                if lowest[id(thing)] == order[id(thing)]:
                    group = stack[next(number for number, each in enumerate(stack) if each is thing) :]
                    del stack[-len(group) :]
                    on_stack.difference_update(map(id, group))
                    if len(group) > 1:
                        found.append(group)
    return found


# A chunk is its parameters' memory, and a parameter is a place in a chunk: neither is made without the other.
ALLOWED_CIRCLES = [{"Chunk", "ManagedParameter"}]


def names_in(circle: list[Any]) -> set[str]:
    return {type(each).__name__ for each in circle if type(each).__module__ != "builtins"}


SETTINGS: dict[str, dict[str, Any]] = {
    "on the device": {"tensor_placement_policy": "cuda"},
    "on the host": {"tensor_placement_policy": "cpu"},
    "updates in the backward": {"update_in_backward": True},
    "updates in the backward, by a thread": {
        "update_in_backward": True,
        "deferred_update": True,
        "tensor_placement_policy": "cpu",
    },
    "deferred updates": {"deferred_update": True, "tensor_placement_policy": "cpu"},
    "on a disk": {"tensor_placement_policy": "disk"},
    "the least budget, lent homes": {
        "dtype": torch.bfloat16,
        "reuse_fp16_shard": True,
        "model_data_memory": "smallest",
    },
}


@pytest.mark.parametrize("is_built", [False, True], ids=["wrapped", "built"])
@pytest.mark.parametrize("setting", SETTINGS)
@on_ranks(1, 2)
def test_the_objects_of_a_model_form_no_circle(rank: int, world_size: int, setting: str, is_built: bool) -> None:
    with ZeroInitContext() if is_built else nullcontext():
        module = mlp.build()
    with TemporaryDirectory() as folder:
        where = mlp.placed(**SETTINGS[setting], **({"disk_path": folder} if setting == "on a disk" else {}))
        model = ShardedModel(module, **where)
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        for step in range(2):
            mlp.train_step(model, optimizer, step, where.get("dtype"))
        parts = [part for part in vars(model).values() if part is not model.module]
        below = {id(each) for part in parts for each in reached_from(part).values()}
        assert {id(model._hooks), id(model.chunk_manager), id(model.chunk_manager.step)} <= below | set(map(id, parts))
        model.chunk_manager.memory.work.finish()
        optimizer.state_dict()  # waits for writes to a disk, which are objects of their own until they are over
        wrong = [names_in(each) for each in circles([optimizer, *parts])]
        model.close()
    assert [each for each in wrong if each not in ALLOWED_CIRCLES] == []


def test_the_walk_sees_circles() -> None:
    """By attributes, bound methods, partials, closures and containers."""
    left, right, lonely = Observer(), Observer(), Observer()
    for back in (left, left.listen, partial(left.listen, print), deque([{"left": [left]}]), lambda: left):
        vars(left)["other"] = (right, lonely)
        vars(right)["other"] = back
        (circle,) = circles([lonely, left])
        assert {id(left), id(right)} <= set(map(id, circle))
        assert id(lonely) not in set(map(id, circle))
    vars(right)["other"] = lonely
    assert circles([left, right]) == []


def test_the_chunk_manager_is_the_owner_of_what_a_model_has() -> None:
    model, optimizer = mlp.sharded()
    manager = model.chunk_manager
    assert isinstance(manager, ChunkManager)
    assert [chunk.index for chunk in manager.chunks] == [facts.index for facts in model.plan.packing.chunks]
    assert model.observer is manager.observer
    before = manager.memory.transfer.bytes_by_link["host->device"]
    mlp.train_step(model, optimizer)
    assert manager.memory.transfer.bytes_by_link["host->device"] > before
    assert sum(tier.ledger.total_bytes for tier in manager.memory.tiers) > 0
    with pytest.raises(UnsupportedError, match="a ShardedOptimizer already"):
        ShardedOptimizer(model, mlp.adam(model.parameters()))


def test_a_model_without_an_optimizer_has_none_in_its_chunk_manager() -> None:
    model = ShardedModel(mlp.build(), device="emulated")
    assert model.chunk_manager.optimizer is None
