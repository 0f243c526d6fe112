"""`Muon`: torch's, which also takes stacks of matrices, such as the experts of a layer in one tensor.

torch.optim.Muon refuses what has not two dimensions. Experts are often one tensor (experts, out, in): each of its
matrices is orthogonalised by itself here, with the momentum, rate and decay that torch's Muon gives a matrix alone.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Muon):
    """`torch.optim.Muon`, for matrices and for stacks of them: a parameter (experts, out, in) is so many matrices.

    The bits are those of `torch.optim.Muon` on each matrix by itself, on a plain model and in a `ShardedOptimizer`. A
    state dict has one momentum buffer for each parameter, in its shape.

    Args:
        params: parameters of two or three dimensions, or param groups of them. All others, embeddings and heads belong
            to another optimizer, as in `ShardedOptimizer(model, [Muon(matrices), HybridAdam(rest)])`. The weight of a
            convolution over one dimension has three, and is no stack of matrices.
        options: as of `torch.optim.Muon`: lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps and
            adjust_lr_fn.

    Local. Raises ValueError for a parameter of other dimensions, and what `torch.optim.Muon` raises.

    Example:
        >>> experts = torch.nn.Parameter(torch.randn(4, 16, 8))
        >>> optimizer = Muon([experts], lr=0.02, adjust_lr_fn="match_rms_adamw")
    """

    def __init__(self, params: Any, **options: Any) -> None:
        # torch's checks of the options, with a matrix that stands for the parameters: it would refuse experts.
        super().__init__([torch.empty(1, 1, device="cpu")], **options)
        torch.optim.Optimizer.__init__(self, params, self.defaults)
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter.ndim not in (2, 3):
                raise ValueError(
                    f"Muon takes matrices and stacks of them, of two and three dimensions, found a parameter of shape "
                    f"{tuple(parameter.shape)}: give it to another optimizer, as in [Muon(matrices), HybridAdam(rest)]"
                )

    def _init_group(
        self,
        group: MutableMapping[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        muon_momentum_bufs: list[Tensor],
    ) -> bool:
        # What torch's step collects of a group: a stack is replaced by views of its matrices, which are updated in
        # place.
        found: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        has_complex = super()._init_group(group, *found)
        for tensors, matrices in zip(found, (params_with_grad, grads, muon_momentum_bufs), strict=True):
            for each in tensors:
                matrices += [each] if each.ndim == 2 else each.detach().unbind()
        return bool(has_complex)
