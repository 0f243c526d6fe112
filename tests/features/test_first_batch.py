"""The first step of a model of tokens leaves the room that its batch may take, before anything has been measured."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemini import EmulatedDevice, ShardedModel, ShardedOptimizer, estimate_memory, state_hash
from gemini.model.workload import most_activations
from tests.harness.on_ranks import gathered, on_ranks
from tests.harness.told import told
from tests.zoo.mlp import adam, build

WIDTH, BLOCKS, VOCAB, LENGTH = 64, 4, 256, 32
OPTIONS: dict[str, Any] = {"chunk_size": 4 * WIDTH * WIDTH}


class Block(nn.Module):
    gradient_checkpointing = False  # as modules of transformers say it

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.gradient_checkpointing:
            checkpointed: Tensor = torch.utils.checkpoint.checkpoint(self.change, x, use_reentrant=False)
            return x + checkpointed
        return x + self.change(x)

    def change(self, x: Tensor) -> Tensor:
        changed: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return changed


class Lm(nn.Module):
    """A model of tokens that returns its loss."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1, 1).flatten())


class Checkpointed(Lm):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.gradient_checkpointing = True


class Tied(Lm):
    def __init__(self) -> None:
        super().__init__(tied=True)


class Frozen(Lm):
    """All but the last block and the head."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self.embed, *self.blocks[:-1]):
            module.requires_grad_(False)


class Training:
    def __init__(self, device: EmulatedDevice, make: type[Lm] = Lm, **options: Any) -> None:
        self.device = device
        self.model = ShardedModel(build(make), device=device, **{**OPTIONS, **options})
        self.optimizer = ShardedOptimizer(self.model, adam(self.model.parameters()))
        self.losses: list[float] = []
        self.plans = [self.model.plan]

    def step(self, rank: int, rows: int, autocasts: bool = False) -> None:
        generator = torch.Generator().manual_seed(100 * len(self.losses) + rank)
        ids = torch.randint(0, VOCAB, (rows, LENGTH), generator=generator)
        with self.device.holding_activations():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
                loss = self.model(ids)
            loss.backward()
            self.plans.append(self.model.plan)
            self.optimizer.step()
        self.losses.append(float(loss.detach()))

    @property
    def peak(self) -> int:
        """The most bytes of activations that this rank's steps have taken."""
        peak = self.model.chunk_manager.trace.peak
        assert peak is not None
        return peak[1]

    def found(self) -> tuple[list[float], int]:
        found = self.losses, state_hash(self.model, self.optimizer)
        self.model.close()
        return found


def run(device: EmulatedDevice, rank: int, rows: int, steps: int, **options: Any) -> Training:
    training = Training(device, **options)
    for _ in range(steps):
        training.step(rank, rows)
    return training


def whole_bytes(world_size: int, make: type[Lm] = Lm) -> int:
    """Of model data, if all of it is on the device."""
    return estimate_memory(build(make), world_size=world_size, device="emulated", **OPTIONS).device_bytes


@on_ranks(1, 2)
def test_a_first_batch_that_would_not_fit_is_trained_on_less_model_data(rank: int, world_size: int) -> None:
    """Of one rank alone. Once the step has shown what it takes, model data grows again. Bits are those of no bound."""
    rows = 8 if rank == world_size - 1 else 1
    free = run(EmulatedDevice(), rank, rows, 4)
    most = max(gathered(free.peak))
    total = whole_bytes(world_size) + 4 * most // 5
    with told() as lines:
        bounded = run(EmulatedDevice(total), rank, rows, 4)
    wrapped, first, second, third, _ = bounded.plans
    assert wrapped.device_bytes == whole_bytes(world_size), "the first batch would have run out of memory"
    assert first.device_bytes + most <= total
    assert second.device_bytes > first.device_bytes, "measured, it takes less than the bound"
    assert third is second
    assert second.device_bytes + most <= total
    assert len(set(gathered(tuple(plan.hash for plan in bounded.plans)))) == 1
    assert bounded.found() == free.found()
    lines = [line for line in lines if "by an estimate from the sizes of the weights" in line]
    assert len(lines) == (rank == 0), lines
    assert all("this batch takes up to " in line and "states moved to the host, 0 onto" in line for line in lines)


@on_ranks(1, 2)
def test_ranks_compare_their_batches_once(rank: int, world_size: int) -> None:
    training = Training(EmulatedDevice(10**9), device_memory=10**9)
    communicator: Any = training.model.chunk_manager.communicator
    reduce, asked = communicator.all_reduce_max_, []

    def counted(words: Tensor, what: str) -> None:
        asked.append(what)
        reduce(words, what)

    communicator.all_reduce_max_ = counted
    for rows in (1, 2, 1):
        training.step(rank, rows)
    assert asked.count("activations of the first batch") == 1
    assert len(set(map(id, training.plans))) == 1, "there is room for all"
    training.model.close()


@pytest.mark.parametrize("make", [Lm, Checkpointed])
def test_a_bound_below_what_is_left_changes_nothing(make: type[Lm]) -> None:
    """Checkpointing is seen: without that, a model which checkpoints would leave room for what it never keeps."""
    peak = run(EmulatedDevice(), 0, 8, 1, make=make).peak
    total = int(2 * peak / 0.3)
    training = run(EmulatedDevice(total), 0, 8, 1, make=make)
    assert training.plans[0] is training.plans[1]


def test_nothing_is_refused_for_a_bound() -> None:
    """Of a batch that may need all of the device, nothing but the least stays there; of a full host nothing leaves."""
    total = whole_bytes(1) + run(EmulatedDevice(), 0, 8, 1).peak + 20_000
    training = run(EmulatedDevice(total), 0, 8, 1, host_memory=1000)
    assert training.plans[0] is training.plans[1]
    tight = Training(EmulatedDevice(total))
    ids = torch.zeros(10**4, LENGTH, dtype=torch.int64)
    with tight.device.holding_activations(), pytest.raises(torch.OutOfMemoryError):
        tight.model(ids)
    assert tight.model.plan.device_bytes == tight.model.plan.packed_minimum_bytes


@pytest.mark.parametrize(
    "options", [{"model_data_memory": 10**7}, {"tensor_placement_policy": "cuda"}], ids=["fixed", "cuda"]
)
def test_what_the_user_fixed_stays(options: dict[str, Any]) -> None:
    device = EmulatedDevice(10**7)
    training = Training(device, **options)
    with device.holding_activations(), pytest.raises(torch.OutOfMemoryError):
        training.model(torch.zeros(10**4, LENGTH, dtype=torch.int64))
    assert training.model.plan is training.plans[0]


CASES: dict[str, tuple[type[Lm], dict[str, Any]]] = {
    "fp32": (Lm, {}),
    "bf16": (Lm, {"dtype": torch.bfloat16}),
    "autocast": (Lm, {"autocasts": True}),
    "checkpointed": (Checkpointed, {}),
    "checkpointed autocast": (Checkpointed, {"autocasts": True}),
    "tied": (Tied, {}),
    "frozen": (Frozen, {}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("case", CASES)
def test_a_bound_is_above_what_a_step_takes_and_not_far(case: str, rows: int) -> None:
    make, options = CASES[case]
    autocasts = options.get("autocasts", False)
    training = Training(EmulatedDevice(), make, **{key: its for key, its in options.items() if key != "autocasts"})
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        bound = most_activations(training.model.module, [torch.zeros(rows, LENGTH, dtype=torch.int64)])
    training.step(0, rows, autocasts)
    assert bound is not None
    assert training.peak <= bound < 3 * training.peak, (training.peak, bound)
    training.model.close()


class Composite:
    """The config of a model with two texts, which transformers asks to choose from."""

    def get_text_config(self) -> Any:
        raise ValueError("Multiple valid text configs were found")


def test_of_other_models_and_inputs_nobody_claims_to_know() -> None:
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    assert most_activations(build(Lm), ids) is not None
    assert most_activations(build(Lm), ids.float()) is None, "no ids"
    assert most_activations(build(Lm), ids[0]) is None, "labels, perhaps"
    assert most_activations(build(Lm).requires_grad_(False), ids) is None
    assert most_activations(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ids) is None, "nothing takes ids"
    nested = torch.nested.nested_tensor([ids[0], ids[1, :4]], layout=torch.jagged)
    assert most_activations(build(Lm), nested) is None
    composite = build(Lm)
    composite.config = Composite()
    assert most_activations(composite, ids) == most_activations(build(Lm), ids)
    convolved = nn.Sequential(nn.Embedding(8, 8), build(Lm), nn.Conv1d(8, 8, 3))
    assert most_activations(convolved, ids) is None, "a convolution has more outputs than inputs"


@on_ranks(1, 2)
def test_what_fits_once_activations_are_known_is_not_refused_before(rank: int, world_size: int) -> None:
    """The host has no room for what 70 % of the device leaves over, and a small batch needs little of the rest."""
    free = run(EmulatedDevice(), rank, 1, 3)
    total = int(whole_bytes(world_size) / 0.85)
    on_host = whole_bytes(world_size) // 10
    tight = run(EmulatedDevice(total), rank, 1, 3, host_memory=on_host, device_memory=total)
    fraction = tight.plans[0].activation_fraction
    assert fraction < 0.3
    assert tight.plans[0].budget.device == int(total * (1 - fraction))
    assert tight.plans[0].predicted.host_peak <= on_host
    assert tight.found() == free.found()
