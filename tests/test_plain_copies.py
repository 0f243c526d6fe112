"""`copy.deepcopy`, moving averages, and conversions that change nothing."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from gemini import ShardedModel, UnsupportedError, set_leaf_module
from tests import plain_copies
from tests.mlp import (
    CHUNK_NUMEL,
    PLACES,
    WIDTH,
    Mlp,
    assert_same,
    build,
    inputs,
    loss_of,
    plain,
    sharded,
    train_step,
    weights_of,
    wrap,
)
from tests.plain_copies import Parts


@pytest.mark.parametrize("place", PLACES)
def test_a_deepcopy_is_the_plain_module_whole_and_on_its_own(place: str) -> None:
    plain_copies.copies_are_plain(0, 1, {}, place)


@pytest.mark.parametrize("case", [plain_copies.copies_of_parts_are_plain, plain_copies.averages_of_parts])
def test_copies_of_the_module_and_of_parts_of_it_are_plain(case: Callable[..., None]) -> None:
    case(0, 1, {})


def test_a_part_is_refused_inside_a_forward_and_plain_again_after_close() -> None:
    class Copies(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            copy.deepcopy(self.layers[1])
            return super().forward(x)

    model = wrap(make=Copies)
    with pytest.raises(Exception, match=r"copy.deepcopy\(\) inside a forward"):
        model(inputs(0))
    model.close()
    assert not any("__reduce_ex__" in vars(module) for module in model.module.modules())


def test_a_wrapper_that_hands_attributes_on_is_copied_itself() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

    model = wrap(make=lambda: Wrapper(Mlp()))
    for outer in (model.module, Wrapper(model.module.inner)):
        copied: Any = copy.deepcopy(outer)
        assert type(copied) is Wrapper
        assert torch.equal(copied.inner(inputs(0)), model.module.inner(inputs(0)))


def test_a_module_with_a_way_to_copy_itself_is_copied_so() -> None:
    class Counts(Mlp):
        copies = 0

        def __deepcopy__(self, memo: dict[int, Any]) -> "Counts":
            made = Counts()
            made.load_state_dict(self.state_dict())
            made.copies = self.copies + 1
            return made

    model = wrap(make=Counts)
    copied: Any = copy.deepcopy(model.module)
    assert copied.copies == 1
    assert torch.equal(copied(inputs(0)), model(inputs(0)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_copy_of_16_bit_weights_has_those_weights(dtype: torch.dtype) -> None:
    model = wrap(dtype=dtype)
    copied = copy.deepcopy(model)
    assert {parameter.dtype for parameter in copied.parameters()} == {dtype}
    assert_same(dict(copied.state_dict()), weights_of(model))


def test_a_copy_keeps_the_users_hooks_and_what_is_frozen_and_can_be_wrapped() -> None:
    module = build(Parts)
    module.layers[1].weight.requires_grad_(False)
    seen: list[nn.Module] = []
    module.layers[2].register_forward_pre_hook(lambda layer, args: seen.append(layer))
    module.layers[2].register_forward_hook(module.note)  # a method of the module goes over to the copy
    model = ShardedModel(module, device="emulated", chunk_size=CHUNK_NUMEL, tensor_placement_policy="cpu")
    copied: Any = copy.deepcopy(model)
    assert [p.requires_grad for p in copied.parameters()] == [p.requires_grad for p in model.parameters()]
    wanted = model(inputs(0)).detach()
    seen.clear()
    assert torch.equal(copied(inputs(0)), wanted)
    assert [layer is copied.layers[2] for layer in seen] == [True]
    assert (copied.noted, model.module.noted) == (1, 1)
    model.close()
    again = ShardedModel(copied, device="emulated")
    assert torch.equal(again(inputs(0)), wanted)


def test_a_plain_module_around_a_sharded_one_is_copied_whole() -> None:
    outer = nn.Sequential(wrap(), nn.Linear(WIDTH, 3))
    copied = copy.deepcopy(outer)
    assert type(copied[0]) is Mlp
    assert torch.equal(copied(inputs(1)), outer(inputs(1)))


def test_a_copy_is_refused_inside_a_forward() -> None:
    class Copies(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            copy.deepcopy(model)
            return super().forward(x)

    model = wrap(make=Copies)
    with pytest.raises(Exception, match=r"copy.deepcopy\(\) inside a forward"):
        model(inputs(0))


AVERAGES: dict[str, dict[str, Any]] = {
    "mean": {},
    "ema": {"avg_fn": get_ema_avg_fn(0.9)},
    "ema of lists": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_an_averaged_model_has_the_bits_of_the_plain_one(kind: str) -> None:
    """At a budget that holds a third of the chunks: a function of all parameters takes them chunk by chunk."""
    both = [sharded(make=Parts), plain(make=Parts)]
    averages = []
    for model, optimizer in both:
        average = AveragedModel(model, **AVERAGES[kind])
        for step in range(3):
            train_step(model, optimizer, step)
            average.update_parameters(model)
        averages.append(average)
    assert_same(dict(averages[0].state_dict()), dict(averages[1].state_dict()))
    assert torch.equal(averages[0](inputs(5)), averages[1](inputs(5)))
    assert_same(weights_of(both[0][0]), weights_of(both[1][0]))


def test_functions_of_lists_return_and_write_what_they_do_on_plain_parameters() -> None:
    model, reference = wrap(), build()
    mine, theirs = list(model.parameters()), list(reference.parameters())
    factors = [1.0 + number for number in range(len(mine))]
    for got, wanted in zip(torch._foreach_mul(mine, factors), torch._foreach_mul(theirs, factors)):
        assert torch.equal(got, wanted)
    assert len(torch._foreach_norm(mine)) == len(mine)
    with torch.no_grad():
        for parameters in (mine, theirs):
            torch._foreach_mul_(parameters, factors)
            torch._foreach_add_(parameters, [torch.ones_like(p) for p in theirs], alpha=0.5)
    with pytest.raises(RuntimeError, match="length"):
        torch._foreach_mul(mine, factors[:-1])
    assert_same(weights_of(model), weights_of(reference))


CHANGE_NOTHING: dict[str, Callable[[Any], Any]] = {
    "to device": lambda m: m.to("cpu"),
    "to dtype": lambda m: m.to(torch.float32),
    "to both": lambda m: m.to("cpu", torch.float32, non_blocking=True),
    "like a tensor": lambda m: m.to(torch.zeros(3)),
    "cpu": lambda m: m.cpu(),
    "float": lambda m: m.float(),
}


@pytest.mark.parametrize("kind", CHANGE_NOTHING)
def test_a_conversion_that_changes_nothing_does_nothing(kind: str) -> None:
    model, optimizer = sharded(make=Parts)
    assert CHANGE_NOTHING[kind](model) is model
    parameter = model.layers[0].weight
    assert CHANGE_NOTHING[kind](parameter) is parameter
    outer = nn.ModuleList([model])
    assert CHANGE_NOTHING[kind](outer)[0] is model
    reference, plain_optimizer = plain(make=Parts)
    train_step(model, optimizer)
    train_step(reference, plain_optimizer)
    assert_same(weights_of(model), weights_of(reference))


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.half(),
        lambda m: m.to("meta"),
        lambda m: m.to_empty(device="cpu"),
        lambda m: m.to(memory_format=torch.channels_last),
        lambda m: m.cuda(),
        lambda m: m.share_memory(),
    ],
    ids=range(6),
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda() is no error there")
def test_a_conversion_that_changes_something_is_refused(convert: Callable[[Any], Any]) -> None:
    class Convolves(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(2, 2, 3)

    model = wrap(make=Convolves)
    with pytest.raises(UnsupportedError, match=r"copy\.deepcopy\(model\)"):
        convert(model)
    assert_same(weights_of(model), dict(build(Convolves).state_dict()))


def to_empty(module: nn.Module) -> None:
    module.to_empty(device="cpu")


def one_by_one(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = torch.empty_like(parameter)


EMPTIES: dict[str, Callable[[nn.Module], object]] = {
    "to_empty": to_empty,
    "to_empty of a part": lambda module: to_empty(module.layers[1]),  # type: ignore[index, union-attr]
    "one by one": one_by_one,
}


@pytest.mark.parametrize("kind", EMPTIES)
@pytest.mark.parametrize("place", ["smallest", "cuda"])
def test_a_wrapped_module_cannot_be_emptied(kind: str, place: str) -> None:
    emptied_is_refused(0, 1, kind, place)


def emptied_is_refused(rank: int, world_size: int, kind: str, place: str) -> None:
    model, optimizer = sharded(place)
    reference, plain_optimizer = plain()
    with pytest.raises(UnsupportedError, match=r"would lose its values.*copy\.deepcopy\(model\)"):
        EMPTIES[kind](model.module)
    assert_same(weights_of(model), weights_of(reference))
    for each in (model, reference):
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.data = torch.empty_like(parameter).fill_(0.5)  # written to, it has values
    train_step(model, optimizer)
    train_step(reference, plain_optimizer)
    for name, value in weights_of(model).items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=0, atol=1e-4)
    model.close()


def test_a_tensor_converted_to_be_like_a_parameter_fetches_nothing() -> None:
    model = wrap(dtype=torch.bfloat16)
    before = model.executor.fetcher.next_use.position
    assert torch.zeros(2).to(model.layers[0].weight).dtype is torch.bfloat16
    assert model.executor.fetcher.next_use.position == before
    assert model.layers[0].weight.to(torch.float32).dtype is torch.float32


def test_forward_has_the_signature_of_the_wrapped_modules() -> None:
    class Named(Mlp):
        def forward(self, input_ids: Tensor, *, labels: Tensor | None = None) -> Tensor:
            return super().forward(input_ids)

    class Own(ShardedModel):
        def forward(self, first: Tensor) -> Tensor:
            return -super().forward(first)

    model = wrap(make=Named)
    assert inspect.signature(model.forward) == inspect.signature(build(Named).forward)
    assert torch.equal(model.forward(input_ids=inputs(0)), build(Named)(inputs(0)))
    own = Own(build(), device="emulated")
    assert list(inspect.signature(own.forward).parameters) == ["first"]
    assert torch.equal(own(inputs(0)), -build()(inputs(0)))


def test_a_mark_for_a_leaf_is_copied() -> None:
    module = build(Parts)
    set_leaf_module(module, nn.LSTM)
    model = ShardedModel(module, device="emulated")
    copied: Any = copy.deepcopy(model)
    assert [type(part).__name__ for part in set_leaf_module(copied, nn.LSTM)] == ["LSTM"]
    assert torch.equal(loss_of(copied), loss_of(model))
