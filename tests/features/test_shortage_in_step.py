"""The device runs out of memory inside `optimizer.step()`: wherever that is, no rank has changed anything.

On an emulated device that counts the storages which a step makes, and refuses one of them.
"""

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch

from gemini import (
    Demand,
    EmulatedDevice,
    GeminiError,
    Kind,
    Placement,
    RemoteRankError,
    ShardedModel,
    ShardedOptimizer,
    Tier,
    slots_for,
    state_hash,
)
from gemini.engine.trainer import Trainer
from gemini.optimizer.update import ChunkUpdates
from tests.features.test_shortage_in_trainer import batches, engine_on
from tests.harness.on_ranks import gathered, on_ranks
from tests.harness.told import told
from tests.zoo.mlp import CHUNK_NUMEL, adam, build, loss_of

TOTAL = 90_000


@dataclass(frozen=True)
class HalfOnHost:
    """These states of every second chunk rest on the host; all others, and all moments, on the device."""

    kinds: tuple[Kind, ...]
    name: str = "half_on_host"

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        homes: tuple[dict[Kind, Tier], ...] = tuple(
            {kind: Tier.HOST if chunk % 2 and kind in self.kinds else Tier.DEVICE for kind in its.home_bytes}
            for chunk, its in enumerate(demand.chunks)
        )
        return replace(slots_for(demand, homes), homes=homes)


class Refusing(EmulatedDevice):
    """Refuses one storage that is made, counted from when it is told to."""

    def __init__(self) -> None:
        super().__init__(TOTAL)
        self.due: int | None = None
        self.num_made = 0

    def _refuse(self, num_bytes: int) -> None:
        self.num_made += 1
        if self.num_made == self.due:
            self.due = None
            self._num_ooms += 1
            raise torch.OutOfMemoryError("emulated device out of memory in a step")
        super()._refuse(num_bytes)

    def count(self, due: int | None) -> None:
        """From now on; the storage number `due` is refused."""
        self.num_made, self.due = 0, due


PLACES: dict[str, Any] = {
    "gradients": HalfOnHost((Kind.GRAD,)),
    "parameters": HalfOnHost((Kind.PARAM,)),
    "both": HalfOnHost((Kind.GRAD, Kind.PARAM)),
}
HOW: list[tuple[str, torch.dtype | None, int]] = [
    ("gradients", None, 1),
    ("parameters", None, 1),
    ("both", torch.bfloat16, 2),  # fp32 sums, which are larger than any slot
]


class Training:
    def __init__(self, rank: int, place: str, dtype: torch.dtype | None, micro_batches: int, stage: int) -> None:
        self.device = Refusing()
        where = {"device": self.device, "chunk_size": CHUNK_NUMEL, "tensor_placement_policy": PLACES[place]}
        self.model = ShardedModel(build(), stage=stage, dtype=dtype, model_data_memory=2 * TOTAL // 3, **where)
        self.optimizer = ShardedOptimizer(self.model, adam(self.model.parameters()), clip_grad_norm=0.1)
        self.rank, self.dtype, self.micro_batches = rank, dtype, micro_batches
        self.made: list[int] = []  # storages of each step

    def backward(self, step: int) -> None:
        for micro in range(self.micro_batches):
            self.optimizer.backward(loss_of(self.model, 10 * step + 2 * micro + self.rank, self.dtype))

    def step(self, due: int | None = None) -> None:
        with self.device.holding_activations():
            self.device.count(due)
            self.optimizer.step()
        self.made.append(self.device.num_made)

    def train(self, steps: int) -> None:
        for step in range(steps):
            self.backward(step)
            self.step()

    def hash(self) -> int:
        return state_hash(self.model, self.optimizer)


@pytest.mark.sampled(2)
@on_ranks(1, 2, timeout_s=180)
@pytest.mark.filterwarnings("ignore:a forward, backward or step ended with an exception")
@pytest.mark.parametrize("how", HOW, ids=str)
def test_wherever_a_step_finds_no_memory_nothing_has_changed(
    rank: int, world_size: int, how: tuple[str, torch.dtype | None, int]
) -> None:
    """The last rank alone runs out of memory. One rank tries each storage of a step, two ranks the first and last."""
    stage = 3 if world_size == 1 or how[0] == "gradients" else 2
    calm = Training(rank, *how, stage)
    calm.train(3)
    most = gathered(calm.made[-1])[-1]
    tries = range(1, most + 1) if world_size == 1 else (1, most - 1, most)
    training = Training(rank, *how, stage)
    training.train(2)
    before, is_short = training.hash(), rank == world_size - 1
    for due in tries:
        training.backward(2)
        with pytest.raises(torch.OutOfMemoryError if is_short else RemoteRankError, match="out of memory in a step"):
            training.step(due if is_short else None)
        training.optimizer.zero_grad()
        assert training.hash() == before, f"storage {due} of {most}"
    training.backward(2)
    training.step()
    assert training.hash() == calm.hash()


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("how", HOW[:2], ids=str)
def test_staged_pieces_lie_in_memory_that_the_plan_has(
    rank: int, world_size: int, how: tuple[str, torch.dtype | None, int]
) -> None:
    """A step makes as many storages as one of which all lies on the device."""
    training = Training(rank, *how, 3)
    with mock.patch.dict(PLACES, {how[0]: "cuda"}):
        resident = Training(rank, *how, 3)
    for each in (training, resident):
        each.train(3)
    assert training.made == resident.made
    assert training.hash() == resident.hash()


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.filterwarnings("ignore:a (forward|backward).* ended with an exception")
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_trainer_repeats_a_step_without_memory_with_the_same_bits(
    rank: int, world_size: int, micro_batches: int
) -> None:
    """Two updates of the last rank find no memory, at their start and at their end."""
    found, plans = [], []
    for due_by_step in ({}, {1: 1, 2: -1}):
        device = Refusing()
        engine = engine_on(device, gradient_accumulation_steps=micro_batches)
        made: list[int] = []

        def begin(
            optimizer: Any, *_: Any, device: Any = device, due_by_step: Any = due_by_step, made: Any = made
        ) -> None:
            made.append(device.num_made)
            due = due_by_step.pop(len(made) - 1, None) if rank == world_size - 1 else None
            device.count(due if due is None or due > 0 else most)

        def end(optimizer: Any, *_: Any, device: Any = device, made: Any = made) -> None:
            made[-1] = device.num_made

        engine.optimizer.register_step_pre_hook(begin)
        engine.optimizer.register_step_post_hook(end)
        with told() as lines, device.holding_activations():
            Trainer(engine).fit(batches(rank, 1), 1)
        most = made[-1]
        plans.append(engine.model.plan)
        found.append((state_hash(engine.model, engine.optimizer), engine.global_steps, engine.micro_steps))
        engine.close()
    assert found[0] == found[1]
    again = [line for line in lines if "which is made once more" in line]
    assert len(again) == (2 if rank == 0 else 0), lines
    assert plans[1].device_bytes < plans[0].device_bytes
    assert len(set(gathered(plans[1].hash))) == 1


@on_ranks(1, 2)
@pytest.mark.filterwarnings("ignore:a (forward|backward).* ended with an exception")
def test_an_update_that_fails_half_way_is_not_repeated(rank: int, world_size: int) -> None:
    engine = engine_on(EmulatedDevice(TOTAL))
    prepare = ChunkUpdates._prepare

    def fails(self: Any, begun: Any, *rest: Any) -> bool:
        if begun.state.chunk.index == 3:
            raise torch.OutOfMemoryError("no room for a kernel's own temporaries")
        return prepare(self, begun, *rest)

    with (
        told() as lines,
        mock.patch.object(ChunkUpdates, "_prepare", fails if rank == world_size - 1 else prepare),
        pytest.raises(GeminiError, match="no room for a kernel"),
    ):
        Trainer(engine).fit(batches(rank, 1), 1)
    assert not [line for line in lines if "once more" in line]
    with pytest.raises(GeminiError, match="failed half way"):
        engine.model.state_dict()
