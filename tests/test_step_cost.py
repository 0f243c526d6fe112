"""What a step costs beside its arithmetic does not grow with the number of chunks that need nothing brought to them."""

from typing import Any

import pytest
import torch

from gemini import ShardedModel, ShardedOptimizer, state_hash
from gemini.memory import transfer
from gemini.memory.transfer import Region, Transfer
from gemini.optimizer import elementwise, update
from gemini.optimizer.elementwise import AdamUpdate
from gemini.placement.demand import Tier
from optim import update_pieces
from tests.harness.streams import CountingLane
from tests.zoo import mlp

DTYPES = [None, torch.bfloat16, torch.float16]


class Counts:
    """Launches and waits of a model's steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lane: CountingLane) -> None:
        self.pieces: list[int] = []
        self._lane, self._waits_before = lane, lane.num_waits
        monkeypatch.setattr(elementwise, "update_pieces", self._update)

    @property
    def waits(self) -> int:
        return self._lane.num_waits - self._waits_before

    def _update(self, pieces: list[Any], scalars: Any) -> None:
        if any(piece.weight.numel() for piece in pieces):  # else only the scalars are checked
            self.pieces.append(len(pieces))
        update_pieces(pieces, scalars)


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> CountingLane:
    """That of the models which are built from now on."""
    lane = CountingLane()
    monkeypatch.setattr(transfer, "lane_of", lambda device: lane)
    return lane


def built(layers: int, dtype: torch.dtype | None, policy: str) -> tuple[ShardedModel, ShardedOptimizer]:
    model = ShardedModel(
        mlp.build(lambda: mlp.Mlp(layers)),
        device="emulated",
        tensor_placement_policy=policy,
        chunk_size=mlp.CHUNK_NUMEL,
        dtype=dtype,
    )
    return model, ShardedOptimizer(model, mlp.adam(model.parameters()), clip_grad_norm=0.1, initial_scale=8.0)


@pytest.mark.parametrize("layers", [3, 12])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("policy", ["cuda", "cpu"])
def test_chunks_that_lie_on_one_tier_are_one_launch(
    policy: str, dtype: torch.dtype | None, layers: int, monkeypatch: pytest.MonkeyPatch, lane: CountingLane
) -> None:
    model, optimizer = built(layers, dtype, policy)
    for step in range(2):
        optimizer.backward(mlp.loss_of(model, step, dtype))
        counts = Counts(monkeypatch, lane)
        optimizer.step()
        assert counts.pieces == [layers]
        wanted = 1 if policy == "cpu" else 0
        assert counts.waits == wanted, "for gradients that may be on their way to the host, all of them together"


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("policy", ["cuda", "cpu"])
def test_torch_optimizers_wait_once_too(
    policy: str, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch, lane: CountingLane
) -> None:
    wrap: dict[str, Any] = {"tensor_placement_policy": policy, "chunk_size": mlp.CHUNK_NUMEL, "dtype": dtype}
    model = ShardedModel(mlp.build(), device="emulated", **wrap)
    optimizer = ShardedOptimizer(model, torch.optim.AdamW(model.parameters()))
    for step in range(2):
        mlp.loss_of(model, step, dtype).backward()
        counts = Counts(monkeypatch, lane)
        optimizer.step()
        assert counts.waits == (1 if policy == "cpu" else 0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", mlp.PLACES)
def test_batches_change_no_bit(place: str, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = set()
    for numel in (1, 3 * mlp.CHUNK_NUMEL, update.BATCH_NUMEL):
        monkeypatch.setattr(update, "BATCH_NUMEL", numel)
        model = mlp.wrap(place, dtype=dtype)
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()), initial_scale=8.0)
        for step in range(3):
            optimizer.backward(mlp.loss_of(model, step, dtype))
            optimizer.step()
        hashes.add(state_hash(model, optimizer))
    assert len(hashes) == 1


def test_the_next_chunk_is_on_its_way_while_the_host_updates_one(
    monkeypatch: pytest.MonkeyPatch, lane: CountingLane
) -> None:
    """Weights on the device, states on the host: the link and the processor do not take turns."""
    layers = 4
    model = ShardedModel(
        mlp.build(lambda: mlp.Mlp(layers)),
        device="emulated",
        tensor_placement_policy="static",
        offload_optim_frac=1.0,
        chunk_size=mlp.CHUNK_NUMEL,
    )
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
    optimizer.backward(mlp.loss_of(model, 0, None))
    seen: list[str] = []
    copy, change = Transfer.copy, AdamUpdate.update

    def noted_copy(transfer_: Transfer, to: Region, source: Region) -> Any:
        if (source.tier, to.tier) == (Tier.DEVICE, Tier.HOST):
            seen.append("copy")
        return copy(transfer_, to, source)

    def noted_update(rule: AdamUpdate, runs: Any, *rest: Any) -> None:
        if any(each.run.numel for each in runs):
            seen.append("update")
        change(rule, runs, *rest)

    monkeypatch.setattr(Transfer, "copy", noted_copy)
    monkeypatch.setattr(AdamUpdate, "update", noted_update)
    optimizer.step()
    assert seen == ["copy", *["copy", "update"] * (layers - 1), "update"]


def test_chunks_that_the_host_updates_in_turns_do_not_share_a_buffer() -> None:
    """Weights and gradients cross the link to the update: it has the bits of one where they rest."""
    hashes = []
    for options in (
        {"tensor_placement_policy": "static", "offload_optim_frac": 1.0},
        {"tensor_placement_policy": "cuda"},
    ):
        model = ShardedModel(
            mlp.build(lambda: mlp.Mlp(4)),
            device="emulated",
            chunk_size=mlp.CHUNK_NUMEL,
            **options,  # type: ignore[arg-type]
        )
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        for step in range(3):
            mlp.train_step(model, optimizer, step)
        hashes.append(state_hash(model, optimizer))
    assert hashes[0] == hashes[1]
