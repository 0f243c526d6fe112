"""The smallest proof of the promise, in seconds: an MLP trained in half the memory of its state, bit for bit.

Run it as a script (`python tests/tiny.py`) from anywhere with the packages installed, or by pytest.
"""

import torch
from torch import Tensor, nn

from gemini import ShardedModel, ShardedOptimizer
from optim import HybridAdam

WIDTH = 128
LAYERS = 3
STEPS = 3
OPERATOR_NUMEL = WIDTH * WIDTH + 256  # weight and bias; every parameter starts on a multiple of 256 elements
STATE_BYTES = LAYERS * OPERATOR_NUMEL * 16  # fp32 parameter, gradient and two moments
BUDGET_BYTES = STATE_BYTES // 2


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
    return (model(x) - x.flip(-1)).square().mean()


def train_plain() -> tuple[list[float], dict[str, Tensor]]:
    model = build()
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def train_sharded() -> tuple[list[float], dict[str, Tensor]]:
    model = ShardedModel(build(), device="emulated", chunk_size=OPERATOR_NUMEL, model_data_memory=BUDGET_BYTES)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2))
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def test_tiny() -> None:
    plain_losses, plain_weights = train_plain()
    losses, weights = train_sharded()
    assert losses == plain_losses, f"losses differ: {losses} and, plain, {plain_losses}"
    assert weights.keys() == plain_weights.keys()
    for name, weight in plain_weights.items():
        assert torch.equal(weights[name], weight), f"{name} differs"


def main() -> None:
    test_tiny()
    print(
        f"tiny: ok, {LAYERS} layers, {STEPS} steps, same bits with {BUDGET_BYTES:,} of {STATE_BYTES:,} bytes "
        "of training state on the device"
    )


if __name__ == "__main__":
    main()
