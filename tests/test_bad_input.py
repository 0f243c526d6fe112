"""Every bad input gets an error that names what is wrong and changes nothing; what is odd but legal just works."""

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemini import (
    BudgetError,
    GeminiError,
    ReleasedParameterError,
    ShardedModel,
    ShardedOptimizer,
    SlotError,
    StaleGraphError,
    UnsupportedError,
    set_leaf_module,
    state_hash,
    unset_leaf_module,
)
from gemini.model.operators import find_operators
from optim import HybridAdam
from tests import mlp
from tests.mlp import (
    PLACES,
    WIDTH,
    Mlp,
    adam,
    assert_same,
    build,
    loss_of,
    plain,
    sharded,
    train_step,
    weights_of,
    wrap,
)

DTYPES = [None, torch.bfloat16]
everywhere = pytest.mark.parametrize("place", PLACES)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])


def num_fetches(model: ShardedModel) -> int:
    return model.executor.fetcher.num_fetches


def weight(model: nn.Module, layer: int = 0) -> nn.Parameter:
    module = model.module if isinstance(model, ShardedModel) else model
    return module.layers[layer].weight


# ---- arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"module": 3}, TypeError, "module must be a torch.nn.Module, found int"),
        ({"shard_strategy": "rows"}, ValueError, "shard_strategy='rows'.*'tensor', 'bucket', 'chunk'"),
        ({"shard_strategy": 3.5}, TypeError, "shard_strategy must be"),
        ({"process_group": "gloo"}, TypeError, "process_group must be a ProcessGroup or None, found str"),
        ({"stage": 4}, ValueError, "stage must be 0, 1, 2 or 3, found 4"),
        ({"stage": "3"}, ValueError, "stage must be 0, 1, 2 or 3, found '3'"),
        ({"stage": True}, ValueError, "stage must be"),
        ({"tensor_placement_policy": "gpu"}, ValueError, "tensor_placement_policy='gpu'.*auto.*cpu.*cuda"),
        ({"tensor_placement_policy": 1}, TypeError, "tensor_placement_policy must be a name"),
        ({"dtype": "bf16"}, ValueError, "dtype must be None or one of .*bfloat16.*found 'bf16'"),
        ({"dtype": torch.int8}, ValueError, "dtype must be None or one of"),
        ({"chunk_size": 1.5}, TypeError, "chunk_size must be an int"),
        ({"chunk_size": True}, TypeError, "chunk_size must be an int"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1 element, found 0"),
        ({"device": 1.5}, TypeError, "device must be"),
        ({"device": "nowhere"}, ValueError, "device='nowhere' is not a device"),
        ({"device": "meta"}, ValueError, "device='meta' is not here"),
        ({"device_memory": "2G"}, ValueError, "device_memory='2G' is not a size.*GB.*GiB"),
        ({"device_memory": []}, TypeError, "device_memory must be bytes"),
        ({"model_data_memory": -1}, ValueError, "model_data_memory must be a finite number of bytes"),
        ({"model_data_memory": float("nan")}, ValueError, "model_data_memory must be a finite number of bytes"),
        ({"model_data_memory": 2000, "device_memory": 1000}, ValueError, "model_data_memory=2000 is more than"),
        ({"host_memory": True}, TypeError, "host_memory must be bytes"),
        ({"host_memory": "much"}, ValueError, "host_memory='much' is not a size"),
        ({"rank_timeout": 0}, ValueError, "rank_timeout must be a number of seconds above 0"),
        ({"rank_timeout": float("nan")}, ValueError, "rank_timeout must be"),
        ({"rank_timeout": "long"}, ValueError, "rank_timeout must be"),
        ({"chunksize": 512}, TypeError, "no argument 'chunksize'; the nearest valid name is 'chunk_size'"),
        ({"placement_policy": "cpu"}, TypeError, "the nearest valid name is 'tensor_placement_policy'"),
    ],
    ids=str,
)
def test_a_wrong_argument_of_the_model_is_named(arguments: dict[str, Any], kind: type, message: str) -> None:
    module = build()
    before, classes = weights_of(module), [type(p) for p in module.parameters()]
    with pytest.raises(kind, match=message):
        ShardedModel(**{"module": module, "device": "emulated", **arguments})
    assert_same(weights_of(module), before)
    assert [type(p) for p in module.parameters()] == classes


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"model": nn.Linear(2, 2)}, TypeError, "model must be a ShardedModel, found Linear"),
        ({"optimizer": 3}, TypeError, "optimizer must be a plain torch optimizer, found int"),
        ({"optimizer": HybridAdam}, TypeError, "optimizer must be a plain torch optimizer"),
        ({"clip_grad_norm": "1"}, ValueError, "clip_grad_norm must be a number above 0 or None, found '1'"),
        ({"clip_grad_norm": 0.0}, ValueError, "clip_grad_norm must be a number above 0"),
        ({"clip_grad_norm": float("nan")}, ValueError, "clip_grad_norm must be a number above 0"),
        ({"elementwise": "yes"}, TypeError, "elementwise must be True or False, found 'yes'"),
        ({"clip_gradnorm": 1.0}, TypeError, "no argument 'clip_gradnorm'; the nearest valid name is 'clip_grad_norm'"),
    ],
    ids=str,
)
def test_a_wrong_argument_of_the_optimizer_is_named(arguments: dict[str, Any], kind: type, message: str) -> None:
    model = wrap()
    optimizer = adam(model.parameters())
    with pytest.raises(kind, match=message):
        ShardedOptimizer(**{"model": model, "optimizer": optimizer, **arguments})
    train_step(model, ShardedOptimizer(model, optimizer))  # the model has no optimizer yet


@pytest.mark.parametrize("policy", ["cpu", "auto", "cuda"])
def test_a_budget_below_the_minimum_names_tier_bytes_and_knob_and_leaves_the_module_alone(policy: str) -> None:
    module = build()
    before = weights_of(module)
    with pytest.raises(
        BudgetError, match=r"device: .*needs ([0-9]+) bytes.*budget is 1000 bytes.*model_data_memory="
    ) as e:
        ShardedModel(
            module,
            device="emulated",
            tensor_placement_policy=policy,
            model_data_memory=1000,
            chunk_size=mlp.CHUNK_NUMEL,
        )
    assert_same(weights_of(module), before)
    assert all(type(p) is nn.Parameter for p in module.parameters())
    needed = int(str(e.value).split("needs ")[1].split()[0])
    ShardedModel(
        module, device="emulated", tensor_placement_policy=policy, model_data_memory=needed, chunk_size=mlp.CHUNK_NUMEL
    )


def test_too_little_host_memory_names_host_memory_and_leaves_the_module_alone() -> None:
    module = build()
    before = weights_of(module)
    with pytest.raises(BudgetError, match=r"host: [0-9]+ bytes.*of 100 bytes.*Raise host_memory="):
        ShardedModel(module, device="emulated", tensor_placement_policy="cpu", host_memory=100)
    assert_same(weights_of(module), before)
    assert all(type(p) is nn.Parameter for p in module.parameters())


@pytest.mark.parametrize("num_chunks", [0, 1.5])
@pytest.mark.parametrize("make", [adam, torch.optim.AdamW, torch.optim.RMSprop], ids=lambda make: make.__name__)
def test_host_memory_that_ends_at_the_optimizer_state_is_refused_there(make: Any, num_chunks: float) -> None:
    """Before a step is half done; and what was taken until then is there for an optimizer that needs less."""
    state_bytes = 4 * mlp.CHUNK_NUMEL * mlp.LAYERS
    room = int(4 * mlp.CHUNK_NUMEL * num_chunks)
    model = wrap("cpu", host_memory=2 * state_bytes + room)  # parameters and gradients
    with pytest.raises(BudgetError, match=r"host: .*optim.*host_memory="):
        ShardedOptimizer(model, make(model.parameters()))
    assert model._tiers[1].ledger.bytes_by_kind["optim"] == 0
    assert_same(weights_of(model), weights_of(build()))
    optimizer = ShardedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    reference = build()
    for _ in range(2):
        train_step(model, optimizer, 0)
        train_step(reference, torch.optim.SGD(reference.parameters(), lr=0.1), 0)
    assert_same(weights_of(model), weights_of(reference))


def test_a_step_that_fails_half_way_is_final() -> None:
    """Momentum that is raised from 0 takes memory in the step, and there is some for the first chunks only."""
    homes_bytes = 2 * 4 * mlp.CHUNK_NUMEL * mlp.LAYERS  # parameters and gradients
    model = wrap("cpu", host_memory=homes_bytes + 10 * mlp.CHUNK_NUMEL)
    optimizer = ShardedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train_step(model, optimizer, 0)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(BudgetError, match="host_memory="):
        train_step(model, optimizer, 1)
    optimizer.param_groups[0]["momentum"] = 0.0
    going_on: list[Any] = [lambda: train_step(model, optimizer, 2), lambda: weights_of(model)]
    for goes_on in (*going_on, lambda: weight(model, 0).sum()):
        with pytest.raises(GeminiError, match=r"failed half way \(BudgetError: .*Build model and optimizer anew"):
            goes_on()
    model.close()


# ---- who belongs to whom ---------------------------------------------------------------------------------------


def test_the_optimizer_of_another_model_or_of_a_plain_one_is_refused() -> None:
    model, other, unwrapped = wrap(), wrap(), build()
    for parameters in (other.parameters(), unwrapped.parameters(), [nn.Parameter(torch.zeros(3))]):
        with pytest.raises(ValueError, match=r"param group 0 of HybridAdam .* not this model's"):
            ShardedOptimizer(model, adam(parameters))


def test_an_optimizer_made_before_wrapping_trains_the_wrapped_model() -> None:
    """Its parameters are the model's own: nothing is wrong with it."""
    module, (reference, plain_optimizer) = build(), plain()
    optimizer = adam(module.parameters())
    model = ShardedModel(module, device="emulated", chunk_size=mlp.CHUNK_NUMEL)
    wrapped = ShardedOptimizer(model, optimizer)
    for step in range(2):
        train_step(model, wrapped, step)
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), weights_of(reference))


def test_an_optimizer_that_has_stepped_or_is_wrapped_and_a_second_one_are_refused() -> None:
    module = build()
    stepped = adam(module.parameters())
    train_step(module, stepped)
    model = ShardedModel(module, device="emulated")
    with pytest.raises(UnsupportedError, match="has stepped before"):
        ShardedOptimizer(model, stepped)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    with pytest.raises(UnsupportedError, match="has a ShardedOptimizer already"):
        ShardedOptimizer(model, adam(model.parameters()))
    with pytest.raises(TypeError, match="found ShardedOptimizer"):
        ShardedOptimizer(wrap(), optimizer)


@pytest.mark.parametrize("what", ["model", "module", "child", "parameter", "parent"])
def test_wrapping_twice_is_refused(what: str) -> None:
    model = wrap()

    class Borrower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight(model)

    twice = {
        "model": model,
        "module": model.module,
        "child": model.module.layers[1],
        "parameter": Borrower(),
        "parent": nn.Sequential(nn.Linear(2, 2), model.module),
    }[what]
    with pytest.raises(UnsupportedError, match="already"):
        ShardedModel(twice, device="emulated")
    assert_same(weights_of(model), weights_of(build()))


@pytest.mark.parametrize("plain_kind", ["hybrid_adam", "adamw", "sgd", "foreach"])
@everywhere
def test_stepping_the_plain_optimizer_by_mistake_works_or_raises(place: str, plain_kind: str) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        if plain_kind == "hybrid_adam":
            return adam(parameters)
        if plain_kind == "adamw":
            return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)
        return torch.optim.SGD(parameters, lr=1e-2, foreach=plain_kind == "foreach")

    model, reference = wrap(place), build()
    optimizer, plain_optimizer = make(model.parameters()), make(reference.parameters())
    try:
        for step in range(3):
            train_step(model, optimizer, step)
    except GeminiError:
        return
    for step in range(3):
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), weights_of(reference))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.LBFGS(p),
        lambda p: torch.optim.Adafactor(p),
        lambda p: type("Lion", (torch.optim.SGD,), {})(p, lr=1e-2),
        lambda p: type("MyAdam", (HybridAdam,), {})(p),
    ],
    ids=["lbfgs", "adafactor", "subclass", "subclass_of_ours"],
)
def test_an_optimizer_that_is_not_known_to_be_elementwise_is_refused(make: Callable[..., Any]) -> None:
    model = wrap()
    with pytest.raises(UnsupportedError, match="elementwise=True"):
        ShardedOptimizer(model, make(model.parameters()))


def test_a_user_optimizer_is_taken_at_its_word() -> None:
    class Sign(torch.optim.Optimizer):
        """Signed momentum."""

        def __init__(self, params: Any, lr: float = 1e-2) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                        momentum.mul_(0.9).add_(p.grad)
                        p.sub_(momentum.sign() * group["lr"])

    model, reference = wrap(), build()
    optimizer = ShardedOptimizer(model, Sign(model.parameters()), elementwise=True)
    plain_optimizer = Sign(reference.parameters())
    for step in range(3):
        train_step(model, optimizer, step)
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), weights_of(reference))


# ---- the loop, in a wrong order --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((None,), "max_norm"), ((-1.0,), "max_norm"), (("1",), "max_norm"), ((1.0, 3.0), "norm_type must be 2 or inf")],
)
def test_wrong_arguments_of_clipping_are_named(arguments: tuple[Any, ...], message: str) -> None:
    model, optimizer = sharded()
    loss_of(model).backward()
    with pytest.raises(ValueError, match=message):
        optimizer.clip_grad_norm_(*arguments)
    optimizer.step()


def test_a_backward_after_clipping_is_not_silently_left_out_of_the_norm() -> None:
    """The norm that was clipped by is not that of the gradients which step() would use."""
    model, optimizer = sharded()
    loss_of(model).backward()
    optimizer.clip_grad_norm_(1.0)
    (loss_of(model, 1) * float("nan")).backward()
    before = state_hash(model, optimizer)
    with pytest.raises(GeminiError, match=r"backward\(\) after clip_grad_norm_\(\)"):
        optimizer.step()
    assert not torch.isfinite(optimizer.clip_grad_norm_(1.0))
    with pytest.warns(UserWarning, match="not finite"):
        optimizer.step()
    assert state_hash(model, optimizer) == before


@everywhere
def test_a_backward_through_a_graph_from_before_the_step_raises(place: str) -> None:
    model, optimizer = sharded(place)
    stale = loss_of(model)
    train_step(model, optimizer, 1)
    with pytest.raises((StaleGraphError, RuntimeError), match=r"before the last optimizer step|modified by an inplace"):
        stale.backward()
    optimizer.zero_grad()
    reference, plain_optimizer = plain()
    for step in (1, 2):
        train_step(reference, plain_optimizer, step)
    train_step(model, optimizer, 2)
    assert_same(weights_of(model), weights_of(reference))


@everywhere
def test_an_edit_between_forward_and_backward_never_gives_a_wrong_gradient(place: str) -> None:
    """Plain torch raises: the weight that backward needs is gone."""
    model, optimizer = sharded(place)
    loss = loss_of(model)
    with torch.no_grad():
        weight(model, 2).mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed since|edited"):
        loss.backward()
    optimizer.zero_grad()


@everywhere
def test_reading_weights_between_forward_and_backward_is_no_edit(place: str) -> None:
    model, optimizer = sharded(place)
    reference, plain_optimizer = plain()
    average = torch.zeros(WIDTH, WIDTH)
    loss = loss_of(model)
    for layer in range(mlp.LAYERS):
        assert weight(model, layer).data.norm() > 0
        assert weight(model, layer).detach().numpy().shape == (WIDTH, WIDTH)
        with torch.no_grad():
            average.lerp_(weight(model, layer), 0.5)
    loss.backward()
    optimizer.step()
    train_step(reference, plain_optimizer)
    assert_same(weights_of(model), weights_of(reference))


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_double_backward_works_or_is_refused() -> None:
    model, optimizer = sharded()
    reference = build()

    def penalty(module: nn.Module) -> Tensor:
        x = mlp.inputs(0).requires_grad_()
        (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return gradient.square().mean()

    with pytest.raises(UnsupportedError, match="double backward"):
        penalty(model).backward()
    optimizer.zero_grad()
    with pytest.raises(UnsupportedError, match="create_graph=True"):
        loss_of(model).backward(create_graph=True)
    optimizer.zero_grad()
    resident = wrap("cuda")
    try:
        penalty(resident).backward()
    except UnsupportedError:
        return
    penalty(reference).backward()
    for mine, theirs in zip(resident.parameters(), reference.parameters()):
        assert torch.equal(mine.grad, theirs.grad)


class EnablesGrad(nn.Linear):
    """Autograd saves its weight although grad mode was off when its forward began: no hooks are there."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.tanh(x @ self.weight)


def test_an_unhooked_save_of_a_released_parameter_is_an_error_or_right() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(EnablesGrad(WIDTH, WIDTH, bias=False) for _ in range(6)))

    model, reference = wrap(make=make, chunk_size=256), build(make)
    x = mlp.inputs(0)
    with torch.no_grad():
        outputs = reference(x), model(x)
    assert torch.equal(*outputs)
    outputs[0].square().sum().backward()
    refused = None
    try:
        outputs[1].square().sum().backward()
    except RuntimeError as error:
        refused = error
    if refused is not None:
        assert "modified by an inplace operation" in str(refused) or isinstance(refused, GeminiError)
        return
    for mine, theirs in zip(model.parameters(), reference.parameters()):
        assert torch.equal(mine.grad, theirs.grad)


def test_a_function_that_keeps_a_parameter_object_reads_it_again_in_backward() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.x, ctx.w = x.detach(), w
            return x * w

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            return grad * ctx.w, (grad * ctx.x).sum(0)

    class Scaled(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            x = Scale.apply(x, self.layers[0].bias)
            return super().forward(x)

    model, reference = wrap(make=Scaled), build(Scaled)
    loss_of(model).backward()
    loss_of(reference).backward()
    for mine, theirs in zip(model.parameters(), reference.parameters()):
        assert torch.equal(mine.grad, theirs.grad)


# ---- copies ----------------------------------------------------------------------------------------------------


PICKLES: list[Callable[[Any], Any]] = [pickle.dumps, lambda x: torch.save(x, io.BytesIO())]
WHAT = ["module", "layer", "parameter", "detached", "optimizer"]
COPIES = [(what, how) for what in WHAT for how in (copy.deepcopy, *PICKLES)]


@pytest.mark.parametrize(("what", "how"), COPIES + [("model", how) for how in PICKLES])
def test_copying_and_pickling_are_refused_with_the_way_out(what: str, how: Callable[[Any], Any]) -> None:
    """But for a copy of the model itself: see test_plain_copies.py."""
    model, optimizer = sharded()
    things = {
        "model": model,
        "module": model.module,
        "layer": model.module.layers[2],
        "parameter": weight(model),
        "detached": weight(model).detach(),
        "optimizer": optimizer,
    }
    with pytest.raises((UnsupportedError, ReleasedParameterError), match="state_dict"):
        how(things[what])
    train_step(model, optimizer)


# ---- gradients of others ---------------------------------------------------------------------------------------


@both_dtypes
def test_a_grad_scaler_is_refused(dtype: torch.dtype | None) -> None:
    model, optimizer = sharded(dtype=dtype)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, dtype=dtype)).backward()
    before = state_hash(model, optimizer)
    with pytest.raises(UnsupportedError, match="GradScaler"):
        scaler.step(optimizer)
    with pytest.raises(UnsupportedError, match="GradScaler"):
        scaler.unscale_(optimizer)
    assert state_hash(model, optimizer) == before
    optimizer.zero_grad()
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(loss_of(model, dtype=dtype)).backward()
    off.step(optimizer)
    off.update()
    reference, plain_optimizer = plain(dtype)
    train_step(reference, plain_optimizer, dtype=dtype)
    assert_same(weights_of(model), weights_of(reference))


def test_sparse_embedding_gradients_equal_dense_ones() -> None:
    class Embeds(nn.Module):
        def __init__(self, sparse: bool = True) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, WIDTH, sparse=sparse)
            self.body = Mlp(2)

        def forward(self, x: Tensor) -> Tensor:
            tokens = (x[:, :4] * 10).long() % 32
            return self.body(self.embed(tokens)).sum(1)

    model, reference = wrap(make=Embeds), build(lambda: Embeds(sparse=False))
    optimizer, plain_optimizer = ShardedOptimizer(model, adam(model.parameters())), adam(reference.parameters())
    for step in range(3):
        train_step(model, optimizer, step)
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), weights_of(reference))


# ---- edits of weights outside their operators ------------------------------------------------------------------


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _assign(p: nn.Parameter) -> None:
    p.data = torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view(p.shape)


def _add_in_place(p: nn.Parameter) -> None:
    p += 0.25


def _through_numpy(p: nn.Parameter) -> None:
    memory = p.detach() if p.dtype is torch.float32 else p.data.view(torch.int16)
    memory.numpy()[0] = 1


def _from_vector(p: nn.Parameter) -> None:
    torch.nn.utils.vector_to_parameters(torch.linspace(-1, 1, p.numel(), dtype=p.dtype), [p])


def _halve_rows(p: nn.Parameter) -> None:
    for row in p:
        if row.dim() or p.dim() == 1:
            row.mul_(0.5)


@torch.enable_grad()
def _zero_row_of_detached(p: nn.Parameter) -> None:
    p.detach()[0].zero_()


def _write_to_view_of_grad_mode(p: nn.Parameter) -> None:
    with torch.enable_grad():
        view = p.view(-1)
    view[2:5].zero_()


def _write_twice(p: nn.Parameter) -> None:
    view = p.view(-1)
    view[:2].zero_()
    p.norm()
    view[4:6].zero_()


EDITS: dict[str, Callable[[nn.Parameter], Any]] = {
    "mul_": lambda p: p.mul_(0.5),
    "data.mul_": lambda p: p.data.mul_(0.5),
    "detach.zero_": lambda p: p.detach().zero_(),
    "setitem": lambda p: p.__setitem__(0, 1),
    "data.setitem": lambda p: p.data.__setitem__(0, 1),
    "init.normal_": lambda p: nn.init.normal_(p, generator=_generator()),
    "init.zeros_": lambda p: nn.init.zeros_(p),
    "data = x": _assign,
    # values of the weight's own dtype: wider ones reach its master unrounded, see tests/wide_values.py
    "copy_": lambda p: p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape).to(p.dtype)),
    "+=": _add_in_place,
    "out=": lambda p: torch.mul(p, 0.5, out=p),
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
    "view.fill_": lambda p: p.view(-1)[3:9].fill_(0.5),
    "row.zero_": lambda p: p[0].zero_(),
    "chunk.mul_": lambda p: p.chunk(2)[0].mul_(0.5),
    "unbind.fill_": lambda p: p.unbind(0)[1].fill_(0.5),
    "iter.mul_": _halve_rows,
    "data.chunk.mul_": lambda p: p.data.chunk(2)[0].mul_(0.5),
    "inplace=True": lambda p: F.hardtanh(p, -0.05, 0.05, inplace=True),
    "detach.row.zero_, grad mode": _zero_row_of_detached,
    "view of grad mode": _write_to_view_of_grad_mode,
    "view after a write": _write_twice,
    "detach.copy_": lambda p: p.detach().copy_(torch.full(p.shape, 0.125, dtype=p.dtype)),
    "numpy": _through_numpy,
    "vector_to_parameters": _from_vector,
    "clamp_": lambda p: p.clamp_(-0.05, 0.05),
}


@pytest.mark.parametrize("edit", EDITS)
@both_dtypes
def test_an_edit_reaches_forward_state_dict_and_master_and_survives_the_step(
    edit: str, dtype: torch.dtype | None
) -> None:
    for place in PLACES:
        model, optimizer = sharded(place, dtype=dtype)
        reference, plain_optimizer = plain(dtype)
        for step in range(3):
            for layer, name in ((step, "weight"), (4, "bias")):
                if name == "weight" or edit not in ("setitem", "data.setitem"):
                    for module in (model.module, reference):
                        with torch.no_grad():
                            EDITS[edit](getattr(module.layers[layer], name))
            assert_same(weights_of(model), weights_of(reference))
            mine, theirs = (loss_of(m, step, dtype) for m in (model, reference))
            assert torch.equal(mine, theirs), f"{place}: the loss of step {step} does not see the edit"
            for loss, its in ((mine, optimizer), (theirs, plain_optimizer)):
                loss.backward()
                its.step()
                its.zero_grad()
            assert_same(weights_of(model), weights_of(reference))
        if dtype is not None:
            masters = optimizer.state_dict()["masters"]
            for number, p in enumerate(reference.parameters()):
                assert torch.equal(masters[number], plain_optimizer.state[p]["master"]), f"{place}: master {number}"


@both_dtypes
@everywhere
def test_an_edit_between_backward_and_step_is_kept(place: str, dtype: torch.dtype | None) -> None:
    model, optimizer = sharded(place, dtype=dtype)
    reference, plain_optimizer = plain(dtype)
    for module, its in ((model, optimizer), (reference, plain_optimizer)):
        train_step(module, its, 0, dtype)
        loss_of(module, 1, dtype).backward()
        with torch.no_grad():
            weight(module, 1).mul_(0.5)
            weight(module, 3).data.add_(0.25)
        its.step()
    assert_same(weights_of(model), weights_of(reference))


@pytest.mark.parametrize("wrong", [torch.zeros(2), torch.zeros(WIDTH, WIDTH, dtype=torch.float64), 3])
def test_data_of_another_shape_or_dtype_is_refused(wrong: Any) -> None:
    model = wrap()
    with pytest.raises(ReleasedParameterError, match=r"layers\.0\.weight.*its \.data cannot be"):
        weight(model).data = wrong
    assert_same(weights_of(model), weights_of(build()))


@pytest.mark.parametrize("place", [*PLACES, "spare slot"])
@pytest.mark.parametrize("take", [lambda p: p.view(-1), lambda p: p.detach(), lambda p: p.data, lambda p: p[0]])
def test_an_edit_through_a_view_that_was_kept_reaches_the_weights_or_raises(place: str, take: Any) -> None:
    """Plain torch writes through such a view; here the weights may have moved on without it."""
    model, reference = _with_spare_slot() if place == "spare slot" else wrap(place), build()
    refused = None
    try:
        for module in (model, reference):
            with torch.no_grad():
                view = take(weight(module))
                loss_of(module)
                view.mul_(2)
        losses = [loss_of(module) for module in (model, reference)]
        assert torch.equal(*losses)
        assert_same(weights_of(model), weights_of(reference))
    except GeminiError as error:
        refused = str(error)
    assert refused is None or ("layers.0.weight" in refused and "view" in refused)


class Decays(nn.Linear):
    """Edits its own weight while it runs."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


@both_dtypes
@everywhere
def test_an_edit_inside_the_operators_own_forward_is_kept(place: str, dtype: torch.dtype | None) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(Decays(WIDTH, WIDTH, bias=False) for _ in range(6)))

    model, optimizer = sharded(place, make=make, chunk_size=256, dtype=dtype)
    reference, plain_optimizer = plain(dtype, make)
    for step in range(2):
        train_step(model, optimizer, step, dtype)
        train_step(reference, plain_optimizer, step, dtype)
    assert_same(weights_of(model), weights_of(reference))


# ---- kept views ------------------------------------------------------------------------------------------------


def test_a_kept_view_that_exhausts_the_slots_names_its_holder_and_the_operator() -> None:
    model = wrap("smallest")
    kept = [weight(model, layer).view(-1) for layer in range(1)]
    with pytest.raises(SlotError, match=r"layers\.\d.*layers\.0\.weight.*view.*model_data_memory="):
        loss_of(model)
    kept.clear()
    gc.collect()
    assert torch.equal(loss_of(model), loss_of(build()))


def test_a_kept_view_with_a_spare_slot_costs_that_slot_until_it_dies() -> None:
    model = _with_spare_slot()
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    reference, plain_optimizer = plain()
    pool = model.executor.fetcher.pools[0]
    in_use = pool.count
    kept = weight(model).view(-1)
    before = kept.clone()
    for step in range(3):
        assert torch.equal(train_step(model, optimizer, step), train_step(reference, plain_optimizer, step))
    assert len(pool.held) == 1
    assert torch.equal(kept, before), "the memory under a kept view was written to"
    del kept
    train_step(model, optimizer, 3)
    train_step(reference, plain_optimizer, 3)
    assert not pool.held
    assert len(pool.slots) == in_use, "a rank with one more slot than the others would evict other chunks"
    assert_same(weights_of(model), weights_of(reference))


def _with_spare_slot() -> ShardedModel:
    least = mlp.smallest_budget(chunk_size=mlp.CHUNK_NUMEL)
    return ShardedModel(
        build(),
        device="emulated",
        chunk_size=mlp.CHUNK_NUMEL,
        tensor_placement_policy=_SlotsOnly(),
        model_data_memory=least + 4 * mlp.CHUNK_NUMEL,
    )


class _SlotsOnly:
    """The smallest cpu placement; what the budget has beyond it stays free."""

    name = "slots_only"

    def place(self, demand: Any, budget_bytes: int | None) -> Any:
        from gemini.placement.demand import Tier
        from gemini.placement.policy import slots_for

        return slots_for(demand, tuple(dict.fromkeys(chunk.home_bytes, Tier.HOST) for chunk in demand.chunks))


# ---- state dicts -----------------------------------------------------------------------------------------------


def _without_first(state: dict[str, Any]) -> dict[str, Any]:
    return dict(list(state.items())[1:])


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (_without_first, RuntimeError, r"missing keys: layers\.0\.weight"),
        (lambda s: {**s, "extra": torch.zeros(1)}, RuntimeError, "unexpected keys: extra"),
        (lambda s: {**s, "layers.5.bias": torch.zeros(3)}, RuntimeError, r"layers\.5\.bias has shape \(3,\)"),
        (lambda s: {**s, "layers.5.bias": [1.0]}, RuntimeError, r"layers\.5\.bias is a list"),
        (lambda s: list(s), TypeError, "takes a dict"),
    ],
)
def test_a_wrong_model_state_dict_changes_nothing(change: Any, kind: type, message: str) -> None:
    model, optimizer = sharded()
    train_step(model, optimizer)
    before = state_hash(model, optimizer)
    wrong = change({name: value + 1 for name, value in model.state_dict().items()})
    with pytest.raises(kind, match=message):
        model.load_state_dict(wrong)
    assert state_hash(model, optimizer) == before


def test_a_state_dict_that_is_not_strict_loads_what_is_there() -> None:
    model = wrap()
    reference = build()
    part = {"layers.2.weight": torch.ones(WIDTH, WIDTH), "extra": torch.zeros(1)}
    mine, theirs = (m.load_state_dict(part, strict=False) for m in (model, reference))
    assert mine.missing_keys == theirs.missing_keys
    assert mine.unexpected_keys == theirs.unexpected_keys
    assert_same(weights_of(model), weights_of(reference))


def _with_state(state: dict[str, Any], number: int, **entries: Any) -> dict[str, Any]:
    states = dict(state["state"])
    states[number] = {**states.get(number, {}), **entries}
    return {**state, "state": states}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"state": s["state"]}, "no 'param_groups'"),
        (lambda s: {"param_groups": s["param_groups"]}, "no 'state'"),
        (lambda s: {}, "not an optimizer state dict"),
        (lambda s: {**s, "param_groups": s["param_groups"] * 2}, "param groups"),
        (lambda s: {**s, "param_groups": [{**s["param_groups"][0], "params": [0]}]}, "param groups of \\[1\\]"),
        (lambda s: _with_state(s, 99, step=1), "parameter 99"),
        (lambda s: _with_state(s, 11, exp_avg=torch.zeros(3)), r"exp_avg of parameter 11 \(layers\.5\.bias\)"),
        (lambda s: {**s, "masters": {**s["masters"], 0: torch.zeros(2)}}, "master of parameter 0"),
        (lambda s: {**s, "masters": {**s["masters"], 77: torch.zeros(2)}}, "masters of parameter 77"),
        (lambda s: _with_state(s, 11, exp_avg=None), "exp_avg"),
        (lambda s: _with_state(s, 11, step="three"), "step"),
        (lambda s: {**s, "state": 3}, "state"),
    ],
    ids=range(12),
)
@both_dtypes
def test_a_wrong_optimizer_state_dict_changes_nothing(change: Any, message: str, dtype: torch.dtype | None) -> None:
    model, optimizer = sharded(dtype=dtype)
    train_step(model, optimizer, dtype=dtype)
    before, groups = state_hash(model, optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    good = optimizer.state_dict()
    for entry in good["state"].values():
        entry["exp_avg"] += 1
    good["param_groups"] = [{**group, "lr": 0.5} for group in good["param_groups"]]
    with pytest.raises((ValueError, KeyError, TypeError), match=message):
        optimizer.load_state_dict(change(good))
    assert state_hash(model, optimizer) == before
    assert optimizer.state_dict()["param_groups"] == groups


# ---- modules that change ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.share_memory(),
        lambda m: m.module.half(),
        lambda m: m.module.double(),
    ],
    ids=range(6),
)
def test_moving_and_casting_are_refused(move: Callable[[ShardedModel], Any]) -> None:
    model, optimizer = sharded()
    with pytest.raises((UnsupportedError, ReleasedParameterError)):
        move(model)
    reference, plain_optimizer = plain()
    train_step(model, optimizer)
    train_step(reference, plain_optimizer)
    assert_same(weights_of(model), weights_of(reference))


def _replace(m: ShardedModel) -> None:
    m.module.layers[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))


@pytest.mark.parametrize(
    "replace",
    [
        _replace,
        lambda m: m.module.layers[0].register_parameter("late", nn.Parameter(torch.zeros(3))),
    ],
    ids=["setattr", "registered"],
)
def test_a_parameter_that_is_replaced_or_added_behind_the_models_back_is_noticed(
    replace: Callable[[ShardedModel], Any],
) -> None:
    """The executor would go on training the ones that the module does not use any more."""
    model, optimizer = sharded()
    train_step(model, optimizer)
    with pytest.raises(GeminiError, match=r"parameter '.*' was added or replaced after ShardedModel"):
        _replaced(model, optimizer, replace)


def _replaced(model: ShardedModel, optimizer: ShardedOptimizer, replace: Callable[[ShardedModel], Any]) -> None:
    replace(model)
    train_step(model, optimizer, 1)


@pytest.mark.parametrize("make", [lambda: nn.LazyLinear(3), lambda: nn.Linear(2, 2, device="meta")])
def test_parameters_without_data_are_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(UnsupportedError, match="has no data yet"):
        ShardedModel(nn.Sequential(make()), device="emulated")


# ---- leaves ----------------------------------------------------------------------------------------------------


def test_set_leaf_module_names_what_it_does_not_find() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert set_leaf_module(model, [nn.Sequential]) == [model, model[1]]
    with pytest.raises(ValueError, match="class or name Bilinear, GRU in Sequential, which has Sequential"):
        set_leaf_module(model, (nn.Bilinear, nn.GRU))
    with pytest.raises(ValueError, match=r"no module of class or name 1\.7, GRU in"):
        set_leaf_module(model, ["1.0", "1.7", "GRU"])
    for bad in ((), [int], model):
        with pytest.raises(TypeError, match="classes must be a module class, a name, or several"):
            set_leaf_module(model, bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model must be a torch module, found int"):
        set_leaf_module(3, nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="before it is wrapped"):
        set_leaf_module(wrap(), nn.Linear)
    with pytest.raises(UnsupportedError, match=r"unset_leaf_module\(\) after"):
        unset_leaf_module(wrap(), "Linear")


class Experts(Mlp):
    def __init__(self) -> None:
        super().__init__(2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))


@pytest.mark.parametrize("name", ["Experts", f"{__name__}.Experts", "1", Experts])
def test_leaves_are_set_and_unset_by_class_and_by_name(name: str | type[nn.Module]) -> None:
    def leaves(model: nn.Module) -> list[str]:
        return [operator.name for operator in find_operators(model, gathers=True) if operator.routes]

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(), Mlp(2))
    assert leaves(model) == ["1"]
    assert unset_leaf_module(model, name) == [model[1]]
    assert leaves(model) == []
    assert set_leaf_module(model, [name, "2.layers"]) == [model[1], model[2].layers]
    assert leaves(model) == ["1", "2.layers"]
    assert unset_leaf_module(model, nn.ModuleList) == [model[1].layers, model[1].experts, model[2].layers]
    assert leaves(model) == ["1"]


# ---- autocast --------------------------------------------------------------------------------------------------


@everywhere
def test_autocast_equals_the_plain_module_under_autocast(place: str) -> None:
    model, optimizer = sharded(place)
    reference, plain_optimizer = plain()
    for step in range(3):
        losses = []
        for module, its in ((model, optimizer), (reference, plain_optimizer)):
            x = mlp.inputs(step)
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=module is model):
                loss = (module(x) - x.flip(-1)).square().mean()
            loss.backward()
            its.step()
            its.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    assert_same(weights_of(model), weights_of(reference))
    assert model.plan.budget_bytes is None or model._tiers[0].ledger.peak_bytes <= model.plan.budget_bytes


@everywhere
def test_autograd_does_not_keep_autocasts_casts_of_weights(place: str) -> None:
    """Seen by hooks below ours, which get all that is not a handle. Convolutions and transposed views too."""

    def make() -> nn.Module:
        return nn.Sequential(
            *(nn.Conv1d(4, 4, 3, padding=1) for _ in range(3)), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        )

    model, reference = wrap(place, make=make, chunk_size=256), mlp.build(make)
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))
    weights = {tuple(p.shape) for p in reference.parameters() if p.dim() > 1}
    kept: dict[bool, list[tuple[int, ...]]] = {}
    grads = []
    for module in (model, reference):
        seen: list[Tensor] = []

        def pack(tensor: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                loss = module(x).square().mean()
        loss.backward()
        kept[module is model] = [tuple(t.shape) for t in seen if t.dtype is torch.bfloat16]
        grads.append([p.grad.clone() for p in module.parameters()])  # type: ignore[union-attr]
    assert weights & set(kept[False]), "plain autograd keeps the casts"
    assert not weights & set(kept[True])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_cast_of_a_weight_that_is_edited_afterwards_is_kept_as_it_was() -> None:
    class Edits(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            cast = self.weight.to(torch.bfloat16)
            with torch.no_grad():
                self.weight.mul_(0.5)
            return nn.functional.linear(x, cast, self.bias)

    def make() -> nn.Module:
        return nn.Sequential(*(Edits(8, 8) for _ in range(4)))

    model, reference = wrap("smallest", make=make, chunk_size=256), mlp.build(make)
    grads = []
    for module in (model, reference):
        x = torch.ones(2, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = module(x).square().mean()
        loss.backward()
        grads.append(x.grad)
    assert torch.equal(*grads)  # type: ignore[misc]


def test_autocasts_cache_is_as_the_user_left_it() -> None:
    model = wrap()
    with torch.autocast("cpu", torch.bfloat16):
        model(mlp.inputs(0))
        assert torch.is_autocast_cache_enabled()
        with pytest.raises(RuntimeError):
            model(torch.zeros(3, 5))
        assert torch.is_autocast_cache_enabled()


# ---- questions that need no data -------------------------------------------------------------------------------

QUESTIONS: dict[str, Callable[[nn.Parameter], Any]] = {
    "shape": lambda p: (
        p.shape,
        p.size(),
        p.size(0),
        p.ndim,
        p.dim(),
        p.numel(),
        p.nelement(),
        len(p),
        p.shape.numel(),
    ),
    "dtype": lambda p: (p.dtype, p.is_floating_point(), p.is_complex(), p.element_size(), p.itemsize, p.nbytes),
    "device": lambda p: (p.device, p.is_cuda, p.is_cpu, p.is_meta, p.get_device(), p.layout, p.is_sparse),
    "stride": lambda p: (p.stride(), p.stride(0), p.is_contiguous()),
    "autograd": lambda p: (p.requires_grad, p.is_leaf, p.grad_fn, p.grad, p.retains_grad, p.is_inference()),
    "torch": lambda p: (torch.is_tensor(p), torch.numel(p), torch.is_floating_point(p), torch.is_complex(p)),
    "class": lambda p: (isinstance(p, nn.Parameter), isinstance(p, Tensor)),
    "detached": lambda p: (p.detach().shape, p.detach().dtype, p.detach().device, p.detach().requires_grad),
}
QUIET = {
    "hash": lambda p: {p: hash(p)}[p],
    "membership": lambda p: p in {p} and any(q is p for q in [p]),
    "repr": lambda p: f"{p} {p!r} {p!s} {p.detach()!r}",
    "hook": lambda p: p.register_hook(lambda g: g).remove(),
    "requires_grad_": lambda p: p.requires_grad_(True),
    "detach": lambda p: p.detach(),
}


@pytest.mark.parametrize("question", [*QUESTIONS, *QUIET])
def test_questions_about_a_released_parameter_never_fetch(question: str) -> None:
    model, reference = wrap(), build()
    model.executor.fetcher.release_all()
    for mine, theirs in zip(model.parameters(), reference.parameters()):
        if question in QUESTIONS:
            assert QUESTIONS[question](mine) == QUESTIONS[question](theirs)
        else:
            QUIET[question](mine)
    assert num_fetches(model) == 0


def test_printing_shows_what_there_is_without_fetching() -> None:
    model, optimizer = sharded()
    assert "Linear(in_features=16, out_features=16" in repr(model)
    assert repr(model.module) == repr(build())
    assert "layers.0.weight" in repr(weight(model))
    assert "(16, 16)" in str(weight(model))
    assert "HybridAdam" in repr(optimizer) or "lr: 0.01" in repr(optimizer)
    assert str(list(model.named_parameters()))
    assert num_fetches(model) == 0


@pytest.mark.parametrize("address", ["data_ptr", "untyped_storage", "storage_offset", "share_memory_"])
def test_addresses_are_refused_outside_a_step(address: str) -> None:
    model = wrap()
    with pytest.raises(ReleasedParameterError, match=rf"{address} of parameter 'layers\.0\.weight'"):
        getattr(weight(model), address)()


def test_released_parameters_work_in_functions_and_scripts() -> None:
    model, reference = wrap(), build()
    for m in (model, reference):
        x = mlp.inputs(0)
        (F.linear(x, weight(m, 3)).sum() + weight(m, 1).norm() + (weight(m, 0) * weight(m, 5)).sum()).backward()
    for mine, theirs in zip(model.parameters(), reference.parameters()):
        assert (mine.grad is None) == (theirs.grad is None)
        assert theirs.grad is None or torch.equal(mine.grad, theirs.grad)


def test_a_host_that_is_too_small_leaves_the_module_as_it_was() -> None:
    module = torch.nn.Linear(64, 64)
    before = module.weight.detach().clone()
    with pytest.raises(BudgetError, match="host_memory="):
        ShardedModel(module, tensor_placement_policy="cpu", host_memory="10KiB")
    assert type(module.weight) is torch.nn.Parameter and torch.equal(module.weight, before)
    assert torch.equal(ShardedModel(module).state_dict()["weight"], before)
