"""What only a stand-in can show: what is counted, what is late, and a device that is full. See test_stand_in.py."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import gemini
from gemini import ShardedModel, ShardedOptimizer, state_hash
from gemini.memory.transfer import StreamTicket
from optim import HybridAdam
from tests.gpu.test_use import assert_same_weights, train, wrap
from tests.stand_in.device import DEVICE, set_capacity, take_counts
from tests.zoo.mlp import Mlp, adam, build


def test_tensors_of_host_and_device_do_not_mix() -> None:
    there = torch.ones(2, 2, device=DEVICE)
    assert float((there + torch.tensor(1.0)).sum()) == 8.0
    with pytest.raises(RuntimeError, match="same device"):
        there @ torch.ones(2, 2)


def test_a_wait_that_is_left_out_changes_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = []
    for _ in range(2):
        model = wrap("cpu")
        optimizer = ShardedOptimizer(model, adam(model.parameters()))
        train(model, optimizer)
        torch.accelerator.synchronize()
        hashes.append(state_hash(model, optimizer))
        monkeypatch.setattr(StreamTicket, "wait", lambda ticket: None)
    assert hashes[0] != hashes[1]
    take_counts()  # the copies that were too early


@pytest.mark.parametrize("make", [HybridAdam, torch.optim.AdamW])
def test_a_steady_step_waits_for_the_device_as_often_however_many_chunks_there_are(
    make: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
) -> None:
    waits = []
    for layers in (4, 8):
        model = ShardedModel(Mlp(layers), device=DEVICE, chunk_size=512)
        optimizer = ShardedOptimizer(model, make(model.parameters()), clip_grad_norm=0.05)
        train(model, optimizer)
        take_counts()
        train(model, optimizer, range(3, 4))
        waits.append(sum(number for what, number in take_counts().items() if what.startswith("wait")))
    assert waits[0] == waits[1]


def test_a_trace_has_each_copy_with_its_bytes_and_times(tmp_path: Path) -> None:
    model = wrap("cpu")
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    train(model, optimizer)
    with gemini.trace(model, tmp_path) as traced:
        train(model, optimizer, range(3, 6))
    assert optimizer.last_step is not None and traced.trace_file is not None
    last = traced.steps[-1]
    assert Counter(last.moved_bytes) == +Counter(optimizer.last_step.moved_bytes)
    assert last.exposed_ms["update thread"] == optimizer.last_step.exposed_ms
    events = json.loads(traced.trace_file.read_text())["traceEvents"]
    copies = [each for each in events if each.get("cat", "").startswith("link ")]
    assert {each["cat"] for each in copies} >= {"link host->device", "link device->host"}
    assert all(each["dur"] >= 0 for each in copies)


def test_a_full_device_leaves_the_states_of_an_optimizer_on_the_host() -> None:
    model, plain = wrap("fits"), build().to(DEVICE)
    set_capacity(torch.accelerator.memory_allocated(DEVICE) + 2 * 4096)
    try:
        optimizer = ShardedOptimizer(model, adam(model.parameters()))
    finally:
        set_capacity(2**40)
    train(model, optimizer)
    train(plain, adam(plain.parameters()))
    assert_same_weights(model, plain)
