"""How much of the host's update the next forward hides, on a device whose kernels take a given time.

    python -m benchmarks.deferred_update                     # about a minute
    python -m benchmarks.deferred_update --kernel-ms 5       # per layer: forward as long, backward twice as long

A stack of linear layers trains on the emulated device with its weights and states on the host. Each layer sleeps in
place of a kernel, so the processor is as idle as beside a GPU. The same training updates at once and beside the next
forward, in turns; the losses must have the same bits. A turn is two steps, of which the second counts: its forward
follows an update of its own training, and no update runs into another turn. Nothing here is a GPU's time: what is
measured is how the update and the waiting for it are arranged.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.rounds import Spread
from gemini import ShardedModel, ShardedOptimizer
from optim import HybridAdam

WARM_UP = 2


class Kernel(torch.autograd.Function):
    """The identity, which takes as long as a device would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class Layer(nn.Module):
    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width, bias=False), seconds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Kernel.apply(x, self.seconds)  # type: ignore[no-untyped-call]
        y = y + self.linear(y)
        return y


class Training:
    """One model, with its update at once or deferred."""

    def __init__(self, deferred: bool, layers: int, width: int, seconds: float) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(*(Layer(width, seconds) for _ in range(layers)))
        self.model = ShardedModel(
            module,
            device="emulated",
            chunk_size=width * width,
            tensor_placement_policy="cpu",
            deferred_update=deferred,
        )
        optimizer = HybridAdam(self.model.parameters(), lr=1e-4)
        self.optimizer = ShardedOptimizer(self.model, optimizer, clip_grad_norm=1.0)
        self.x = torch.randn(4, width)
        self.losses: list[float] = []

    def turn(self) -> tuple[float, float, float]:
        """Milliseconds of the second of two steps, of the update before it, and that it waited for this update."""
        self.step()
        elapsed, report = self.step(), self.optimizer.last_step
        assert report is not None
        self.model.chunk_manager.memory.work.join()
        return elapsed, report.update_ms, report.exposed_ms

    def step(self) -> float:
        """Milliseconds of one step."""
        start = time.perf_counter()
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        return (time.perf_counter() - start) * 1e3


def main(
    layers: Annotated[int, typer.Option(help="Layers, each a chunk.")] = 12,
    width: Annotated[int, typer.Option(help="Width of a layer, which has its square in weights.")] = 2048,
    kernel_ms: Annotated[float, typer.Option(help="Time of a layer's forward.")] = 4.0,
    rounds: Annotated[int, typer.Option(help="Turns of each training that count.")] = 15,
) -> None:
    """Print the time of a step with the update at once and deferred, and what training waited for."""
    trainings = {name: Training(name == "deferred", layers, width, kernel_ms / 1e3) for name in ("at once", "deferred")}
    times: dict[str, list[float]] = {name: [] for name in trainings}
    busy: list[float] = []
    exposed: list[float] = []
    for number in range(WARM_UP + rounds):
        order = list(trainings.items())
        for name, training in order if number % 2 else reversed(order):
            elapsed, update_ms, exposed_ms = training.turn()
            if number >= WARM_UP:
                times[name].append(elapsed)
                if name == "deferred":
                    busy.append(update_ms)
                    exposed.append(exposed_ms)
    losses = [training.losses for training in trainings.values()]
    assert losses[0] == losses[1], "the losses have other bits"
    table = Table(title=f"{layers} layers of {width}², {kernel_ms:g} ms each forward and {2 * kernel_ms:g} backward")
    for column in ("update", "step ms (range of quartiles)", "of it without kernels"):
        table.add_column(column)
    kernels = 3 * layers * kernel_ms
    for name, sample in times.items():
        spread = Spread.of(sample)
        table.add_row(name, spread.text(), f"{spread.median - kernels:.1f}")
    console = Console()
    console.print(table)
    ratio = Spread.of([late / once for late, once in zip(times["deferred"], times["at once"], strict=True)])
    console.print(f"deferred / at once: {ratio.text(digits=3)}")
    console.print(
        f"the thread's update: {Spread.of(busy).text()} ms, training waited for {Spread.of(exposed).text()} ms"
    )


if __name__ == "__main__":
    typer.run(main)
