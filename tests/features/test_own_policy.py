"""A placement policy of the user's own: the documented one trains, and a bad one is told before anything is taken."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from gemini import (
    BudgetError,
    Demand,
    DivergenceError,
    Kind,
    Placement,
    PlacementPolicy,
    RemoteRankError,
    ShardedModel,
    ShardedOptimizer,
    Tier,
    slots_for,
)
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import CHUNK_NUMEL, LAYERS, adam, build, train_while

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api" / "placement.md"
Homes = tuple[dict[Any, Any], ...]


def documented() -> PlacementPolicy:
    """An object of the class that the page on policies shows."""
    names: dict[str, Any] = {}
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    exec(compile(snippet.split("model = ")[0], str(PAGE), "exec"), names)
    policy: PlacementPolicy = names["StateOnHost"]()
    return policy


@dataclass(frozen=True)
class Changed:
    """Everything on the host, but for a mistake."""

    change: Callable[[Homes], Homes] = lambda homes: homes
    then: Callable[[Placement], Any] = lambda placement: placement
    name: str = "mine"

    def place(self, demand: Demand, budget_bytes: int | None) -> Any:
        homes = tuple(dict.fromkeys(chunk.home_bytes, Tier.HOST) for chunk in demand.chunks)
        return self.then(replace(slots_for(demand, homes), homes=self.change(homes)))


def wrap(policy: Any, module: Any = None, **options: Any) -> ShardedModel:
    module = build() if module is None else module
    options = {"device": "emulated", "chunk_size": CHUNK_NUMEL, **options}
    return ShardedModel(module, tensor_placement_policy=policy, **options)


def train(policy: Any, rank: int) -> tuple[ShardedModel, tuple[list[float], int]]:
    model = wrap(policy, model_data_memory=100_000)
    return model, train_while(model, ShardedOptimizer(model, adam(model.parameters())), rank, steps=4)


@on_ranks(1, 2)
def test_the_documented_policy_places_as_it_says_and_changes_no_bit(rank: int, world_size: int) -> None:
    model, found = train(documented(), rank)
    homes = model.plan.placement.homes
    assert all(
        tier is (Tier.DEVICE if kind is Kind.PARAM else Tier.HOST) for its in homes for kind, tier in its.items()
    )
    assert model.plan.policy == "state_on_host"
    assert found == train("auto", rank)[1]


def without_gradients(homes: Homes) -> Homes:
    return tuple({kind: tier for kind, tier in its.items() if kind is not Kind.GRAD} for its in homes)


BAD: dict[str, tuple[Changed, type[Exception], str]] = {
    "one chunk short": (Changed(lambda homes: homes[1:]), ValueError, f"homes of {LAYERS - 1} chunks, .* has {LAYERS}"),
    "one chunk more": (Changed(lambda homes: (*homes, homes[0])), ValueError, f"homes of {LAYERS + 1} chunks"),
    "a kind is missing": (Changed(without_gradients), ValueError, "chunk 0 homes for optim, param, and it has grad, "),
    "no tier": (
        Changed(lambda homes: (dict.fromkeys(homes[0], "nvme"), *homes[1:])),
        ValueError,
        "chunk 0 the home 'nvme', which is no Tier: choose one of device, host",
    ),
    "too few slots": (
        Changed(then=lambda placement: replace(placement, num_slots=(1, 0))),
        ValueError,
        r"num_slots=\(1, 0\), and training needs \(2, 0\): slots_for\(\)",
    ),
    "a kept slot on the host": (
        Changed(then=lambda placement: replace(placement, kept=frozenset({2}))),
        ValueError,
        "keeps a slot for chunk 2, whose",
    ),
    "a gradient on the disk": (
        Changed(lambda homes: ({**homes[0], Kind.GRAD: Tier.DISK}, *homes[1:])),
        ValueError,
        "gradient of chunk 0 onto the disk, where no gradient rests: choose device or host",
    ),
    "a disk that nobody has named": (
        Changed(lambda homes: (*homes[:-1], {**homes[-1], Kind.OPTIM: Tier.DISK})),
        ValueError,
        f"optim of chunk {LAYERS - 1} onto the disk, and the model has none: name its folder with disk_path=",
    ),
    "no placement": (Changed(then=lambda placement: None), TypeError, "must return a Placement, found NoneType"),
}


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("mistake", BAD)
def test_a_bad_answer_is_told_before_anything_is_taken(rank: int, world_size: int, mistake: str) -> None:
    policy, error, words = BAD[mistake]
    module = build()
    memory = [parameter.data_ptr() for parameter in module.parameters()]
    with pytest.raises(error, match=rf"^tensor_placement_policy='mine': place\(demand, budget_bytes\) .*{words}"):
        wrap(policy, module)
    assert [parameter.data_ptr() for parameter in module.parameters()] == memory
    wrap("auto", module).close()


@on_ranks(1, 2)
def test_a_policy_may_answer_the_disk(rank: int, world_size: int, tmp_path: Path) -> None:
    """No bit differs; weights that a step makes whole are not for it, nor more than `disk_memory`."""

    def on_disk(*kinds: Kind) -> Changed:
        return Changed(lambda homes: tuple({**its, **dict.fromkeys(kinds, Tier.DISK)} for its in homes))

    found = [train("auto", rank)[1]]
    for kinds in ((Kind.OPTIM,), (Kind.OPTIM, Kind.PARAM)):
        model = wrap(on_disk(*kinds), disk_path=tmp_path)
        found.append(train_while(model, ShardedOptimizer(model, adam(model.parameters())), rank, steps=4))
        assert model.plan.placement.disk_bytes(model.plan.demand) > 0
        model.close()
    assert found[0] == found[1] == found[2]
    with pytest.raises(BudgetError, match="Allow more with disk_memory="):
        wrap(on_disk(Kind.PARAM), disk_path=tmp_path, disk_memory=100)
    if world_size > 1:
        with pytest.raises(ValueError, match="parameters of chunk 0 onto the disk, and its may_be_on_disk is False"):
            wrap(on_disk(Kind.PARAM), disk_path=tmp_path, stage=2)


@on_ranks(1, 2)
def test_an_answer_over_the_budget_is_told_with_both_numbers(rank: int, world_size: int) -> None:
    least = wrap(Changed()).plan.device_bytes
    wrap(Changed(), model_data_memory=least).close()
    model = wrap(Changed(), model_data_memory=least - 1)  # it has room to infer
    with pytest.raises(BudgetError, match=f"'mine' needs {least} bytes of .* the budget is {least - 1} bytes") as error:
        ShardedOptimizer(model, adam(model.parameters()))
    assert (error.value.needed_bytes, error.value.budget_bytes) == (least, least - 1)


@on_ranks(1, 2)
def test_parameters_that_persist_stay_where_the_user_wants_them(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="parameters of chunk 1 onto the host, and they persist on the device"):
        wrap(Changed(), param_persistence_threshold=100)


@on_ranks(2)
def test_answers_that_differ_between_ranks_are_told_by_what_differs(rank: int, world_size: int) -> None:
    def one_on_the_device(homes: Homes) -> Homes:
        return tuple({**its, Kind.GRAD: Tier.DEVICE} if index == rank else its for index, its in enumerate(homes))

    with pytest.raises(
        DivergenceError,
        match=r"the plan differs .*: grad: chunks 0 to 0 on the device, chunks 1 to 5 on the host against grad: chunks "
        r"0 to 0 on the host, chunks 1 to 1 on the device.*must follow from its arguments alone",
    ):
        wrap(Changed(one_on_the_device))
    with pytest.raises(ValueError if rank else RemoteRankError, match="homes of 5 chunks"):
        wrap(Changed(lambda homes: homes[rank:]))


def test_a_policy_that_fails_without_a_bound_is_told_why_it_is_asked_so() -> None:
    """Its user gave a budget, and sees an exception of a call with None."""
    policy = Changed(change=lambda homes: homes)

    class NeedsBound(Changed):
        def place(self, demand: Demand, budget_bytes: int | None) -> Any:
            if budget_bytes is None:
                raise ValueError("no bound")
            return policy.place(demand, budget_bytes)

    with pytest.raises(ValueError, match="no bound") as raised:
        wrap(NeedsBound(), model_data_memory=100_000)
    assert "'mine': place(demand, budget_bytes) was asked with budget_bytes=None" in "".join(raised.value.__notes__)
