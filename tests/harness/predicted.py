"""One training, predicted from its plan and measured while it runs: bytes over links, collectives, model data held.

Nothing is compared with itself. The prediction has the plan, and what a dry run of the plain module says of the order
of uses. Bytes are counted where they are copied, collectives by torch's profiler, memory over live storages.
"""

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from gemini import ShardedModel, ShardedOptimizer, estimate_memory
from gemini.memory.transfer import Region
from gemini.placement.demand import Tier
from gemini.placement.next_use import PassSchedule
from gemini.placement.plan import Plan
from gemini.placement.policies import StaticPolicy
from gemini.placement.predict import Predicted, predict_forwards, predict_steps
from gemini.placement.simulate import Exchange
from optim import HybridAdam
from tests.harness.dry_run import dry_run
from tests.zoo.models import MODELS, ModelCase

STEPS = 4
_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_TESTS = str(Path(__file__).parents[1])  # whose lines the library's warnings name, as those of a script
_SHAPED = ("gloo:broadcast", "gloo:all_gather", "gloo:all_to_all")


@dataclass(frozen=True)
class Case:
    """One training. budget: how much of what lies between the least budget and everything on the device; None: all."""

    model: str
    seed: int = 0
    budget: float | None = 0.0
    stage: int = 3
    strategy: str = "chunk"
    dtype: str = "fp32"
    policy: str = "auto"
    micro: int = 1
    clip: float | None = None
    reduce: str | None = None
    accumulate: str | None = None
    reuse: bool = False
    chunk: float | None = 1.0  # times the model's own chunk size; None: searched
    plans_sums: bool = False  # the number of micro-batches is known to the plan
    prefetch: int = 1  # payloads that may be gathered ahead at once
    in_backward: bool = False  # the backward updates

    def __str__(self) -> str:
        plain = asdict(Case(self.model))
        said = [f"{name}={value}" for name, value in asdict(self).items() if value != plain[name]]
        return "-".join([self.model, *said])


def random_case(seed: int, models: list[str]) -> Case:
    """The same in every process."""
    choose = random.Random(seed)
    dtype = choose.choice(["fp32", "fp32", "bf16", "bf16", "fp16"])
    accumulate = choose.choice([None, None, "fp32"])
    case = Case(
        model=choose.choice(models),
        seed=seed,
        budget=choose.choice([0.0, 0.0, 0.1, 0.3, 0.5, 0.8, None]),
        stage=choose.choice([3, 3, 3, 2, 1, 0]),
        strategy=choose.choice(["chunk", "chunk", "tensor", "bucket"]),
        dtype=dtype,
        policy=choose.choice(["auto", "auto", "auto", "cpu", "cuda", "static"]),
        micro=choose.choice([1, 1, 2, 3]),
        clip=choose.choice([None, 0.05]),
        reduce=choose.choice([None, None, "fp32", "bf16"]),
        accumulate=accumulate,
        reuse=accumulate is None and dtype != "fp32" and choose.random() < 0.3,
        chunk=choose.choice([1.0, 1.0, 2.0, 0.5, None]),
        plans_sums=choose.random() < 0.3,
        prefetch=choose.choice([0, 1, 1, 4]),
    )
    # With reentrant checkpointing the gradients of a shared layer come in pieces, which are refused.
    may_update = case.micro == 1 and case.clip is None and case.dtype != "fp16" and "reentrant" not in case.model
    return replace(case, in_backward=may_update and choose.random() < 0.7)


@dataclass
class Measured:
    """A step, as it was."""

    links: dict[str, int]
    gathered: tuple[float, int]  # launches, bytes
    reduced: tuple[int, int]
    peaks: dict[Tier, int] | None  # bytes of model data


class Peaks:
    """The most bytes of model data on each tier, looked at whenever data has moved.

    On the device that is what all storages have. On the host, where many regions lie in one mapping and what is spilled
    belongs to nobody while it is copied, it is what was taken and not given back.
    """

    def __init__(self, model: ShardedModel) -> None:
        self._manager = model.chunk_manager
        self._most: dict[Tier, int] = {}
        model.observer.listen(lambda move: self._look())

    def pop_peaks(self) -> dict[Tier, int]:
        """Since the last time that this was asked."""
        self._look()
        most, self._most = self._most, {}
        return most

    def _look(self) -> None:
        storages = {}
        for region in self._regions():
            if region is not None and region.tier is Tier.DEVICE and region.flat.numel():
                with torch._C.DisableTorchFunctionSubclass():
                    storage = region.flat.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        now = {Tier.DEVICE: sum(storages.values()), Tier.HOST: self._manager.memory.host.ledger.total_bytes}
        self._most = {tier: max(self._most.get(tier, 0), num_bytes) for tier, num_bytes in now.items()}

    def _regions(self) -> Iterator[Region | None]:
        manager = self._manager
        for chunk in manager.chunks:
            yield from chunk.homes.values()
        for pool in (*manager.params.slots.pools, *manager.grads.places.pools):
            yield from (slot.region for slot in pool.slots + pool.held)
        for gradient in manager.grads.places.gradients.values():
            yield from (gradient.home, gradient.wide, gradient.unsynced)
        yield manager.grads.scratch._memory
        states = {} if manager.optimizer is None else manager.optimizer.states.by_chunk
        for state in states.values():
            yield from (Region(state.tier, flat) for flat in state.flats.values())


def _arguments(case: Case, of: ModelCase) -> dict[str, Any]:
    size = None if case.chunk is None else int(of.chunk_numel * case.chunk)
    found: dict[str, Any] = {"stage": case.stage, "shard_strategy": case.strategy, "chunk_size": size}
    found["gradient_accumulation_steps"] = case.micro if case.plans_sums else 1  # never learnt
    found["max_prefetch"], found["update_in_backward"] = case.prefetch, case.in_backward
    policy = StaticPolicy(0.5, 0.6, 0.4) if case.policy == "static" else case.policy
    found |= {"tensor_placement_policy": policy, "reuse_fp16_shard": case.reuse}
    for name, value in (("dtype", case.dtype), ("reduce_dtype", case.reduce), ("accumulate_dtype", case.accumulate)):
        found[name] = (
            {**_DTYPES, "fp32": torch.float32}[value] if value and (name, value) != ("dtype", "fp32") else None
        )
    return found


def _with_budget(case: Case, of: ModelCase, world_size: int, **wrap: Any) -> dict[str, Any]:
    if case.budget is None:
        return wrap
    whole = estimate_memory(of.build(), world_size=world_size, **wrap | {"tensor_placement_policy": "cuda"})
    least = estimate_memory(of.build(), world_size=world_size, **wrap).plan.minimum_bytes
    assert least is not None
    return {**wrap, "model_data_memory": int(least + case.budget * max(0, whole.device_bytes - least))}


def _loss(case: Case, of: ModelCase, model: nn.Module, step: int, micro: int, rank: int, world_size: int) -> Tensor:
    return of.loss(model, of.batch(step, rank, world_size, micro)).float() / case.micro


def dry(case: Case, of: ModelCase, plan: Plan) -> PassSchedule:
    """The schedule of the case's model, from a plain copy of it in the dtype in which it is trained."""
    dtype = _DTYPES[case.dtype]
    module = of.build() if dtype is None else of.build().to(dtype)
    return dry_run(module, plan.spec, lambda plain: _loss(case, of, plain, 1, 0, 0, 1))


def run(case: Case, rank: int = 0, world_size: int = 1) -> tuple[list[Predicted], list[Measured], list[str]]:
    """What was predicted of every step, and what was measured; warnings of the steps."""
    of = MODELS[case.model]
    wrap = _with_budget(case, of, world_size, **_arguments(case, of))
    model = ShardedModel(of.build(), device="emulated", rank_timeout=60, **wrap)
    scaled = {"initial_scale": 8.0} if case.dtype == "fp16" else {}
    adam = HybridAdam(model.parameters(), lr=1e-4)
    optimizer = ShardedOptimizer(model, adam, clip_grad_norm=case.clip, **scaled)
    plan, peaks = model.plan, Peaks(model)
    predicted = predict_steps(plan, STEPS, schedule=dry(case, of, plan), micro_batches=case.micro, rank=rank)
    measured, said = [], []

    def train(step: int) -> None:
        for micro in range(case.micro):
            optimizer.backward(_loss(case, of, model, step, micro, rank, world_size))
        optimizer.step()

    for step in range(STEPS):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            measured.append(measure(model, peaks, world_size, partial(train, step)))
        said += [f"step {step}: {each.message}" for each in caught if each.filename.startswith(_TESTS)]
    model.close()
    return predicted, measured, said


def measure(model: ShardedModel, peaks: Peaks | None, world_size: int, run: Callable[[], None]) -> Measured:
    """What `run()` moves and holds. peaks: None does not look at what it holds."""
    counted = model.chunk_manager.memory.transfer.bytes_by_link
    before = dict(counted)
    with _profiled(world_size) as profiled:
        if peaks is not None:
            peaks.pop_peaks()
        run()
    links = {link: now - before.get(link, 0) for link, now in sorted(counted.items()) if now != before.get(link, 0)}
    return Measured(links, *_exchanged(profiled, world_size), None if peaks is None else peaks.pop_peaks())


def run_inference(case: Case, rank: int = 0, world_size: int = 1) -> tuple[list[Predicted], list[Measured]]:
    """Forwards without gradients of a model that has no optimizer, behind the first, which brings its plan along."""
    of = MODELS[case.model]
    model = ShardedModel(
        of.build(), device="emulated", rank_timeout=60, **_with_budget(case, of, world_size, **_arguments(case, of))
    )
    schedule = dry(case, of, model.plan)

    def infer(step: int) -> None:
        with torch.no_grad():
            _loss(case, of, model, step, 0, rank, world_size)

    infer(0)
    assert model.plan.infers
    predicted = predict_forwards(model.plan, STEPS + 1, schedule=schedule)[1:]
    peaks = Peaks(model)
    measured = [measure(model, peaks, world_size, partial(infer, step)) for step in range(STEPS)]
    model.close()
    return predicted, measured


def _profiled(world_size: int) -> Any:
    return profile(activities=[ProfilerActivity.CPU], record_shapes=True) if world_size > 1 else _Nothing()


class _Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


def _exchanged(profiled: Any, world_size: int) -> tuple[tuple[float, int], tuple[int, int]]:
    """Launches and bytes of gathers and of reductions of floating-point data, from what torch saw of gloo.

    A gather of one unit is a broadcast from each rank, or an exchange of bytes if they are few, of which every rank
    sends its part to each; what is compared is integers.
    """
    if profiled is None:
        return (0, 0), (0, 0)
    gathers, gathered, reductions, reduced = 0.0, 0, 0, 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() not in _SHAPED:
            continue
        (shape,), (dtype,) = event.shapes()[:1], event.dtypes()[:1]
        itemsize = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2, "double": 8, "unsigned char": 1}.get(dtype, 0)
        num_bytes = itemsize
        for edge in shape:
            num_bytes *= edge
        if not itemsize:
            continue
        if event.name() == "gloo:all_to_all" and itemsize == 1:
            gathers, gathered = gathers + 1, gathered + num_bytes
        elif event.name() == "gloo:all_to_all":
            reductions, reduced = reductions + 1, reduced + num_bytes
        elif event.name() == "gloo:broadcast":
            gathers, gathered = gathers + 1 / world_size, gathered + num_bytes
        else:  # of several units: every rank's shard
            gathers, gathered = gathers + 1, gathered + num_bytes * world_size
    return (round(gathers, 6), gathered), (reductions, reduced)


def differences(predicted: list[Predicted], measured: list[Measured]) -> list[str]:
    """What was not as predicted, in any step."""
    found = []
    for step, (wanted, got) in enumerate(zip(predicted, measured, strict=True)):
        kinds = Exchange.GATHER, Exchange.WHOLE_GRADIENT, Exchange.WHOLE_WEIGHT
        its = [wanted.exchanged.get(kind, (0, 0)) for kind in kinds]
        pairs = [
            ("links", wanted.bytes_by_link, got.links),
            ("gathers", (sum(n for n, _ in its), sum(n for _, n in its)), got.gathered),
            ("reductions", wanted.exchanged.get(Exchange.REDUCE, (0, 0)), got.reduced),
        ]
        if got.peaks is not None:
            pairs.append(("peaks", {Tier.DEVICE: wanted.device_peak, Tier.HOST: wanted.host_peak}, got.peaks))
        found += [f"step {step}: {what} {were}, predicted {would}" for what, would, were in pairs if would != were]
    return found
