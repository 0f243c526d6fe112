"""Leaves, modules that are fetched as one operator: every rank may use other parts of them."""

import pytest
from torch import nn

from gemini import (
    DivergenceError,
    RemoteRankError,
    ShardedModel,
    ShardedOptimizer,
    UnsupportedError,
    set_leaf_module,
    unset_leaf_module,
)
from gemini.model.operators import find_operators
from tests import switches
from tests.harness.on_ranks import on_ranks, on_ranks_with
from tests.harness.ranks import RankPool
from tests.switches import IDLE, INSIDE
from tests.zoo import mlp
from tests.zoo.mlp import CHUNK_NUMEL, WIDTH, Mlp, build, wrap


def test_set_leaf_module_names_what_it_does_not_find() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert set_leaf_module(model, [nn.Sequential]) == [model, model[1]]
    with pytest.raises(ValueError, match="class or name Bilinear, GRU in Sequential, which has Sequential"):
        set_leaf_module(model, (nn.Bilinear, nn.GRU))
    with pytest.raises(ValueError, match=r"no module of class or name 1\.7, GRU in"):
        set_leaf_module(model, ["1.0", "1.7", "GRU"])
    for bad in ((), [int], model):
        with pytest.raises(TypeError, match="classes must be a module class, a name, or several"):
            set_leaf_module(model, bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model must be a torch module, found int"):
        set_leaf_module(3, nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="before it is wrapped"):
        set_leaf_module(wrap(), nn.Linear)
    with pytest.raises(UnsupportedError, match=r"unset_leaf_module\(\) after"):
        unset_leaf_module(wrap(), "Linear")


class Experts(Mlp):
    def __init__(self) -> None:
        super().__init__(2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))


@pytest.mark.parametrize("name", ["Experts", f"{__name__}.Experts", "1", Experts])
def test_leaves_are_set_and_unset_by_class_and_by_name(name: str | type[nn.Module]) -> None:
    def leaves(model: nn.Module) -> list[str]:
        return [operator.name for _, operator in find_operators(model, True, {}) if operator.routes]

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(), Mlp(2))
    assert leaves(model) == ["1"]
    assert unset_leaf_module(model, name) == [model[1]]
    assert leaves(model) == []
    assert set_leaf_module(model, [name, "2.layers"]) == [model[1], model[2].layers]
    assert leaves(model) == ["1", "2.layers"]
    assert unset_leaf_module(model, nn.ModuleList) == [model[1].layers, model[1].experts, model[2].layers]
    assert leaves(model) == ["1"]


def assert_equals_plain(rank: int, world_size: int, way: str, budget: str | None) -> None:
    """Five steps beside plain PyTorch, which takes the ranks' turns one after the other."""

    def make() -> nn.Module:
        net = switches.Net(way)
        assert len(set_leaf_module(net, "Switch" if budget else switches.Switch)) == 2
        return net

    module, reference = build(make), build(make)
    model = ShardedModel(module, **mlp.placed(make, model_data_memory=budget))
    optimizer, its = ShardedOptimizer(model, mlp.adam(model.parameters())), mlp.adam(reference.parameters())
    mlp.train_beside_plain(model, optimizer, reference, its, switches.loss_of, rank, world_size, 5)
    assert model.observer.counts["evict"] > 0 or budget is None
    model.close()


@pytest.mark.sampled(4)
@on_ranks(2)
@pytest.mark.parametrize("budget", ["smallest", None])
@pytest.mark.parametrize("way", ["", IDLE, INSIDE, "not reentrant", "reentrant"])
def test_ranks_that_use_other_branches_equal_plain(rank: int, world_size: int, way: str, budget: str | None) -> None:
    assert_equals_plain(rank, world_size, way, budget)


# Four are a power of two: the mean's division is exact, and so is the comparison.
@on_ranks_with("way", {3: [""], 4: [IDLE]}, soak={4: [IDLE, ""]})
def test_more_ranks_than_that(rank: int, world_size: int, way: str) -> None:
    assert_equals_plain(rank, world_size, way, "smallest")


def unmarked(rank: int, world_size: int) -> str:
    """The same without a mark, at one slot for each branch."""
    module = build(lambda: switches.Net(""))
    wrap = {"chunk_size": CHUNK_NUMEL}
    model = ShardedModel(
        module, device="emulated", model_data_memory=mlp.smallest_budget(lambda: switches.Net(""), **wrap), **wrap
    )
    switches.turn(module, rank, 0)
    try:
        model(switches.inputs(rank, 0)).backward()
    except (DivergenceError, RemoteRankError) as error:
        return str(error)
    return ""


def test_without_a_mark_ranks_that_choose_differently_are_told(ranks: RankPool) -> None:
    for said in ranks(2).run(unmarked, fresh=True, forked=True):
        assert "blocks.0.switch.branches." in said.result, said
        assert "set_leaf_module" in said.result
