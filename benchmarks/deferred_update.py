"""How much of the host's update forward and backward hide, on a device whose kernels take a given time.

    python -m benchmarks.deferred_update                     # about a minute
    python -m benchmarks.deferred_update --kernel-ms 5       # per layer: forward as long, backward twice as long

A stack of linear layers trains on the emulated device with its weights and states on the host. Each layer sleeps in
place of a kernel, so the processor is as idle as beside a GPU. The same training updates at once, beside the next
forward, and from the backward on, in turns; the losses must have the same bits. A turn is two steps, of which the
second counts: its forward follows an update of its own training, and no update runs into another turn. Nothing here is
a GPU's time: what is measured is how the update and the waiting for it are arranged.
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
WAYS: dict[str, dict[str, bool]] = {
    "at once": {"deferred_update": False},
    "deferred": {"deferred_update": True},
    "in backward": {"deferred_update": True, "update_in_backward": True},
}


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
    """One model, updated in one of the ways."""

    def __init__(self, way: dict[str, bool], layers: int, width: int, seconds: float) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(*(Layer(width, seconds) for _ in range(layers)))
        self.model = ShardedModel(
            module, device="emulated", chunk_size=width * width, tensor_placement_policy="cpu", **way
        )
        optimizer = HybridAdam(self.model.parameters(), lr=1e-4)
        self.optimizer = ShardedOptimizer(self.model, optimizer)
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
    """Print the time of a step updated in each way, of the thread that updates, and what training waited for."""
    trainings = {name: Training(way, layers, width, kernel_ms / 1e3) for name, way in WAYS.items()}
    samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in trainings}
    for number in range(WARM_UP + rounds):
        order = list(trainings.items())
        for name, training in order if number % 2 else reversed(order):
            sample = training.turn()
            if number >= WARM_UP:
                samples[name].append(sample)
    losses = [training.losses for training in trainings.values()]
    assert losses.count(losses[0]) == len(losses), "the losses have other bits"
    table = Table(title=f"{layers} layers of {width}², {kernel_ms:g} ms each forward and {2 * kernel_ms:g} backward")
    columns = "update", "step ms (range of quartiles)", "of it without kernels", "/ at once", "thread ms", "waited ms"
    for column in columns:
        table.add_column(column)
    kernels = 3 * layers * kernel_ms
    once = [elapsed for elapsed, _, _ in samples["at once"]]
    for name, sample_of in samples.items():
        elapsed, busy, waited = ([each[part] for each in sample_of] for part in range(3))
        spread = Spread.of(elapsed)
        ratio = Spread.of([mine / theirs for mine, theirs in zip(elapsed, once, strict=True)])
        without = f"{spread.median - kernels:.1f}"
        table.add_row(
            name, spread.text(), without, ratio.text(digits=3), Spread.of(busy).text(), Spread.of(waited).text()
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
