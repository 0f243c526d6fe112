"""Kills a process that saves in a loop, at random moments, and loads what is there: run by test_checkpoint_files.py."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import gemini


def make(seed: int) -> tuple[gemini.ShardedModel, gemini.ShardedOptimizer]:
    torch.manual_seed(seed)
    model = gemini.ShardedModel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), chunk_size=8192)
    return model, gemini.ShardedOptimizer(model, gemini.HybridAdam(model.parameters(), lr=1e-3))


def step(model: gemini.ShardedModel, optimizer: gemini.ShardedOptimizer) -> None:
    optimizer.backward(model(torch.ones(2, 64)).square().mean())
    optimizer.step()


def save_for_ever(folder: str, asynchronous: bool) -> None:
    model, optimizer = make(0)
    while True:
        step(model, optimizer)
        extra = gemini.state_hash(model, optimizer)
        gemini.save_checkpoint(folder, model, optimizer, extra=extra, keep=2, asynchronous=asynchronous)


def main(folder: str, kills: int) -> None:
    torch.set_num_threads(1)
    chance = random.Random(0)
    newest = Path(folder, "latest")
    steps = []
    for number in range(kills):
        child = os.fork()
        if not child:
            save_for_ever(folder, asynchronous=number % 2 == 1)
        _wait_until(newest.exists)
        there = newest.read_text()
        _wait_until(lambda: newest.read_text() != there)
        time.sleep(chance.random() * 0.1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        model, optimizer = make(1)
        loaded = gemini.load_checkpoint(folder, model, optimizer)
        assert gemini.state_hash(model, optimizer) == loaded.extra
        steps.append(loaded.step)
        model.close()
    print("loaded", kills, "after steps", steps)


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "the child saves nothing"
        time.sleep(0.001)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
