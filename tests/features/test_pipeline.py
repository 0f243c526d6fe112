"""torch's pipeline schedules around stages that are sharded models: 2-D and 3-D, with one norm over all stages."""

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gemini import ShardedModel, ShardedOptimizer, load_checkpoint, save_checkpoint, state_hash
from optim import clip_coefficient
from tests.harness.meshes import kept_mesh
from tests.harness.on_ranks import in_soak, on_ranks, on_ranks_with
from tests.zoo import divided
from tests.zoo.divided import CLOSE

ROOT = Path(__file__).resolve().parents[2]
MICRO_BATCHES, CLIP = 4, 0.5
NAMES = ("pp", "dp", "tp")


class SomeLayers(nn.Module):
    """The first block with the embedding, or the others with the head; all of them if there is one stage."""

    def __init__(self, place: int, of: int) -> None:
        super().__init__()
        net = divided.build()
        self.embed = net.embed if place == 0 else None
        blocks = range(3) if of == 1 else range(1) if place == 0 else range(1, 3)
        self.blocks = nn.ModuleDict({str(number): net.blocks[number] for number in blocks})
        self.head = net.head if place == of - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def divide(part: SomeLayers, mesh: Any) -> nn.Module:
    plan: dict[str, Any] = {}
    for number in part.blocks:
        plan |= {f"blocks.{number}.up": ColwiseParallel(), f"blocks.{number}.down": RowwiseParallel()}
    if part.embed is not None:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate())
    if part.head is not None:
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(part, mesh, plan)


def loss_of(logits: Tensor, wanted: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def words_of(step: int, data_rank: int) -> Tensor:
    return torch.cat([divided.batch(10 * step + micro, data_rank) for micro in range(MICRO_BATCHES)])


def plain(data_ranks: int, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    model = SomeLayers(0, 1)
    optimizer, norms = divided.adam(model.parameters()), []
    for step in range(steps):
        for data_rank in range(data_ranks):
            for words in words_of(step, data_rank).chunk(MICRO_BATCHES):
                (loss_of(model(words), words.roll(-1, 1)) / data_ranks / MICRO_BATCHES).backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        for gradient in gradients:
            gradient.mul_(clip_coefficient(norms[-1], CLIP))
        optimizer.step()
        optimizer.zero_grad()
    return norms, dict(model.state_dict())


def train(rank: int, shape: tuple[int, int, int], schedule: Any, scales: bool, **wrap: Any) -> None:
    """Train stages, and compare norms and weights with plain training. scales: torch divides gradients itself."""
    mesh, steps = kept_mesh(*shape, names=NAMES), 2
    place, data_rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    part = SomeLayers(place, shape[0])
    module = divide(part, mesh["tp"]) if shape[2] > 1 else part
    options = {"chunk_size": 1024, "device": "emulated", **wrap}
    model = ShardedModel(module, device_mesh=mesh, **options)
    optimizer = ShardedOptimizer(model, divided.adam(model.parameters()), clip_grad_norm=CLIP)
    stage = PipelineStage(model, place, shape[0], torch.device("cpu"), group=mesh["pp"].get_group())
    factor = 1 if scales else MICRO_BATCHES
    pipeline = schedule(stage, MICRO_BATCHES, loss_fn=lambda *pair: loss_of(*pair) / factor, scale_grads=scales)
    norms, weights = plain(shape[1], steps)
    for step in range(steps):
        words = words_of(step, data_rank)
        inputs = (words,) if part.embed is not None else ()
        pipeline.step(*inputs, **({"target": words.roll(-1, 1)} if part.head is not None else {}))
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(float(optimizer.grad_norm), norms[step], rtol=1e-6, atol=0.0)  # type: ignore[arg-type]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, weights[name], **CLOSE)
    # Each stage has a checkpoint of its own, which the ranks of its data and its parts write together.
    folders: list[Any] = [mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders, 0)
    folder, before = Path(folders[0]) / f"stage {place}", state_hash(model, optimizer)
    save_checkpoint(folder, model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_checkpoint(folder, model, optimizer)
    assert state_hash(model, optimizer) == before
    model.close()


@on_ranks(4, timeout_s=120)
@pytest.mark.parametrize("scales", [False, *in_soak(True)])
@pytest.mark.parametrize("schedule", [Schedule1F1B, *in_soak(ScheduleGPipe)])
def test_two_stages_of_two_shards_equal_plain(rank: int, world_size: int, schedule: Any, scales: bool) -> None:
    train(rank, (2, 2, 1), schedule, scales, tensor_placement_policy="cpu")


@on_ranks_with("shape", {}, soak={4: [(2, 1, 2)], 8: [(2, 2, 2)]}, timeout_s=240)
def test_stages_of_parts_of_shards_equal_plain(rank: int, world_size: int, shape: tuple[int, int, int]) -> None:
    for place in ({"tensor_placement_policy": "cpu"}, {"stage": 2}, {"model_data_memory": "96KB"}):
        train(rank, shape, Schedule1F1B, False, **place)


@pytest.mark.soak
def test_the_example_has_the_losses_of_one_stage(tmp_path: Path) -> None:
    def losses(ranks: int, *flags: str) -> list[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += [str(ROOT / "examples" / "pipeline.py"), "--steps", "3", *flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return re.findall(r"step \d+: loss (\d+\.\d{4})", done.stdout)

    one = losses(2, "--stages", "1")
    assert len(one) == 3
    assert losses(4) == losses(8, "--parts", "2", "--policy", "cpu") == one
