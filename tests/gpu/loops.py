"""The same training as a plain loop and sharded, on any device, and their comparison bit by bit."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import gemini
from gemini import ShardedModel, ShardedOptimizer
from optim import HybridAdam
from tests.harness.devices import emulated
from tests.zoo import hf_models, mlp
from tests.zoo.mlp import minimum_bytes

STATE_BYTES = 16  # a parameter: fp32 weight, gradient, moments; or bf16 weight and gradient, fp32 master, moments
IN_BACKWARD = ", updated in backward"
MAX_NORM = 0.05  # below the subjects' norms, so that clipping changes bits
ADAM: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01}


@dataclass(frozen=True)
class Subject:
    """A model and its batches. Weights are bf16 numbers, so that both loops start from the same masters."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Tensor]  # step -> on the CPU
    loss: Callable[[nn.Module, Tensor], Tensor]
    chunk_numel: int

    def build(self) -> nn.Module:
        return mlp.build(self.make)

    def __str__(self) -> str:
        return self.name


def _mlp_loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.flip(-1)).square().mean()


def _tokens(step: int) -> Tensor:
    return torch.randint(0, hf_models.VOCAB, (2, 32), generator=torch.Generator().manual_seed(100 + step))


def _model_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens)


MLP = Subject("mlp", mlp.Mlp, mlp.inputs, _mlp_loss, mlp.CHUNK_NUMEL)
GPT2 = Subject("gpt2", lambda: hf_models.gpt2("eager"), _tokens, _model_loss, 16384)
GPT2_SDPA = Subject("gpt2-sdpa", lambda: hf_models.gpt2("sdpa"), _tokens, _model_loss, 16384)
GPT2_CHECKPOINT = Subject(
    "gpt2-checkpoint", lambda: hf_models.gpt2("eager", reentrant=False), _tokens, _model_loss, 16384
)
SUBJECTS = (MLP, GPT2, GPT2_SDPA, GPT2_CHECKPOINT)


@dataclass
class Outcome:
    """All that two runs are compared by; tensors on the CPU."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Tensor] = field(default_factory=dict)  # "parameter number, name"
    masters: dict[int, Tensor] = field(default_factory=dict)


def batch_on(subject: Subject, step: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    batch = subject.batch(step)
    return batch.to(device, dtype) if batch.is_floating_point() else batch.to(device)


def train_plain(subject: Subject, device: torch.device, dtype: torch.dtype, steps: int = 4) -> Outcome:
    """Clipped in fp32; not in bf16, where a plain loop would round the clipped gradients."""
    model = subject.build().to(device, dtype)
    parameters = list(model.parameters())
    optimizer = HybridAdam(parameters, **ADAM)
    outcome = Outcome()
    for step in range(steps):
        loss = subject.loss(model, batch_on(subject, step, device, dtype))
        loss.backward()
        if dtype is torch.float32:
            outcome.norms.append(gemini.clip_grad_norm_(parameters, MAX_NORM).cpu())
        optimizer.step()
        optimizer.zero_grad()
        outcome.losses.append(loss.detach().cpu())
    outcome.weights = {name: value.cpu() for name, value in model.state_dict().items()}
    state = optimizer.state_dict()["state"]
    outcome.moments = {f"{n}, {k}": each[k].cpu() for n, each in state.items() for k in ("exp_avg", "exp_avg_sq")}
    outcome.masters = {number: each["master"].cpu() for number, each in state.items() if "master" in each}
    return outcome


def wrap(
    subject: Subject, device: torch.device, dtype: torch.dtype, place: str
) -> tuple[ShardedModel, ShardedOptimizer]:
    """`place`: fits, cuda, cpu, half (of the state on the device) or smallest (the least that is accepted).

    With `IN_BACKWARD` behind it the backward updates.
    """
    module = subject.build()
    options: dict[str, Any] = {"chunk_size": subject.chunk_numel, "device": emulated(device)}
    if place.endswith(IN_BACKWARD):
        place, options["update_in_backward"] = place.removesuffix(IN_BACKWARD), True
    if dtype is not torch.float32:
        options["dtype"] = dtype
    if place in ("cpu", "cuda"):
        options["tensor_placement_policy"] = place
    if place in ("half", "smallest"):
        least = smallest_budget(subject, options)
        half = STATE_BYTES * sum(p.numel() for p in module.parameters()) // 2
        options["model_data_memory"] = least if place == "smallest" else max(least, half)
    model = ShardedModel(module, **options)
    clip = MAX_NORM if dtype is torch.float32 else None
    return model, ShardedOptimizer(model, HybridAdam(model.parameters(), **ADAM), clip_grad_norm=clip)


def smallest_budget(subject: Subject, options: dict[str, Any]) -> int:
    return minimum_bytes(subject.build(), **options)


def train_steps(
    subject: Subject,
    model: ShardedModel,
    optimizer: ShardedOptimizer,
    device: torch.device,
    dtype: torch.dtype,
    steps: range,
    outcome: Outcome,
) -> None:
    for step in steps:
        loss = subject.loss(model, batch_on(subject, step, device, dtype))
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        outcome.losses.append(loss.detach())  # read at the end: an early read would make the host wait
        if dtype is torch.float32:
            assert optimizer.grad_norm is not None
            outcome.norms.append(optimizer.grad_norm)


def collect(model: ShardedModel, optimizer: ShardedOptimizer, outcome: Outcome) -> Outcome:
    outcome.losses = [loss.cpu() for loss in outcome.losses]
    outcome.norms = [norm.cpu() for norm in outcome.norms]
    outcome.weights = dict(model.state_dict())
    saved = optimizer.state_dict()
    outcome.moments = {
        f"{number}, {name}": each[name] for number, each in saved["state"].items() for name in ("exp_avg", "exp_avg_sq")
    }
    outcome.masters = dict(saved.get("masters") or {})
    return outcome


def train_sharded(
    subject: Subject, device: torch.device, dtype: torch.dtype, place: str, steps: int = 4
) -> tuple[Outcome, ShardedModel]:
    model, optimizer = wrap(subject, device, dtype, place)
    outcome = Outcome()
    train_steps(subject, model, optimizer, device, dtype, range(steps), outcome)
    return collect(model, optimizer, outcome), model


def assert_same_bits(got: Outcome, wanted: Outcome) -> None:
    """Losses first: the step at which they part says most."""
    different = [n for n, (a, b) in enumerate(zip(got.losses, wanted.losses, strict=True)) if not same_bits(a, b)]
    assert not different, f"losses differ from step {different[0]} of {len(wanted.losses)} on"
    different = [n for n, (a, b) in enumerate(zip(got.norms, wanted.norms, strict=True)) if not same_bits(a, b)]
    assert not different, f"norms differ from step {different[0]} on"
    for what in ("weights", "moments", "masters"):
        mine, theirs = getattr(got, what), getattr(wanted, what)
        assert mine.keys() == theirs.keys(), f"{what}: other names"
        parted = [str(name) for name in theirs if not same_bits(mine[name], theirs[name])]
        assert not parted, f"{what}: other bits in {', '.join(parted[:5])} ({len(parted)} of {len(theirs)})"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """As bytes: NaNs count, and so does the sign of zero."""
    if a.dtype != b.dtype or a.numel() != b.numel():
        return False
    a, b = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)
