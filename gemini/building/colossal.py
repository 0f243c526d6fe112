"""Arguments that Colossal-AI's `ZeroInitContext` has, or had in some release, and ours has under another name or not.

with ZeroInitContext(convert_fp16=True, target_device=0, shard_strategy=TensorShardStrategy(), seed=42): ...
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gemini.settings import check_dtype

_WITHOUT_EFFECT = {
    "convert_cuda": "target_device says where the model runs",
    "rm_torch_payload_on_the_fly": "the whole weights of an operator are freed when the next operator is built",
    "shard_grad": "ShardedModel(stage=) says whether gradients are sharded",
}
_FLAGS = ("convert_fp16", "bf16", *_WITHOUT_EFFECT)
NAMES = (*_FLAGS, "model_numel_tensor", "seed", "default_dtype", "dp_process_group")


@dataclass(frozen=True)
class ColossalArguments:
    """What the arguments with these names ask for, together with ours."""

    dtype: torch.dtype | None
    process_group: dist.ProcessGroup | None
    default_dtype: torch.dtype | None = None
    seed: int | None = None
    num_elements: Tensor | None = None  # of one integer, to which the elements of all parameters are added

    @staticmethod
    def of(
        given: Mapping[str, Any], dtype: torch.dtype | None, process_group: dist.ProcessGroup | None
    ) -> ColossalArguments:
        """given: arguments by a name of `NAMES`. dtype, process_group: those that were given under our names.

        Warns of what has no effect. Raises TypeError or ValueError for values that are not valid or say two things.
        """
        for name in _FLAGS:
            if not isinstance(given.get(name, False), bool):
                raise TypeError(f"{name} must be True or False, found {given[name]!r}")
        for name, half in (("convert_fp16", torch.float16), ("bf16", torch.bfloat16)):
            if given.get(name):
                if dtype not in (None, half):
                    raise ValueError("dtype, convert_fp16 and bf16 ask for different dtypes: give one of them")
                dtype = half
        group = given.get("dp_process_group")
        if None not in (group, process_group) and group is not process_group:
            raise ValueError("process_group and dp_process_group are different groups: give one of them")
        seed, count = given.get("seed"), given.get("model_numel_tensor")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"seed must be an integer or None, found {seed!r}")
        if count is not None and not (
            isinstance(count, Tensor) and count.numel() == 1 and not count.is_floating_point()
        ):
            raise TypeError(f"model_numel_tensor must be a tensor of one integer, found {count!r}")
        check_dtype("default_dtype", given.get("default_dtype"))
        for name, instead in _WITHOUT_EFFECT.items():
            if given.get(name):
                warnings.warn(f"ZeroInitContext({name}=True) has no effect: {instead}", stacklevel=3)
        return ColossalArguments(
            dtype, group if process_group is None else process_group, given.get("default_dtype"), seed, count
        )

    @contextmanager
    def in_force(self, device: torch.device) -> Iterator[None]:
        """Inside, torch's default dtype and random numbers are as asked for; afterwards both are as before. Local."""
        before, accelerators = torch.get_default_dtype(), [] if device.type == "cpu" else [device]
        kind = device.type if accelerators else "cuda"
        with torch.random.fork_rng(accelerators, enabled=self.seed is not None, device_type=kind):
            if self.seed is not None:
                torch.manual_seed(self.seed)
            torch.set_default_dtype(self.default_dtype or before)
            try:
                yield
            finally:
                torch.set_default_dtype(before)

    def count(self, num_elements: int) -> None:
        """The model has so many more elements. Local."""
        if self.num_elements is not None:
            self.num_elements.add_(num_elements)
