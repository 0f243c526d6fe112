"""The sharded counterpart of tests/harness/reference.py: the same recipe through ShardedModel and ShardedOptimizer."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gemini import Move, ShardedModel, ShardedOptimizer
from tests.harness.reference import Recipe, make_optimizer
from tests.harness.runs import Run
from tests.zoo.mlp import minimum_bytes
from tests.zoo.models import ModelCase


@dataclass
class Facts:
    """What the machinery did, to assert that it was used."""

    num_chunks: int
    num_oversize: int
    num_evictions: int
    num_fetches: int
    num_refetches_elsewhere: int
    spans_two_chunks: bool
    peak_bytes: int
    budget_bytes: int | None
    num_spills: int
    peak_open_gradients: int
    bytes_sent: int


def train_sharded(
    case: ModelCase, recipe: Recipe, rank: int = 0, *, read_grads: bool = True, **wrap: Any
) -> tuple[Run, Facts]:
    """Trains `case` sharded; `wrap`: arguments of ShardedModel. Losses have shape (steps, 1, micro), this rank's."""
    half = recipe.dtype in (torch.bfloat16, torch.float16)
    module = case.build(torch.float32 if half else recipe.dtype)
    wrap.setdefault("chunk_size", case.chunk_numel)
    wrap |= {k: v for k in ("reduce_dtype", "accumulate_dtype") if (v := getattr(recipe, k)) is not None}
    if wrap.get("model_data_memory") == "smallest":
        del wrap["model_data_memory"]
        wrap["model_data_memory"] = smallest_budget(case, recipe, **wrap)
    model = ShardedModel(module, device="emulated", dtype=recipe.dtype if half else None, rank_timeout=60, **wrap)
    scaled = {"initial_scale": recipe.loss_scale} if recipe.dtype is torch.float16 else {}
    optimizer = ShardedOptimizer(
        model, make_optimizer(model.parameters(), recipe), clip_grad_norm=recipe.clip, **scaled
    )
    slots_of: dict[int, set[int]] = {}
    _watch_slots(model, slots_of)
    run = Run(grads=[] if read_grads else None, norms=[])
    losses = []
    for step in range(recipe.steps):
        micro_losses = []
        for micro in range(recipe.accumulation):
            loss = recipe.rank_losses(case, model, step, rank, micro)
            if recipe.dtype is torch.float16:
                optimizer.backward(loss / recipe.accumulation if recipe.accumulation > 1 else loss)
            else:
                recipe.for_backward(loss).backward()
            micro_losses.append(loss.detach().clone())
        losses.append(torch.stack(micro_losses))
        if read_grads:
            grads: dict[str, Tensor | None] = {}
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    grad = None if parameter.grad is None else parameter.grad.clone()
                    several = recipe.accumulation > 1 and recipe.accumulate_dtype is None
                    wide = grad is not None and several and grad.itemsize == 2
                    grads[name] = grad.float() if wide else grad
            run.grads.append(grads)
        if recipe.norm_type != 2.0 or recipe.clip is None:
            norm = optimizer.clip_grad_norm_(recipe.clip or 1e30, norm_type=recipe.norm_type)
            optimizer._next.requested = None if recipe.clip is None else optimizer._next.requested
        if recipe.lr_at:
            optimizer.param_groups[0]["lr"] = recipe.lr * recipe.lr_at(step)
        optimizer.step()
        norm = optimizer.grad_norm
        optimizer.zero_grad()
        run.norms.append(norm)
    run.losses = torch.stack(losses).unsqueeze(1)
    state = model.state_dict()
    names = [name for name, _ in model.named_parameters()]
    run.weights = {name: state[name] for name in names}
    saved = optimizer.state_dict()
    numbers = dict(enumerate(n for n, p in model.named_parameters() if p.requires_grad))
    run.moments = {
        numbers[n]: {k: v for k, v in entry.items() if k != "step" and isinstance(v, Tensor)}
        for n, entry in saved["state"].items()
    }
    if half:
        run.masters = {numbers[n]: master for n, master in saved["masters"].items()}
    manager = model.chunk_manager
    facts = Facts(
        len(manager.chunks),
        sum(chunk.oversize for chunk in manager.chunks),
        model.observer.counts["evict"],
        model.observer.counts["fetch"] + model.observer.counts["prefetch"],
        sum(len(slots) > 1 for slots in slots_of.values()),
        any(len({c.index for c in op.chunks}) > 1 for op in model.operators),
        model.chunk_manager.memory.tiers[0].ledger.peak_bytes,
        model.plan.budget_bytes,
        model.observer.counts["spill"],
        manager.grads.places.peak_open,
        manager.communicator.bytes_sent,
    )
    return run, facts


def smallest_budget(case: ModelCase, recipe: Recipe, **wrap: Any) -> int:
    """The least model_data_memory that ShardedModel accepts."""
    half = recipe.dtype in (torch.bfloat16, torch.float16)
    wrap.setdefault("chunk_size", case.chunk_numel)
    module = case.build(torch.float32 if half else recipe.dtype)
    return minimum_bytes(module, dtype=recipe.dtype if half else None, **wrap)


def _watch_slots(model: ShardedModel, slots_of: dict[int, set[int]]) -> None:
    params = model.chunk_manager.params

    def watch(move: Move) -> None:
        chunk = model.chunk_manager.chunks[move.chunk]
        if move.what in ("fetch", "prefetch") and chunk.own_slot is None:
            slots_of.setdefault(chunk.index, set()).add(
                next(i for i, s in enumerate(params.slots.pools[chunk.oversize].slots) if s.chunk == chunk.index)
            )

    model.observer.listen(watch)
