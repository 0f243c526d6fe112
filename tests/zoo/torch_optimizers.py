"""Every optimizer that is known to be elementwise, in two variants, and schedulers that drive them."""

from collections.abc import Callable
from typing import Any

import torch

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one_cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=8, cycle_momentum=True),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)],
        milestones=[2],
    ),
}


def make_torch_optimizer(kind: type[torch.optim.Optimizer], parameters: Any, variant: int) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": 1e-2, "foreach": False}
    name = kind.__name__
    if variant and name != "Rprop":
        options["weight_decay"] = 0.1
    if variant and name in ("SGD", "RMSprop"):
        options["momentum"] = 0.9
    if variant and name in ("Adam", "AdamW"):
        options["amsgrad"] = True
    if variant and name == "RMSprop":
        options["centered"] = True
    if variant and name == "SGD":
        options["nesterov"] = True
    return kind(parameters, **options)
