"""What a step promises by itself, on one rank at tight budgets: pins, stale graphs, edits, late traces."""

import pytest
import torch
from torch import nn

from gemini import ShardedModel, ShardedOptimizer, StaleGraphError, state_hash
from optim import HybridAdam

WIDTH = 32


class TwoWeights(nn.Module):
    """One autograd node (a bilinear product) that needs two weights of two chunks in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x @ _Product.apply(self.first, self.second)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, first, second):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(first, second)
        return first @ second

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        first, second = ctx.saved_tensors
        return grad @ second.t(), first.t() @ grad


def wrap(module: nn.Module, slots: int = 3, **options: object) -> tuple[ShardedModel, ShardedOptimizer]:
    torch.manual_seed(0)
    chunk = WIDTH * WIDTH + 256
    options.setdefault("model_data_memory", (slots + 2) * chunk * 4)
    options.setdefault("tensor_placement_policy", "cpu")
    model = ShardedModel(module, device="emulated", chunk_size=chunk, **options)
    return model, ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2))


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def test_a_node_pins_what_it_has_unpacked_until_the_next_node_asks() -> None:
    torch.manual_seed(1)
    model, _ = wrap(TwoWeights(), slots=4)
    pinned_at_fetch: list[int] = []
    node_fetch = model.chunk_manager.step.backward.node_fetch

    def watch(chunk, operator):  # type: ignore[no-untyped-def]
        payload = node_fetch(chunk, operator)
        pinned_at_fetch.append(sum(pins > 0 for pins in model.chunk_manager.params.rules.pins))
        return payload

    model.chunk_manager.step.backward.node_fetch = watch  # type: ignore[method-assign]
    model(torch.randn(2, WIDTH)).sum().backward()
    assert max(pinned_at_fetch) == 2, "the product's backward needs both weights at once"
    assert min(pinned_at_fetch) == 1, "every other node needs one"
    assert sum(model.chunk_manager.params.rules.pins) == 0, "nothing stays pinned"


def test_backward_through_a_graph_from_before_a_step_raises() -> None:
    model, optimizer = wrap(build())
    x = torch.randn(2, WIDTH)
    old = model(x).sum()
    model(x).sum().backward()
    optimizer.step()
    before = state_hash(model)
    with pytest.raises(StaleGraphError, match="before the last optimizer step"):
        old.backward()
    assert state_hash(model) == before


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("policy", ["cpu", "cuda"])
def test_edits_outside_a_step_reach_shard_and_master(policy: str, dtype: torch.dtype | None) -> None:
    """Every way of writing has the same effect as loading the edited weights."""
    edits = {
        "mul_": lambda p: p.mul_(0.5),
        "data": lambda p: p.data.mul_(0.5),
        "detach": lambda p: p.detach().mul_(0.5),
        "setitem": lambda p: p.__setitem__(slice(None), p.detach() * 0.5),
        "copy_": lambda p: p.copy_(p.detach().clone() * 0.5),
    }
    x = torch.randn(2, WIDTH)
    plain = build()
    reference = HybridAdam(plain.parameters(), lr=1e-2)
    for step in range(2):
        plain(x).sum().backward()
        reference.step()
        reference.zero_grad()
        if step == 0:
            with torch.no_grad():
                plain[0].weight.mul_(0.5)
    for name, edit in edits.items():
        options = {"model_data_memory": None} if policy == "cuda" else {}
        model, optimizer = wrap(build(), tensor_placement_policy=policy, dtype=dtype, **options)
        model(x.to(dtype)).sum().backward()
        optimizer.step()
        before = model.state_dict()["0.weight"]
        with torch.no_grad():
            edit(next(model.parameters()))
        for _ in model.modules():  # another chunk needs the slots: the edited one leaves
            model(x.to(dtype))
        assert torch.equal(model.state_dict()["0.weight"], before * 0.5), name
        if dtype is not None:
            assert torch.equal(optimizer.state_dict()["masters"][0], (before * 0.5).float()), name
        model(x.to(dtype)).sum().backward()
        optimizer.step()
        if dtype is None:
            assert torch.equal(model.state_dict()["0.weight"], plain[0].weight), f"{name}: the step started elsewhere"


def test_changing_control_flow_re_records_the_trace() -> None:
    """Layers skipped now and then: the same bits as plain PyTorch, with eviction by next use in between."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

        def forward(self, x: torch.Tensor, skip: int) -> torch.Tensor:
            for number, layer in enumerate(self.layers):
                if number != skip:
                    x = torch.tanh(layer(x))
            return x

    torch.manual_seed(1)
    plain = Skips()
    torch.manual_seed(1)
    model, optimizer = wrap(Skips())
    reference = HybridAdam(plain.parameters(), lr=1e-2)
    for step, skip in enumerate([9, 9, 3, 9, 5, 5, 9]):
        x = torch.randn(2 + step % 3, WIDTH)
        loss, wanted = model(x, skip).sum(), plain(x, skip).sum()
        assert torch.equal(loss, wanted)
        if step == 3:
            with torch.no_grad():
                model(x, 0)
        loss.backward()
        wanted.backward()
        optimizer.step()
        reference.step()
        reference.zero_grad()
    for name, weight in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    assert model.observer.counts["evict"] > 0


def test_eviction_by_next_use_fetches_less_than_recency() -> None:
    """A second pass over more layers than slots: recency would fetch every layer again, next use keeps some."""
    model, optimizer = wrap(build(), slots=4)
    counts = []
    for _ in range(4):
        before = model.observer.num_fetches
        model(torch.randn(2, WIDTH)).sum().backward()
        counts.append(model.observer.num_fetches - before)
        optimizer.step()
    assert counts[-1] <= 6 + (6 - 4), "all layers once, and again what four slots could not keep for backward"
