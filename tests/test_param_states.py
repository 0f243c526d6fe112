"""The states of a chunk's parameters: which memory each one holds, and that only steps that are listed are made."""

import pytest
import torch

from gemini.runtime.chunk import NEXT, ParamState
from tests.zoo import mlp


def test_a_step_that_no_chunk_makes_raises_and_changes_nothing() -> None:
    (resident, *_), (released, *_) = (mlp.wrap(place).chunk_manager.chunks for place in ("cuda", "smallest"))
    assert resident.state is ParamState.RESIDENT
    assert released.state is ParamState.RELEASED
    for chunk, state in ((chunk, state) for chunk in (resident, released) for state in ParamState):
        if state not in NEXT[chunk.state]:
            before = chunk.state, chunk.slot, chunk.payload
            with pytest.raises(RuntimeError, match=f"chunk 0 is {chunk.state.value} and cannot be {state.value} next"):
                chunk.become(state)
            assert all(now is then for now, then in zip((chunk.state, chunk.slot, chunk.payload), before, strict=True))
    with pytest.raises(RuntimeError, match="other memory"):
        released.become(ParamState.GATHERED)
    assert released.state is ParamState.RELEASED


@pytest.mark.parametrize("place", ["cuda", "smallest", "cpu"])
def test_each_state_holds_the_memory_that_it_says(place: str) -> None:
    model, optimizer = mlp.sharded(place, dtype=torch.bfloat16, reuse_fp16_shard=True)
    seen = set()
    for step in range(2):
        for phase in ("forward", "backward", "step"):
            if phase == "forward":
                loss = mlp.loss_of(model, step, torch.bfloat16)
            elif phase == "backward":
                loss.backward()
            else:
                optimizer.step()
            for chunk in model.chunk_manager.chunks:
                seen.add(chunk.state)
                gathered = chunk.state in (ParamState.GATHERED, ParamState.GATHERED_BESIDE_GRAD)
                assert (chunk.slot is not None) == gathered
                assert (chunk.payload is not None) == (gathered or chunk.state is ParamState.RESIDENT)
                assert not (chunk.holds_grad and phase == "step"), "the step has made the parameters again"
    assert any(state in seen for state in (ParamState.HOLDS_GRAD, ParamState.GATHERED_BESIDE_GRAD)), seen
