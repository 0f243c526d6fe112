"""Inputs and outputs of modules that have another dtype than the rest (`dtype={...}`), in whatever they are packed."""

import dataclasses
import warnings
from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding

import gemini
from gemini import DivergenceError, ShardedModel, ShardedOptimizer
from gemini.engine.trainer import hooks
from gemini.model.operators import map_tensors, tensors_in
from optim import HybridAdam
from tests.harness.on_ranks import on_ranks
from tests.zoo import mlp


@dataclasses.dataclass
class Open:
    hidden: Tensor
    mask: Tensor | None = None
    note: str = ""
    made: Any = dataclasses.field(init=False, default=None)


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: Tensor
    mask: Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    hidden: Tensor
    mask: Tensor | None = None


@dataclasses.dataclass
class Derived:
    """Whose constructor would change what it is given."""

    hidden: Tensor
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        self.hidden = self.hidden + 1


class Named(NamedTuple):
    hidden: Tensor
    mask: Tensor | None = None


class Encoding(UserDict[str, Any]):
    """A mapping that torch does not know, as what a tokenizer returns."""

    def __init__(self, hidden: Tensor, mask: Tensor | None = None) -> None:
        super().__init__(hidden=hidden, mask=mask)

    @property
    def hidden(self) -> Tensor:
        return self["hidden"]  # type: ignore[no-any-return]

    @property
    def mask(self) -> Tensor | None:
        return self["mask"]  # type: ignore[no-any-return]


@dataclasses.dataclass
class Nested:
    inner: Any
    mask: Tensor | None = None

    @property
    def hidden(self) -> Tensor:
        return self.inner["parts"][0].hidden  # type: ignore[no-any-return]


class Unpacks(nn.Module):
    """Takes a batch and returns another one with the layer's output in its place, like the model around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: list[Any] = []

    def forward(self, batch: Any) -> Any:
        self.seen = [batch, batch.hidden.dtype]
        hidden = self.layer(batch.hidden)
        if isinstance(batch, Nested):
            return Nested({"parts": [Frozen(hidden)]}, batch.mask)
        return type(batch)(hidden, batch.mask)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.unpacks, self.last = nn.Linear(4, 4), Unpacks(), nn.Linear(4, 4)

    def forward(self, batch: Any) -> Tensor:
        batch = self.unpacks(batch)
        return self.last(batch.hidden)  # type: ignore[no-any-return]


MASK = torch.ones(2, dtype=torch.bool)
HIDDEN = torch.linspace(-1, 1, 8, dtype=torch.bfloat16).view(2, 4)
BATCHES = [
    *(lambda kind=kind: kind(HIDDEN, MASK) for kind in (Open, Frozen, Slotted, Derived, Named)),
    lambda: Nested({"parts": [Frozen(HIDDEN)], "size": 2}, MASK),
    lambda: Encoding(HIDDEN, MASK),
]


@pytest.mark.parametrize("make", BATCHES, ids=["open", "frozen", "slots", "derived", "tuple", "nested", "encoding"])
def test_tensors_in_a_dataclass_or_mapping_are_cast_as_those_in_a_tuple_are(make: Any) -> None:
    model = ShardedModel(mlp.build(Around), device="emulated", dtype={"unpacks": torch.float32, "*": torch.bfloat16})
    plain = mlp.build(Around).to(torch.bfloat16)
    plain.unpacks.float()
    batch = make()
    given = batch.hidden
    out = model(batch)
    assert batch.hidden is given, "the caller's own batch stays as it was"
    received, dtype = model.module.unpacks.seen
    assert dtype is torch.float32
    assert type(received) is type(batch)
    assert received.mask is MASK
    returned = plain.unpacks.layer(given.float())
    if isinstance(batch, Derived):
        returned = returned + 1
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, plain.last(returned.bfloat16()))
    out.float().square().mean().backward()
    assert model.module.unpacks.layer.weight.grad.isfinite().all()


def test_tensors_in_any_container_are_mapped_and_what_does_not_change_is_the_same_object() -> None:
    one, two = torch.ones(1), torch.ones(1, dtype=torch.int64)
    for make in (lambda *its: set(its), lambda *its: frozenset(its), lambda *its: UserDict(enumerate(its))):
        values = make(one, two)
        mapped = map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, values)
        assert type(mapped) is type(values)
        assert sorted(str(tensor.dtype) for tensor in tensors_in(mapped)) == ["torch.float64", "torch.int64"]
        assert {id(tensor) for tensor in tensors_in(values)} == {id(one), id(two)}
        assert map_tensors(lambda tensor: tensor, values) is values


def test_a_dataclass_without_a_tensor_to_cast_is_handed_on_as_it_is() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor, options: Any) -> Any:  # type: ignore[override]
            return super().forward(x), options

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.looks, self.other = Looks(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, options: Any) -> Any:
            x, returned = self.looks(x, options)
            return self.other(x), returned

    model = ShardedModel(mlp.build(Root), device="emulated", dtype={"looks": torch.float32, "*": torch.bfloat16})
    options = Open(torch.zeros(2, dtype=torch.int64), MASK)
    out, returned = model(HIDDEN, options)
    assert returned is options
    assert out.dtype is torch.bfloat16


def test_reusing_16_bit_memory_of_a_model_that_has_none_is_said_once() -> None:
    with pytest.warns(UserWarning, match=r"does nothing here.*dtype=torch.float16") as found:
        model = mlp.wrap("cuda", reuse_fp16_shard=True)
    assert len(found) == 1
    assert found[0].filename == mlp.__file__, "where the user wraps"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = gemini.ShardedOptimizer(model, mlp.adam(model.parameters()))
        mlp.train_step(model, optimizer)
        for dtype in (torch.float16, torch.bfloat16, {"layers.1": torch.float16}):
            mlp.wrap("cuda", reuse_fp16_shard=True, dtype=dtype)
        mlp.wrap("cuda")


def test_a_tokenizers_batch_moves_to_the_models_device() -> None:
    batch = BatchEncoding({"input_ids": torch.ones(2, 3, dtype=torch.int64), "n": 1})
    there = hooks.moved(batch, torch.device("meta"))
    assert there["input_ids"].is_meta and not batch["input_ids"].is_meta and hooks.num_samples(there) == 2


# -- `cast_inputs=True`: the inputs of the model, and nothing else.


class _Mixes(nn.Module):
    """Takes inputs of several dtypes, in containers and by name, and notes how they came."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, batch: dict[str, Tensor], *, scale: Tensor) -> Tensor:
        self.seen = [batch["x"].dtype, batch["mask"].dtype, batch["ids"].dtype, scale.dtype]
        hidden = self.first(batch["x"] * scale) * batch["mask"]
        return self.last(hidden.relu())[batch["ids"]]

    def sampled(self, batch: dict[str, Tensor]) -> Tensor:
        return self(batch, scale=torch.ones(1))


def _batch(step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
    return {"x": x.to(dtype), "mask": torch.ones(6, 8, dtype=torch.bool), "ids": torch.tensor([0, 3, 5])}


@on_ranks(1, 2)
@pytest.mark.parametrize(("dtype", "by_argument"), [(torch.bfloat16, False), (torch.float16, True)], ids=str)
def test_a_model_that_casts_its_inputs_trains_as_one_whose_script_casts_them(
    rank: int, world_size: int, dtype: torch.dtype, by_argument: bool
) -> None:
    found = []
    for casts in (True, False):
        torch.manual_seed(0)
        module = _Mixes().to(dtype)
        # As given, or as cast while it is wrapped: the same weights.
        module, dtypes = (module.float(), {"dtype": dtype}) if by_argument else (module, {})
        model = ShardedModel(module, device="emulated", chunk_size=80, cast_inputs=casts, **dtypes)
        optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2), initial_scale=1.0)
        given, outputs = torch.float32 if casts else dtype, []
        for step in range(2):
            output = model(_batch(2 * step + rank, given), scale=torch.ones(1, dtype=given))
            assert model.module.seen == [dtype, torch.bool, torch.int64, dtype] and output.dtype is dtype
            outputs.append(output.detach().clone())
            optimizer.backward(output.float().square().sum())
            optimizer.step()
        found.append((gemini.state_hash(model, optimizer), outputs, model.plan.hash))
        if casts:
            model.eval()
            model.sampled(_batch(9, given))  # the module calls itself
            assert model.module.seen == [dtype, torch.bool, torch.int64, dtype]
        model.close()
    (ended, outputs, plan), (expected, theirs, their_plan) = found
    assert (ended, plan) == (expected, their_plan)
    torch.testing.assert_close(outputs, theirs, rtol=0, atol=0)


def test_inputs_are_cast_to_one_dtype_or_the_model_is_refused() -> None:
    for refused, words in (
        ({"dtype": {"": torch.bfloat16}}, "leave cast_inputs out"),
        ({}, r"weights of one dtype, found torch\.bfloat16 and torch\.float32: give dtype="),
    ):
        module = _Mixes()
        module.first.to(torch.bfloat16)
        with pytest.raises(ValueError, match=words):
            ShardedModel(module, device="emulated", cast_inputs=True, **refused)  # type: ignore[arg-type]
        module(_batch(0, torch.bfloat16) | {"mask": torch.zeros(6, 8)}, scale=torch.ones(1, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="cast_inputs must be True or False, or None, found 'yes'"):
        ShardedModel(_Mixes(), device="emulated", cast_inputs="yes")  # type: ignore[arg-type]
    # One that is in no chunk does not count.
    module = _Mixes().bfloat16()
    module.seen_by = nn.Linear(2, 2)
    model = ShardedModel(module, device="emulated", cast_inputs=True, ignored_parameters=["seen_by.*"])
    assert model(_batch(0, torch.float32), scale=torch.ones(1)).dtype is torch.bfloat16
    model.close()
    with pytest.raises(RuntimeError, match="dtype"):  # the casts ended with it
        module(_batch(0, torch.float32), scale=torch.ones(1))


@on_ranks(2)
def test_ranks_that_cast_their_inputs_otherwise_make_no_model(rank: int, world_size: int) -> None:
    with pytest.raises(DivergenceError, match="cast_inputs=True against cast_inputs=False"):
        ShardedModel(_Mixes(), device="emulated", dtype=torch.bfloat16, cast_inputs=rank == 0)
