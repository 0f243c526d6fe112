"""`dtype=`, for all of a model or by module; and the dtypes that cannot be."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import ShardedModel, ShardedOptimizer, estimate_memory
from tests.zoo import mlp

BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"reuse_fp16_shard": 1}, TypeError, "reuse_fp16_shard must be True or False, found 1"),
    ({"reuse_fp16_shard": True, "accumulate_dtype": torch.float32}, ValueError, "leave one of the two out"),
    ({"reduce_dtype": torch.int32}, ValueError, "reduce_dtype must be None or one of"),
    ({"reduce_dtype": torch.float64}, ValueError, "reduce_dtype must be None or one of"),
    ({"accumulate_dtype": "int8"}, ValueError, "accumulate_dtype must be None or one of"),
    ({"dtype": {nn.LayerNorm: torch.float32}}, ValueError, "no module is chosen by <class"),
    ({"dtype": {"layers.9": torch.float32}}, ValueError, "no module is chosen by 'layers.9'"),
    ({"dtype": {"*": torch.int8}}, ValueError, r"dtype of '\*' must be None or one of"),
    ({"dtype": {3: torch.float32}}, TypeError, "module classes and names of modules as keys, found 3"),
    ({"dtype": torch.int8}, ValueError, "dtype must be None or one of"),
]


@pytest.mark.parametrize(("arguments", "error", "words"), BAD, ids=str)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    module = mlp.build()
    with pytest.raises(error, match=words):
        ShardedModel(module, device="emulated", **arguments)
    with pytest.raises(error, match=words):
        estimate_memory(module, **arguments)
    assert not any(hasattr(parameter, "_gemini") for parameter in module.parameters())


class Mixed(nn.Module):
    """An embedding, norms, a leaf, a tied head."""

    norm: type[nn.Module] = nn.LayerNorm

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.blocks = nn.ModuleList(nn.Sequential(self.norm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.last = self.norm(16)
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("temperature", torch.tensor(2.0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.last(x)) / self.temperature.to(x.dtype)


class WrittenNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class WrittenAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor, *rest: Tensor, **options: Any) -> Any:  # type: ignore[override]
        out, weights = super().forward(x.float(), *(each.float() for each in rest), **options)
        return out.to(x.dtype), weights


class Written(Mixed):
    """`Mixed` with the casts written out."""

    norm = WrittenNorm

    def __init__(self) -> None:
        super().__init__()
        attention = WrittenAttention(16, 2, batch_first=True)
        attention.load_state_dict(self.attention.state_dict())
        self.attention = attention


def tokens(step: int) -> Tensor:
    return torch.randint(24, (2, 6), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(tokens(step)).float().logsumexp(-1).square().mean()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("place", mlp.PLACES)
def test_norms_and_attention_in_fp32_equal_a_model_that_casts(place: str, reuse: bool) -> None:
    dtypes = {nn.LayerNorm: torch.float32, "attent*": torch.float32, "*": torch.bfloat16}
    model = mlp.wrap(place, Mixed, dtype=dtypes, reuse_fp16_shard=reuse)
    plain = mlp.build(Written).to(torch.bfloat16)
    plain.temperature = plain.temperature.float()
    for module in plain.modules():
        if isinstance(module, (WrittenNorm, WrittenAttention)):
            module.float()
    assert {n: p.dtype for n, p in model.named_parameters()} == {n: p.dtype for n, p in plain.named_parameters()}
    assert model.temperature.dtype is torch.float32
    optimizer, its = ShardedOptimizer(model, mlp.adam(model.parameters())), mlp.adam(plain.parameters())
    for step in range(4):
        loss, wanted = loss_of(model, step), loss_of(plain, step)
        assert torch.equal(loss, wanted)
        loss.backward()
        wanted.backward()
        optimizer.step()
        its.step()
        its.zero_grad()
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(plain))


def test_what_a_module_of_another_dtype_returns_has_the_dtype_of_its_input() -> None:
    dtypes = {"embed": torch.float32, "head": torch.float32, nn.Linear: None, "*": torch.bfloat16}
    seen: dict[str, list[torch.dtype]] = {}
    model = ShardedModel(mlp.build(Mixed), device="emulated", dtype=dtypes)
    for name in ("embed", "head", "last"):
        module = model.get_submodule(f"module.{name}")
        module.register_forward_hook(lambda m, args, out, name=name: seen.__setitem__(name, [args[0].dtype, out.dtype]))
    with pytest.raises(RuntimeError, match="dtype"):  # `None` keeps fp32 and casts nothing
        model(tokens(0))
    assert seen["embed"] == [torch.int64, torch.bfloat16], "no floating-point input: the model's default"
    dtypes.pop(nn.Linear)
    model = ShardedModel(mlp.build(Mixed), device="emulated", dtype=dtypes)
    module = model.get_submodule("module.head")
    module.register_forward_hook(lambda m, args, out: seen.__setitem__("head", [args[0].dtype, out.dtype]))
    assert loss_of(model, 0).isfinite()
    assert seen["head"] == [torch.float32, torch.bfloat16]


def test_tied_weights_have_one_dtype() -> None:
    with pytest.raises(ValueError, match=r"'embed.weight' torch.float32, and tied to it 'head.weight' torch.bfloat16"):
        ShardedModel(mlp.build(Mixed), device="emulated", dtype={"embed": torch.float32, "*": torch.bfloat16})


def test_a_module_that_keeps_its_dtype_is_cast_around() -> None:
    model = ShardedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), dtype={"1": None, "*": torch.bfloat16})
    out = model(torch.ones(1, 4, dtype=torch.bfloat16))
    assert out.dtype is torch.bfloat16
    assert model.module[1].weight.dtype is torch.float32


def test_inputs_of_the_model_are_given_in_its_dtype() -> None:
    """Only inputs of modules with a dtype of their own are cast: FSDP2's policy casts those of the root."""
    model = ShardedModel(nn.Linear(16, 16), device="emulated", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        model(torch.randn(4, 16))
    assert model(torch.randn(4, 16).bfloat16()).dtype == torch.bfloat16
