"""FSDP2, the peer: `fully_shard` on every block and on the root, and the bytes of model data it holds at its peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

HOW_MEASURED = (
    "two steps under a dispatch mode; after every operation the distinct live storages of sharded and unsharded "
    "parameters, sharded and unsharded gradients and optimizer state are added up (smaller of the ranks). FSDP2's "
    "all-gather and reduce-scatter buffers are not in it; ours counts its receive buffers"
)


def shard(model: Any, mesh: DeviceMesh, reshard_after_forward: bool, **policies: Any) -> None:
    """Shard a GPT-2 per block. The root keeps its parameters until its backward, as torch advises, in both settings."""
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, **policies)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if reshard_after_forward else False, **policies)


def peak_model_data(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> dict[str, int]:
    """Bytes on this rank by kind at the moment of the largest sum, and "total", over two calls of `step`."""
    watch = _Watch(model, optimizer)
    with watch:
        for _ in range(2):
            step()
    return watch.peak


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Adds up live storages after every operation."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._optimizer = optimizer
        self._looking = False
        self.peak: dict[str, int] = {"total": 0}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._looking:
            self._looking = True
            try:
                self._look()
            finally:
                self._looking = False
        return result

    def _look(self) -> None:
        seen: set[int] = set()
        bytes_by_kind: Counter[str] = Counter()
        for kind, tensor in self._tensors():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            if storage.nbytes() and storage._cdata not in seen:
                seen.add(storage._cdata)
                bytes_by_kind[kind] += storage.nbytes()
        total = sum(bytes_by_kind.values())
        if total > self.peak["total"]:
            self.peak = {**bytes_by_kind, "total": total}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for group in _parameter_groups(self._model):
            for each in group.fsdp_params:
                yield "sharded parameters", each._sharded_param_data
                if each.sharded_param.grad is not None:
                    yield "sharded gradients", each.sharded_param.grad
                for output in each.all_gather_outputs:
                    yield "unsharded parameters", output
                if each.unsharded_accumulated_grad is not None:
                    yield "unsharded gradients", each.unsharded_accumulated_grad
                unsharded = getattr(each, "_unsharded_param", None)
                if unsharded is not None:
                    yield "unsharded parameters", unsharded.detach()
                    if unsharded.grad is not None:
                        yield "unsharded gradients", unsharded.grad
        for state in self._optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    yield "optimizer state", value


def _parameter_groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        if state is None:
            continue
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        yield from (group for group in groups if group is not None)
