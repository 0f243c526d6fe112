"""`update_in_backward`: gradients are used as they come, their memory is free at once, and no bit tells."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gemini
from gemini import GeminiError, ShardedModel, ShardedOptimizer, state_hash
from gemini.placement.demand import Kind, Tier
from optim import HybridAdam
from tests.features.test_deferred_update import DETOURS, SOME, end_of
from tests.harness import late_copies, slow_updates
from tests.harness.on_ranks import on_ranks, on_ranks_with
from tests.zoo import half, mlp
from tests.zoo.half import Trained
from tests.zoo.models import MODELS

WHERE: dict[str, tuple[dict[str, Any], bool]] = {  # arguments of ShardedModel, whether homes may be lent
    "all on the device": ({"tensor_placement_policy": "cuda"}, False),
    "all on the host": ({"tensor_placement_policy": "cpu"}, False),
    "weights at home on the device": ({"tensor_placement_policy": "static", "offload_optim_frac": 1.0}, False),
    "weights on the host, states on the device": (
        {"tensor_placement_policy": "static", "offload_optim_frac": 0.0, "offload_param_frac": 1.0},
        False,
    ),
    "smallest": ({"model_data_memory": "smallest"}, True),
}
Setting = tuple[str, torch.dtype | None, tuple[str, ...]]  # place, dtype, detours
SAMPLE: dict[int, list[Setting]] = {
    1: [
        ("all on the device", torch.bfloat16, tuple(DETOURS)),
        ("all on the host", None, SOME),
        ("weights at home on the device", torch.bfloat16, SOME),
        ("weights on the host, states on the device", None, SOME),
        ("smallest", torch.bfloat16, SOME),
    ],
    2: [("smallest", torch.bfloat16, SOME), ("all on the device", None, SOME)],
}
EVERY: list[Setting] = [(place, dtype, tuple(DETOURS)) for place in WHERE for dtype in (None, torch.bfloat16)]


def _id_of(setting: Setting) -> str:
    place, dtype, names = setting
    return f"{place}-{dtype}-{'some' if names == SOME else 'all'}"


@on_ranks_with("setting", SAMPLE, soak={1: EVERY, 2: EVERY, 4: EVERY[::3]}, ids=_id_of, timeout_s=600)
def test_bits_do_not_tell_that_the_backward_has_updated(rank: int, world_size: int, setting: Setting) -> None:
    place, dtype, names = setting
    arguments, reuse = WHERE[place]
    arguments, reuse = {**arguments, "dtype": dtype}, reuse and dtype is not None
    for number, name in enumerate(names):
        found = [end_of(Trained(rank, world_size, reuse, arguments, clip=None), DETOURS[name], 1)]
        arguments = {**arguments, "update_in_backward": True}
        found.append(end_of(Trained(rank, world_size, reuse, arguments, clip=None), DETOURS[name], 1))
        with late_copies.installed(), slow_updates.installed(seed=number):
            trained = Trained(rank, world_size, reuse, {**arguments, "deferred_update": True}, clip=None)
            found.append(end_of(trained, DETOURS[name], 1))
        for state, losses in found[1:]:
            assert (state, losses) == found[0], name


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_other_stages_have_the_same_bits(rank: int, world_size: int, stage: int) -> None:
    found = []
    for in_backward in (False, True):
        where = {"dtype": torch.bfloat16, "stage": stage, "update_in_backward": in_backward}
        trained = Trained(rank, world_size, False, where, clip=None)
        planned = trained.model.plan.placement.device_bytes(trained.model.plan.demand)
        found.append((end_of(trained, half._nothing, 1), planned))
    assert found[0][0] == found[1][0]
    # At stages 1 and 2 the backward updates nothing, and gradients have their homes.
    assert (found[1][1] < found[0][1]) == (stage == 0)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "groups": lambda parameters: HybridAdam(
        [{"params": [each], "lr": 1e-2 / (1 + i)} for i, each in enumerate(parameters)]
    ),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_may_update_in_the_backward(rank: int, world_size: int, name: str) -> None:
    found = []
    for in_backward in (False, True):
        for place in ("all on the device", "weights at home on the device"):
            model = ShardedModel(mlp.build(), **mlp.placed(**WHERE[place][0], update_in_backward=in_backward))
            optimizer = ShardedOptimizer(model, OPTIMIZERS[name](model.parameters()))
            for step in range(3):
                mlp.train_step(model, optimizer, step * world_size + rank)
            found.append(state_hash(model, optimizer))
            model.close()
    assert found[:2] == found[2:]


# -- Memory: no gradient rests, and each has left its slot before the backward ends.


def _most_bytes(layers: int, width: int, **options: Any) -> tuple[int, int]:
    """(parameters, bytes of model data on both tiers at the most) of a training in bf16."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    # As many slots for few layers as for many.
    fixed = {"chunk_size": width * width, "max_live_parameters": 4 * width * width}
    model = ShardedModel(module, device="emulated", dtype=torch.bfloat16, **fixed, **options)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-3))
    for _ in range(2):
        model(torch.ones(2, width, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
    most = sum(tier.ledger.peak_bytes for tier in model.chunk_manager.memory.tiers)
    model.close()
    return layers * width * width, most


@pytest.mark.parametrize("policy", ["cuda", "cpu"])
def test_a_parameter_takes_twelve_bytes(policy: str) -> None:
    def slope(**options: Any) -> float:
        (few, its), (many, theirs) = (
            _most_bytes(layers, 128, tensor_placement_policy=policy, **options) for layers in (8, 40)
        )
        return (theirs - its) / (many - few)

    # bf16 weights, the other half of their masters, and two moments in fp32.
    assert slope(update_in_backward=True) <= 12.1
    assert slope() == pytest.approx(14.0, abs=0.1)


def test_a_gradient_is_used_before_the_backward_ends() -> None:
    model = ShardedModel(mlp.build(), **mlp.placed(tensor_placement_policy="cuda", update_in_backward=True))
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
    homes = [chunk.homes[Kind.PARAM].flat for chunk in model.chunk_manager.chunks]
    before, seen = [home.clone() for home in homes], []
    # This gradient comes last: the weights of the other layers are new by then.
    model.layers[0].weight.register_hook(lambda grad: seen.extend(home.clone() for home in homes))
    mlp.loss_of(model, 0).backward()
    changed = [not torch.equal(now, was) for now, was in zip(seen, before, strict=True)]
    assert changed == [False, True, True, True, True, True]
    assert all(parameter.grad is not None for parameter in model.parameters())  # as without the setting
    assert not any(Kind.GRAD in chunk.homes for chunk in model.chunk_manager.chunks)
    optimizer.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert optimizer.last_step is not None and optimizer.last_step.grad_norm > 0


def test_a_thread_updates_while_the_backward_runs() -> None:
    with slow_updates.installed() as slow:
        model, optimizer = mlp.sharded("cpu", deferred_update=True, update_in_backward=True)
        mlp.train_step(model, optimizer, 0)
        model.chunk_manager.memory.work.join()
        with slow.held():
            mlp.loss_of(model, 1).backward()
            assert model.chunk_manager.memory.work.is_busy
            optimizer.step()
            assert model.chunk_manager.memory.work.is_busy
        reference, its = mlp.plain()
        for step in range(2):
            mlp.train_step(reference, its, step)
        mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))


def test_gradients_wait_for_a_thread_in_as_much_memory_as_the_host_has_left() -> None:
    def waiting(**options: Any) -> int:
        model, optimizer = mlp.sharded("cpu", deferred_update=True, update_in_backward=True, **options)
        mlp.train_step(model, optimizer, 0)
        state = state_hash(model, optimizer)
        taken = model.chunk_manager.memory.host.ledger.bytes_by_kind["gradients on their way to an update"]
        optimizer.close()
        assert not model.chunk_manager.memory.host.ledger.bytes_by_kind["gradients on their way to an update"]
        model.close()
        found.append(state)
        return taken

    found: list[str] = []
    chunk_bytes = 4 * mlp.CHUNK_NUMEL
    assert waiting() == mlp.LAYERS * chunk_bytes
    # weights and two moments of all layers, and room for two gradients
    assert waiting(host_memory=3 * mlp.LAYERS * chunk_bytes + 3 * chunk_bytes) == 2 * chunk_bytes
    assert waiting(host_memory=3 * mlp.LAYERS * chunk_bytes) == 0  # they wait in their slots
    assert found[0] == found[1] == found[2]


# -- Models whose gradients do not all come, or come in an unusual order.


class Branches(nn.Module):
    """One chunk, of which each pass uses some layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(mlp.WIDTH, mlp.WIDTH) for _ in range(4))
        self.used: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for index in self.used:
            x = x + torch.tanh(self.layers[index](x))
        return x


@on_ranks(1, 2)
def test_branches_train_as_without_it(rank: int, world_size: int) -> None:
    found = []
    for in_backward in (False, True):
        model = ShardedModel(mlp.build(Branches), device="emulated", chunk_size=2048, update_in_backward=in_backward)
        optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2))
        for step, used in enumerate([(0, 1, 2), (0, 1, 3), (0, 1, 2, 3), (2,), (0, 1, 2, 3)]):
            model.module.used = used
            mlp.train_step(model, optimizer, step)
        found.append((state_hash(model, optimizer), float(optimizer.grad_norm or 0)))
        model.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("place", ["all on the device", "all on the host"])
def test_zeros_of_parameters_without_a_gradient_move_them(place: str) -> None:
    found = []
    for in_backward in (False, True):
        where = {**WHERE[place][0], "chunk_size": 2048, "update_in_backward": in_backward}
        model = ShardedModel(mlp.build(Branches), device="emulated", **where)
        optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2))
        for step, used in enumerate([(0, 1, 2, 3), (0, 1), (0, 1, 2, 3)]):
            model.module.used = used
            mlp.loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        found.append(state_hash(model, optimizer))
    assert found[0] == found[1]


class Mixture(nn.Module):
    """Each rank chooses by itself which experts it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(mlp.WIDTH, mlp.WIDTH) for _ in range(4))
        self.used: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        for index in self.used:
            x = x + torch.tanh(self.experts[index](x))
        return x


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixture, self.head = Mixture(), nn.Linear(mlp.WIDTH, mlp.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.mixture(x))
        return y


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("chunk_numel", [512, 1024, 4096])
def test_ranks_that_use_other_parts_update_alike(rank: int, world_size: int, stage: int, chunk_numel: int) -> None:
    """With a forward and a state dict after each step, which are collectives."""
    found = []
    routes = [((0, 1, 2, 3), (0, 2)), ((0, 1, 2, 3), (0, 1, 2)), ((3,), (0, 1, 2, 3)), ((0, 1, 2, 3), (0, 1, 2, 3))]
    for in_backward in (False, True):
        module = mlp.build(Routed)
        gemini.set_leaf_module(module, [Mixture])
        options = {"stage": stage, "chunk_size": chunk_numel, "update_in_backward": in_backward}
        model = ShardedModel(module, device="emulated", rank_timeout=60, **options)
        optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2))
        for step, used in enumerate(routes):
            model.module.mixture.used = used[rank]
            mlp.loss_of(model, 2 * step + rank).backward()
            optimizer.step()
            with torch.no_grad():
                mlp.loss_of(model, 9)
            model.state_dict()
        found.append((state_hash(model, optimizer), float(optimizer.grad_norm or 0)))
        model.close()
    assert found[0] == found[1]


ALL = (0, 1, 2, 3)
ROUTES = {  # by step: the layers that rank 0 uses, and rank 1
    "a part first": [(ALL, (0, 1, 2)), (ALL, (0, 1, 2)), (ALL, (3, 0, 1, 2)), (ALL, ALL)],
    "late on the other rank": [((0, 1, 2), ALL), (ALL, (3, 0, 1, 2)), (ALL, ALL)],
}


@on_ranks(2)
@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("policy", ["auto", "cpu"])
def test_a_chunk_that_once_came_in_part_waits_for_the_step(
    rank: int, world_size: int, routes: str, policy: str
) -> None:
    found = []
    for in_backward in (False, True):
        options = {"stage": 0, "chunk_size": 2048, "tensor_placement_policy": policy}
        model = ShardedModel(mlp.build(Branches), device="emulated", **options, update_in_backward=in_backward)
        optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2))
        for step, used in enumerate(ROUTES[routes]):
            model.module.used = used[rank]
            mlp.loss_of(model, 2 * step + rank).backward()
            optimizer.step()
        found.append((state_hash(model, optimizer), float(optimizer.grad_norm or 0)))
        model.close()
    assert found[0] == found[1]


@on_ranks(2)
def test_a_chunk_that_comes_in_part_after_it_came_whole_is_refused(rank: int, world_size: int) -> None:
    """Which of the ranks has updated it by then is not known: the model is torn on all."""
    model = ShardedModel(mlp.build(Branches), device="emulated", stage=0, chunk_size=2048, update_in_backward=True)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2))
    model.module.used = ALL
    for step in range(2):
        mlp.train_step(model, optimizer, step)
    model.module.used = ALL if rank == 0 else (0, 1)
    with pytest.raises(GeminiError, match=r"no gradient of 'layers.2.weight' came in this backward, as in all before"):
        mlp.loss_of(model, 2).backward()
    with pytest.raises(GeminiError, match="failed half way"):
        mlp.train_step(model, optimizer, 2)


@on_ranks(2)
def test_where_it_has_no_effect_a_gradient_that_is_not_finite_skips_the_step(rank: int, world_size: int) -> None:
    model = ShardedModel(mlp.build(), **mlp.placed(stage=2, update_in_backward=True))
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()), clip_grad_norm=1.0)
    before = mlp.weights_of(model)
    (mlp.loss_of(model, 1) * math.inf).backward()
    with pytest.warns(UserWarning, match="skipped on all ranks"):
        optimizer.step()
    mlp.assert_same(mlp.weights_of(model), before)


def test_parameters_in_no_group_keep_their_gradients() -> None:
    found = []
    for in_backward in (False, True):
        model = ShardedModel(mlp.build(), **mlp.placed(tensor_placement_policy="cuda", update_in_backward=in_backward))
        trained = [each for name, each in model.named_parameters() if name != "layers.2.bias"]
        optimizer = ShardedOptimizer(model, HybridAdam(trained, lr=1e-2))
        for step in range(3):
            mlp.loss_of(model, step).backward()
            optimizer.step()
        grad = model.layers[2].bias.grad
        assert grad is not None
        found.append((state_hash(model, optimizer), grad.tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_an_edit_after_the_update_changes_what_was_edited(place: str) -> None:
    """Weights in bf16 are half of their masters: an edit of one element must leave the other half of the rest alone."""
    found = []
    for in_backward in (False, True):
        model, optimizer = mlp.sharded(place, dtype=torch.bfloat16, update_in_backward=in_backward)
        mlp.train_step(model, optimizer, 0, torch.bfloat16)
        weight = model.layers[2].weight
        weight.data[0, 0] = 0.25  # from here on the library knows what the weights were
        mlp.loss_of(model, 1, torch.bfloat16).backward()
        optimizer.step()
        weight.data[1, 1] = 0.5
        mlp.train_step(model, optimizer, 2, torch.bfloat16)
        found.append(state_hash(model, optimizer))
    assert found[0] == found[1]


def test_frozen_parts_and_tied_weights() -> None:
    class Tied(mlp.Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.layers[4].weight = self.layers[1].weight
            self.layers[2].requires_grad_(False)
            self.layers[3].bias.requires_grad_(False)

    found = []
    for in_backward in (False, True):
        model = ShardedModel(
            mlp.build(Tied), **mlp.placed(tensor_placement_policy="cpu", update_in_backward=in_backward)
        )
        optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2))
        for step in range(3):
            mlp.train_step(model, optimizer, step)
        found.append(state_hash(model, optimizer))
    assert found[0] == found[1]


# With batch norms several ranks have other bits than one rank, which is not compared here.
ANY_MODEL = [name for name, case in MODELS.items() if name not in ("mixed_dtypes", "checkpoint_shared_reentrant")]


SOME_MODELS = {1: [*ANY_MODEL[::7], "sometimes_unused"], 2: ANY_MODEL[3::12]}


@on_ranks_with("name", SOME_MODELS, soak={1: ANY_MODEL, 2: ANY_MODEL, 3: ANY_MODEL[::3]})
def test_any_model_trains_to_the_same_bits(rank: int, world_size: int, name: str) -> None:
    case, found = MODELS[name], []
    for in_backward in (False, True):
        wrap = {"chunk_size": case.chunk_numel, "tensor_placement_policy": "cpu", "update_in_backward": in_backward}
        model = ShardedModel(case.build(), device="emulated", rank_timeout=60, **wrap)
        optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-3))
        for step in range(3):
            case.loss(model, case.batch(step, rank, world_size)).backward()
            optimizer.step()
        found.append((state_hash(model, optimizer), float(optimizer.grad_norm or 0)))
        model.close()
    assert found[0] == found[1]


# -- What it cannot do is refused, before anything has changed where that can be known before.


@pytest.mark.parametrize(
    ("options", "its", "error", "words"),
    [
        ({"gradient_accumulation_steps": 2}, {}, ValueError, "gradient_accumulation_steps=2 adds up several"),
        ({"update_in_backward": 1}, {}, TypeError, "update_in_backward must be True or False, found 1"),
        ({}, {"clip_grad_norm": 1.0}, ValueError, "clip_grad_norm=1 needs all gradients before the first update"),
        ({"dtype": torch.float16}, {}, gemini.UnsupportedError, "float16 weights need all of them first"),
    ],
)
def test_settings_that_exclude_it(
    options: dict[str, Any], its: dict[str, Any], error: type[Exception], words: str
) -> None:
    def make() -> None:
        model = ShardedModel(mlp.build(), **mlp.placed(**{"update_in_backward": True, **options}))
        ShardedOptimizer(model, mlp.adam(model.parameters()), **its)

    with pytest.raises(error, match=words):
        make()


def _again(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    mlp.loss_of(model, 2).backward()


def _unsynced(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    optimizer.step()
    with model.no_sync():
        mlp.loss_of(model, 2).backward()


def _clips(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    optimizer.clip_grad_norm_(1.0)


def _clips_by_largest(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    optimizer.clip_grad_norm_(math.inf, norm_type=math.inf)


def _discards(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    optimizer.zero_grad()


def _discards_of_the_model(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    model.zero_grad()


def _discards_one(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    model.layers[3].bias.grad = None


def _changes_the_rate(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    before, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.5
    try:
        optimizer.step()
    finally:
        optimizer.param_groups[0]["lr"] = before


def _sets(model: ShardedModel, optimizer: ShardedOptimizer) -> None:
    model.layers[0].weight.grad = torch.ones(mlp.WIDTH, mlp.WIDTH)


REFUSED = {
    _again: "a forward between backward.. and step.. is not possible: update_in_backward=True has updated layers.0",
    _unsynced: "under no_sync",
    _clips: r"clip_grad_norm_.1, norm_type=2. needs all gradients",
    _clips_by_largest: r"clip_grad_norm_.inf, norm_type=inf. needs all gradients",
    _discards: "discarding gradients between backward",
    _discards_of_the_model: "discarding gradients between backward",
    _discards_one: "discarding gradients between backward",
    _changes_the_rate: "hyperparameters were changed between backward",
    _sets: "gradient of 'layers.0.weight' cannot be set",
}


@on_ranks(1, 2)
@pytest.mark.parametrize("does", REFUSED)
def test_calls_that_exclude_it(
    rank: int, world_size: int, does: Callable[[ShardedModel, ShardedOptimizer], None]
) -> None:
    model, optimizer = mlp.sharded("cpu", update_in_backward=True)
    mlp.train_step(model, optimizer, 0)
    mlp.loss_of(model, 1).backward()
    with pytest.raises(GeminiError, match=REFUSED[does]):
        does(model, optimizer)
    # Nothing has changed: training goes on.
    if does is not _unsynced:
        optimizer.step()
    reference, its = mlp.plain()
    mlp.train_step(model, optimizer, 3)
    for step in (0, 1, 3):
        mlp.train_step(reference, its, step)
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))


def test_a_gradient_that_is_not_finite_is_told_and_skips_nothing() -> None:
    model, optimizer = mlp.sharded("cuda", update_in_backward=True)
    (mlp.loss_of(model, 1) * math.inf).backward()
    with pytest.warns(UserWarning, match="step 1: the gradient of 'layers.* is not finite, and .* has changed weights"):
        optimizer.step()
    assert optimizer.last_step is not None and not math.isfinite(optimizer.last_step.grad_norm)
    assert optimizer.last_step.skipped is None


class Detached(nn.Module):
    """The first layer's weight is used once more, where autograd does not know of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(mlp.WIDTH, mlp.WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.layers[1].weight.detach())
        return torch.tanh(self.layers[1](torch.tanh(self.layers[0](y))))


class Reentrant(nn.Module):
    """One layer is called twice, each call in a checkpoint of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(mlp.WIDTH, mlp.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(lambda each: torch.tanh(self.layer(each)), x, use_reentrant=True)
        return x


@pytest.mark.parametrize("make", [Detached, Reentrant])
@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_weights_that_are_needed_again_are_refused(make: Callable[[], nn.Module], place: str) -> None:
    model, _ = mlp.sharded(place, make=make, update_in_backward=True)
    x = mlp.inputs(0).requires_grad_()
    # Where weights are at home on the device autograd itself compares versions.
    with pytest.raises(RuntimeError, match=r"update_in_backward|modified by an inplace operation"):
        model(x).square().mean().backward()
    with pytest.raises(GeminiError, match="failed half way"):
        model(x)


def _fails(grad: Tensor) -> Tensor:
    raise RuntimeError("a hook has failed")


@on_ranks(1, 2)
def test_a_backward_that_fails_half_way_leaves_no_model_to_go_on_with(rank: int, world_size: int) -> None:
    model, optimizer = mlp.sharded("cpu", update_in_backward=True)
    mlp.train_step(model, optimizer, 0)
    handle = model.layers[0].weight.register_hook(_fails)
    with pytest.raises(RuntimeError, match="a hook has failed"):
        mlp.loss_of(model, 1).backward()
    handle.remove()
    with pytest.raises(GeminiError, match=r"failed half way .*update_in_backward"):
        mlp.train_step(model, optimizer, 1)


@on_ranks(1, 2)
@pytest.mark.parametrize("discards", [_discards, _discards_of_the_model, _discards_one])
def test_discarding_gradients_after_a_backward_that_failed_says_that_the_model_is_torn(
    rank: int, world_size: int, discards: Callable[[ShardedModel, ShardedOptimizer], None]
) -> None:
    model, optimizer = mlp.sharded("cpu", update_in_backward=True)
    model.layers[0].weight.register_hook(_fails)
    with pytest.raises(RuntimeError, match="a hook has failed"):
        mlp.loss_of(model, 1).backward()
    with pytest.raises(GeminiError, match=r"failed half way .*update_in_backward.*load a checkpoint"):
        discards(model, optimizer)


def test_a_refused_backward_has_changed_nothing() -> None:
    model, optimizer = mlp.sharded("cuda", update_in_backward=True)
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr"):
        mlp.loss_of(model, 0).backward()
    optimizer.param_groups[0]["lr"] = mlp.plain()[1].param_groups[0]["lr"]
    reference, its = mlp.plain()
    mlp.train_step(model, optimizer, 0)
    mlp.train_step(reference, its, 0)
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))


def test_another_optimizer_finds_the_backward_free() -> None:
    model, optimizer = mlp.sharded("cuda", update_in_backward=True)
    mlp.train_step(model, optimizer, 0)
    optimizer.close()
    mlp.loss_of(model, 1).backward()
    assert model.layers[0].weight.grad is not None
    assert model.chunk_manager.chunks[0].homes  # weights are there
    assert all(region.tier is Tier.DEVICE for chunk in model.chunk_manager.chunks for region in chunk.homes.values())
