"""The states of a chunk's gradient: a step that no gradient makes is refused, and nothing has changed then."""

from typing import Any

import pytest
import torch

from gemini import ShardedModel, ShardedOptimizer
from gemini.memory.arena import HostTier
from gemini.memory.slot import Slot
from gemini.placement.gradient import GradState, ReducedState, UnsyncedState
from gemini.runtime.gradient import ChunkGradient
from tests.zoo.mlp import CHUNK_NUMEL, adam, build

CLOSED, AT_HOME, IN_SLOT, SPILLED, REDUCING = GradState
LEGAL = {
    (CLOSED, AT_HOME),
    (CLOSED, IN_SLOT),
    (AT_HOME, REDUCING),
    (AT_HOME, CLOSED),
    (IN_SLOT, SPILLED),
    (IN_SLOT, REDUCING),
    (IN_SLOT, CLOSED),
    (SPILLED, IN_SLOT),
    (SPILLED, CLOSED),
    (REDUCING, CLOSED),
}


@pytest.fixture(scope="module")
def chunk() -> Any:
    model = ShardedModel(build(), chunk_size=CHUNK_NUMEL)
    ShardedOptimizer(model, adam(model.parameters()))  # with it gradients have their memory
    yield model.chunk_manager.chunks[0]
    model.close()


def memory_of(state: GradState, gradient: ChunkGradient) -> dict[str, Any]:
    """What `become` is given for it."""
    chunk = gradient.chunk
    if state is IN_SLOT:
        slot = Slot(HostTier(), chunk.payload_bytes, "gradient slots")
        chunk.payload_in(slot)
        return {"slot": slot}
    return {"spilled": torch.zeros(4, dtype=torch.uint8)} if state is SPILLED else {}


def brought_to(state: GradState, gradient: ChunkGradient) -> ChunkGradient:
    on_the_way = {SPILLED: [IN_SLOT, SPILLED], REDUCING: [IN_SLOT, REDUCING], CLOSED: []}
    for each in on_the_way.get(state, [state]):
        gradient.become(each, **memory_of(each, gradient))
    return gradient


@pytest.mark.parametrize("after", GradState)
@pytest.mark.parametrize("before", GradState)
def test_a_local_gradient_takes_the_steps_of_its_life_only(chunk: Any, before: GradState, after: GradState) -> None:
    gradient = brought_to(before, ChunkGradient(chunk, keeps_whole=True))
    fields = dict(vars(gradient))
    if (before, after) in LEGAL:
        gradient.become(after, **memory_of(after, gradient))
        assert gradient.state is after
        assert (gradient.payload is None) == (after in (CLOSED, SPILLED))
        assert (gradient.spilled is None) == (after is not SPILLED)
        assert any(view is not None for view in gradient.expects) == (after in (AT_HOME, IN_SLOT))
    else:
        with pytest.raises(RuntimeError, match=f"is {before.value!r} and cannot become {after.value!r}"):
            gradient.become(after, **memory_of(after, gradient))
        assert all(getattr(gradient, name) is value for name, value in fields.items())


@pytest.mark.parametrize(("state", "other"), [(IN_SLOT, SPILLED), (AT_HOME, IN_SLOT), (IN_SLOT, AT_HOME)])
def test_a_state_comes_with_its_memory_and_no_other(chunk: Any, state: GradState, other: GradState) -> None:
    gradient = ChunkGradient(chunk, keeps_whole=True)
    with pytest.raises(RuntimeError, match="has other memory than that"):
        gradient.become(state, **memory_of(other, gradient))
    assert gradient.state is CLOSED
    assert gradient.payload is None


def test_a_sum_in_fp32_is_not_rounded_and_an_unreduced_sum_is_not_lost(chunk: Any) -> None:
    gradient = ChunkGradient(chunk, keeps_whole=True)
    gradient.become_reduced(ReducedState.IN_SHARD, backward=3)
    gradient.become_reduced(ReducedState.WIDE, backward=4)
    assert gradient.first_backward == 3
    with pytest.raises(RuntimeError, match="cannot become 'in its shard'"):
        gradient.become_reduced(ReducedState.IN_SHARD)
    gradient.become_unsynced(UnsyncedState.HELD)
    with pytest.raises(RuntimeError, match="cannot become 'left on other ranks only'"):
        gradient.become_unsynced(UnsyncedState.ELSEWHERE)
    assert gradient.is_behind
    assert gradient.is_reduced


@pytest.mark.parametrize("state", GradState)
def test_a_parameters_gradient_comes_into_an_open_payload_only(chunk: Any, state: GradState) -> None:
    gradient = brought_to(state, ChunkGradient(chunk, keeps_whole=True))
    fields = dict(vars(gradient), fired=bytes(gradient.fired), expects=list(gradient.expects))
    for note in (lambda: gradient.note_fired(0), lambda: gradient.note_all_fired([0])):
        if state in (AT_HOME, IN_SLOT):
            note()
            assert gradient.fired[0] == gradient.got[0] == 1 and gradient.expects[0] is None
        else:
            with pytest.raises(RuntimeError, match="came into a payload that is"):
                note()
            assert dict(vars(gradient), fired=bytes(gradient.fired), expects=list(gradient.expects)) == fields


def test_a_parameters_second_gradient_is_not_counted_as_another_one(chunk: Any) -> None:
    gradient = brought_to(AT_HOME, ChunkGradient(chunk, keeps_whole=True))
    gradient.note_fired(0)
    gradient.note_fired(0)
    assert gradient.num_fired == 1
