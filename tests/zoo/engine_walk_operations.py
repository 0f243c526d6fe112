"""What the walks of `engine_walks.py` do to an engine and to a plain loop. Importing this adds them."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

import gemini
from tests.zoo.engine_walks import EngineWalk, Stopped, operation
from tests.zoo.walks import BLOCKS, Net, assert_same, batch_for, loss_of


def backward_of_both(walk: EngineWalk) -> None:
    number = walk.number()
    losses = [loss_of(model, number) for model in (walk.engine, walk.plain.model)]
    assert_same(losses[0], losses[1], "a loss")
    walk.engine.backward(losses[0])
    walk.plain.backward(losses[1])
    walk.has_gradients = True


def step_of_both(walk: EngineWalk, last: bool = False) -> None:
    before = walk.plain.global_steps
    walk.engine.step(last=last)
    walk.plain.step(last, moves=walk.scheduled == "engine")
    if walk.plain.global_steps > before:
        assert walk.engine.grad_norm == walk.plain.norm
        walk.has_update = True


@operation(8)
def micro_batch(walk: EngineWalk) -> None:
    backward_of_both(walk)
    walk.left_unsynced = False
    step_of_both(walk)


@operation(2)
def backward_only(walk: EngineWalk) -> None:
    backward_of_both(walk)
    walk.left_unsynced = False


@operation(2)
def step_only(walk: EngineWalk) -> None:
    step_of_both(walk)


@operation(2)
def step_that_is_the_last(walk: EngineWalk) -> None:
    step_of_both(walk, last=True)


@operation(2)
def move_the_schedule(walk: EngineWalk) -> None:
    """It stays where it is while a window is open."""
    if walk.scheduled == "script" and walk.plain.schedule is not None:
        walk.engine.lr_scheduler.step()
        if walk.has_update or not walk.has_gradients:
            walk.plain.schedule.step()
            walk.has_update = walk.has_gradients = False


@operation()
def zero_grad(walk: EngineWalk) -> None:
    walk.engine.zero_grad()
    if not 0 < walk.plain.in_window < walk.plain.window:
        walk.plain.drop()
        walk.plain.window_begins = walk.plain.micro_steps


@operation()
def discard_the_window(walk: EngineWalk) -> None:
    """Micro-batches since the last update are counted again, also those that a failure has dropped before."""
    walk.engine.discard_window()
    walk.plain.micro_steps = walk.plain.window_begins
    walk.plain.drop()


@operation(2)
def evaluate(walk: EngineWalk) -> None:
    number = walk.number()
    found = []
    for model in (walk.engine, walk.plain.model):
        model.eval()
        with torch.no_grad():
            found.append(loss_of(model, number))
        model.train()
    assert_same(found[0], found[1], "a loss of an evaluation")


@operation(2)
def fail(walk: EngineWalk) -> None:
    """A hook raises in a forward or a backward, on all ranks."""
    place, number, in_backward = walk.chance.randrange(BLOCKS), walk.number(), walk.chance.random() < 0.5

    def stop(*args: Any) -> None:
        raise Stopped

    def stop_backward(module: nn.Module, given: Any, found: Tensor) -> None:
        if found.requires_grad:
            found.register_hook(stop)

    for model in (walk.engine, walk.plain.model):
        net: Net = walk.engine.module if model is walk.engine else walk.plain.model
        had = {name: each.clone() for name, each in net.named_buffers()}
        handle = net.blocks[place].up.register_forward_hook(stop_backward if in_backward else stop)
        try:
            loss = loss_of(model, number)
            walk.engine.backward(loss) if model is walk.engine else (loss / walk.window).backward()
            raise AssertionError("nothing was raised")
        except Stopped:
            pass
        finally:
            handle.remove()
        with torch.no_grad():
            for name, each in net.named_buffers():
                each.copy_(had[name])
    walk.engine.recover()
    if in_backward or walk.world_size > 1:  # one rank that fails in a forward keeps the gradients of earlier ones
        walk.plain.drop()


@operation()
def set_a_rate(walk: EngineWalk) -> None:
    if walk.scheduled == "no":
        rate = walk.chance.choice([1e-3, 5e-3, 2e-2])
        for each in (walk.engine.optimizer, walk.plain.optimizer):
            for group in each.param_groups:
                group["lr"] = rate


@operation(2)
def save(walk: EngineWalk) -> None:
    if walk.plain.in_window:
        return
    engine, plain = walk.engine, walk.plain
    ours = [engine.state_dict(), engine.optimizer.state_dict()]
    its = [plain.model.state_dict(), plain.optimizer.state_dict()]
    if plain.schedule is not None:
        ours.append(engine.lr_scheduler.state_dict())
        its.append(plain.schedule.state_dict())
    walk.saved = copy.deepcopy(ours), copy.deepcopy(its)


@operation(2)
def load_into_a_new_engine(walk: EngineWalk) -> None:
    if walk.saved is None:
        return
    plain = walk.plain
    # The state of a schedule that has more than numbers in it, such as a LambdaLR, is loaded as torch does it.
    walk.steps_before, walk.micro_before = plain.global_steps, plain.micro_steps
    walk.engine.close()
    walk.engine = walk.make()
    plain.drop()
    plain.window_begins = plain.micro_steps
    for net in (walk.engine.module, plain.model):  # flags are in no file
        net.requires_grad_(True)
    ours, its = copy.deepcopy(walk.saved)
    walk.engine.load_state_dict(ours[0])
    walk.engine.optimizer.load_state_dict(ours[1])
    plain.model.load_state_dict(its[0])
    plain.optimizer.load_state_dict(its[1])
    if plain.schedule is not None:
        walk.engine.lr_scheduler.load_state_dict(ours[2])
        plain.schedule.load_state_dict(its[2])
    walk.has_gradients = walk.has_update = False


@operation()
def move_states(walk: EngineWalk) -> None:
    way = walk.chance.choice(["offload", "reload", "empty"])
    if way == "offload" and not walk.plain.in_window:  # else it is refused
        walk.engine.offload_states(walk.chance.choice([None, ["optim"], ["param", "grad"]]))
    elif way == "reload":
        walk.engine.reload_states()
    elif way == "empty":
        walk.engine.empty_partition_cache()


@operation()
@torch.no_grad()
def generate(walk: EngineWalk) -> None:
    batch, found = batch_for(walk.plain.model, walk.number()), []
    try:
        with walk.engine.gathered_for_generation() as module:
            module.eval()
            found.append(module(batch))
            module.train()
    except gemini.SlotError:
        return
    walk.plain.model.eval()
    assert_same(found[0], walk.plain.model(batch), "an output")
    walk.plain.model.train()


@operation()
def freeze_or_unfreeze(walk: EngineWalk) -> None:
    if not walk.plain.in_window:
        place = walk.chance.randrange(BLOCKS)
        for net in (walk.engine.module, walk.plain.model):
            wanted = not net.blocks[place].scale.requires_grad
            net.blocks[place].requires_grad_(wanted)


@operation()
def without_synchronisation(walk: EngineWalk) -> None:
    # What it leaves is added up by itself, beside what is reduced already: on several ranks in another order.
    if walk.world_size == 1 or not walk.plain.in_window or walk.left_unsynced:
        with walk.engine.no_sync():
            backward_of_both(walk)
        walk.left_unsynced = True
