"""`torch.autograd.grad` and the transforms of `torch.func`, over models whose weights move."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gemini import GatheredParameters, GeminiError, ShardedModel, ShardedOptimizer, UnsupportedError
from tests.harness.on_ranks import on_ranks
from tests.transforms import ANYWHERE, REVERSE
from tests.zoo import mlp
from tests.zoo.mlp import CHUNK_NUMEL, assert_same, build, inputs, loss_of, plain, sharded, weights_of, wrap

PLACES = ["cuda", "cpu", "smallest"]


def assert_equal(got: Any, wanted: Any) -> None:
    (left, tree), (right, its) = (torch.utils._pytree.tree_flatten(each) for each in (got, wanted))
    assert tree == its
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(left, right, strict=True))


# -- torch.autograd.grad(loss, parameters)


@pytest.mark.parametrize("place", PLACES)
def test_gradients_of_all_parameters_are_the_plain_ones_and_leave_grad_alone(place: str) -> None:
    both = sharded(place), plain()
    found = []
    for model, optimizer in both:
        found.append(torch.autograd.grad(loss_of(model), list(model.parameters())))
        assert all(parameter.grad is None for parameter in model.parameters())
        mlp.train_step(model, optimizer)
    assert_equal(*found)
    assert_same(*(weights_of(model) for model, _ in both))


@pytest.mark.parametrize("how", ["unused", "zeros", "generator", "dict", "batched", "retained", "checkpointed"])
def test_every_option_of_grad_does_what_it_does_in_plain_pytorch(how: str) -> None:
    grad = torch.autograd.grad
    if how == "dict" and torch.__version__ < "2.13":
        pytest.skip("torch before 2.13 takes a sequence alone")

    def gradients(model: Any) -> Any:
        x, parameters = inputs(0), list(model.parameters())
        if how in ("unused", "zeros"):
            out = model.layers[1](x).sum()
            return grad(out, parameters, allow_unused=how == "unused" or None, materialize_grads=how == "zeros")
        if how == "dict":
            return grad(model(x).sum(), dict(model.named_parameters()))
        if how == "generator":
            return grad(model(x).sum(), model.parameters())
        if how == "batched":
            out = model(x)
            return grad(out, parameters, torch.ones(3, *out.shape), is_grads_batched=True)
        if how == "checkpointed":  # the recomputation fetches, while gradients are asked for
            return grad(checkpoint(model, x, use_reentrant=False).sum(), parameters)
        loss = model(x).square().sum()
        return grad(loss, parameters[3], retain_graph=True), grad(loss, [x for x in parameters if x.ndim == 2])

    assert_equal(gradients(wrap("smallest")), gradients(build()))


def test_what_grad_refuses_is_refused_in_its_own_words() -> None:
    for model in (build(), wrap("smallest")):
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            torch.autograd.grad(model.layers[1](inputs(0)).sum(), list(model.parameters()))
        model.layers[1].weight.requires_grad_(False)
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.autograd.grad(model(inputs(0)).sum(), list(model.parameters()))


@on_ranks(1, 2)
def test_a_backward_may_start_from_a_parameter_and_be_for_some_alone(rank: int, world_size: int) -> None:
    model, reference = wrap("smallest"), build()
    for each in (model, reference):
        loss_of(each).backward(inputs=[each.layers[0].weight, *each.layers[2].parameters()])
        torch.autograd.backward([each.layers[1].bias], [torch.ones_like(each.layers[1].bias)])
    for (name, ours), its in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (its.grad is None), name
        assert its.grad is None or torch.equal(ours.grad.clone(), its.grad), name


@pytest.mark.parametrize("place", ["cpu", "smallest"])
def test_double_backward_through_weights_that_can_leave_is_refused_in_one_sentence(place: str) -> None:
    for ask in ("parameters", "inputs"):
        model, x = wrap(place), inputs(0).requires_grad_()
        of = list(model.parameters()) if ask == "parameters" else x
        with pytest.raises(UnsupportedError, match=r"double backward .*Keep everything resident with"):
            torch.autograd.grad(model(x).square().sum(), of, create_graph=True)


# -- loss.backward(inputs=parameters)


@pytest.mark.parametrize("place", PLACES)
def test_a_backward_for_some_parameters_gives_these_their_gradients_wherever_they_are(place: str) -> None:
    both = sharded(place), plain()
    for model, optimizer in both:
        loss_of(model).backward(inputs=[mlp.weight(model, number) for number in range(4)])
        assert [parameter.grad is None for parameter in model.parameters()] == [False, True] * 4 + [True] * 4
        optimizer.step()
        optimizer.zero_grad()
        mlp.train_step(model, optimizer, 1)
    assert_same(*(weights_of(model) for model, _ in both))


# -- torch.func


@pytest.mark.sampled(4)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", [*REVERSE, *ANYWHERE])
def test_a_transform_gives_what_it_gives_of_the_plain_model_or_is_refused_by_name(name: str, place: str) -> None:
    both = sharded(place), plain()
    transform = {**REVERSE, **ANYWHERE}[name]
    if name in REVERSE and place != "cuda":
        refused = "layers.0.weight.* is not possible while it can leave the device.*torch.autograd.grad"
        with pytest.raises(UnsupportedError, match=f"torch.func.grad .*{refused}"):
            transform(both[0][0])
    else:
        assert_equal(*(transform(model) for model, _ in both))
    for model, optimizer in both:
        mlp.train_step(model, optimizer)
    assert_same(*(weights_of(model) for model, _ in both))


def test_detached_weights_in_a_transform_have_the_plain_gradients_or_are_refused_by_name() -> None:
    def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
        detached = {name: parameter.detach() for name, parameter in module.named_parameters()}
        found: dict[str, Tensor] = torch.func.grad(
            lambda given: torch.func.functional_call(module, given, (inputs(0),)).square().sum()
        )(detached)
        return found

    assert_same(gradients(wrap("cuda")), gradients(build()))
    with pytest.raises(GeminiError, match=r"torch\.func\.grad .* through layers\.0\.weight"):
        gradients(wrap("smallest"))


def test_a_transform_inside_the_models_own_forward_works_where_all_is_resident() -> None:
    class Force(mlp.Mlp):
        def forward(self, x: Tensor) -> Tensor:
            forces: Tensor = torch.func.grad(lambda x: super(Force, self).forward(x).square().sum())(x)
            return forces

    assert_equal(wrap("cuda", Force)(inputs(0)), build(Force)(inputs(0)))
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        wrap("smallest", Force)(inputs(0))


# -- on several ranks, each with a batch of its own


@on_ranks(2)
@pytest.mark.parametrize("wrap", [{"stage": 3, "model_data_memory": "smallest"}, {"stage": 3}, {"stage": 1}], ids=str)
def test_a_rank_gets_the_gradients_of_its_own_batch(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """A rank gets the plain gradients of its batch, and the step after it is as if nobody had asked."""
    wrap = mlp.placed(**wrap)
    reference = build()
    weights = []
    for asks in (True, False):
        model = ShardedModel(build(), **wrap)
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        for step in range(2):
            if asks:
                loss, wanted = (each(inputs(rank)).square().mean() for each in (model, reference))
                found = torch.autograd.grad(loss, list(model.parameters()))
                its = torch.autograd.grad(wanted, list(reference.parameters()))
                assert step or all(torch.equal(a, b) for a, b in zip(found, its, strict=True))
                assert all(parameter.grad is None for parameter in model.parameters())
            model(inputs(step + 10 * rank)).square().mean().backward()
            optimizer.step()
        weights.append(mlp.weights_of(model))
        model.close()
    mlp.assert_same(*weights)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_transforms_work_on_weights_that_stay(rank: int, world_size: int, stage: int) -> None:
    """Without a budget, weights stay where they are until a step; then a rank transforms its own function."""
    model, reference = ShardedModel(build(), device="emulated", stage=stage, chunk_size=CHUNK_NUMEL), build()
    for name, transform in {**REVERSE, **ANYWHERE}.items():
        found, wanted = (torch.utils._pytree.tree_leaves(transform(each)) for each in (model, reference))
        assert len(found) == len(wanted) and all(map(torch.equal, found, wanted)), name
    model(inputs(rank)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.close()


# -- what users' functions save, and what is computed in GatheredParameters


class Adjoint(torch.autograd.Function):
    """Saves the weights of a module, runs it again in its backward, and differentiates by them."""

    @staticmethod
    def forward(ctx: Any, module: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x, *weights)
        with torch.no_grad():
            out: Tensor = module(x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found = torch.autograd.grad(ctx.module(x), (x, *weights), grad)
        return None, *found


class WithAdjoint(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp.Mlp(2)
        self.last = torch.nn.Linear(mlp.WIDTH, mlp.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(Adjoint.apply(self.inner, x, *self.inner.parameters()))
        return out


@on_ranks(1, 2)
@pytest.mark.parametrize("room", ["all", 4, 3, 2])
def test_a_function_that_saves_weights_differentiates_by_them(rank: int, world_size: int, room: str | int) -> None:
    """Also where the weights had left their slots when they were saved."""
    options: dict[str, Any] = {"device": "emulated", "chunk_size": CHUNK_NUMEL}
    if room != "all":
        least = mlp.minimum_bytes(build(WithAdjoint), **options)
        options["model_data_memory"] = least + (int(room) - 2) * CHUNK_NUMEL * 4
    model = ShardedModel(build(WithAdjoint), **options)
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
    reference, plain_optimizer = plain(make=WithAdjoint)
    for step in range(3):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        assert torch.equal(loss.detach(), mlp.train_step(reference, plain_optimizer, step))
    assert_same(weights_of(model), weights_of(reference))


@on_ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_penalty_made_inside_gathered_parameters_is_used_after_it(
    rank: int, world_size: int, place: str, together: bool, dtype: torch.dtype
) -> None:
    if together and place == "smallest":
        return  # all weights at once have no room there
    runs = []
    for gathers in (False, True):
        model = ShardedModel(build(), dtype=dtype, **mlp.placed(**mlp.PLACES[place]))
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        losses = []
        for step in range(3):
            weights = [parameter for name, parameter in model.named_parameters() if "weight" in name]
            penalty = torch.zeros((), dtype=dtype)
            with GatheredParameters(weights) if gathers and together else contextlib.nullcontext():
                for weight in weights:
                    with GatheredParameters(weight) if gathers and not together else contextlib.nullcontext():
                        penalty = penalty + weight.pow(2).mean() + weight.norm()
            loss = model(inputs(step, dtype)).square().mean() + penalty
            optimizer.backward(loss)
            optimizer.step()
            losses.append(float(loss.detach()))
        runs.append((losses, weights_of(model)))
    assert runs[0][0] == runs[1][0]
    assert_same(runs[0][1], runs[1][1])
