"""Children that the data, or the step, chooses."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tests.zoo.awkward.embedded import Embedded, H


class ExpertLayer(nn.Module):
    """Top-1 routing over experts that are modules: each rank's batch wakes others of them."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(H, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(H, 2 * H), nn.GELU(), nn.Linear(2 * H, H)) for _ in range(num_experts)
        )

    def forward(self, h: Tensor) -> Tensor:
        weights, chosen = self.router(h).softmax(-1).max(-1)
        out = torch.zeros_like(h)
        for expert in chosen.unique().tolist():
            rows = (chosen == expert).nonzero()[:, 0]
            out = out.index_add(0, rows, self.experts[expert](h[rows]) * weights[rows, None])
        return h + out


class Experts(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ExpertLayer(16) for _ in range(2))

    def body(self, h: Tensor, step: int) -> Tensor:
        h = h[:, :3].reshape(-1, H)  # few tokens: some experts stay idle
        for layer in self.layers:
            h = layer(h)
        return h


class ScheduledExperts(Embedded):
    """The step, not the data, chooses the experts, so all ranks run the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(H, 2 * H), nn.GELU(), nn.Linear(2 * H, H)) for _ in range(8)
        )

    def chosen(self, step: int) -> Iterator[nn.Module]:
        yield from (self.experts[(step + offset) % len(self.experts)] for offset in (0, 3, 4))

    def body(self, h: Tensor, step: int) -> Tensor:
        for expert in self.chosen(step):
            h = h + expert(h)
        return h
