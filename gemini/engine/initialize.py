"""`initialize`: makes an `Engine` from a model, an optimizer and a config, in Colossal-AI's call form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from gemini.engine.agreement import Source, agreed_config
from gemini.engine.assemble import OptimizerLike, SchedulerLike, assemble
from gemini.engine.engine import Engine
from gemini.engine.loaders import whole_windows
from gemini.engine.said import say
from gemini.launch import launched_config, ranks_of


def initialize(
    model: nn.Module,
    optimizer: OptimizerLike = None,
    criterion: Callable[..., Any] | None = None,
    train_dataloader: Any = None,
    test_dataloader: Any = None,
    lr_scheduler: SchedulerLike = None,
    *,
    config: Source = None,
    process_group: dist.ProcessGroup | None = None,
    verbose: bool = True,
) -> tuple[Engine, Any, Any, Any]:
    """An `Engine` that trains the model sharded, as the config says. Collective: every rank calls it alike.

    The call form of `colossalai.initialize`. For DeepSpeed's see `gemini.deepspeed.initialize`.

    Args:
        model: any module, also one from a `ZeroInitContext`, or a `ShardedModel`, which stays as it is.
        optimizer: an optimizer of the model's parameters, or a class or callable that makes one from them. None: the
            optimizer of the config.
        criterion: a function of outputs and labels.
        train_dataloader: returned without the batches at its end that do not fill a window of accumulation.
        test_dataloader: returned as it is.
        lr_scheduler: a schedule of that optimizer, which the script (or a `Trainer`) moves after a step or an epoch, as
            in Colossal-AI. Or a callable that makes one, which the engine moves after every optimizer step, as it moves
            one that the config names.
        config: a mapping, the path of a JSON, YAML, TOML or Python file, or a `Config`. None: the config that was given
            to `launch_from_torch(config=...)`, else all defaults.
        process_group: the ranks. None: all that were started, which join here if they have not met (`ShardedModel`).
        verbose: whether rank 0 logs what was decided.

    Returns the engine, the two loaders and the schedule, whose `step()` waits for a full window of accumulation and
    ignores skipped steps. Raises ConfigError for an invalid config, DivergenceError if the ranks' configs differ, and
    what `ShardedModel` and `ShardedOptimizer` raise.

    Example:
        >>> config = {"stage": 2, "optimizer": {"type": "HybridAdam", "params": {"lr": 1e-3}}}
        >>> engine, *_ = initialize(torch.nn.Linear(8, 1), config=config, verbose=False)
    """
    # The config is compared over the ranks that `ShardedModel` finds for `process_group=None`.
    group = ranks_of(process_group)
    # Ranks compare configs before anything else: one that cannot read its file would leave the others in the wrapping.
    agreed = agreed_config(launched_config() if config is None else config, group)
    engine = assemble(Engine, agreed, model, optimizer, None, criterion, lr_scheduler, process_group, moves_given=False)
    if verbose:
        say(engine)
    window = engine.batch_sizes.accumulation
    # As in Colossal-AI. Otherwise a window that is open at the end of an epoch would go on with batches of the next
    # one.
    train = None if train_dataloader is None else whole_windows(train_dataloader, window)
    return engine, train, test_dataloader, engine.lr_scheduler
