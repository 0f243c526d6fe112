"""Ranks that take different ways are told apart, never mixed up; what one rank alone refers to changes nothing."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemini import BudgetError, DivergenceError, HybridAdam, ShardedModel, ShardedOptimizer, set_leaf_module
from gemini.ranks import watchdog
from tests.dist import divergence_cases, view_cases
from tests.harness.on_ranks import on_ranks
from tests.harness.ranks import RankPool

IN_STEP = ["forward", "backward", "touch in forward", "skipped backward", "skipped step", "read gradient"]
NO_GRAPH = "loss without a graph"
OUTSIDE = ["outside a step", "evaluation", "outside, one rank only"]
NAMES = {
    "forward": ["forward of layers.3", "forward of layers."],
    "backward": ["backward of layers.", "use of a parameter of layers.7"],
    "touch in forward": ["forward of layers.3", "use of a parameter of layers.7"],
    "outside a step": ["use of a parameter of layers."],
    "outside, one rank only": ["a call between steps for the whole model, such as state_dict()", "forward of"],
    "evaluation": ["forward of layers.0", "forward of layers.4"],
    "skipped step": ["the optimizer step"],
    NO_GRAPH: ["If rank 1 made no backward because its loss had no graph", "add 0 * output.sum()"],
    "read gradient": ["the optimizer step", "all-gather of chunk"],
}


@pytest.mark.parametrize(
    ("stage", "ways"),
    [
        (3, [*IN_STEP, *OUTSIDE, NO_GRAPH]),
        (2, [NO_GRAPH]),
        pytest.param(2, ["skipped step", "read gradient"], marks=pytest.mark.soak),
    ],
)
def test_ranks_that_take_different_ways_all_name_both_and_use_nothing(
    ranks: RankPool, stage: int, ways: list[str]
) -> None:
    exits = ranks(2).run(divergence_cases.ranks_diverge, stage, ways, fresh=True, forked=True, timeout_s=150)
    for one in exits:
        assert one.result is not None, one.stderr[-3000:]
        for way in ways:
            message, unchanged = one.result[way]
            assert message.startswith("DivergenceError: ranks took different ways"), (way, message)
            assert "rank 0" in message and "rank 1" in message, (way, message)
            assert all(name in message for name in NAMES.get(way, [])), (way, message)
            assert unchanged, (way, "foreign data reached the weights")
        assert one.result["wrong"] == [], "a layer computed with another's weights"
        assert one.result["goes on"], "after all of that, training is what it would have been"


@pytest.mark.parametrize(
    ("stage", "odd", "is_told"),
    [
        (3, "evaluation", True),
        pytest.param(3, "operator", True, marks=pytest.mark.soak),
        pytest.param(3, "backward", True, marks=pytest.mark.soak),
        pytest.param(3, "forward", False, marks=pytest.mark.soak),  # in its slot the weight is a plain parameter
        pytest.param(3, "random", None, marks=pytest.mark.soak),
        pytest.param(2, "random", False, marks=pytest.mark.soak),  # no rank gathers, so each may evict what it likes
    ],
)
def test_ranks_whose_traces_differ_are_told_where_or_have_equal_bits(
    ranks: RankPool, stage: int, odd: str, is_told: bool | None
) -> None:
    """No hash has the trace, which orders evictions, gathers and reductions: but each collective is compared.

    In "evaluation" the traces of one evaluation differ, and the error comes in the next one, where all ranks do alike.
    """
    results = ranks(2).run(divergence_cases.traces_differ, stage, odd, timeout_s=90)
    for found in results:
        assert is_told is None or bool(found["said"]) == is_told, found["said"]
        assert len(set(found["hashes"])) == 1, "the bits are those of a run that evicts nothing"
        for words in found["said"]:
            assert "DivergenceError: ranks took different ways: rank 0 wa" in words, words
            assert "of layers." in words, words
    assert (results[0]["touches"] != results[1]["touches"]) == (odd == "evaluation")


def test_an_update_in_another_order_is_found_and_final(ranks: RankPool) -> None:
    exits = ranks(2).run(divergence_cases.another_update_order, fresh=True, forked=True, timeout_s=60)
    for one in exits:
        assert one.result is not None, one.stderr[-3000:]
        assert "took different ways" in one.result[0], one.result
        assert "failed half way" in one.result[1], one.result


def test_references_dropped_late_change_neither_evictions_nor_bits(ranks: RankPool) -> None:
    calm = ranks(2).run(view_cases.late_references, False, timeout_s=60)
    disturbed = ranks(2).run(view_cases.late_references, True, timeout_s=60)
    assert calm[0][0] == calm[1][0] == disturbed[0][0] == disturbed[1][0]
    assert len({hash_ for _, hash_ in calm + disturbed}) == 1
    assert any(what == "evict" for what, _ in calm[0][0])


@pytest.mark.parametrize(("from_step", "to_step"), [(1, 99), (1, 3)])
def test_a_kept_view_costs_its_rank_a_slot_and_changes_nothing(ranks: RankPool, from_step: int, to_step: int) -> None:
    (calm_moves, calm_hash, _, _), _ = ranks(2).run(view_cases.kept_view, 99, 99)
    for rank, (moves, hash_, held, intact) in enumerate(ranks(2).run(view_cases.kept_view, from_step, to_step)):
        assert moves == calm_moves, "which chunk leaves depends on one rank's references"
        assert hash_ == calm_hash
        assert held == rank
        assert intact, "the memory under a kept view was written to"


def test_weights_and_buffers_become_those_of_rank_0(ranks: RankPool) -> None:
    (first, _), (second, _) = results = ranks(2).run(divergence_cases.different_weights)
    assert not torch.equal(first["mean"], second["mean"])
    assert not torch.equal(first["layers.0.weight"], second["layers.0.weight"])
    for _, after in results:
        assert after.keys() == first.keys()
        assert all(torch.equal(after[name], first[name]) for name in first)


def test_different_arguments_are_refused_with_what_differs(ranks: RankPool) -> None:
    words: dict[str, list[str]] = {
        "stage": ["stage=2 against stage=3"],
        "dtype": ["bfloat16"],
        "strategy": ["Tensor", "Chunk"],
        "chunk size": ["chunk_size=1536 against chunk_size=3072"],
        "budget": [" model_data_memory=", "against model_data_memory="],
        "shape": ["differs between rank 0 and rank 1: parameter 'layers.0.weight' of shape (32, 32)", "shape (33, 32)"],
        "frozen": ["parameter 'layers.0.weight'", "True", "False"],
        "buffer": ["built in a ZeroInitContext: nothing against buffer 'mean' of shape (5,), torch.float32"],
        "buffer's shape": ["buffer 'mean' of shape (5,), torch.float32 against buffer 'mean' of shape (6,)"],
        "disk on one rank": ["disk_path=a folder against disk_path=None"],
        "folder": ["accepted"],
    }
    exits = ranks(2).run(divergence_cases.different_arguments, fresh=True, forked=True, timeout_s=90)
    for one in exits:
        assert one.result is not None, one.stderr[-3000:]
        said: dict[str, Any] = one.result
        for what, wanted in words.items():
            assert all(word in said[what] for word in wanted), (what, said[what])
        assert said["one too small"].startswith("DivergenceError"), "a budget is an argument, and all give the same"
        assert said["too small"].startswith("BudgetError")


class Tells(logging.Handler):
    """Notes what is logged, and lets the other rank go on."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.said: list[str] = []
        self.key = key

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        dist.distributed_c10d._get_default_store().set(self.key, "")


@contextmanager
def told_while_rank_1_is_elsewhere(rank: int) -> Iterator[Tells]:
    """Inside, rank 1 comes when rank 0 has been told that it waits alone."""
    logger, handler = logging.getLogger("gemini"), Tells("rank 0 was told")
    store = dist.distributed_c10d._get_default_store()
    logger.addHandler(handler)
    try:
        with mock.patch.multiple(watchdog, POLL_S=0.05, DIVERGED_AFTER_S=0.0, ALONE_AFTER_S=0.0):
            if rank == 1:
                store.wait([handler.key])
            yield handler
            dist.barrier()
            store.delete_key(handler.key)
    finally:
        logger.removeHandler(handler)


class ExitsEarly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Tensor, num_layers: int = 4) -> Tensor:
        for layer in self.layers[:num_layers]:
            x = layer(x)
        return x


@on_ranks(2)
@pytest.mark.parametrize("waits", ["for a collective", "at a meeting"])
def test_a_rank_that_uses_the_model_alone_is_told_how_not_to(rank: int, world_size: int, waits: str) -> None:
    """The other rank waits somewhere else, as in a collective of Accelerate's, until this one has been told."""
    model = ShardedModel(ExitsEarly(), device="emulated", chunk_size=256, model_data_memory=9216)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters()))
    batch = torch.ones(2, 8)
    if waits == "at a meeting":
        # Steps that are alike are predicted. Ranks meet before they leave a pass that is cut short, as by this loss
        # without a backward.
        for _ in range(2):
            optimizer.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        model(batch, num_layers=1)
    with mock.patch.object(watchdog.Watchdog, "meet", autospec=True, side_effect=watchdog.Watchdog.meet) as met:
        with told_while_rank_1_is_elsewhere(rank) as handler, torch.no_grad():
            model(batch)
    assert met.called == (waits == "at a meeting")
    if rank == 0:
        (words,) = [each for each in handler.said if "uses the model alone" in each]
        assert "rank 1 is in no collective of the model" in words
        assert "gathered_for_generation()" in words
    model.close()


@on_ranks(2)
def test_a_rank_that_wraps_a_model_alone_is_told_that_all_ranks_do(rank: int, world_size: int) -> None:
    with told_while_rank_1_is_elsewhere(rank) as handler:
        model = ShardedModel(nn.Linear(8, 8), device="emulated")
    if rank == 0:
        (words,) = [each for each in handler.said if "to start together" in each]
        assert "1 of 2 ranks did not come yet" in words
        assert "under `if rank == 0`" in words
    model.close()


class Experts(nn.Module):
    """Experts in parameters of three dimensions, of which each rank uses those that its rows choose."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 6, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(6, 32, 48) / 6), nn.Parameter(torch.randn(6, 48, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for expert in chosen.unique():
            row, place = (chosen == expert).nonzero(as_tuple=True)
            out.index_add_(0, row, (x[row] @ self.up[expert]).tanh() @ self.down[expert] * weight[row, place][:, None])
        return out


@on_ranks(2)
@pytest.mark.parametrize("is_marked", [False, True])
def test_experts_in_one_tensor_are_named_with_the_mark_that_they_need(
    rank: int, world_size: int, is_marked: bool
) -> None:
    module = nn.Sequential(nn.Linear(32, 32), Experts(), Experts(), nn.Linear(32, 8))
    if is_marked:
        set_leaf_module(module, [Experts])
    model = ShardedModel(module, device="emulated")
    rows = torch.randn(6, 32, generator=torch.Generator().manual_seed(rank)) * (1 + rank)
    if is_marked:
        model(rows).square().mean().backward()
    else:
        with (
            mock.patch.multiple(watchdog, POLL_S=0.25, DIVERGED_AFTER_S=0.5, UNCHANGED_S=1.5),
            pytest.raises(DivergenceError, match=r"experts in one tensor, mark its class with gemini.set_leaf_module"),
        ):
            model(rows).square().mean().backward()
    model.close()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(x)


@on_ranks(2)
@pytest.mark.parametrize("place", [{}, {"model_data_memory": "least"}, {"tensor_placement_policy": "cpu"}])
def test_experts_in_one_tensor_of_this_name_train_without_a_mark(
    rank: int, world_size: int, place: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 32), Block(), Block(), nn.Linear(32, 8))
    module, wrap = copy.deepcopy(plain), {"device": "emulated", **place}
    if "model_data_memory" in place:
        with pytest.raises(BudgetError) as refused:
            ShardedModel(module, **{**wrap, "model_data_memory": 64})
        wrap["model_data_memory"] = refused.value.needed_bytes
    model = ShardedModel(module, **wrap)
    optimizer, its = ShardedOptimizer(model, HybridAdam(model.parameters())), HybridAdam(plain.parameters())
    for step in range(3):
        # Ranks choose other experts, in other numbers.
        rows = [torch.randn(4 + 3 * k, 32, generator=torch.Generator().manual_seed(9 * step + k)) for k in range(2)]
        for each in rows:
            (plain(each).square().mean() / 2).backward()
        optimizer.backward(model(rows[rank]).square().mean())
        for one in (optimizer, its):
            one.step()
            one.zero_grad()
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value)
    model.close()
