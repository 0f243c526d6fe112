"""Random walks of what is newest in optimizers: whole tensors, several of them, averages, moments in 8 and 16 bits.

The plain model has the same optimizers side by side, and an average of its weights beside them. The operations are
those of `walks.py`, and some that only these have.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gemini import HybridAdam, ShardedModel, ShardedOptimizer, per_tensor
from tests.harness.devices import CPU
from tests.zoo.walks import Walk, assert_same, of
from tests.zoo.whole import Lamb

DECAY = 0.75


def _matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Those of the model that an optimizer of matrices takes, and all others, without `extra`."""
    some = [each for name, each in model.named_parameters() if "extra" not in name]
    return [each for each in some if each.ndim == 2], [each for each in some if each.ndim != 2]


def _halves(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02}]


def _muon(model: nn.Module, rest: Callable[[Any], torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    matrices, others = _matrices(model)
    return [torch.optim.Muon(_halves(matrices), lr=0.05), rest(others)]


def _of_all(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    return lambda model: [make(_halves(list(chain(*_matrices(model)))))]


def _small(kind: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda groups: HybridAdam(groups, lr=1e-2, weight_decay=0.01, state_dtype=kind)


MAKES: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "hybrid": _of_all(lambda groups: HybridAdam(groups, lr=1e-2)),
    "muon, hybrid": lambda model: _muon(model, lambda rest: HybridAdam(rest, lr=1e-2)),
    "muon, adamw": lambda model: _muon(model, lambda rest: torch.optim.AdamW(rest, lr=1e-2, foreach=False)),
    "muon, sgd": lambda model: _muon(model, lambda rest: torch.optim.SGD(rest, lr=1e-2, foreach=False)),
    "hybrid, sgd": lambda model: [
        HybridAdam(_matrices(model)[1], lr=1e-2),
        torch.optim.SGD(_matrices(model)[0], lr=1e-2, momentum=0.9, foreach=False),
    ],
    "adafactor": _of_all(lambda groups: torch.optim.Adafactor(groups, lr=0.05, foreach=False)),
    "lamb": _of_all(lambda groups: per_tensor(Lamb(groups, lr=1e-2, most_trust=1.5))),
    "8bit": _of_all(_small("8bit")),
    "bf16": _of_all(_small(torch.bfloat16)),
}


class Together:
    """Plain optimizers, and an average of the weights, as the one optimizer that the wrapped model has."""

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], averages: bool) -> None:
        self.model, self.optimizers, self.averages = model, optimizers, averages
        self.average: dict[str, Tensor] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """As `ShardedOptimizer.state` shows it: in fp32, whatever it is stored in."""
        found: dict[Any, dict[str, Any]] = {}
        for each in self.optimizers:
            if not any(key.endswith("_scale") for entry in each.state.values() for key in entry):
                found |= each.state
                continue
            ordered = [p for group in each.param_groups for p in group["params"]]
            found |= {ordered[number]: entry for number, entry in each.state_dict()["state"].items()}
        return found

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.optimizers[-1].add_param_group({key: value for key, value in group.items() if key != "optimizer"})

    def step(self) -> None:
        for each in self.optimizers:
            each.step()
        if self.averages:
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    if name in self.average:
                        self.average[name].lerp_(parameter, 1 - DECAY)
                    else:
                        self.average[name] = parameter.detach().clone()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.optimizers:
            each.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        groups = [{**group, "params": []} for group in self.param_groups]
        each = [its.state_dict() for its in self.optimizers]
        return {"param_groups": groups, "average": self.average, "each": each}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for each, its in zip(self.optimizers, state["each"], strict=True):
            each.load_state_dict(its)
        self.average = state["average"]

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        was = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        with torch.no_grad():
            for name, value in self.average.items():
                of(self.model, name).copy_(value)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in was.items():
                    of(self.model, name).copy_(value)


class FeatureWalk(Walk):
    """`optimizer` is one of several optimizers, or has an average; `its` has plain ones side by side."""

    optimizers = MAKES

    def __init__(self, chance: random.Random, world_size: int, device: torch.device = CPU) -> None:
        self.has_average = chance.random() < 0.5
        super().__init__(chance, world_size, device)

    def draw_options(self) -> dict[str, Any]:
        options = super().draw_options()
        if self.chance.random() < 0.3:
            options["deferred_update"] = True
        return options

    @staticmethod
    def _groups(model: nn.Module) -> Any:
        return model  # of which each of the optimizers takes its part

    def finish(self, model: Any, optimizer: Any) -> Any:
        if self.name in ("8bit", "bf16"):
            self.has_average = False
        if isinstance(model, ShardedModel):
            its = optimizer if len(optimizer) > 1 else optimizer[0]
            return ShardedOptimizer(model, its, ema=DECAY if self.has_average else None)
        return Together(model, optimizer, self.has_average)

    def compare(self) -> None:
        super().compare()
        if self.has_average and self.its.average and self.chance.random() < 0.4:
            with self.optimizer.ema.weights():
                for name, ours in self.model.named_parameters():
                    assert_same(ours.detach().clone(), self.its.average[name], f"average of {name}")
