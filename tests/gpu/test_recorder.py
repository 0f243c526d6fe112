"""The first step on a GPU is recorded by itself: the bytes beside the model data at each event."""

import gc

import torch
from torch import nn

from gemini import HybridAdam, ShardedModel, ShardedOptimizer
from gemini.placement.next_use import Phase

MIB = 2**20
WIDTH = 1024


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


def test_the_first_step_is_recorded(cuda: torch.device) -> None:
    plain, x = Blocks().to(cuda), torch.ones(8192, WIDTH, device=cuda)
    plain(x).mean().backward()  # cuBLAS takes its workspace, and keeps it
    del plain, x
    gc.collect()
    before = torch.cuda.memory_allocated(cuda)
    model = ShardedModel(Blocks(), device=cuda, tensor_placement_policy="cpu", chunk_size=WIDTH * WIDTH)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters()))
    activation, peaks = 4096 * WIDTH * 4, []
    for rows in (4096, 4096, 8192):
        x = torch.ones(rows, WIDTH, device=cuda)
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(model.chunk_manager.trace.peak)
    trace = model.chunk_manager.trace
    assert peaks[0] is not None and peaks[2] is not None
    first, large = peaks[0][1] - before, peaks[2][1] - before
    assert 8 * activation < first < 24 * activation, "what each layer keeps for its backward"
    assert peaks[1] == peaks[0]
    assert large > 1.7 * first
    assert {event.phase for event in trace.non_model_bytes} >= {Phase.FORWARD, Phase.BACKWARD}
    live = model.chunk_manager.live
    assert live.words(0, 1)[1] > 8 * activation, "the peak of the step is not lost"
    model.close()
