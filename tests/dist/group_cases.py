"""Models on parts of the ranks, which are made, trained and closed again and again."""

import torch
import torch.distributed as dist

from tests.zoo.mlp import assert_same, plain, sharded, train_step

_TIMEOUT_S = 20.0


def _again(group: dist.ProcessGroup, times: int) -> None:
    """Each model trains as the plain one on the same batches, if the ranks that found one another are the group's."""
    reference, plain_optimizer = plain()
    for step in range(1):
        train_step(reference, plain_optimizer, step)
    for _ in range(times):
        model, optimizer = sharded("auto", process_group=group, rank_timeout=_TIMEOUT_S)
        for step in range(1):
            train_step(model, optimizer, step)
        trained = dict(model.state_dict())
        model.close()
        if group.size() == 2:  # the mean of two equal gradients is the gradient
            assert_same(trained, dict(reference.state_dict()))
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(trained[name], value, rtol=0, atol=1e-4)  # AdamW's steps are of 1e-2


def pairs_make_models_again(rank: int, world_size: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    _again(pairs[rank // 2], 3)


def three_of_four_make_models_again(rank: int, world_size: int) -> None:
    """The others go on alone, with a model on all ranks after it."""
    three = dist.new_group([0, 2, 3])
    if rank != 1:
        _again(three, 3)
    _again(dist.group.WORLD, 1)  # type: ignore[arg-type]


def two_models_of_which_one_is_closed(rank: int, world_size: int) -> None:
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    kept, optimizer = sharded("auto", process_group=pair, rank_timeout=_TIMEOUT_S)
    _again(pair, 2)
    train_step(kept, optimizer)
    kept.close()


def one_rank_has_another_group_more(rank: int, world_size: int) -> None:
    """Ranks name a group by what they share, whatever else each of them has."""
    three = dist.new_group([0, 1, 2])
    more = dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 else None
    if rank < 3:
        _again(three, 1)
    if more is not None:
        dist.destroy_process_group(more)
