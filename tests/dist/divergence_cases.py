"""Ranks that take different ways on purpose, or are given different models and arguments."""

import random
import tempfile
from typing import Any

import torch
from torch import Tensor, nn

from gemini import DivergenceError, GeminiError, ShardedModel, ShardedOptimizer, state_hash
from gemini.placement.next_use import PassKind, Touch
from tests.dist.failing import (
    CHUNK,
    WIDTH,
    InBackward,
    Net,
    batch,
    build,
    impatient,
    make,
    smallest_budget,
    train_step,
    wrong,
)


def ranks_diverge(rank: int, world_size: int, stage: int, ways: list[str]) -> dict[str, Any]:
    """By way: (the error's words, whether the weights are as before); and whether training goes on as it should."""
    impatient()
    model, optimizer, net = make(slots=1, stage=stage)
    for step in range(2):
        train_step(model, optimizer, rank, step)
    before = model.state_dict()
    wanted = state_hash(model, optimizer)
    for number, layer in enumerate(net.layers):
        layer.truth, layer.name = before[f"layers.{number}.weight"], f"layers.{number}"  # type: ignore[assignment]
    said: dict[str, Any] = {}
    for way in ways:
        try:
            _diverge(model, optimizer, net, rank, way)
            message = "no error"
        except GeminiError as error:
            message = f"{type(error).__name__}: {error}"
        net.at.clear()
        optimizer.zero_grad()
        said[way] = message, state_hash(model, optimizer) == wanted
    said["wrong"] = list(wrong)
    for layer in net.layers:
        layer.truth = None
    train_step(model, optimizer, rank, 2)
    calm, calm_optimizer, _ = make(slots=1, stage=stage)
    for step in range(3):
        train_step(calm, calm_optimizer, rank, step)
    said["goes on"] = state_hash(model, optimizer) == state_hash(calm, calm_optimizer)
    return said


def _diverge(model: ShardedModel, optimizer: ShardedOptimizer, net: Net, rank: int, way: str) -> None:
    other = rank == 1
    weights = [layer.weight for layer in net.layers]
    if way == "outside a step":
        float(weights[5 if other else 2].sum())
        float(weights[1 if other else 7].sum())
    elif way == "outside, one rank only":
        if other:
            model.state_dict()
        train_step(model, optimizer, rank, 2)
    elif way == "evaluation":
        if other:
            net.at[0] = lambda net, x: net.layers[4]
        with torch.no_grad():
            model(batch(rank, 2))
    elif way == "skipped backward":
        loss = model(batch(rank, 2)).square().mean()
        if not other:
            optimizer.backward(loss)
            optimizer.step()
        else:
            model(batch(rank, 3))
            optimizer.clip_grad_norm_(1.0) if optimizer.model.chunk_manager.grads.num_backwards else model.state_dict()
    elif way == "loss without a graph":
        loss = model(batch(rank, 2)).square().mean()
        optimizer.backward(torch.zeros((), requires_grad=True) * 1 if other else loss)
        optimizer.step()
    elif way == "skipped step":
        optimizer.backward(model(batch(rank, 2)).square().mean())
        if other:
            optimizer.backward(model(batch(rank, 3)).square().mean())
        optimizer.step()
    elif way == "read gradient":
        optimizer.backward(model(batch(rank, 2)).square().mean())
        if other:
            net.layers[2].weight.grad.sum()
        optimizer.step()
    else:
        if other:
            net.at[3] = {
                "forward": lambda net, x: net.layers[6],
                "backward": lambda net, x: InBackward.apply(x, lambda: net.layers[7].weight.detach().sum()),
                "touch in forward": lambda net, x: net.layers[7].weight.detach().sum() and None,
                "fails nothing": lambda net, x: None,
            }[way]
        train_step(model, optimizer, rank, 2)


def another_update_order(rank: int, world_size: int) -> tuple[str, str]:
    """Rank 1 updates in reverse at a stage where every update is spread: (the error, what the next step says)."""
    impatient()
    model, optimizer, _ = make(stage=2)
    train_step(model, optimizer, rank, 0)
    if rank == 1:
        states = optimizer._chunk_states.by_chunk
        reverse = list(reversed(states.items()))
        states.clear()
        states.update(reverse)
    said = []
    for step in (1, 2):
        try:
            train_step(model, optimizer, rank, step)
            said.append("nothing")
        except GeminiError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said[0], said[1]


def traces_differ(rank: int, world_size: int, stage: int, odd: str) -> dict[str, Any]:
    """Rank 1 alone uses layers that are in their slots, which takes no collective; then all ranks do alike.

    odd: in one step "forward" and "backward" read a weight, and "operator" calls a layer; "random" does one of these
        somewhere in each of five steps; "evaluation" calls a layer in the first of the evaluations, which then precede
        each step.

    What ranks were told, the trace that the second evaluation has, and hashes of this run's state and of a calm one's.
    """
    impatient()
    said: list[str] = []
    touches: list[Touch] = []  # that the second evaluation expects
    model, optimizer, net = make(slots=3 if odd == "evaluation" else 1, stage=stage)
    steps = {"random": range(1, 6), "evaluation": range(1)}.get(odd, range(2, 3))
    next_use = model.chunk_manager.params.next_use
    for step in range(8):
        if rank == 1 and step in steps:
            _use_in_passing(net, odd, random.Random(step))
        for _ in range(3):
            try:
                for _ in range(3 * (odd == "evaluation")):
                    with torch.no_grad():
                        model(batch(rank, step))
                    net.at.clear()
                    touches = touches or list(next_use.touches(PassKind.EVALUATION))
                train_step(model, optimizer, rank, step)
                break
            except GeminiError as error:
                said.append(f"step {step}: {type(error).__name__}: {error}")
                optimizer.zero_grad()
                net.at.clear()
        net.at.clear()
    calm, calm_optimizer, _ = make(stage=stage, tensor_placement_policy="cuda", model_data_memory=None)
    for step in range(8):
        train_step(calm, calm_optimizer, rank, step)
    hashes = state_hash(model, optimizer), state_hash(calm, calm_optimizer)
    return {"said": said, "touches": touches, "hashes": hashes}


def _use_in_passing(net: Net, odd: str, chance: random.Random) -> None:
    """Have a layer, while it runs, use one that has run just before."""
    at = 3
    if odd == "random":
        odd, at = chance.choice(["forward", "backward", "operator"]), chance.randrange(1, 7)
    before, behind = net.layers[at - 1], net.layers[at + 1]
    net.at[at] = {
        "forward": lambda net, x: before.weight.detach().sum() and None,
        "backward": lambda net, x: InBackward.apply(x, lambda: behind.weight.detach().sum()),
        "operator": lambda net, x: before(x.detach()) is None or None,
        "evaluation": lambda net, x: net.layers[at - 2](x) is None or None,
    }[odd]


class WithBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(5))


def different_weights(rank: int, world_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(what this rank had before, what it has after)."""
    torch.manual_seed(rank)
    module = WithBuffer()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    return before, dict(ShardedModel(module, device="emulated", chunk_size=CHUNK).state_dict())


def with_buffer(numel: int) -> Net:
    module = build()
    module.register_buffer("mean", torch.zeros(numel))
    return module


def different_arguments(rank: int, world_size: int) -> dict[str, str]:
    """What each difference is answered with."""
    impatient()
    least = smallest_budget({"chunk_size": CHUNK, "device": "emulated"})
    options: dict[str, list[dict[str, Any]]] = {
        "stage": [{"stage": 2}, {"stage": 3}],
        "dtype": [{"dtype": torch.bfloat16}, {}],
        "strategy": [{"shard_strategy": "tensor"}, {}],
        "chunk size": [{"chunk_size": CHUNK}, {"chunk_size": 2 * CHUNK}],
        "budget": [{"model_data_memory": least}, {"model_data_memory": least + 40 * CHUNK}],
        "one too small": [{"model_data_memory": least}, {"model_data_memory": least // 2}],
        "too small": [{"model_data_memory": least // 8}] * 2,  # also for inference
        "shape": [{}, {"module": nn.Sequential(nn.Linear(WIDTH, WIDTH + 1))}],
        "buffer": [{}, {"module": with_buffer(5)}],
        "buffer's shape": [{"module": with_buffer(5)}, {"module": with_buffer(6)}],
        "disk on one rank": [{"disk_path": tempfile.gettempdir()}, {}],
        "folder": [{"disk_path": tempfile.gettempdir()}, {"disk_path": f"{tempfile.gettempdir()}/."}],
    }
    said = {}
    for what, by_rank in options.items():
        mine = {"chunk_size": CHUNK, "module": build(), "device": "emulated", "rank_timeout": 20, **by_rank[rank]}
        try:
            ShardedModel(mine.pop("module"), **mine)
            said[what] = "accepted"
        except GeminiError as error:
            said[what] = f"{type(error).__name__}: {error}"
    equal = build()
    for parameter in equal.layers[rank].parameters():  # a frozen layer on one rank is another model
        parameter.requires_grad_(False)
    try:
        ShardedModel(equal, chunk_size=CHUNK, device="emulated")
    except DivergenceError as error:
        said["frozen"] = str(error)
    return said
