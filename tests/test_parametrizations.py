"""spectral_norm, orthogonal, pruning and parametrizations of the user's: the bits of plain PyTorch, or refused."""

import pytest
import torch

from gemini import ReleasedParameterError
from tests.mlp import PLACES, Mlp, assert_same, build, loss_of, plain, sharded, train_step, weights_of
from tests.parametrizations import KINDS, NEW_PARAMETERS, put, with_


@pytest.mark.parametrize("place", ["smallest", "cuda"])
@pytest.mark.parametrize("kind", KINDS | NEW_PARAMETERS)
def test_a_parametrization_put_on_before_wrapping_trains_as_in_plain_pytorch(kind: str, place: str) -> None:
    (model, optimizer), (reference, plain_optimizer) = sharded(place, make=with_(kind)), plain(make=with_(kind))
    for step in range(3):
        train_step(model, optimizer, step)
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), dict(reference.state_dict()))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_optimizer", [False, True], ids=["before the optimizer", "after it"])
def test_a_parametrization_put_on_after_wrapping_trains_as_in_plain_pytorch(
    kind: str, place: str, has_optimizer: bool
) -> None:
    model, optimizer = sharded(place)
    reference, plain_optimizer = plain()
    if has_optimizer:
        train_step(model, optimizer)
        train_step(reference, plain_optimizer)
    for each in (model, reference):
        put(kind, each)
    assert torch.equal(loss_of(model), loss_of(reference))
    for step in range(1, 4):
        train_step(model, optimizer, step)
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), dict(reference.state_dict()))


@pytest.mark.parametrize("kind", NEW_PARAMETERS)
def test_one_that_makes_new_parameters_is_refused_after_wrapping(kind: str) -> None:
    model, _ = sharded()
    with pytest.raises(ReleasedParameterError, match=r"'layers\.1\.weight'.* weight_norm.* before ShardedModel"):
        put(kind, model)
    if kind == "weight_norm":  # the deprecated one has taken the weight out of its module by then
        assert_same(weights_of(model), dict(build().state_dict()))


def test_what_set_gives_a_parameter_are_values() -> None:
    model, reference = sharded()[0], build(Mlp)
    with torch.no_grad():
        for each in (model, reference):
            each.layers[0].weight.set_(torch.ones_like(each.layers[0].bias).expand(16, 16).clone())
    assert_same(weights_of(model), dict(reference.state_dict()))
    with pytest.raises(ReleasedParameterError, match=r"'layers\.0\.weight' is \(16, 16\)"):
        model.layers[0].weight.set_(torch.zeros(3))
    with pytest.raises(ReleasedParameterError, match=r"set_ to a storage of parameter 'layers\.0\.weight'"):
        model.layers[0].weight.set_(torch.zeros(256).untyped_storage(), 0, (16, 16), (16, 1))
    with pytest.raises(ReleasedParameterError, match=r"memory of 'layers\.1\.weight'"):
        model.layers[0].weight.set_(model.layers[1].weight)
