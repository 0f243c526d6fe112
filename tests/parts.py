"""Models of which only parts are trained, on one rank or several, beside a plain loop in which the same is done.

What is frozen keeps its optimizer state in both, until it is discarded in both.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini
from gemini import BudgetError, GatheredParameters, GeminiError, ShardedModel, ShardedOptimizer, state_hash
from tests.zoo import mlp
from tests.zoo.mlp import CHUNK_NUMEL, LAYERS, WIDTH, assert_same, build, weights_of

POLICIES = ({"tensor_placement_policy": "cuda"}, {"tensor_placement_policy": "cpu"})
WRAPS: list[dict[str, Any]] = [{"stage": stage, **policy} for stage in (0, 1, 2, 3) for policy in POLICIES]
WRAPS += [{"dtype": torch.bfloat16, **policy} for policy in POLICIES]
WRAPS += [{"dtype": torch.bfloat16, "chunk_size": 4 * CHUNK_NUMEL, "stage": 1}, {"chunk_size": 100 * CHUNK_NUMEL}]
WRAPS += [{"dtype": torch.bfloat16, "reuse_fp16_shard": True, **policy} for policy in POLICIES]
WRAPS += [{"shard_strategy": "tensor"}, {"model_data_memory": "smallest"}, {"model_data_memory": "half"}]


class Trunk(mlp.Mlp):
    """Only the last two layers are trained at first, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.layers[4:].requires_grad_(True)
        self.layers[0].bias.requires_grad_(True)


class Pair:
    """A sharded model and its plain reference. In fp32 every rank sees other data."""

    def __init__(self, rank: int, world_size: int, wrap: dict[str, Any], make: Callable[[], nn.Module] = Trunk) -> None:
        wrap = {"chunk_size": CHUNK_NUMEL, **wrap}
        if wrap.get("model_data_memory") in ("smallest", "half"):
            room = 4 if wrap.pop("model_data_memory") == "half" else 1
            least = mlp.smallest_budget(make, **wrap)
            trained = mlp.smallest_budget(mlp.Mlp, **wrap)  # with the gradients of layers that are frozen at first
            wrap["model_data_memory"] = room * max(least, trained)
        self.rank, self.world_size, self.dtype = rank, world_size, wrap.get("dtype")
        self.model = ShardedModel(build(make), device="emulated", rank_timeout=60, **wrap)
        self.plain = build(make).to(self.dtype or torch.float32)
        self.optimizer, self.its = self.made()

    def made(self) -> tuple[ShardedOptimizer, torch.optim.Optimizer]:
        return ShardedOptimizer(self.model, mlp.adam(self.model.parameters())), mlp.adam(self.plain.parameters())

    def both(self, name: str) -> list[nn.Parameter]:
        return [dict(model.named_parameters())[name] for model in (self.model, self.plain)]

    def flag(self, trains: bool, *prefixes: str) -> None:
        """Freeze or unfreeze all parameters whose names begin so."""
        for name, parameter in self.model.named_parameters():
            if name.startswith(prefixes):
                parameter.requires_grad_(trains)
        for name, parameter in self.plain.named_parameters():
            if name.startswith(prefixes):
                parameter.requires_grad = trains

    def discard(self, *prefixes: str) -> None:
        """Give up the state of all frozen parameters whose names begin so; of all without prefixes."""
        names = [n for n, p in self.plain.named_parameters() if not p.requires_grad and n.startswith(prefixes or "")]
        ours, plain = dict(self.model.named_parameters()), dict(self.plain.named_parameters())
        self.optimizer.discard_state([ours[name] for name in names] if prefixes else None)
        for name in names:
            self.its.state.pop(plain[name], None)

    def loss(self, model: nn.Module, step: int, rank: int) -> Tensor:
        return mlp.loss_of(model, 10 * step + (rank if self.dtype is None else 0), self.dtype)

    def backward(self, step: int) -> None:
        loss = self.loss(self.model, step, self.rank)
        loss.backward()
        for rank in range(self.world_size if self.dtype is None else 1):
            wanted = self.loss(self.plain, step, rank)
            wanted.backward()
            assert rank != self.rank or torch.equal(loss, wanted)
        if self.dtype is None:
            for parameter in self.plain.parameters():
                if parameter.grad is not None:
                    parameter.grad /= self.world_size

    def step(self) -> None:
        self.optimizer.step()
        self.its.step()
        self.plain.zero_grad()
        assert_same(weights_of(self.model), weights_of(self.plain))

    def zero_grad(self) -> None:
        self.model.zero_grad()
        self.plain.zero_grad()

    def steps(self, *numbers: int) -> None:
        for number in numbers:
            self.backward(number)
            self.step()

    def held(self, kind: str) -> int:
        """Bytes of a kind on both tiers."""
        return sum(tier.ledger.bytes_by_kind[kind] for tier in self.model.chunk_manager.memory.tiers)


def unfreezes(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """Gradual unfreezing, then freezing, then unfreezing of what was trained before: the bits of the plain loop."""
    pair = Pair(rank, world_size, wrap)
    pair.steps(0, 1)
    pair.flag(True, "layers.2", "layers.1.bias")
    assert all(parameter.requires_grad for parameter in pair.both("layers.2.weight"))
    pair.steps(2, 3)
    before = weights_of(pair.model)
    assert not torch.equal(before["layers.2.weight"], build().layers[2].weight), "it trains"
    pair.flag(False, "layers.5", "layers.4.bias")
    pair.steps(4, 5)
    assert torch.equal(weights_of(pair.model)["layers.5.weight"], before["layers.5.weight"])
    pair.flag(True, "layers.3", "layers.4", "layers.5.weight")
    pair.flag(False, "layers.2.weight")
    pair.steps(6, 7)
    pair.flag(True, "layers")
    pair.steps(8, 9)
    state = pair.optimizer.state_dict()["state"]
    assert [int(state[number]["step"]) for number in (0, 2, 4, 10)] == [2, 2, 6, 8], "what is frozen keeps its count"
    pair.model.close()


def discards(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """State that is given up on request starts afresh, as when it is popped from a plain optimizer's state."""
    pair = Pair(rank, world_size, wrap, mlp.Mlp)
    pair.steps(0, 1)
    pair.flag(False, "layers.1.", "layers.2.weight", "layers.5.")
    pair.steps(2)
    pair.discard("layers.1.", "layers.2.weight")
    pair.steps(3)
    pair.flag(True, "layers.1.", "layers.2.weight")
    pair.steps(4)
    pair.flag(False, "layers.3.")
    pair.discard()
    pair.flag(True, "layers.")
    pair.steps(5)
    state = pair.optimizer.state_dict()["state"]
    assert [int(state[2 * layer]["step"]) for layer in range(LAYERS)] == [6, 2, 2, 1, 6, 1]
    before = state_hash(pair.model, pair.optimizer)
    pair.flag(False, "layers.3.")
    trained, frozen = (pair.both(name)[0] for name in ("layers.2.weight", "layers.3.weight"))
    for bad, complaint in (
        ([frozen, trained], "'layers.2.weight', which is trained: freeze it first"),
        ([nn.Parameter(torch.zeros(3))], r"found Parameter of shape \(3,\)"),
    ):
        with pytest.raises(ValueError, match=complaint):
            pair.optimizer.discard_state(bad)
    pair.flag(True, "layers.3.")
    pair.backward(6)
    pair.flag(False, "layers.3.")
    with pytest.raises(GeminiError, match=r"discard_state\(\) between backward\(\) and step\(\)"):
        pair.optimizer.discard_state()
    pair.flag(True, "layers.3.")
    pair.zero_grad()
    assert state_hash(pair.model, pair.optimizer) == before
    pair.steps(7)
    pair.model.close()


def resumes(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """A state dict that was saved while something was frozen, loaded where that was frozen before wrapping."""
    pair = Pair(rank, world_size, wrap, mlp.Mlp)
    pair.steps(0, 1)
    pair.flag(False, "layers.1.", "layers.4.weight")
    pair.steps(2)
    saved = pair.model.state_dict(), pair.optimizer.state_dict()
    masters = {number: master.clone() for number, master in saved[1]["masters"].items()}
    wanted = state_hash(pair.model, pair.optimizer)
    pair.model.close()

    class Frozen(mlp.Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.layers[1].requires_grad_(False)
            self.layers[4].weight.requires_grad_(False)

    again = Pair(rank, world_size, wrap, Frozen)
    again.model.load_state_dict(saved[0])
    again.optimizer.load_state_dict(saved[1])
    assert state_hash(again.model, again.optimizer) == wanted
    assert_same(again.optimizer.state_dict()["masters"], masters)
    again.plain, again.its = pair.plain, pair.its
    again.flag(True, "layers.")
    again.steps(3, 4)
    again.model.close()


def memory(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """Frozen chunks hold parameters only once their state is given up; each layer is a chunk: bytes count layers."""
    pair = Pair(rank, world_size, wrap | {"chunk_size": CHUNK_NUMEL}, mlp.Mlp)
    kinds = ["grad", "optim", *(["master"] if pair.dtype else [])]

    def bytes_now() -> dict[str, int]:
        return {kind: pair.held(kind) for kind in (*kinds, "param")}

    pair.steps(0)
    full = bytes_now()
    for step, count in enumerate((4, 1, 0, 3, 6), start=1):  # trained layers, the last ones
        pair.flag(False, *(f"layers.{n}." for n in range(LAYERS - count)))
        pair.flag(True, *(f"layers.{n}." for n in range(LAYERS - count, LAYERS)))
        if count:
            pair.steps(step)
        else:
            pair.model(mlp.inputs(0, pair.dtype))
        now = bytes_now()
        assert now["param"] == full["param"] and now["grad"] * LAYERS == full["grad"] * count
        if step == 1:
            assert now == {**full, "grad": now["grad"]}, "frozen layers keep their state"
        pair.discard()
        now = bytes_now()
        assert {kind: now[kind] * LAYERS for kind in kinds} == {kind: full[kind] * count for kind in kinds}
        budget = pair.model.plan.budget_bytes
        assert budget is None or pair.model.chunk_manager.memory.tiers[0].ledger.peak_bytes <= budget
    pair.model.close()


def groups(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """What is unfrozen and in no group is an error at the step; add_param_group is the way."""

    class Grouped(Pair):
        def made(self) -> tuple[ShardedOptimizer, torch.optim.Optimizer]:
            mine, its = (mlp.adam(p for p in m.parameters() if p.requires_grad) for m in (self.model, self.plain))
            return ShardedOptimizer(self.model, mine), its

    pair = Grouped(rank, world_size, wrap)
    pair.steps(0)
    pair.flag(True, "layers.3")
    pair.backward(1)
    with pytest.raises(GeminiError, match=r"layers\.3\.weight, layers\.3\.bias: unfrozen, but .*add_param_group"):
        pair.optimizer.step()
    pair.zero_grad()
    assert_same(weights_of(pair.model), weights_of(pair.plain))
    before = state_hash(pair.model, pair.optimizer)
    weight, bias = (pair.both(f"layers.3.{name}") for name in ("weight", "bias"))
    foreign = nn.Parameter(torch.zeros(3))
    for bad, complaint in (
        ([foreign], "not this model's"),
        ([weight[0], weight[0]], "'layers.3.weight' twice"),
        ([weight[0], pair.both("layers.4.weight")[0]], "more than one parameter group"),
    ):
        with pytest.raises(ValueError, match=complaint):
            pair.optimizer.add_param_group({"params": bad})
    with pytest.raises(ValueError, match="lr must be"):
        pair.optimizer.add_param_group({"params": [weight[0]], "lr": -1.0})
    assert len(pair.optimizer.param_groups) == 1
    assert state_hash(pair.model, pair.optimizer) == before
    for place, optimizer in enumerate((pair.optimizer, pair.its)):
        optimizer.add_param_group({"params": [weight[place], bias[place]], "lr": 0.05})
    pair.steps(2, 3)
    assert [group["lr"] for group in pair.optimizer.param_groups] == [1e-2, 0.05]
    pair.flag(True, "layers.1")  # in two steps: group first, flag later
    one = [pair.both(f"layers.1.{name}") for name in ("weight", "bias")]
    pair.flag(False, "layers.1")
    for place, optimizer in enumerate((pair.optimizer, pair.its)):
        optimizer.add_param_group({"params": [each[place] for each in one], "weight_decay": 0.5})
    pair.steps(4)
    pair.flag(True, "layers.1")
    pair.steps(5, 6)
    saved = pair.optimizer.state_dict()
    assert [len(group["params"]) for group in saved["param_groups"]] == [5, 2, 2]
    pair.optimizer.load_state_dict(saved)
    pair.steps(7)
    pair.model.close()


def refusals(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """What cannot be is an error that changes nothing, and training goes on."""
    pair = Pair(rank, world_size, wrap)
    pair.steps(0)
    pair.backward(1)
    pair.flag(True, "layers.2.")
    with pytest.raises(GeminiError, match=r"layers\.2\.weight, layers\.2\.bias were unfrozen between the micro-ba"):
        pair.loss(pair.model, 2, rank)
    pair.flag(False, "layers.2.")
    pair.zero_grad()
    pair.steps(2)
    before = state_hash(pair.model, pair.optimizer)
    with GatheredParameters(pair.both("layers.2.weight")[0]):
        pair.flag(True, "layers.2.")
        with pytest.raises(GeminiError, match="inside GatheredParameters"):
            pair.loss(pair.model, 2, rank)
    assert state_hash(pair.model, pair.optimizer) == before
    pair.steps(3)  # outside, it counts
    pair.flag(False, "layers.4.")
    pair.backward(4)
    pair.flag(False, "layers.5.weight")  # its gradient is there already: it waits for the step
    pair.zero_grad()
    pair.steps(5)
    pair.model.close()


def penalties(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """Parameters that are used outside of a forward, right after they were unfrozen or frozen."""
    pair = Pair(rank, world_size, wrap)
    pair.steps(0)
    plain_loss = pair.loss
    for step, trains in enumerate((True, False, True), start=1):
        pair.flag(trains, "layers.2.")

        def loss(model: nn.Module, step: int, rank: int, trains: bool = trains) -> Tensor:
            weight = dict(model.named_parameters())["layers.2.weight"]
            penalty = (weight * weight).sum() * 0.01
            assert penalty.requires_grad == trains
            return plain_loss(model, step, rank) + penalty

        pair.loss = loss  # type: ignore[method-assign]
        pair.steps(step)
    pair.model.close()


def unused(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """ignore_unused_parameters=False names what no rank has a gradient of, before anything changes."""
    pair = Pair(rank, world_size, {**wrap, "ignore_unused_parameters": False}, Sometimes)
    its = pair.model.module
    pair.steps(0)
    before = state_hash(pair.model, pair.optimizer)
    for uses in ((), (0,)):
        its.uses = pair.plain.uses = uses
        pair.backward(1)
        named = r"layers\.2\.weight, layers\.2\.bias" + (r":" if uses else r", layers\.3\.weight, layers\.3\.bias:")
        with pytest.raises(GeminiError, match=f"no rank has a gradient of {named}"):
            pair.optimizer.step()
        pair.zero_grad()
        assert state_hash(pair.model, pair.optimizer) == before
    pair.flag(False, "layers.2.")
    pair.steps(2)
    pair.flag(True, "layers.2.")
    its.uses = pair.plain.uses = (0,)
    pair.backward(3)
    its.uses = pair.plain.uses = (0, 1)
    pair.backward(4)  # one micro-batch of the step is enough
    pair.optimizer.step()
    pair.model.close()


def nothing(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """For a while nothing at all is trained, but inputs have gradients; they are no reason to wait for a step."""
    pair = Pair(rank, world_size, wrap)
    pair.steps(0)
    pair.flag(False, "layers")
    inputs = [mlp.inputs(1, pair.dtype).requires_grad_() for _ in range(2)]
    for model, x in zip((pair.model, pair.plain), inputs):
        model(x).sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert not pair.held("grad") and pair.held("optim")
    pair.flag(True, "layers.5")
    pair.steps(2, 3)
    pair.flag(False, "layers")
    pair.discard()
    assert not pair.held("grad") and not pair.held("optim") and not pair.held("master")
    pair.flag(True, "layers.4")
    pair.steps(4)
    pair.model.close()


class Sometimes(mlp.Mlp):
    """Layers 3 and 2 take part only when the caller says so."""

    uses: tuple[int, ...] = (0, 1)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number not in (3, 2) or 3 - number in self.uses:
                x = x + torch.tanh(layer(x))
        return x


def beside(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """A plain head with an optimizer of its own, on a sharded trunk that is a part of a plain module."""
    dtype = wrap.get("dtype")

    class Whole(nn.Module):
        def __init__(self, trunk: nn.Module) -> None:
            super().__init__()
            self.trunk = trunk
            self.head = nn.Linear(WIDTH, 3, dtype=dtype)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.trunk(x))

    pair = Pair(rank, world_size, wrap, mlp.Mlp)
    wholes = []
    for trunk in (pair.model, pair.plain):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            wholes.append(Whole(trunk))
    heads = [mlp.adam(whole.head.parameters()) for whole in wholes]
    same = [0] if dtype is not None else list(range(world_size))
    for step in range(3):
        losses = []
        for other in [rank if dtype is None else 0, *same]:
            whole = wholes[len(losses) > 0]
            loss = whole(mlp.inputs(10 * step + other, dtype)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(losses[0], losses[1 + (rank if dtype is None else 0)])
        for parameter in wholes[0].head.parameters():
            if world_size > 1 and dtype is None:
                parts = [torch.empty_like(parameter.grad) for _ in range(world_size)]
                torch.distributed.all_gather(parts, parameter.grad)
                parameter.grad = sum(parts[1:], start=parts[0]) / world_size
        for parameter in wholes[1].parameters():
            if dtype is None:
                parameter.grad /= world_size
        for head in heads:
            head.step()
            head.zero_grad()
        pair.step()
    state, wanted = (dict(whole.state_dict()) for whole in wholes)
    assert_same(state, wanted)
    changed = {name: value_like(value, place) for place, (name, value) in enumerate(wanted.items())}
    for whole in wholes:
        found = whole.load_state_dict(changed)
        assert not found.missing_keys and not found.unexpected_keys
        assert_same(dict(whole.state_dict()), changed)
    pair.backward(7)
    pair.step()
    some = {name: value for name, value in changed.items() if name != "trunk.layers.1.bias"}
    with pytest.raises(RuntimeError, match=r"trunk\.layers\.1\.bias.*\n.*trunk\.more"):
        wholes[0].load_state_dict(some | {"trunk.more": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"layers\.1\.bias has shape"):
        wholes[0].load_state_dict(some | {"trunk.layers.1.bias": torch.zeros(1)})
    pair.model.close()


def value_like(value: Tensor, seed: int) -> Tensor:
    """bf16 numbers."""
    drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
    return drawn.bfloat16().to(value.dtype)


PARITY = [unfreezes, resumes, memory, penalties, nothing, beside]
REFUSALS = [groups, refusals, unused, discards]  # with several ranks each one makes them start anew together


def too_tight(rank: int, world_size: int) -> None:
    """Unfreezing more than there is room for is an error, and freezing it again mends it."""
    least = mlp.smallest_budget(Trunk, chunk_size=CHUNK_NUMEL, tensor_placement_policy="cuda")
    wrap = {"tensor_placement_policy": "cuda", "model_data_memory": least}
    pair = Pair(rank, world_size, wrap)
    pair.steps(0)
    before = state_hash(pair.model, pair.optimizer)
    held = [pair.held(kind) for kind in ("param", "grad", "optim")]
    pair.flag(True, "layers.1.", "layers.2.")
    for _ in range(2):
        refusal = r"unfrozen: layers\.1\.weight, .*does not fit: device: .*model_data_mem"
        with pytest.raises(BudgetError, match=refusal) as e:
            pair.loss(pair.model, 1, rank)
        assert e.value.tier == "device" and e.value.needed_bytes > e.value.budget_bytes == least, "in other words"
    assert [pair.held(kind) for kind in ("param", "grad", "optim")] == held
    assert state_hash(pair.model, pair.optimizer) == before
    pair.flag(False, "layers.1.", "layers.2.")
    pair.steps(1)
    pair.flag(False, "layers.4.")
    pair.flag(True, "layers.2.")  # the gradients fit, and the state of what is frozen goes to the host
    pair.steps(2, 3)
    pair.model.close()


def largest_gradients(rank: int, world_size: int) -> None:
    """The infinity norm over ranks: exact, infinite, and NaN wherever the NaN lies; such steps are skipped."""
    model = ShardedModel(build(), device="emulated", chunk_size=CHUNK_NUMEL)
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
    weights = dict(model.named_parameters())
    for name, element, value in [
        *((name, element, math.nan) for name in ("layers.0.weight", "layers.5.bias") for element in (0, -1)),
        ("layers.3.weight", 5, math.inf),
        ("layers.3.weight", -5, 2.0**20),
    ]:
        mlp.loss_of(model).backward()
        gradient = torch.zeros(weights[name].shape)
        gradient.view(-1)[element] = -value
        gemini.safe_set_full_grad(weights[name], gradient)
        norm = float(optimizer.clip_grad_norm_(1.0, math.inf))
        assert norm == value or (math.isnan(norm) and math.isnan(value)), (norm, name, element, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        assert optimizer.last_step is not None
        assert optimizer.last_step.skipped == (None if math.isfinite(value) else name)
    model.close()
