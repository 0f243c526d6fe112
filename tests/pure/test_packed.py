"""Packings that several plans share: the same plans as without sharing, and each packing is made once."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from gemini import FreeBytes, Plan, Settings, plan_model
from gemini.errors import BudgetError
from gemini.placement.needs import Packed
from gemini.placement.search import plan_packed
from tests.pure.test_plan import LINE


def outcome(plan: Callable[[], Plan]) -> object:
    """The plan's hash, or how it is refused."""
    try:
        found = plan()
    except BudgetError as error:
        return str(error), error.needed_bytes
    return found.hash, found.budget, found.demand, found.settings


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", [Settings(), Settings(stage=1), Settings(gradient_accumulation_steps=3)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_shared_packings_make_the_same_plans(settings: Settings, ranks: int) -> None:
    packed = Packed(LINE, settings, ranks)
    seen = set()
    for policy in ("auto", "cpu", "cuda"):
        for device in (None, 1_000, 20_000, 60_000, 200_000):
            for host in (None, 40_000):
                its = replace(settings.with_policy(policy), model_data_memory=device, host_memory=host)
                shared = outcome(lambda its=its: plan_packed(packed, its))  # type: ignore[misc]
                assert shared == outcome(lambda its=its: plan_model(LINE, its, ranks))  # type: ignore[misc]
                seen.add(isinstance(shared[0], str))  # type: ignore[index]
    assert seen == {True, False}, "some are refused and some are not"


def test_a_packing_is_made_once_and_only_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from gemini.placement import needs

    made, packings = [], needs.packings

    def counted(*given: object):  # type: ignore[no-untyped-def]
        for packing in packings(*given):  # type: ignore[arg-type]
            made.append(packing)
            yield packing

    monkeypatch.setattr(needs, "packings", counted)
    packed = Packed(LINE, Settings(), 2)
    assert not made
    first = next(iter(packed))
    assert len(made) == 1
    every, again = list(packed), list(packed)
    assert every[0] is first and all(one is other for one, other in zip(every, again, strict=True))
    assert len(made) == len(every) > 1


def test_the_default_share_of_activations_is_said_only_where_it_applies() -> None:
    settings = Settings(device_memory=3_000)
    for free, is_said in ((None, True), (FreeBytes(), True), (FreeBytes(activations=2_000), False)):
        with pytest.raises(BudgetError) as refused:
            plan_model(LINE, settings, 2, free)
        assert ("until a step has shown its activations" in str(refused.value)) is is_said
