"""Operations of random walks: training, and what is trained. See `walks.py`; importing this adds them."""

from typing import Any

import torch
from torch import Tensor, nn

from gemini import ShardedOptimizer
from tests.zoo.walks import BLOCKS, WIDTH, Walk, assert_same, batch_for, loss_of, net_of, of, operation, zero_both

# -- forward, backward, step


@operation(8)
def train(walk: Walk) -> None:
    number, through_optimizer = walk.number(), walk.chance.random() < 0.5

    def do(model: Any, optimizer: Any) -> Tensor:
        loss = loss_of(model, number)
        takes = through_optimizer and isinstance(optimizer, ShardedOptimizer)
        optimizer.backward(loss) if takes else walk.scale(optimizer, loss).backward()
        return loss

    walk.agree(do)


@operation(6)
def step(walk: Walk) -> None:
    walk.both(lambda model, optimizer: optimizer.step())
    walk.its.zero_grad()  # a step uses the gradients of its param groups up


@operation(4)
def zero_grad(walk: Walk) -> None:
    if walk.chance.random() < 0.5:
        zero_both(walk)
    else:
        walk.both(lambda model, optimizer: optimizer.zero_grad())


@operation(2)
def two_graphs(walk: Walk) -> None:
    """Two forwards, and their backwards in some order."""
    numbers, how = (walk.number(), walk.number()), walk.chance.randrange(4)
    if how == 0 and walk.world_size > 1 and _has_reentrant(walk):
        how = 1  # one backward of both: the sums are those that `penalise` leaves out

    def do(model: Any, optimizer: Any) -> None:
        one, two = (walk.scale(optimizer, loss_of(model, number)) for number in numbers)
        if how == 0:
            (one + two).backward()
        elif how == 1:
            two.backward()
            one.backward()
        elif how == 2:
            one.backward()
        else:
            one.backward(retain_graph=True)
            one.backward()

    walk.both(do)


@operation()
def drop_a_graph(walk: Walk) -> None:
    number = walk.number()
    walk.agree(lambda model, _: loss_of(model, number).detach())


@operation(2)
def evaluate(walk: Walk) -> None:
    number, trains = walk.number(), walk.chance.random() < 0.5
    mode = walk.chance.choice([torch.no_grad, torch.inference_mode])

    def do(model: Any, _: Any) -> Tensor:
        was = model.training
        model.train(trains and was)
        with mode():
            found = model(batch_for(model, number)).clone()
        model.train(was)
        return found

    walk.agree(do)


def _has_reentrant(walk: Walk) -> bool:
    """torch refuses reentrant checkpoints under `autograd.grad` and `backward(inputs=)`."""
    return any(block.reentrant for block in walk.plain.blocks)


@operation(2)
def ask_for_gradients(walk: Walk) -> None:
    names, number = walk.names(3, trained=True), walk.number()
    if names and not _has_reentrant(walk):

        def do(model: Any, optimizer: Any) -> list[Tensor | None]:
            wanted = [of(model, name) for name in names]
            return list(torch.autograd.grad(walk.scale(optimizer, loss_of(model, number)), wanted, allow_unused=True))

        for name, ours, its in zip(names, *walk.both(do), strict=True):
            assert_same(ours, its, f"autograd.grad of {name}")


@operation(2)
def train_some(walk: Walk) -> None:
    names, number = walk.names(3, trained=True), walk.number()
    if names and not _has_reentrant(walk):

        def do(model: Any, optimizer: Any) -> None:
            walk.scale(optimizer, loss_of(model, number)).backward(inputs=[of(model, name) for name in names])

        walk.both(do)


@operation()
def penalise(walk: Walk) -> None:
    """With a penalty on a weight outside of the model."""
    (name,), number = walk.names(), walk.number()
    # On several ranks a backward is reduced as a whole: a + (b + c), where a reentrant part makes (a + b) + c of it.
    if walk.world_size == 1 or not _has_reentrant(walk):

        def do(model: Any, optimizer: Any) -> None:
            loss = loss_of(model, number) + 0.1 * of(model, name).square().sum()
            walk.scale(optimizer, loss).backward()

        walk.both(do)


@operation()
def call_a_block(walk: Walk) -> None:
    place, x, trains = walk.chance.randrange(BLOCKS), torch.linspace(-1, 1, 4 * WIDTH).view(4, -1), walk.number() % 2

    def do(model: Any, optimizer: Any) -> Tensor:
        block = net_of(model).blocks[place]
        found: Tensor = block(x.to(block.scale))
        if trains and found.requires_grad:
            walk.scale(optimizer, found.sum()).backward()
        return found

    walk.agree(do)


class Stopped(Exception):
    """Raised by a hook of the user's."""


@operation()
def fail(walk: Walk) -> None:
    """A hook raises before, in, or behind the backward of a block."""
    place, number, when = walk.chance.randrange(BLOCKS), walk.number(), walk.chance.choice(["before", "after", "back"])

    def stop(*args: Any) -> None:
        raise Stopped

    def stop_backward(module: nn.Module, given: Any, found: Tensor) -> None:
        if found.requires_grad:
            found.register_hook(stop)

    def do(model: Any, optimizer: Any) -> bool:
        block, had = net_of(model).blocks[place], {name: each.clone() for name, each in model.named_buffers()}
        if when == "before":
            handle = block.down.register_forward_pre_hook(stop)
        else:
            handle = block.up.register_forward_hook(stop if when == "after" else stop_backward)
        try:
            walk.scale(optimizer, loss_of(model, number)).backward()
            return False
        except Stopped:
            return True
        finally:
            handle.remove()
            for name, each in model.named_buffers():
                each.copy_(had[name])

    # What failed has dropped all gradients since the step, on several ranks in a forward, too.
    if any(walk.both(do)) and (when == "back" or walk.world_size > 1):
        zero_both(walk)


# -- what is trained, and how


def _set_flags(walk: Walk, names: list[str]) -> None:
    flag = walk.chance.random() < 0.6
    # Unfreezing between micro-batches is refused, and gradients that no step uses end where others are frozen.
    zero_both(walk)
    walk.both(lambda model, _: [of(model, name).requires_grad_(flag) for name in names])


@operation(2)
def freeze_or_unfreeze(walk: Walk) -> None:
    _set_flags(walk, walk.names(walk.chance.randint(1, 4)))


@operation()
def freeze_or_unfreeze_a_block(walk: Walk) -> None:
    place = walk.chance.randrange(BLOCKS)
    _set_flags(walk, [name for name, _ in walk.plain.named_parameters() if name.startswith(f"blocks.{place}.")])


@operation(2)
def leave_parts_out(walk: Walk) -> None:
    uses = walk.chance.random() < 0.5
    skipped = frozenset(place for place in range(BLOCKS) if walk.chance.random() < 0.3)

    def do(model: Any, _: Any) -> None:
        net = net_of(model)
        net.uses_extra, net.skipped = uses, skipped

    walk.both(do)


@operation()
def checkpoint_a_block(walk: Walk) -> None:
    place, how = walk.chance.randrange(BLOCKS), walk.chance.choice(walk.checkpoints)
    walk.both(lambda model, _: setattr(net_of(model).blocks[place], "reentrant", how))


@operation()
def change_a_rate(walk: Walk) -> None:
    place, rate = walk.number() % 2, walk.chance.choice([1e-3, 5e-3, 1e-2])
    walk.both(lambda _, optimizer: optimizer.param_groups[place].update(lr=rate, weight_decay=0.1 * place))


@operation()
def add_a_group(walk: Walk) -> None:
    if not walk.has_extra:
        walk.has_extra = True
        extra = ["extra.weight", "extra.bias"]
        its_optimizer = {key: its for key, its in walk.optimizer.param_groups[-1].items() if key == "optimizer"}

        def do(model: Any, optimizer: Any) -> None:
            parameters = [of(model, name) for name in extra]
            optimizer.add_param_group({"params": parameters, "lr": 3e-3, **its_optimizer})

        walk.both(do)


@operation()
def hook_a_parameter(walk: Walk) -> None:
    for handle in walk.hooks:
        handle.remove()
    names = [] if walk.hooks else walk.names(trained=True)
    walk.hooks = (
        [*walk.both(lambda model, _: of(model, names[0]).register_hook(lambda grad: grad * 0.5))] if names else []
    )
