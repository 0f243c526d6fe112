"""One case on one rank: trains, and returns what is compared. Everything but `measure` is gemini's public API."""

import gc
import hashlib
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gemini import ShardedModel, ShardedOptimizer, ZeroInitContext
from optim import HybridAdam
from tests.golden import measure
from tests.golden.cases import Case
from tests.zoo.models import MODELS, ModelCase

STEPS = 4
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
Result = dict[str, dict[str, Any]]  # "bits" and "counts", by name


def train(rank: int, world_size: int, options: dict[str, Any]) -> Result:
    """Collective over the case's ranks."""
    case = Case.of(options)
    assert case.ranks == world_size
    launches = measure.Launches()
    with launches.counted(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="reuse_fp16_shard")
        warnings.filterwarnings("ignore", message="step . skipped")
        try:
            return _train(case, rank, launches)
        except Exception as error:
            error.add_note(f"in the golden case {case}")
            raise


def wrapping(case: Case) -> dict[str, Any]:
    """Arguments of `ShardedModel`, its budget included."""
    model = MODELS[case.model]
    wrap: dict[str, Any] = {
        "stage": case.stage,
        "shard_strategy": case.strategy,
        "dtype": None if case.dtype == "fp32" else _DTYPES[case.dtype],
        "reuse_fp16_shard": case.reuse,
        "reduce_dtype": _DTYPES[case.travels],
        "accumulate_dtype": _DTYPES[case.rests],
        "chunk_size": None if case.chunk is None else int(model.chunk_numel * case.chunk),
        "tensor_placement_policy": {"resident": "cuda", "host": "cpu"}.get(case.place, "auto"),
    }
    if case.place != "resident":
        least = measure.least_budget(model.build(), case.ranks, **wrap)
        whole = measure.whole_budget(model.build(), case.ranks, **wrap)
        wrap["model_data_memory"] = max(least, (least + whole) // 2) if case.place == "middle" else least + least // 50
    return wrap


def _end_dropped_groups() -> None:
    """Process groups of models that other tests dropped end, with launches, when the next model is made and closed."""
    gc.collect()
    ShardedModel(torch.nn.Linear(1, 1), device="emulated", rank_timeout=60).close()


def _train(case: Case, rank: int, launches: measure.Launches) -> Result:
    model_case = MODELS[case.model]
    _end_dropped_groups()
    launches.pop_counts()
    wrap = wrapping(case)
    least = measure.least_budget(model_case.build(), case.ranks, **_without_budget(wrap))
    with ZeroInitContext(enabled=case.built, rank_timeout=60):
        module = model_case.build()
    model = ShardedModel(module, device="emulated", rank_timeout=60, **wrap)
    moves = measure.Moves(model)
    counts: dict[str, Any] = {"least": least, "budget": wrap.get("model_data_memory"), **measure.plan_counts(model)}
    optimizer = ShardedOptimizer(
        model, _optimizer(case, model.parameters()), clip_grad_norm=case.clip, initial_scale=2.0**10, hysteresis=1
    )
    counts["wrapping"] = launches.pop_counts()
    losses: list[str] = []
    norms: list[str] = []
    frozen = _later_half([p for p in model.parameters() if p.requires_grad]) if case.freezes else []
    for step in range(STEPS):
        if step >= STEPS - 2:  # frozen for one step, then trained again
            for parameter in frozen:
                parameter.requires_grad_(step == STEPS - 1)
        losses.append(hash_of(_backward(case, model_case, model, optimizer, step, rank)))
        optimizer.step()
        optimizer.zero_grad()
        report = optimizer.last_step
        assert report is not None
        norms.append(hash_of([("norm", optimizer.grad_norm), (f"{report.clip} {report.skipped}", report.loss_scale)]))
        if case.evaluates and step == 1:
            with torch.no_grad():
                losses.append(hash_of([("evaluated", model_case.loss(model, model_case.batch(7, rank, case.ranks)))]))
    counts |= {"moves": moves.hash(), "training": launches.pop_counts(), **measure.work_counts(model)}
    bits = {"losses": losses, "norms": norms, **_state(model, optimizer)}
    model.close()
    return {"bits": bits, "counts": counts}


def _without_budget(wrap: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in wrap.items() if name != "model_data_memory"}


def _later_half(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """The first ones stay trained: reentrant checkpoints have no gradient for what begins with frozen inputs."""
    return parameters[(len(parameters) + 1) // 2 :]


def _optimizer(case: Case, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if case.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=1e-2, momentum=0.9, weight_decay=0.01, foreach=False)
    if case.optimizer == "adamw":
        return torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01, foreach=False)
    return HybridAdam(trained, lr=1e-3, weight_decay=0.01)


def _backward(
    case: Case, model_case: ModelCase, model: ShardedModel, optimizer: ShardedOptimizer, step: int, rank: int
) -> list[tuple[str, Tensor]]:
    """All micro-batches of a step; this rank's losses."""
    losses = []
    count = 1 if case.micro == "1" else 2
    for micro in range(count):
        unsynced = case.micro == "no_sync" and micro == 0
        with model.no_sync() if unsynced else nullcontext():
            loss = model_case.loss(model, model_case.batch(step, rank, case.ranks, micro))
            optimizer.backward(loss.float() / count)
        losses.append((f"{step}.{micro}", loss.detach()))
    return losses


def _state(model: ShardedModel, optimizer: ShardedOptimizer) -> dict[str, str]:
    """Hashes of weights, buffers, and whatever the optimizer keeps, each over all parameters by name."""
    weights = model.state_dict()
    buffers = {name for name, _ in model.named_buffers()}
    by_kind: dict[str, list[tuple[str, Any]]] = {"weights": [], "buffers": []}
    for name in sorted(weights):
        by_kind["buffers" if name in buffers else "weights"].append((name, weights[name]))
    saved = optimizer.state_dict()
    for number, entry in saved["state"].items():
        for kind, value in entry.items():
            by_kind.setdefault(kind, []).append((str(number), value))
    by_kind["masters"] = [(str(number), master) for number, master in saved["masters"].items()]
    return {kind: hash_of(values) for kind, values in sorted(by_kind.items()) if values}


def hash_of(values: Iterable[tuple[str, Any]]) -> str:
    """Of names, dtypes, shapes and bits, in the order given."""
    digest = hashlib.sha256()
    for name, value in values:
        digest.update(name.encode())
        if isinstance(value, Tensor):
            whole = value.detach().cpu().contiguous()
            digest.update(f"{whole.dtype}{tuple(whole.shape)}".encode())
            digest.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b"")
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()[:10]
