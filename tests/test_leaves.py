"""Modules that are fetched as one operator: set and unset by class and by name."""

import pytest
from torch import nn

from gemini import UnsupportedError, set_leaf_module, unset_leaf_module
from gemini.model.operators import find_operators
from tests.mlp import WIDTH, Mlp, wrap


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
        return [operator.name for operator in find_operators(model, gathers=True) if operator.routes]

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(), Mlp(2))
    assert leaves(model) == ["1"]
    assert unset_leaf_module(model, name) == [model[1]]
    assert leaves(model) == []
    assert set_leaf_module(model, [name, "2.layers"]) == [model[1], model[2].layers]
    assert leaves(model) == ["1", "2.layers"]
    assert unset_leaf_module(model, nn.ModuleList) == [model[1].layers, model[1].experts, model[2].layers]
    assert leaves(model) == ["1"]
