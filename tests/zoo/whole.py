"""A model of matrices and vectors, optimizers that need its tensors whole, and a plain reference of both."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gemini
from tests.harness.seed import seed

WIDTH = 24
Makes = Callable[[nn.Module], list[torch.optim.Optimizer]]


class Matrices(nn.Module):
    """Matrices that are wide, high and square, a norm, biases, and experts that are one tensor of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 40)
        self.norm = nn.LayerNorm(40)
        self.square = nn.Linear(40, 40, bias=False)
        self.experts = nn.Parameter(torch.randn(2, 40, 16) * 0.1)
        self.last = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        x = torch.tanh(self.square(x))
        return self.last((x @ self.experts).mean(0))


def build(dtype: torch.dtype | None = None) -> Matrices:
    """The same weights on every call, which are bf16 numbers."""
    with torch.random.fork_rng(devices=[]):
        seed(0)
        model = Matrices()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model if dtype is None else model.to(dtype)


def loss_of(model: nn.Module, *numbers: int, dtype: torch.dtype | None = None) -> Tensor:
    """The loss of the batch that has these numbers, such as those of a step, a micro-batch and a rank."""
    number = sum(1000**place * each for place, each in enumerate(numbers))
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(number))
    return model(x if dtype is None else x.to(dtype)).square().mean()


def matrices_and_rest(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    named = list(model.parameters())
    return [p for p in named if p.ndim == 2], [p for p in named if p.ndim != 2]


def muon_and_adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, rest = matrices_and_rest(model)
    return [torch.optim.Muon(matrices, lr=0.05), gemini.HybridAdam(rest, lr=1e-2, weight_decay=0.01)]


def muon_of_experts(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon of matrices and of experts in one tensor; the rest is Adam's."""
    stacks = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    return [gemini.Muon(stacks, lr=0.05, weight_decay=0.1), gemini.HybridAdam(rest, lr=1e-2, weight_decay=0.01)]


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, rest = matrices_and_rest(model)
    moonlight = torch.optim.Muon(matrices, lr=0.01, adjust_lr_fn="match_rms_adamw", nesterov=False)
    return [torch.optim.AdamW(rest, lr=1e-2, foreach=False), moonlight]


def adafactor(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adafactor(model.parameters(), lr=0.05, weight_decay=0.01, foreach=False)]


def transformers_adafactor(model: nn.Module) -> list[torch.optim.Optimizer]:
    from transformers.optimization import Adafactor

    return [Adafactor(model.parameters(), beta1=0.9)]


class Lamb(torch.optim.Optimizer):
    """You et al. 2019: Adam, whose update of a tensor is scaled by norm of the weight / norm of the update."""

    def __init__(self, params: Any, lr: float, most_trust: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6})
        self.most_trust = most_trust  # in no group

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                (beta1, beta2), its = group["betas"], state["step"]
                state["m"].lerp_(p.grad, 1 - beta1)
                state["v"].lerp_(p.grad.square(), 1 - beta2)
                update = state["m"] / (1 - beta1**its) / ((state["v"] / (1 - beta2**its)).sqrt() + group["eps"])
                trust = min(self.most_trust, float(p.norm()) / float(update.norm())) if update.any() else 1.0
                p.sub_(update, alpha=group["lr"] * trust)


def lamb(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [gemini.per_tensor(Lamb(model.parameters(), lr=1e-2, most_trust=1.5))]


class Whitened(torch.optim.Optimizer):
    """Keeps a square buffer of another shape than the weight, a number and a text, and replaces the weight's memory."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                rows = p.grad.reshape(p.shape[0], -1)
                state = self.state[p]
                if "gram" not in state:
                    state["gram"], state["largest"], state["kind"] = torch.eye(len(rows)), 0.0, "of rows"
                state["gram"] = state["gram"] * 0.9 + rows @ rows.T
                state["largest"] = max(state["largest"], float(rows.abs().max()))
                step = torch.linalg.solve(state["gram"], rows).reshape(p.shape)
                p.data = p.data - group["lr"] * step / (1 + state["largest"])


def whitened(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [gemini.per_tensor(Whitened(model.parameters()))]


MAKES: dict[str, Makes] = {
    "muon": muon_and_adam,
    "experts": muon_of_experts,
    "moonlight": muon_and_adamw,
    "adafactor": adafactor,
    "transformers": transformers_adafactor,
    "lamb": lamb,
    "whitened": whitened,
}


class Plain:
    """The plain model and its optimizers, given the gradients that so many ranks reduce."""

    def __init__(self, make: str, world_size: int, max_norm: float | None = None) -> None:
        self.model = build()
        self.optimizers = MAKES[make](self.model)
        self._world_size = world_size
        self._max_norm = max_norm

    def step(self, step: int, micro_batches: int = 1) -> None:
        """The mean over ranks of each micro-batch, added in rank order; a sum of the micro-batches; a step."""
        parameters = list(self.model.parameters())
        total: list[Tensor] | None = None
        for micro in range(micro_batches):
            mean = self._mean(parameters, step, micro)
            total = mean if total is None else [a + b for a, b in zip(total, mean, strict=True)]
        assert total is not None
        for parameter, grad in zip(parameters, total, strict=True):
            parameter.grad = grad
        if self._max_norm is not None:
            gemini.clip_grad_norm_(parameters, self._max_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def _mean(self, parameters: Sequence[nn.Parameter], step: int, micro: int) -> list[Tensor]:
        total: list[Tensor] | None = None
        for rank in range(self._world_size):
            grads = torch.autograd.grad(loss_of(self.model, step, micro, rank), parameters)
            # In the strides of the parameters, as `backward()` leaves them: sums over a tensor follow its strides.
            grads = [torch.empty_like(p).copy_(grad) for p, grad in zip(parameters, grads, strict=True)]
            total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
        assert total is not None
        return total if self._world_size == 1 else [each / self._world_size for each in total]


def train_step(model: nn.Module, optimizer: Any, rank: int, step: int, micro_batches: int = 1) -> None:
    """The same step of the sharded model."""
    for micro in range(micro_batches):
        optimizer.backward(loss_of(model, step, micro, rank))
    optimizer.step()
    optimizer.zero_grad()
