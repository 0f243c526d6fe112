"""Random walks over an `Engine` beside a plain loop: windows of micro-batches, clipping, schedules, files, failures.

All ranks have the same batches, as in `walks.py`. The plain loop has the exact norm of `optim.clip_grad_norm_`.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import gemini
import optim
from tests.harness.devices import CPU, emulated
from tests.zoo.drawn import Operations
from tests.zoo.walks import Net, assert_same, build

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "hybrid": lambda parameters: optim.HybridAdam(parameters, lr=1e-2, weight_decay=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


def schedule_of(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


class Stopped(Exception):
    """What a hook of the walk raises."""


class PlainEngine:
    """What an `Engine` does, by hand."""

    def __init__(
        self, model: Net, make: Callable[[Any], torch.optim.Optimizer], window: int, clip: float | None
    ) -> None:
        self.model = model
        self.optimizer = make(self.model.parameters())
        self.window, self.clip, self.in_window = window, clip, 0
        self.global_steps = self.micro_steps = self.window_begins = 0
        self.schedule: LambdaLR | None = None
        self.norm: float | None = None

    def backward(self, loss: Tensor) -> None:
        if not self.in_window:
            self.window_begins = self.micro_steps
        (loss / self.window if self.window > 1 else loss).backward()
        self.in_window += 1
        self.micro_steps += 1

    def step(self, last: bool, moves: bool) -> None:
        if self.in_window >= self.window or (last and self.in_window):
            given = [each for each in self.model.parameters() if each.grad is not None]
            self.norm = float(optim.clip_grad_norm_(given, float("inf") if self.clip is None else self.clip))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.in_window, self.window_begins = 0, self.micro_steps
            self.global_steps += 1
            if self.schedule is not None and moves:
                self.schedule.step()

    def drop(self) -> None:
        self.optimizer.zero_grad()
        self.in_window = 0


class EngineWalk:
    """An engine and the plain loop, and what has been done to them."""

    optimizers = OPTIMIZERS

    def __init__(self, chance: random.Random, world_size: int, device: torch.device = CPU) -> None:
        self.chance, self.world_size, self.device = chance, world_size, device
        self.name = chance.choice(list(self.optimizers))
        self.window, self.clip = chance.choice([1, 1, 2, 3]), chance.choice([None, 0.05, 1.0])
        self.scheduled = chance.choice(["no", "engine", "script"])
        self.engine = self.make()
        self.plain = PlainEngine(build().to(device), self.optimizers[self.name], self.window, self.clip)
        if self.scheduled != "no":
            self.plain.schedule = schedule_of(self.plain.optimizer)
        self.saved: tuple[Any, ...] | None = None
        self.steps_before = self.micro_before = 0  # of engines that came before
        self.has_gradients = self.has_update = False  # since a script moved the schedule
        self.left_unsynced = False  # all micro-batches of the window were under no_sync()
        self.done: list[str] = []

    def make(self) -> Any:
        """An engine with other places and the same arithmetic."""
        chance = self.chance
        self.options: dict[str, Any] = {
            "device": str(emulated(self.device)),
            "rank_timeout": 60.0,
            "stage": chance.choice([0, 1, 2, 3]),
            "tensor_placement_policy": chance.choice(["auto", "cpu", "cuda"]),
            "gradient_accumulation_steps": self.window,
        }
        size = chance.choice([None, 512, 2048])
        if size is not None:
            self.options["chunk_size"] = size
        if self.clip is not None:
            self.options["clip_grad_norm"] = self.clip
        model = build()
        if self.scheduled == "script":
            optimizer = self.optimizers[self.name](model.parameters())
            found = gemini.initialize(
                model, optimizer, lr_scheduler=schedule_of(optimizer), config=self.options, verbose=False
            )
        else:
            schedule = schedule_of if self.scheduled == "engine" else None
            found = gemini.initialize(
                model, self.optimizers[self.name], lr_scheduler=schedule, config=self.options, verbose=False
            )
        return found[0]

    def walk(self, length: int) -> None:
        for _ in range(length):
            operation.draw(self, self.chance, self.done)
            if self.chance.random() < 0.3:
                self.compare()
        self.compare()
        self.engine.close()

    def compare(self) -> None:
        engine, plain = self.engine, self.plain
        counts = (engine.global_steps + self.steps_before, engine.micro_steps + self.micro_before)
        assert counts == (plain.global_steps, plain.micro_steps)
        assert engine.is_window_open() == (plain.in_window > 0)
        assert engine.is_gradient_accumulation_boundary() == (plain.in_window >= plain.window)
        rates = [[group["lr"] for group in each.param_groups] for each in (engine.optimizer, plain.optimizer)]
        assert rates[0] == rates[1]
        pairs = zip(engine.module.named_parameters(), plain.model.named_parameters(), strict=True)
        for (name, ours), (_, its) in pairs:
            assert_same(ours.detach().clone(), its.detach(), name)
            assert_same(ours.grad, its.grad, f"gradient of {name}")
        for (name, buffer), (_, its_buffer) in zip(
            engine.module.named_buffers(), plain.model.named_buffers(), strict=True
        ):
            assert_same(buffer, its_buffer, name)

    def number(self) -> int:
        return self.chance.randrange(100)


operation = Operations[EngineWalk]()
