"""`copy.deepcopy` of a model, of the wrapped module and of its parts."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import ShardedModel, ShardedOptimizer, set_leaf_module
from tests.harness.on_ranks import on_ranks_with
from tests.zoo.mlp import (
    CHUNK_NUMEL,
    PLACES,
    WIDTH,
    Mlp,
    adam,
    assert_same,
    build,
    inputs,
    loss_of,
    train_step,
    weights_of,
    wrap,
)
from tests.zoo.plain_copies import WRAPS, Parts, everywhere


@pytest.mark.sampled(2)
@on_ranks_with("arguments", {1: [{"place": place} for place in PLACES], 2: WRAPS}, timeout_s=90)
def test_a_deepcopy_is_the_plain_module_whole_and_on_its_own(
    rank: int, world_size: int, arguments: dict[str, Any]
) -> None:
    """A copy is equal and shares nothing; training the one does not change the other."""
    model = wrap(make=Parts, **arguments)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    train_step(model, optimizer)
    before = weights_of(model)
    copied: Any = copy.deepcopy(model)
    assert type(copied) is Parts
    assert {type(parameter) for parameter in copied.parameters()} == {nn.Parameter}
    assert {tensor.device.type for tensor in (*copied.parameters(), *copied.buffers())} == {"cpu"}
    assert copied.tied.weight is copied.layers[0].weight
    assert list(copied.state_dict()) == list(build(Parts).state_dict())
    assert_same(dict(copied.state_dict()), before)
    for module in copied.modules():
        own = (module._forward_hooks, module._forward_pre_hooks, module._state_dict_hooks, module._backward_hooks)
        assert not any(own), "hooks of the sharded model are left in its copy"
    plain_optimizer = adam(copied.parameters())
    train_step(copied, plain_optimizer, 1)
    assert_same(weights_of(model), before)
    train_step(model, optimizer, 2)
    assert torch.equal(loss_of(copy.deepcopy(model), 3), loss_of(model, 3))
    model.close()


@everywhere
def test_copies_of_the_module_and_of_parts_of_it_are_plain(
    rank: int, world_size: int, arguments: dict[str, Any]
) -> None:
    """The module itself, modules in it, parameters, and containers of those: whole, tied as they were, on their own."""
    model = wrap(make=Parts, **arguments)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    train_step(model, optimizer)
    wanted = weights_of(model)
    copied: Any = copy.deepcopy(model.module)
    assert type(copied) is Parts
    assert_same(dict(copied.state_dict()), wanted)
    assert copied.tied.weight is copied.layers[0].weight
    module_too, layers, weight = copy.deepcopy([model.module, model.module.layers, model.tied.weight])
    assert module_too.layers is layers
    assert module_too.tied.weight is weight
    for path in ("layers", "layers.2", "norm", "recurrent"):
        part = copy.deepcopy(model.module.get_submodule(path))
        assert_same({f"{path}.{name}": value for name, value in part.state_dict().items()}, _of(path, wanted))
    for each in (*copied.modules(), *module_too.modules()):
        assert "__reduce_ex__" not in vars(each)
        assert not any((each._forward_hooks, each._forward_pre_hooks, each._state_dict_hooks))
    assert {(type(t), t.device.type) for t in copied.parameters()} == {(nn.Parameter, "cpu")}
    bias, data = copy.deepcopy(model.layers[1].bias), copy.deepcopy(model.layers[1].bias.detach())
    assert (type(bias), type(data), bias.requires_grad) == (nn.Parameter, Tensor, True)
    assert torch.equal(bias, wanted["layers.1.bias"])
    assert torch.equal(data, bias)
    train_step(copied, adam(copied.parameters()), 1)
    assert_same(weights_of(model), wanted)
    assert torch.equal(loss_of(module_too, 3), loss_of(model, 3))
    model.close()


def _of(path: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if name.startswith(f"{path}.")}


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


def test_a_copy_of_modules_of_several_dtypes_casts_between_them() -> None:
    model = wrap(dtype={"layers.1": torch.bfloat16, "layers.3": torch.float16})
    wanted = model(inputs(0)).detach()
    copied: Any = copy.deepcopy(model)
    again: Any = copy.deepcopy(copied)
    model.close()
    for each in (copied, again):
        assert torch.equal(each(inputs(0)), wanted)


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


def test_a_mark_for_a_leaf_is_copied() -> None:
    module = build(Parts)
    set_leaf_module(module, nn.LSTM)
    model = ShardedModel(module, device="emulated")
    copied: Any = copy.deepcopy(model)
    assert [type(part).__name__ for part in set_leaf_module(copied, nn.LSTM)] == ["LSTM"]
    assert torch.equal(loss_of(copied), loss_of(model))
