"""`deferred_update`: `step()` returns before the host has updated the weights, and nobody can tell from any bit."""

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import gemini
from gemini import GeminiError, ShardedModel, ShardedOptimizer, state_hash
from gemini.memory.transfer import Region, wait_on_host
from gemini.memory.work import WorkThread, WorkTicket
from gemini.optimizer import summary, update
from gemini.placement.demand import Tier
from tests.harness import late_copies, slow_updates
from tests.harness.on_ranks import on_ranks, on_ranks_with
from tests.zoo import half, mlp
from tests.zoo.half import Trained

# where states are: (arguments of ShardedModel, whether a gradient rests in its parameters' home)
ON_HOST: dict[str, tuple[dict[str, Any], bool]] = {
    "all on the host": ({"tensor_placement_policy": "cpu"}, False),
    "weights at home on the device": ({"tensor_placement_policy": "static", "offload_optim_frac": 1.0}, False),
    "lent homes on the device": ({"tensor_placement_policy": "static", "offload_optim_frac": 1.0}, True),
    "some of each": ({"model_data_memory": 8 * mlp.CHUNK_NUMEL * mlp.LAYERS}, False),
    "smallest": ({"model_data_memory": "smallest"}, True),
}


def _changes_hyperparameters(trained: Trained) -> None:
    for group in trained.optimizer.param_groups:
        group["lr"], group["betas"] = 0.0, (0.5, 0.5)


def _reads_a_parameter(trained: Trained) -> None:
    trained.losses.append(trained.weight.detach().float().sum())


def _reads_every_parameter(trained: Trained) -> None:
    trained.losses += [parameter.float().sum().detach() for parameter in trained.model.parameters()]


def _reads_states(trained: Trained) -> None:
    trained.losses.append(gemini.safe_get_full_fp32_param(trained.weight).sum())
    trained.losses.append(gemini.safe_get_full_optimizer_state(trained.weight, "exp_avg").sum())


def _reads_this_ranks_part(trained: Trained) -> None:
    trained.losses.append(gemini.safe_get_local_fp32_param(trained.weight).sum())


def _freezes(trained: Trained) -> None:
    trained.model.layers[1].requires_grad_(False)


def _hashes(trained: Trained) -> None:
    trained.losses.append(torch.tensor(int(state_hash(trained.model, trained.optimizer)[:8], 16)))


def _zeros(trained: Trained) -> None:
    trained.optimizer.zero_grad(set_to_none=False)


def _takes_another_optimizer(trained: Trained) -> None:
    trained.optimizer.close()
    trained.optimizer = ShardedOptimizer(trained.model, mlp.adam(trained.model.parameters()))


def _moves_all_states(trained: Trained) -> None:
    if trained.model.settings.model_data_memory is not None:
        trained.model.change_budgets(model_data_memory=10**9)


def _steps_without_gradients(trained: Trained) -> None:
    trained.optimizer.step()


DETOURS: dict[str, Callable[[Trained], None]] = {
    detour.__name__[1:]: detour
    for detour in (
        *(half._nothing, half._saves, half._evaluates, half._looks, half._changes, half._sets_weights, half._edits),
        *(half._loads, half._resumes, _changes_hyperparameters, _reads_a_parameter, _reads_every_parameter),
        *(_reads_states, _reads_this_ranks_part, _freezes, _hashes, _zeros, _takes_another_optimizer),
        *(_moves_all_states, _steps_without_gradients),
    )
}
SOME = (
    *("nothing", "evaluates", "edits", "reads_a_parameter", "changes_hyperparameters", "resumes", "moves_all_states"),
)


def end_of(trained: Trained, detour: Callable[[Trained], None], micro_batches: int) -> tuple[str, list[str]]:
    """Train three steps, with a detour right after the second one. The losses are in words: NaN is equal to NaN."""
    for step in range(3):
        for micro in range(micro_batches):
            trained.backward(step * micro_batches + micro)
        trained.optimizer.step()
        assert trained.optimizer.grad_norm is not None
        trained.losses.append(trained.optimizer.grad_norm.clone())
        if step == 1:
            detour(trained)
    result = state_hash(trained.model, trained.optimizer), [float(loss).hex() for loss in trained.losses]
    trained.model.close()
    return result


Setting = tuple[str, torch.dtype | None, int, tuple[str, ...]]  # place, dtype, micro-batches, detours
HALF = torch.bfloat16, torch.float16
SAMPLE: dict[int, list[Setting]] = {
    1: [
        ("all on the host", None, 1, SOME),
        ("weights at home on the device", torch.bfloat16, 1, tuple(DETOURS)),
        ("lent homes on the device", torch.float16, 2, SOME),
        ("some of each", torch.bfloat16, 2, SOME),
        ("smallest", torch.bfloat16, 1, SOME),
    ],
    2: [("smallest", torch.bfloat16, 1, SOME), ("weights at home on the device", None, 2, SOME)],
}
EVERY: list[Setting] = [
    (place, dtype, micro, tuple(DETOURS)) for place in ON_HOST for dtype in (None, *HALF) for micro in (1, 2)
]


def _id_of(setting: Setting) -> str:
    place, dtype, micro_batches, names = setting
    return f"{place}-{dtype}-{micro_batches}-{'some' if names == SOME else 'all'}"


@pytest.mark.filterwarnings("ignore:reuse_fp16_shard=True. parameters are used again")
@on_ranks_with("setting", SAMPLE, soak={1: EVERY, 2: EVERY, 4: EVERY[::3]}, ids=_id_of, timeout_s=600)
def test_bits_do_not_tell_when_the_update_was(rank: int, world_size: int, setting: Setting) -> None:
    place, dtype, micro_batches, names = setting
    arguments, reuse = ON_HOST[place]
    arguments, reuse = {**arguments, "dtype": dtype}, reuse and dtype is not None
    for number, name in enumerate(names):
        found = [end_of(Trained(rank, world_size, reuse, arguments), DETOURS[name], micro_batches)]
        for copies in (nullcontext(), late_copies.installed()):
            with copies, slow_updates.installed(seed=number) as slow:
                trained = Trained(rank, world_size, reuse, {**arguments, "deferred_update": True})
                found.append(end_of(trained, DETOURS[name], micro_batches))
                assert slow.num_begun >= 2
        for state, losses in found[1:]:
            assert (state, losses) == found[0], name


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_other_stages_have_the_same_bits(rank: int, world_size: int, stage: int) -> None:
    found = []
    for deferred in (False, True):
        with slow_updates.installed() as slow:
            where = {"tensor_placement_policy": "static", "offload_optim_frac": 1.0, "stage": stage}
            trained = Trained(rank, world_size, False, {**where, "deferred_update": deferred})
            found.append(end_of(trained, half._nothing, 1))
            # Ranks that update a part of whole weights gather them in the step.
            assert (slow.num_begun > 0) == (deferred and stage == 0)
    assert found[0][0] == found[1][0]


def _doubles(trained: Trained) -> None:
    for parameter in trained.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(2)


def _sets_one(trained: Trained) -> None:
    gemini.safe_set_full_grad(trained.weight, torch.ones_like(gemini.safe_get_full_grad(trained.weight)))


def _discards_one(trained: Trained) -> None:
    trained.weight.grad = None


def _goes_on(trained: Trained) -> None:
    trained.backward(7)


@on_ranks(1, 2)
@pytest.mark.parametrize("change", [half._nothing, _doubles, _sets_one, _discards_one, _goes_on])
def test_the_norm_is_of_the_gradients_as_they_are_in_the_step(
    rank: int, world_size: int, change: Callable[[Trained], None]
) -> None:
    found, taken = [], []
    find = summary.SumsAhead.find

    def finding(self: summary.SumsAhead, *args: Any) -> Any:
        taken.append(find(self, *args))
        return taken[-1]

    for deferred in (False, True):
        with slow_updates.installed(), mock.patch.object(summary.SumsAhead, "find", finding):
            arguments = {"tensor_placement_policy": "cpu", "deferred_update": deferred, "dtype": torch.bfloat16}
            trained = Trained(rank, world_size, False, arguments)
            for step in range(3):
                trained.backward(step)
                change(trained)
                trained.optimizer.step()
                assert trained.optimizer.grad_norm is not None
                trained.losses.append(trained.optimizer.grad_norm.clone())
            found.append((state_hash(trained.model, trained.optimizer), [float(loss) for loss in trained.losses]))
            trained.model.close()
    assert found[0] == found[1]
    were_taken = [made is not None for made in taken]
    assert {half._nothing: all(were_taken), _doubles: not any(were_taken)}.get(change, True), were_taken
    # A step of several micro-batches adds to them: nothing is summed ahead of it.
    assert bool(taken) == (change is not _goes_on)


def wrapped(**options: Any) -> tuple[ShardedModel, ShardedOptimizer]:
    """A model after a step, whose update is done."""
    model, optimizer = mlp.sharded("cpu", deferred_update=True, **options)
    mlp.train_step(model, optimizer, 0)
    model.chunk_manager.memory.work.join()
    return model, optimizer


def assert_as_plain(model: ShardedModel, num_steps: int) -> None:
    reference, its = mlp.plain()
    for step in range(num_steps):
        mlp.train_step(reference, its, step)
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))


def test_a_step_returns_before_the_update() -> None:
    with slow_updates.installed() as slow:
        model, optimizer = wrapped()
        mlp.loss_of(model, 1).backward()
        with slow.held():
            optimizer.step()
            assert model.chunk_manager.memory.work.is_busy
            assert optimizer.last_step is not None and optimizer.last_step.number == 2
        assert_as_plain(model, 2)


@pytest.mark.parametrize("place", ["all on the host", "weights at home on the device"])
def test_each_chunk_is_waited_for_by_itself(place: str) -> None:
    """The first operators run while the last chunks are still being updated."""
    model = ShardedModel(mlp.build(), **mlp.placed(**ON_HOST[place][0], deferred_update=True))
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
    last = model.chunk_manager.chunks[-1]
    entered, may_go_on = threading.Event(), threading.Event()
    close = update._close

    def closes(each: Any) -> None:
        if each.state.chunk is last:
            assert may_go_on.wait(60)
        close(each)

    def runs(*arguments: Any) -> None:
        entered.set()
        may_go_on.set()

    handle = model.layers[0].register_forward_hook(runs)
    with mock.patch.object(update, "_close", closes):
        mlp.loss_of(model, 1).backward()
        for event in (entered, may_go_on):
            event.clear()
        optimizer.step()
        mlp.loss_of(model, 2).backward()
    handle.remove()
    assert entered.is_set()


class Boom(Exception):
    pass


def test_an_update_that_fails_is_final() -> None:
    """On several ranks: tests/dist/test_rank_failures.py."""
    model, optimizer = wrapped()
    close = update._close

    def fails(each: Any) -> None:
        if each.state.chunk.index == 2:
            raise Boom("the host has failed")
        close(each)

    with mock.patch.object(update, "_close", fails):
        mlp.loss_of(model, 1).backward()
        optimizer.step()
        with pytest.raises(GeminiError, match=r"chunk 2 \(.*the host has failed"):
            mlp.train_step(model, optimizer, 2)
    for _ in range(2):
        with pytest.raises(GeminiError, match="failed half way"):
            mlp.train_step(model, optimizer, 3)


def test_a_thread_that_does_not_begin_leaves_nobody_waiting() -> None:
    model, optimizer = wrapped()
    mlp.loss_of(model, 1).backward()
    with mock.patch.object(WorkThread, "begin", side_effect=Boom("can't start new thread")), pytest.raises(Boom):
        optimizer.step()
    with pytest.raises(GeminiError, match="failed half way"):
        mlp.train_step(model, optimizer, 2)
    with pytest.raises(GeminiError, match="did not begin: Boom: can't start new thread"):
        wait_on_host(*model.chunk_manager.chunks[0].homes.values())
    model.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_the_new_weights() -> None:
    with slow_updates.installed(0.2):
        model, optimizer = wrapped()
        mlp.train_step(model, optimizer, 1)
        child = os.fork()
        if not child:
            try:
                assert_as_plain(model, 2)  # a child has no thread, and does not wait for one
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        mlp.train_step(model, optimizer, 2)


SCRIPT = """
from tests.harness import slow_updates
from tests.zoo import mlp
with slow_updates.installed(0.5):
    model, optimizer = mlp.sharded("cpu", deferred_update=True)
    mlp.train_step(model, optimizer, 0)
    print("stepped", flush=True)
"""


def test_a_process_ends_while_weights_are_updated() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "stepped\n", "")


def test_nothing_is_deferred_where_states_are_on_the_device_or_the_optimizer_is_torchs() -> None:
    with slow_updates.installed() as slow:
        model, optimizer = mlp.sharded("cuda", deferred_update=True)
        mlp.train_step(model, optimizer, 0)
        model = mlp.wrap("cpu", deferred_update=True)
        optimizer = ShardedOptimizer(model, torch.optim.AdamW(model.parameters()))
        mlp.train_step(model, optimizer, 0)
        assert not slow.num_begun


def test_work_keeps_nothing_of_the_work_before_it() -> None:
    """Otherwise each step's tickets would keep those of the step before."""
    thread, region = WorkThread(), Region(Tier.DEVICE, torch.zeros(4))
    before, after = WorkTicket(thread), WorkTicket(thread)
    before.hand_over(region)
    before.end()
    after.hand_over(region)
    after.end()
    is_kept = weakref.ref(before)
    del before
    assert region.tickets.pending == [after] and is_kept() is None
