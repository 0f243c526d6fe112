"""Weights that are read or written through a wrapped module are whole, or the user is told that they are not there."""

import io

import pytest
import torch

from gemini import ShardedModel
from tests import whole_weights
from tests.mlp import build, inputs, loss_of, sharded, wrap


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_what_reads_or_writes_weights_does_what_it_does_to_plain_ones(dtype: torch.dtype | None) -> None:
    whole_weights.reads_and_writes(0, 1, {}, dtype)


def test_what_would_take_memory_that_moves_is_refused() -> None:
    whole_weights.refusals(0, 1, {})


def test_a_traced_module_computes_with_the_weights_wherever_they_are() -> None:
    """TorchScript holds the parameters themselves, and asks nobody about them."""
    model = wrap("cpu")
    model(inputs(0))
    traced = torch.jit.trace(model.module, inputs(0))
    assert torch.equal(traced(inputs(1)), build()(inputs(1)))


def test_a_model_wrapped_and_read_in_inference_mode_has_its_weights() -> None:
    module, reference = build(), build()
    with torch.inference_mode():
        model = ShardedModel(module, device="emulated", tensor_placement_policy="cpu")
        assert torch.equal(model(inputs(0)), reference(inputs(0)))
        assert torch.equal(torch.asarray(model.layers[0].weight.detach()), reference.layers[0].weight)


def test_a_gradient_is_data_for_a_new_tensor() -> None:
    model, _ = sharded()
    loss_of(model).backward()
    reference = build()
    loss_of(reference).backward()
    with pytest.warns(UserWarning, match="copy construct"):
        got = torch.tensor(model.layers[0].weight.grad)
    assert torch.equal(got, reference.layers[0].weight.grad)


def test_an_operation_that_would_write_to_a_placeholder_is_refused() -> None:
    model = wrap()
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match=r"'layers\.0\.weight'"):
        model.layers[0].weight.detach_().zero_()


def test_a_capsule_of_a_weight_itself_has_placeholders() -> None:
    """`to_dlpack` takes the memory and asks nobody."""
    weight = wrap().layers[0].weight
    assert torch.from_dlpack(torch.utils.dlpack.to_dlpack(weight.detach())).isnan().all()
    assert torch.equal(torch.from_dlpack(weight.detach()), build().layers[0].weight)


def test_a_saved_whole_state_loads_after_refusals() -> None:
    model, file = wrap(), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    build().load_state_dict(torch.load(file))
