"""Arguments of Colossal-AI's `ZeroInitContext`, of any release, which ours has under another name or not at all.

with ZeroInitContext(convert_fp16=True, target_device=0, shard_strategy=TensorShardStrategy(), seed=42): ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gemini.script import warn_at_script
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
    """The values of these arguments, merged with those of our own."""

    dtype: torch.dtype | None
    process_group: dist.ProcessGroup | None
    default_dtype: torch.dtype | None = None
    seed: int | None = None
    num_elements: Tensor | None = None  # one integer, to which the number of elements of all parameters is added

    @staticmethod
    def of(
        given: Mapping[str, Any], dtype: torch.dtype | None, process_group: dist.ProcessGroup | None
    ) -> ColossalArguments:
        """Merge `given`, arguments by a name of `NAMES`, with those that were given under our own names.

        Warns of arguments without effect. Raises TypeError or ValueError for values that are invalid or contradict each
        other.
        """
        for name in _FLAGS:
            if not isinstance(given.get(name, False), bool):
                raise TypeError(f"{name} must be True or False, found {given[name]!r}")
        for name, half in (("convert_fp16", torch.float16), ("bf16", torch.bfloat16)):
            if given.get(name):
                # Both flags together end here, too, because the first one has set `dtype`.
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
                warn_at_script(f"ZeroInitContext({name}=True) has no effect: {instead}")
        return ColossalArguments(
            dtype, group if process_group is None else process_group, given.get("default_dtype"), seed, count
        )

    @contextmanager
    def in_force(self, device: torch.device) -> Iterator[None]:
        """A context with the requested default dtype and random seed. It restores both of torch's. Local."""
        # `fork_rng` restores the CPU's generator as well, and asks for a device type even without accelerators.
        before, accelerators = torch.get_default_dtype(), [] if device.type == "cpu" else [device]
        kind = device.type if accelerators else "cuda"
        # Without a seed the build draws from the script's own generators, as a build without the context does.
        with torch.random.fork_rng(accelerators, enabled=self.seed is not None, device_type=kind):
            if self.seed is not None:
                torch.manual_seed(self.seed)
            torch.set_default_dtype(self.default_dtype or before)
            try:
                yield
            finally:
                torch.set_default_dtype(before)

    def count(self, num_elements: int) -> None:
        """Add `num_elements` to the user's tensor, if there is one. Local."""
        if self.num_elements is not None:
            self.num_elements.add_(num_elements)
