"""Evaluations, other lengths, idle experts, frozen parts: a step is predicted by those before it, with equal bits."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gemini import ShardedOptimizer
from gemini.placement.next_use import PassKind
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import WIDTH, adam, assert_same, inputs, weights_of, wrap

ALL = (0, 1, 2, 3, 4, 5)


class Chosen(nn.Module):
    """Layers of which each call uses some, of any number of times."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in ALL)
        self.recomputes = recomputes

    def forward(self, x: Tensor, chosen: Sequence[int] = ALL) -> Tensor:
        for number in chosen:
            x = x + (
                checkpoint(self._layer, x, number, use_reentrant=False) if self.recomputes else self._layer(x, number)
            )
        return x

    def _layer(self, x: Tensor, number: int) -> Tensor:
        return torch.tanh(self.layers[number](x))


class Recomputed(Chosen):
    def __init__(self) -> None:
        super().__init__(recomputes=True)


class Training:
    """Steps of a model whose chunks must all come and go, or stay; what each step has moved and asked."""

    def __init__(self, place: str, make: Callable[[], nn.Module]) -> None:
        self.model = wrap(place, make)
        self.optimizer = ShardedOptimizer(self.model, adam(self.model.parameters()))
        self.asked = 0
        communicator: Any = self.model.chunk_manager.communicator
        agree = communicator.all_reduce_max_

        def counted(words: Tensor, what: str) -> None:
            self.asked += what == "agreement on complete gradients"
            agree(words, what)

        communicator.all_reduce_max_ = counted

    def step(self, number: int, chosen: Sequence[int] = ALL) -> Counter[str]:
        """Moves by kind, and under "asked" how often ranks agreed on which gradients are complete."""
        before, asked = Counter(self.model.observer.counts), self.asked
        self.model(inputs(number), chosen).square().mean().backward()
        moves = self.model.observer.counts - before
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Counter(gathered=moves["fetch"] + moves["prefetch"], asked=self.asked - asked)

    def evaluate(self, number: int, chosen: Sequence[int] = ALL) -> int:
        """Payloads that were gathered."""
        before = Counter(self.model.observer.counts)
        with torch.no_grad():
            self.model(inputs(number), chosen)
        moves = self.model.observer.counts - before
        return moves["fetch"] + moves["prefetch"]


def trained(rank: int, place: str, make: Callable[[], nn.Module], run: Callable[[Training, int], None]) -> Any:
    """The weights after `run`."""
    training = Training(place, make)
    run(training, rank)
    found = weights_of(training.model)
    training.model.close()
    return found


FLOWS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "skipped": (ALL, (0, 1, 4, 5)),
    "longer": (ALL, (*ALL, 2, 2, 3)),
    "turns": ((0, 1, 3, 5), (0, 2, 4, 5)),
}


@pytest.mark.sampled(4)
@on_ranks(1, 2)
@pytest.mark.parametrize("make", [Chosen, Recomputed])
@pytest.mark.parametrize("flow", FLOWS)
def test_flows_that_take_turns_are_both_predicted(
    rank: int, world_size: int, flow: str, make: Callable[[], nn.Module]
) -> None:
    """From the second time on no step asks which gradients are complete, and the bits are those of the device."""
    one, other = FLOWS[flow]

    def run(training: Training, rank: int) -> None:
        steps = [training.step(10 * number + rank, (one, other)[number % 2]) for number in range(8)]
        assert not any(step["asked"] for step in steps[4:]), steps

    assert_same(trained(rank, "smallest", make, run), trained(rank, "cuda", make, run))


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("make", [Chosen, Recomputed])
def test_an_evaluation_shifts_nothing(rank: int, world_size: int, make: Callable[[], nn.Module]) -> None:
    """First, between steps, between a forward and its backward, of any length."""

    def run(training: Training, rank: int) -> None:
        training.evaluate(rank, (3, 3, 1))
        quiet = [training.step(number + rank) for number in range(4)][-1]
        for number in range(4, 8):
            training.evaluate(number, ALL[number - 4 :])
            noisy = training.step(number + rank)
            assert noisy["asked"] == 0
            assert noisy["gathered"] <= quiet["gathered"] + 2, "the slots held what the evaluation used last"
        loss = training.model(inputs(9 + rank)).square().mean()
        training.evaluate(9, (5, 0))
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        assert training.step(10 + rank)["asked"] == 0

    assert_same(trained(rank, "smallest", make, run), trained(rank, "cuda", make, run))


@on_ranks(1, 2)
def test_evaluations_evict_by_next_use(rank: int, world_size: int) -> None:
    """Six layers through two slots: recency gathers all six each time, the next use keeps one over.

    Several ranks gather them in advance, which takes both slots.
    """
    model = wrap("smallest", Chosen)
    ShardedOptimizer(model, adam(model.parameters()))  # without one, parameters would have the room of its states
    slots = model.plan.placement.num_slots[0]
    counts, in_advance = [], 0
    for number in range(5):
        before = Counter(model.observer.counts)
        with torch.no_grad():
            model(inputs(number))
        moves = model.observer.counts - before
        counts.append(moves["fetch"] + moves["prefetch"])
        in_advance += moves["prefetch"]
    assert counts[0] == len(ALL)
    if world_size == 1:
        assert max(counts[2:]) <= len(ALL) - (slots - 1), counts
    else:
        assert in_advance >= 4 * (len(ALL) - slots), in_advance
    model.close()


@on_ranks(1, 2)
def test_forwards_without_a_backward_do_not_add_up(rank: int, world_size: int) -> None:
    """As of a script that evaluates and does not turn gradients off."""

    def run(training: Training, rank: int) -> None:
        training.step(rank)
        uses = training.model.chunk_manager.params.next_use
        sizes = []
        for number in range(66):
            training.model(inputs(number), (0, 1))
            sizes.append(len(uses.passed))
        assert sizes[63] in (0, 2 * 64), "none where nothing is fetched"
        assert sizes[65] == sizes[1]
        for number in range(3):
            step = training.step(number + rank)
        assert step["asked"] == 0

    assert_same(trained(rank, "smallest", Chosen, run), trained(rank, "cuda", Chosen, run))


@pytest.mark.parametrize("fails_second", [False, True], ids=["alone", "behind another"])
def test_a_forward_that_fails_costs_the_next_step_nothing(fails_second: bool) -> None:
    """Twice through six layers and two slots: only the next use keeps a payload over.

    fails_second: the failed forward is one of two before a common backward.
    """

    def run(training: Training, rank: int) -> None:
        twice = (*ALL, *ALL)
        uses = training.model.chunk_manager.params.next_use
        first, _, quiet = (training.step(number, twice)["gathered"] for number in range(3))
        assert quiet < first or quiet == 0
        known = list(uses.touches(PassKind.TRAINING))
        for number in range(3, 6):
            loss = training.model(inputs(number), twice).square().mean() if fails_second else None
            with pytest.raises(IndexError):
                training.model(inputs(number), (0, 3, 1, 99))
            if loss is not None:
                loss.backward()
                training.optimizer.step()
                training.optimizer.zero_grad()
            training.evaluate(number)
            assert training.step(number, twice)["gathered"] <= quiet
            assert uses.touches(PassKind.TRAINING) == known, "nothing is learned from what failed"

    assert_same(trained(0, "smallest", Chosen, run), trained(0, "cuda", Chosen, run))


@on_ranks(1, 2)
def test_frozen_layers_shift_nothing(rank: int, world_size: int) -> None:
    def run(training: Training, rank: int) -> None:
        for number in range(9):
            training.model.module.layers[2].requires_grad_(number % 3 != 2)
            step = training.step(number + rank)
            assert number % 3 != 1 or step["asked"] == 0, "what is trained is as in the step before"

    assert_same(trained(rank, "smallest", Chosen, run), trained(rank, "cuda", Chosen, run))


@on_ranks(1, 2)
def test_a_second_backward_and_a_loss_beside_the_model_shift_nothing(rank: int, world_size: int) -> None:
    """Through the same graph again, and of a penalty that no forward of the model makes."""

    def run(training: Training, rank: int) -> None:
        for number in range(6):
            loss = training.model(inputs(number + rank)).square().mean()
            loss.backward(retain_graph=True)
            (loss * 0.5).backward()
            (training.model.module.layers[1].weight * 1e-3).square().sum().backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
        assert training.step(6 + rank)["asked"] == 0

    assert_same(trained(rank, "smallest", Chosen, run), trained(rank, "cuda", Chosen, run))
