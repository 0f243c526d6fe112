"""Parameters, buffers and plain tensors that share memory: tied, or refused by their names, and never torn apart."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gemini import (
    BudgetError,
    GatheredParameters,
    ReleasedParameterError,
    ShardedModel,
    UnsupportedError,
    ZeroInitContext,
)
from tests.zoo.mlp import PLACES, WIDTH, Mlp, assert_same, build, plain, sharded, train_step, weights_of, wrap

# ---- between a wrapped parameter and a plain one ---------------------------------------------------------------


def test_a_plain_parameter_cannot_take_a_wrapped_ones_memory_and_keeps_its_own() -> None:
    """The wrapped one's memory moves; a plain one would be left with placeholders."""
    model, other = wrap(), nn.Linear(WIDTH, WIDTH)
    before = other.weight.detach().clone()
    with pytest.raises(ReleasedParameterError, match=r"'layers\.0\.weight'.*clone\(\)"):
        other.weight.data = model.layers[0].weight.data
    with pytest.raises(ReleasedParameterError, match=r"'layers\.0\.weight'.*clone\(\)"):
        other.weight = nn.Parameter(model.layers[0].weight.data)
    assert torch.equal(other.weight, before)
    other.weight.data = model.layers[0].weight.data.clone()
    other.bias.data.copy_(model.layers[0].bias.data)
    assert torch.equal(other.weight, build().layers[0].weight)
    assert torch.equal(other.bias, build().layers[0].bias)
    assert nn.Parameter(model.layers[0].weight.data.clone()).requires_grad


def test_a_plain_parameter_that_takes_a_wrapped_one_itself_is_told_to_take_a_copy() -> None:
    """Torch asks the right side of `.data =` nothing: its placeholder refuses."""
    model, other = wrap(), nn.Linear(WIDTH, WIDTH)
    before = other.weight.detach().clone()
    with pytest.raises(ReleasedParameterError, match=r"'layers\.0\.weight'.*plain\.weight\.data = .*\.clone\(\)"):
        other.weight.data = model.layers[0].weight
    assert torch.equal(other.weight, before)
    other.weight.data = model.layers[0].weight.clone()
    assert torch.equal(other.weight, build().layers[0].weight)


def test_what_was_detached_answers_for_its_place_without_memory() -> None:
    model = wrap()
    lazy = model.layers[0].weight.detach()
    assert (lazy.device.type, lazy.is_cpu, lazy.is_meta, lazy.get_device()) == ("cpu", True, False, -1)
    with pytest.raises(ReleasedParameterError, match=r"'layers\.0\.weight'.*clone\(\)"):
        lazy.requires_grad_()
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(ReleasedParameterError, match=r"layers\.0\.weight"):
        lazy.zero_()  # as a function of C++ would reach for its memory
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(lazy + 1, build().layers[0].weight + 1)


# ---- between wrapped parameters --------------------------------------------------------------------------------

SHARES: dict[str, Callable[[Any], Any]] = {
    "data": lambda m: setattr(m.layers[0].weight, "data", m.layers[2].weight.data),
    "detach": lambda m: setattr(m.layers[0].weight, "data", m.layers[2].weight.detach()),
    "itself": lambda m: setattr(m.layers[0].weight, "data", m.layers[2].weight),
    "view": lambda m: setattr(m.layers[0].weight, "data", m.layers[2].weight.data.t()),
    "part": lambda m: setattr(m.layers[0].bias, "data", m.layers[2].weight.data[3]),
}


@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize("place", ["smallest", "cuda"])
def test_a_wrapped_parameter_cannot_take_anothers_memory(kind: str, place: str) -> None:
    model, optimizer = sharded(place)
    with pytest.raises(ReleasedParameterError, match=r"'layers\.0\.\w+'.* memory of 'layers\.2\.weight'"):
        SHARES[kind](model)
    reference, plain_optimizer = plain()
    train_step(model, optimizer)
    train_step(reference, plain_optimizer)
    assert_same(weights_of(model), weights_of(reference))


def test_gathered_parameters_cannot_take_one_anothers_memory() -> None:
    model = wrap()
    layers = model.layers
    with (
        pytest.raises(ReleasedParameterError, match=r"'layers\.0\.weight'.* memory of 'layers\.2\.weight'"),
        GatheredParameters([layers[0].weight, layers[2].weight], modifier_rank=0),
    ):
        layers[0].weight.data = layers[2].weight.data
    assert_same(weights_of(model), dict(build().state_dict()))


def test_a_parameter_takes_values_and_its_own_memory() -> None:
    model, reference = wrap(), build()
    for each in (model, reference):
        first, third = each.layers[0].weight, each.layers[2].weight
        first.data = first.data
        first.data = third.data.clone()
        third.data = third.data * 2
        each.layers[1].bias.data = each.layers[1].bias.data.to(torch.float32)
    assert_same(weights_of(model), dict(reference.state_dict()))


def test_parameters_of_a_model_that_is_built_cannot_take_one_anothers_memory() -> None:
    with ZeroInitContext():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        with pytest.raises(ReleasedParameterError, match=r"a\.weight = b\.weight"):
            model[0].weight.data = model[1].weight.data


# ---- when a module is wrapped ----------------------------------------------------------------------------------


def _shared(model: Any) -> None:
    model.layers[3].weight.data = model.layers[1].weight.data


def _tied(model: Any) -> None:
    model.layers[3].weight = model.layers[1].weight


def _with(change: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = Mlp()
        change(module)
        return module

    return make


@pytest.mark.parametrize("place", PLACES)
def test_parameters_of_the_same_memory_are_one_under_two_names(place: str) -> None:
    reference, plain_optimizer = plain(make=_with(_tied))
    with pytest.warns(UserWarning, match=r"'layers\.1\.weight' and 'layers\.3\.weight' share their memory"):
        model, optimizer = sharded(place, make=_with(_shared))
    assert model.layers[3].weight is model.layers[1].weight
    assert len(list(model.parameters())) == len(list(reference.parameters()))
    for step in range(3):
        train_step(model, optimizer, step)
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), dict(reference.state_dict()))
    reference.load_state_dict(model.state_dict())


def test_frozen_parameters_of_the_same_memory_need_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    def frozen(model: Any) -> None:
        _shared(model)
        for number in (1, 3):
            model.layers[number].weight.requires_grad_(False)

    (model, optimizer), (reference, plain_optimizer) = sharded(make=_with(frozen)), plain(make=_with(frozen))
    assert not [each for each in recwarn if "share their memory" in str(each.message)]
    for step in range(3):
        train_step(model, optimizer, step)
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), dict(reference.state_dict()))


def _recurrent(model: Any) -> None:
    model.first, model.second = nn.LSTM(4, 4), nn.LSTM(4, 4)
    model.second.weight_hh_l0.data = model.first.weight_hh_l0.data


def test_recurrent_layers_of_the_same_memory_use_the_one_parameter() -> None:
    with pytest.warns(UserWarning, match="share their memory"):
        model = wrap(make=_with(_recurrent))
    assert model.second._flat_weights[1] is model.first.weight_hh_l0
    x = torch.ones(3, 1, 4)
    assert torch.equal(model.second(x)[0], build(_with(_recurrent)).second(x)[0])


def _flat(model: Any) -> None:
    """Views of one tensor that share no element, some of whose spans interlock."""
    flat = torch.linspace(-1, 1, 2 * WIDTH * WIDTH + WIDTH)
    both = flat[: 2 * WIDTH * WIDTH].view(WIDTH, 2 * WIDTH)
    model.layers[0].weight.data, model.layers[1].weight.data = both[:, :WIDTH], both[:, WIDTH:]
    model.layers[2].bias.data = flat[2 * WIDTH * WIDTH :]


def test_views_of_one_tensor_that_share_no_element_train_as_in_plain_pytorch() -> None:
    (model, optimizer), (reference, plain_optimizer) = sharded(make=_with(_flat)), plain(make=_with(_flat))
    for step in range(2):
        train_step(model, optimizer, step)
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), dict(reference.state_dict()))


def _transposed(model: Any) -> None:
    model.layers[3].weight.data = model.layers[1].weight.data.t()


def _row(model: Any) -> None:
    model.layers[3].bias.data = model.layers[1].weight.data[2]


def _other_dtype(model: Any) -> None:
    model.layers[3].weight = nn.Parameter(model.layers[1].weight.data.view(torch.int32), requires_grad=False)


def _buffer(model: Any) -> None:
    model.layers[3].register_buffer("shadow", model.layers[1].weight.data)


def _half_frozen(model: Any) -> None:
    _shared(model)
    model.layers[3].weight.requires_grad_(False)


@pytest.mark.parametrize("change", [_transposed, _row, _other_dtype, _buffer, _half_frozen], ids=lambda c: c.__name__)
def test_what_overlaps_otherwise_is_refused_by_both_names_and_left_as_it_is(change: Callable[[Any], Any]) -> None:
    module: Any = build(_with(change))
    before = {name: (value, value.clone()) for name, value in module.state_dict(keep_vars=True).items()}
    with pytest.raises(UnsupportedError, match=r"'layers\.1\.weight' and .*'layers\.3\.\w+' share"):
        ShardedModel(module, device="emulated")
    for name, value in module.state_dict(keep_vars=True).items():
        assert value is before[name][0]
        assert torch.equal(value, before[name][1])


@pytest.mark.filterwarnings("ignore:'layers.1.weight' and 'layers.3.weight' share")
@pytest.mark.parametrize(
    ("options", "error"),
    [({"dtype": {"nowhere": torch.float16}}, ValueError), ({"model_data_memory": 1}, BudgetError)],
    ids=["option", "budget"],
)
def test_parameters_of_the_same_memory_are_as_before_if_wrapping_fails(
    options: dict[str, Any], error: type[Exception]
) -> None:
    module: Any = build(_with(_shared))
    before = dict(module.named_parameters(remove_duplicate=False))
    with pytest.raises(error):
        ShardedModel(module, device="emulated", **options)
    after = dict(module.named_parameters(remove_duplicate=False))
    assert all(after[name] is before[name] for name in before) and len(list(module.parameters())) == len(before)
    one, other = module.layers[1].weight, module.layers[3].weight
    assert one.data_ptr() == other.data_ptr() and torch.equal(one, build(_with(_shared)).layers[1].weight)
    model = ShardedModel(module, device="emulated")
    assert model.layers[3].weight is model.layers[1].weight


def test_buffers_may_share_memory() -> None:
    def shadows(model: Any) -> None:
        model.register_buffer("one", torch.ones(4))
        model.register_buffer("other", model.one[:2])

    assert_same(weights_of(wrap(make=_with(shadows))), dict(build(_with(shadows)).state_dict()))


def test_a_plain_attribute_that_views_a_parameter_keeps_what_it_has() -> None:
    module: Any = build()
    module.view = module.layers[0].weight.detach().t()
    model = ShardedModel(module, device="emulated")
    with torch.no_grad():
        model.layers[0].weight.zero_()
    assert torch.equal(module.view, build().layers[0].weight.t())
