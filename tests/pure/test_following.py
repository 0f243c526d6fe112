"""Which changes of free memory make another plan, and what that one may take: numbers only."""

from dataclasses import replace

import torch
from torch import nn

from gemini import Settings, plan_model, specs_of
from gemini.placement.budget import Budget, FreeBytes
from gemini.placement.plan import Plan
from gemini.placement.planning import budget_to_follow, followed_in_words, replan

HOST = 10**9


def plan(device_bytes: int | None) -> Plan:
    """Of a model with 12 chunks of 64 KiB, with so many bytes on the device."""
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(12)))
    settings = Settings(chunk_size=128 * 128, model_data_memory=device_bytes, host_memory=HOST)
    return plan_model(specs_of(module, settings, 1), settings, 1)


FULL = plan(None).device_bytes


def following(before: Plan, device_bytes: int | None) -> int | None:
    """The device's budget of the plan to come; -1 if there is none to come."""
    found = budget_to_follow(before, Budget(device_bytes, HOST))
    return -1 if found is None else found.device


def test_a_plan_that_still_fits_stays() -> None:
    everything = plan(2 * FULL)
    assert [following(everything, each) for each in (FULL, 2 * FULL, 4 * FULL, None)] == [-1] * 4
    part = plan(FULL // 2)
    assert [following(part, each) for each in (part.device_bytes, FULL // 2, int(FULL / 2 * 1.04))] == [-1] * 3


def test_less_than_a_plan_holds_is_followed_with_a_margin() -> None:
    for before in (plan(2 * FULL), plan(FULL // 2)):
        room = before.device_bytes - 1
        assert following(before, room) == int(room * 0.98)
        after = replan(before, before.trained, {}, budget=Budget(following(before, room), HOST))
        assert after.device_bytes <= 0.98 * room
        assert following(after, int(room * 0.985)) == -1, "a reading that is a little less moves nothing"


def test_the_first_reading_is_followed_to_the_byte() -> None:
    """It is what the device has, and no change of it: a margin would leave a part of the device empty for good."""
    part = plan(FULL // 2)
    for room in (part.device_bytes - 1, FULL // 2 + 1):
        found = budget_to_follow(part, Budget(room, HOST), is_first=True)
        assert found is not None and found.device == room
    assert budget_to_follow(part, Budget(part.device_bytes, HOST), is_first=True) is None


def test_more_is_followed_where_it_is_of_use() -> None:
    part = plan(FULL // 2)
    assert part.host_bytes > 0
    more = int(FULL / 2 * 1.05)
    assert following(part, more) == more
    assert following(part, None) is None
    assert following(plan(None), FULL * 2) == -1


def test_the_least_of_the_chunks_is_never_passed() -> None:
    part = plan(FULL // 2)
    least = part.packed_minimum_bytes
    assert least is not None
    assert following(part, 0) == following(part, least // 2) == least
    assert following(plan(least), 0) == -1, "nothing is left to give"


def test_activations_that_were_seen_take_the_place_of_a_guess() -> None:
    settings = Settings(device_memory=1000, host_memory=HOST)
    assert Budget.of(settings, FreeBytes()).device == 700
    assert Budget.of(settings, FreeBytes(activations=100)).device == 1000 - 110 - 30
    assert Budget.of(settings, FreeBytes(activations=10**6)).device == 0
    assert Budget.of(replace(settings, model_data_memory=900), FreeBytes(activations=10**6)).device == 900


def test_a_line_says_what_moved() -> None:
    before = plan(2 * FULL)
    after = replan(before, before.trained, {}, budget=Budget(FULL // 2, HOST))
    words = followed_in_words(before, after, 1000, is_short=False)
    homes = [(kind, tier) for its in after.placement.homes for kind, tier in its.items()]
    moved = sum(tier == "host" for _, tier in homes)
    assert f"beside 1000 B of activations, after 6 MiB: {moved} states moved to the host, 0 onto the device" in words
    words = followed_in_words(before, after, 1000, is_short=False, peak="backward 0 of layers.3")
    assert "beside 1000 B of activations (the most at backward 0 of layers.3), after 6 MiB" in words
    words = followed_in_words(before, after, None, is_short=False, room=1000)
    assert "the device has room for 1000 B of model data, where the chunks need 1.5 MiB, after 6 MiB" in words
    words = followed_in_words(before, after, None, is_short=True)
    assert words.startswith("the device ran out of memory in the last step, which was dropped: it has room for 1.5 MiB")
