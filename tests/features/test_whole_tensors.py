"""Optimizers that treat each tensor by itself: torch's Muon and Adafactor, a class of the user's. Equal to plain."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gemini
from gemini import ShardedModel, ShardedOptimizer, UnsupportedError, state_hash
from gemini.placement import owners
from optim import round_master_
from sharding.collectives import Collectives
from tests.harness.on_ranks import gathered, on_ranks
from tests.zoo.mlp import assert_same, minimum_bytes, weights_of
from tests.zoo.whole import MAKES, Lamb, Matrices, Plain, build, loss_of, matrices_and_rest, muon_and_adam, train_step

CHUNK_NUMEL = 2048
# The module with the function that Muon calls for each matrix.
ORTHOGONALIZE = "torch.optim._muon._zeropower_via_newtonschulz"
PLACES: dict[str, dict[str, Any]] = {
    "cuda": {"tensor_placement_policy": "cuda"},
    "cpu": {"tensor_placement_policy": "cpu"},
    "smallest": {"model_data_memory": "smallest"},
    "disk": {"tensor_placement_policy": "disk"},
}


def wrapped(place: str, folder: Path | None = None, module: nn.Module | None = None, **arguments: Any) -> ShardedModel:
    arguments = {"device": "emulated", "chunk_size": CHUNK_NUMEL, **PLACES[place], **arguments}
    if place == "disk":
        arguments["disk_path"] = folder
    if arguments.get("model_data_memory") == "smallest":
        del arguments["model_data_memory"]
        arguments["model_data_memory"] = minimum_bytes(build() if module is None else module, **arguments)
    return ShardedModel(build() if module is None else module, **arguments)


def made_for(model: ShardedModel, make: str, **arguments: Any) -> ShardedOptimizer:
    optimizers = MAKES[make](model)
    return ShardedOptimizer(model, optimizers[0] if len(optimizers) == 1 else optimizers, **arguments)


def train_beside_plain(rank: int, world_size: int, model: ShardedModel, make: str, max_norm: float | None) -> None:
    """Steps of one and of three micro-batches; a learning rate that changes."""
    plain, optimizer = Plain(make, world_size, max_norm), made_for(model, make, clip_grad_norm=max_norm)
    for step in range(4):
        if step == 2:
            for group in [*optimizer.param_groups, *(g for each in plain.optimizers for g in each.param_groups)]:
                group["lr"] = group["lr"] and group["lr"] / 2
        micro_batches = 3 if step % 2 else 1
        train_step(model, optimizer, rank, step, micro_batches)
        plain.step(step, micro_batches)
        assert_same(weights_of(model), weights_of(plain.model))
    model.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("max_norm", [None, 0.1])
@on_ranks(1, 2, soak=(3, 4))
def test_muon_beside_adam_trains_as_on_the_plain_model(
    rank: int, world_size: int, max_norm: float | None, place: str, stage: int, tmp_path: Path
) -> None:
    train_beside_plain(rank, world_size, wrapped(place, tmp_path, stage=stage), "muon", max_norm)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["cuda", "cpu", "smallest"])
@pytest.mark.parametrize("make", ["moonlight", "experts", "adafactor", "transformers", "lamb", "whitened"])
@on_ranks(1, 2, soak=(3, 4))
def test_any_optimizer_of_whole_tensors_trains_as_on_the_plain_model(
    rank: int, world_size: int, make: str, place: str
) -> None:
    """Factors by row and column, a norm of a tensor, a buffer of another shape than its weight."""
    train_beside_plain(rank, world_size, wrapped(place), make, 0.5)


@pytest.mark.parametrize("options", [{}, {"adjust_lr_fn": "match_rms_adamw", "nesterov": False}], ids=str)
def test_experts_in_one_tensor_have_the_bits_of_torchs_muon_on_each_matrix(options: dict[str, Any]) -> None:
    """On a plain model, also with experts whose memory is transposed, and from a state dict on."""
    experts = torch.randn(3, 24, 16, generator=torch.Generator().manual_seed(1))
    stacks = [nn.Parameter(experts.clone()), nn.Parameter(experts.transpose(1, 2).contiguous().transpose(1, 2))]
    alone = [[nn.Parameter(each.clone()) for each in experts] for _ in stacks]
    ours = gemini.Muon([{"params": stacks, "lr": 0.03}], weight_decay=0.2, **options)
    torchs = torch.optim.Muon([p for its in alone for p in its], lr=0.03, weight_decay=0.2, **options)
    for step in range(3):
        for stack, its in zip(stacks, alone, strict=True):
            stack.grad = torch.randn(3, 24, 16, generator=torch.Generator().manual_seed(step))
            for matrix, grad in zip(its, stack.grad, strict=True):
                matrix.grad = grad.clone()
        ours.step()
        torchs.step()
        again = gemini.Muon(stacks, lr=1.0)
        again.load_state_dict(ours.state_dict())
        ours = again
    for stack, its in zip(stacks, alone, strict=True):
        assert torch.equal(stack, torch.stack([*its]))
        buffers = [torchs.state[matrix]["momentum_buffer"] for matrix in its]
        assert torch.equal(ours.state[stack]["momentum_buffer"], torch.stack(buffers))
    with pytest.raises(ValueError, match=r"found a parameter of shape \(4,\): give it to another optimizer"):
        gemini.Muon([nn.Parameter(torch.ones(4))])
    with pytest.raises(ValueError, match="Learning rate should be >= 0"):
        gemini.Muon(stacks, lr=-1.0)


@on_ranks(1, 2, soak=(4,))
def test_each_matrix_is_orthogonalised_once_a_step_whatever_the_micro_batches(rank: int, world_size: int) -> None:
    """In all ranks together, and in windows of few elements as in one."""
    for most in (1, owners.WINDOW_NUMEL):
        model = wrapped("cpu")
        optimizer = made_for(model, "muon")
        num_matrices = len(matrices_and_rest(build())[0])
        real, calls = torch.optim._muon._zeropower_via_newtonschulz, list[Any]()

        def counted(*args: Any, real: Any = real, calls: list[Any] = calls) -> Any:
            calls.append(tuple(args[0].shape))
            return real(*args)

        with mock.patch(ORTHOGONALIZE, counted), mock.patch.object(owners, "WINDOW_NUMEL", most):
            for step in range(3):
                train_step(model, optimizer, rank, step, micro_batches=3)
        everywhere = [shape for its in gathered(calls) for shape in its]
        assert len(everywhere) == 3 * num_matrices
        assert {(40, WIDTH), (40, 40), (8, 16)} == set(everywhere)
        if world_size > 1 and most > 1:
            busy = sum(each > 0 for each in gathered(len(calls)))
            assert busy == min(world_size, num_matrices), "ranks share the work"
        model.close()


WIDTH = 24


@on_ranks(1, 2, soak=(4,))
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_step_exchanges_each_matrix_once_to_its_owner_and_once_back(
    rank: int, world_size: int, micro_batches: int
) -> None:
    """Gradient, weight and momentum go to the owner, and weight and momentum back; the first step has no momentum."""
    model = wrapped("cuda", stage=3)
    optimizer = made_for(model, "muon")
    train_step(model, optimizer, rank, 0)
    sent: list[int] = []
    real = Collectives.exchange

    def noted(self: Collectives, payload: Any, numels: Any, *rest: Any) -> None:
        sent.append((payload.numel() - numels[self.rank]) * payload.itemsize)
        real(self, payload, numels, *rest)

    with mock.patch.object(Collectives, "exchange", noted):
        train_step(model, optimizer, rank, 1, micro_batches)
    assert len(sent) == (2 if world_size > 1 else 0)
    # What an owner has of its own tensor travels nowhere: at least nothing, at most all of it.
    to_owners, back = (sum(each) for each in zip(*gathered(tuple(sent) or (0, 0)), strict=True))
    numel = sum(p.numel() for p in matrices_and_rest(build())[0])
    assert to_owners * 2 == back * 3
    assert back <= 2 * 4 * numel
    assert (back > 0) == (world_size > 1)
    model.close()


@on_ranks(1, 2)
def test_a_model_of_zero_init_context_is_trained_by_muon_and_not_by_something_else(rank: int, world_size: int) -> None:
    with gemini.ZeroInitContext():
        module = build()
    train_beside_plain(rank, world_size, wrapped("cpu", module=module), "muon", None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["cuda", "cpu", "smallest"])
@pytest.mark.parametrize("reuse", [False, True])
@on_ranks(1, 2)
def test_muon_updates_the_fp32_masters_of_16_bit_weights(rank: int, world_size: int, reuse: bool, place: str) -> None:
    model = wrapped(place, module=build(torch.bfloat16), reuse_fp16_shard=reuse)
    optimizer = made_for(model, "muon")
    plain, masters = build(torch.bfloat16), build()
    optimizers = muon_and_adam(masters)
    for step in range(3):
        optimizer.backward(loss_of(model, step, dtype=torch.bfloat16))
        optimizer.step()
        loss_of(plain, step, dtype=torch.bfloat16).backward()
        for weight, master in zip(plain.parameters(), masters.parameters(), strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        for each in optimizers:
            each.step()
        for weight, master in zip(plain.parameters(), masters.parameters(), strict=True):
            round_master_(weight.data.view(-1), master.data.view(-1))
        assert_same(weights_of(model), weights_of(plain))
    model.close()


@on_ranks(1, 2)
def test_a_step_with_a_gradient_that_is_not_finite_changes_no_optimizer(rank: int, world_size: int) -> None:
    model = wrapped("cpu", dtype=torch.float16)
    optimizer = made_for(model, "muon", initial_scale=2.0**4)
    for step in range(2):
        optimizer.backward(loss_of(model, step, dtype=torch.float16))
        optimizer.step()
    before = state_hash(model, optimizer)
    loss = loss_of(model, 2, dtype=torch.float16)
    optimizer.backward(loss * (float("inf") if rank == 0 else 1.0))
    with pytest.warns(UserWarning, match="skipped on all ranks"):
        optimizer.step()
    assert state_hash(model, optimizer) == before
    optimizer.backward(loss_of(model, 3, dtype=torch.float16))
    optimizer.step()
    assert len(set(gathered(state_hash(model, optimizer)))) == 1
    assert state_hash(model, optimizer) != before
    model.close()


@pytest.mark.parametrize("make", ["muon", "transformers", "whitened"])
@on_ranks(1, 2)
def test_a_checkpoint_goes_on_at_another_stage_and_on_another_number_of_ranks(
    rank: int, world_size: int, make: str, tmp_path: Path
) -> None:
    plain, model = Plain(make, world_size), wrapped("cuda", stage=3)
    optimizer = made_for(model, make)
    for step in range(2):
        train_step(model, optimizer, rank, step)
        plain.step(step)
    gemini.save_checkpoint(tmp_path, model, optimizer)
    saved = optimizer.state_dict()
    model.close()
    # Each rank alone, and as many ranks, where states rest on the host.
    groups = [None] if world_size == 1 else [[dist.new_group([each]) for each in range(world_size)][rank], None]
    for group in groups:
        other = wrapped("cpu", stage=1 if group is None else 3, process_group=group)
        its = made_for(other, make)
        gemini.load_checkpoint(tmp_path, other, its)
        assert_same(weights_of(other), weights_of(plain.model))
        assert _shapes(its.state_dict()) == _shapes(saved)
        if group is None:
            train_step(other, its, rank, 2)
            plain.step(2)
            assert_same(weights_of(other), weights_of(plain.model))
        other.close()


def _shapes(state: dict[str, Any]) -> Any:
    return {
        number: {name: tuple(each.shape) if isinstance(each, torch.Tensor) else each for name, each in entry.items()}
        for number, entry in state["state"].items()
    }


@pytest.mark.parametrize("make", ["muon", "adafactor", "transformers", "lamb", "whitened"])
@on_ranks(1, 2)
def test_a_state_dict_has_what_the_plain_optimizers_have_and_is_loaded(rank: int, world_size: int, make: str) -> None:
    plain, model = Plain(make, world_size), wrapped("cpu")
    optimizer = made_for(model, make)
    for step in range(2):
        train_step(model, optimizer, rank, step)
        plain.step(step)
    saved, number = optimizer.state_dict(), 0
    for each in plain.optimizers:
        for group in each.param_groups:
            for parameter in group["params"]:
                entry = saved["state"][number]
                assert entry.keys() == each.state[parameter].keys()
                for name, value in each.state[parameter].items():
                    same = torch.equal(entry[name], value) if isinstance(value, torch.Tensor) else entry[name] == value
                    assert same, name
                number += 1
    other = wrapped("cuda", module=model_with(weights_of(model)))
    its = made_for(other, make)
    its.load_state_dict(saved)
    train_step(other, its, rank, 2)
    plain.step(2)
    assert_same(weights_of(other), weights_of(plain.model))


def model_with(weights: dict[str, torch.Tensor]) -> Matrices:
    model = build()
    model.load_state_dict(weights)
    return model


def test_the_state_of_another_optimizer_is_refused() -> None:
    model = wrapped("cuda")
    optimizer = made_for(model, "adafactor")
    other = torch.optim.AdamW(build().parameters())
    with pytest.raises(ValueError, match=r"Adafactor cannot step with .*eps=1e-08"):
        optimizer.load_state_dict(other.state_dict())
    model.close()


def test_states_read_and_written_by_parameter_count() -> None:
    model = wrapped("cuda")
    optimizer = made_for(model, "muon")
    train_step(model, optimizer, 0, 0)
    weight = model.module.square.weight
    momentum = optimizer.state[weight]["momentum_buffer"]
    assert momentum.shape == weight.shape
    optimizer.state[weight]["momentum_buffer"] = torch.zeros(40, 40)
    assert not optimizer.state_dict()["state"][1]["momentum_buffer"].any()
    assert torch.equal(gemini.safe_get_full_optimizer_state(weight, "momentum_buffer"), torch.zeros(40, 40))
    train_step(model, optimizer, 0, 1)
    model.close()


@on_ranks(1, 2)
def test_what_an_optimizer_of_whole_tensors_cannot_step_is_refused_each_time_and_changes_nothing(
    rank: int, world_size: int
) -> None:
    model, plain = wrapped("cpu"), Plain("muon", world_size)
    optimizer = made_for(model, "muon")
    muon, adam = optimizer.param_groups
    bias = adam["params"].pop()
    muon["params"].append(bias)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"Muon cannot update 'last.bias' of shape \(8,\): Param gradient must be a"
        ):
            train_step(model, optimizer, rank, 0)
    adam["params"].append(muon["params"].pop())
    for name, bad, words in (("lr", "0.1", "lr='0.1'"), ("ns_steps", None, "it has no 'ns_steps'")):
        had = muon.pop(name)
        if bad is not None:
            muon[name] = bad
        for _ in range(2):
            with pytest.raises(ValueError, match=f"Muon cannot step with .*{words}"):
                train_step(model, optimizer, rank, 0)
        muon[name] = had
    optimizer.zero_grad()
    train_step(model, optimizer, rank, 0)
    plain.step(0)
    assert_same(weights_of(model), weights_of(plain.model))
    model.close()


class Scaled(torch.optim.Optimizer):
    """An optimizer of the user's, with a factor that is in no param group and that its constructor takes."""

    def __init__(self, params: Any, factor: float, counts: str = "") -> None:
        super().__init__(params, {"lr": 0.1})
        self.factor, self.steps = factor, 0
        self.counts = counts  # in what it remembers its number of steps

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += self.counts == "attribute"
        for group in self.param_groups:
            if self.counts == "group":
                group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] * self.factor)


def scaled(parameters: Any, whole: bool, counts: str = "") -> Scaled:
    optimizer = Scaled(parameters, 0.5, counts)
    if whole:
        gemini.per_tensor(optimizer)
    return optimizer


@pytest.mark.parametrize("whole", [False, True], ids=["elementwise", "whole"])
@on_ranks(1, 2)
def test_attributes_of_the_users_optimizer_count_as_they_are_at_each_step(
    rank: int, world_size: int, whole: bool
) -> None:
    model, plain = wrapped("cpu"), Plain("adafactor", world_size)
    ours, its = scaled(model.parameters(), whole), scaled(plain.model.parameters(), whole)
    plain.optimizers = [its]
    optimizer = ShardedOptimizer(model, ours, elementwise=not whole)
    for step in range(4):
        if step == 2:
            ours.factor = its.factor = 0.125
        train_step(model, optimizer, rank, step)
        plain.step(step)
        assert_same(weights_of(model), weights_of(plain.model))
    model.close()


@pytest.mark.parametrize("whole", [False, True], ids=["elementwise", "whole"])
@pytest.mark.parametrize(
    ("counts", "words"), [("attribute", "its attribute 'steps'"), ("group", "in a param group 'steps'")]
)
def test_an_optimizer_that_remembers_something_elsewhere_than_in_its_states_is_refused(
    counts: str, words: str, whole: bool
) -> None:
    model = wrapped("cpu")
    optimizer = scaled(model.parameters(), whole, counts)
    with pytest.raises(UnsupportedError, match=rf"Scaled\.step\(\) changes {words}.*self\.state\[parameter\]"):
        ShardedOptimizer(model, optimizer, elementwise=not whole)
    model.close()


def test_states_of_another_shape_are_in_the_state_of_the_optimizer_alone() -> None:
    model = wrapped("cuda")
    optimizer = made_for(model, "adafactor")
    train_step(model, optimizer, 0, 0)
    weight = model.module.square.weight
    with pytest.raises(
        ValueError, match=r"'row_var' of 'square.weight' has another shape .*optimizer.state\[parameter"
    ):
        gemini.safe_get_full_optimizer_state(weight, "row_var")
    optimizer.state[weight]["row_var"] = torch.full((40, 1), 0.5)
    assert torch.equal(optimizer.state_dict()["state"][5]["row_var"], torch.full((40, 1), 0.5))
    model.close()


def test_the_plan_counts_the_states_of_whole_tensors() -> None:
    """Muon's one state and Adam's two share memory where both are in one chunk; Adafactor's of vectors is one."""
    for make, num_states in (("muon", {1, 2}), ("adafactor", {0, 1})):
        model = wrapped("cpu")
        optimizer = made_for(model, make)
        train_step(model, optimizer, 0, 0)
        counts = {chunk.optim_states for chunk in model.plan.demand.chunks}
        assert counts <= num_states
        held = sum(each.nbytes for state in optimizer._chunk_states.by_chunk.values() for each in state.held.values())
        assert held == sum(chunk.home_bytes.get(gemini.Kind.OPTIM, 0) for chunk in model.plan.demand.chunks)
        model.close()


def test_lbfgs_and_an_optimizer_that_needs_a_closure_are_refused_by_name() -> None:
    class Sharp(Lamb):
        def step(self, closure: Any) -> None:
            """As SAM's."""

    for make, message in (
        (lambda p: torch.optim.LBFGS(p), "LBFGS treats neither .* calls its closure several times"),
        (lambda p: gemini.per_tensor(Sharp(p, 0.1, 1.0)), r"Sharp\.step\(\) needs closure=.* SAM"),
    ):
        model = wrapped("cuda")
        with pytest.raises(UnsupportedError, match=message):
            ShardedOptimizer(model, make(model.parameters()))
        model.close()
    with pytest.raises(UnsupportedError, match="LBFGS"):
        gemini.per_tensor(torch.optim.LBFGS(build().parameters()))
    with pytest.raises(TypeError, match="found str"):
        gemini.per_tensor("Muon")  # type: ignore[arg-type]


def test_updates_in_the_backward_are_refused_with_muon() -> None:
    model = ShardedModel(build(), device="emulated", update_in_backward=True)
    with pytest.raises(UnsupportedError, match=r"update_in_backward=True .* Muon"):
        ShardedOptimizer(model, muon_and_adam(model))
    model.close()


@on_ranks(1, 2)
def test_sam_is_two_backwards_in_the_loop(rank: int, world_size: int) -> None:
    """Foret et al. 2020: the gradient at the weights moved uphill updates the weights before that."""
    model, plain = wrapped("cuda"), build()
    optimizer = ShardedOptimizer(model, gemini.HybridAdam(model.parameters(), lr=1e-2))
    plain_optimizer = gemini.HybridAdam(plain.parameters(), lr=1e-2)
    for step in range(3):
        for each, its in ((model, optimizer), (plain, plain_optimizer)):
            loss_of(each, step).backward()
            with torch.no_grad():
                before = [p.detach().clone() for p in each.parameters()]
                for p in each.parameters():
                    p.add_(p.grad, alpha=0.05)
            its.zero_grad()
            loss_of(each, step).backward()
            with torch.no_grad():
                for p, value in zip(each.parameters(), before, strict=True):
                    p.copy_(value)
            its.step()
            its.zero_grad()
    assert_same(weights_of(model), weights_of(plain))
    model.close()


@on_ranks(2, soak=(4,))
def test_replicas_each_step_their_own_copy_alike(rank: int, world_size: int) -> None:
    """All ranks see the same data: the order in which means are added does not count."""
    model = wrapped("cuda", shard_group_size=world_size // 2)
    train_beside_plain(0, 1, model, "muon", 0.1)


class Failing(Lamb):
    """Fails at one tensor, on the rank that owns it."""

    def step(self, closure: Any = None) -> None:
        if any(p.shape == (40, 40) and p.grad.any() for group in self.param_groups for p in group["params"]):
            raise ArithmeticError("of the user's")
        super().step(closure)


@on_ranks(1, 2)
def test_a_step_that_fails_on_one_owner_ends_on_all_ranks(rank: int, world_size: int) -> None:
    model = wrapped("cuda")
    optimizer = ShardedOptimizer(model, gemini.per_tensor(Failing(model.parameters(), 0.1, 1.0)))
    optimizer.backward(loss_of(model, 0, 0, rank))
    with pytest.raises((ArithmeticError, gemini.RemoteRankError), match="of the user's"):
        optimizer.step()


def test_states_that_no_rank_can_be_told_or_that_are_not_fp32_are_refused_by_name() -> None:
    class Keeps(Lamb):
        kept: Any = None

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["its"] = p.bfloat16() if self.kept is None else self.kept

    for kept, message in ((None, r"keeps 'its' in torch\.bfloat16"), (object(), "keeps 'its' as a object")):
        model = wrapped("cuda")
        its = Keeps(model.parameters(), 0.1, 1.0)
        its.kept = kept
        with pytest.raises(UnsupportedError, match=message):
            ShardedOptimizer(model, gemini.per_tensor(its))
        model.close()


def test_a_given_optimizer_serves_another_model_once_its_own_is_closed() -> None:
    model = wrapped("cuda")
    given = torch.optim.Adafactor(model.parameters(), lr=0.05, foreach=False)
    for _ in range(2):
        optimizer = ShardedOptimizer(model, given)
        train_step(model, optimizer, 0, 0)
        assert optimizer.state_dict()["state"][0]["step"] == 1
        optimizer.close()
    model.close()
