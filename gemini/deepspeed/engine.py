"""`DeepSpeedEngine`: an `Engine` with the methods that loops for DeepSpeed call."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gemini.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum, kinds_of
from gemini.engine.engine import Engine
from gemini.engine.saving import save_weights
from gemini.errors import GeminiError, UnsupportedError

_CHECKPOINTS = (
    "sharded checkpoints are not there yet: save engine.state_dict() and optimizer.state_dict(), which are whole and "
    "collective, or engine.save_16bit_model()"
)


class DeepSpeedEngine(Engine):
    """See `Engine`. Questions are methods here, as they are in DeepSpeed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._was_step_applied = False

    def step(self, *, last: bool = False) -> None:
        """See `Engine.step`. Collective."""
        before = self._num_applied
        try:
            super().step(last=last)
        finally:
            # Also if `step` raises: the update may be over by then, and the answer must not be that of the step before.
            self._was_step_applied = self._num_applied > before

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated the weights: the window was full, and every gradient finite. Local."""
        return self._was_step_applied

    @property
    def _num_applied(self) -> int:
        """Optimizer steps that updated the weights."""
        return self.global_steps - self.skipped_steps

    def train_batch_size(self) -> int | None:
        """Samples of an optimizer step, over all ranks; None where the loader decides."""
        return self.batch_sizes.train

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change how many samples make an optimizer step, by the number of micro-batches. Local, alike on every rank.

        Raises ValueError if they are not a whole number of micro-batches on every rank, or if the loader decides how
        large these are, and GeminiError while a window is open, whose losses were divided by the present number.
        """
        micro, ranks = self.batch_sizes.micro, self.model.world_size
        if micro is None:
            raise ValueError("set_train_batch_size() needs the config's 'train_micro_batch_size_per_gpu'")
        # The loader goes on with micro-batches of the same size, so only their number can follow.
        accumulation, rest = divmod(train_batch_size, micro * ranks)
        if rest or accumulation < 1:
            raise ValueError(
                f"set_train_batch_size({train_batch_size}): give a multiple of {micro * ranks}, which is "
                f"train_micro_batch_size_per_gpu={micro} * {ranks} ranks"
            )
        if self.is_window_open():
            raise GeminiError("set_train_batch_size() inside a window: call it right after a step() that updates")
        self.batch_sizes = replace(self.batch_sizes, train=train_batch_size, accumulation=accumulation)

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples of a forward on one rank; None where the loader decides."""
        return self.batch_sizes.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of an optimizer step."""
        return self.batch_sizes.accumulation

    def zero_optimization_stage(self) -> int:
        """The stage, 0 to 3."""
        return self.model.settings.stage

    def get_global_grad_norm(self) -> float | None:
        """See `Engine.grad_norm`."""
        return self.grad_norm

    def get_lr(self) -> list[float]:
        """The learning rate of every param group."""
        return [group["lr"] for group in self._needs_optimizer("get_lr()").param_groups]

    def set_lr(self, lr: float) -> None:
        """Give every param group this learning rate. Local, alike on every rank. A schedule overwrites it."""
        for group in self._needs_optimizer("set_lr()").param_groups:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """The `betas` of every param group, or its `momentum`; None where the optimizer has neither."""
        groups = self._needs_optimizer("get_mom()").param_groups
        return [group.get("betas", group.get("momentum")) for group in groups]

    def gradient_clipping(self) -> float:
        """The global L2 norm that gradients are clipped to; 0 without clipping."""
        return self.config.clip_grad_norm or 0.0

    def module_state_dict(self) -> dict[str, Any]:
        """The module's whole state dict. Collective. Raises what `ShardedModel.state_dict` raises."""
        return self.model.state_dict()

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load a whole state dict into the module. Collective. Raises what `ShardedModel.load_state_dict` raises."""
        self.model.load_state_dict(state_dict, strict=strict)

    def fp16_enabled(self) -> bool:
        """Whether the config casts weights to fp16, and inputs should be fp16."""
        return self.config.dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether the config casts weights to bf16, and inputs should be bf16."""
        return self.config.dtype is torch.bfloat16

    @property
    def local_rank(self) -> int:
        """This rank among those of its machine, as the launcher counts them; 0 without one."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def dp_world_size(self) -> int:
        """Ranks that share the model."""
        return self.model.world_size

    @property
    def global_rank(self) -> int:
        """This rank in the model's process group."""
        return self.model.rank

    @property
    def global_samples(self) -> int | None:
        """Samples of all backwards on all ranks; None where the loader decides how many."""
        micro = self.batch_sizes.micro
        return None if micro is None else micro * self.micro_steps * self.model.world_size

    def save_16bit_model(self, save_dir: str | Path, save_filename: str = "pytorch_model.bin") -> bool:
        """Write the whole weights, in their own dtype, as one file of rank 0's; True. Collective.

        The end of the name says the format: .safetensors, else torch's. Raises OSError on every rank if it cannot be
        written; a file that was there before is as it was then.
        """
        save_weights(self.model, Path(save_dir) / save_filename)
        return True

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Raises UnsupportedError."""
        raise UnsupportedError(f"save_checkpoint(): {_CHECKPOINTS}")

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Raises UnsupportedError."""
        raise UnsupportedError(f"load_checkpoint(): {_CHECKPOINTS}")

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum | str] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to the host between steps. Collective. See `ShardedModel.offload_states`.

        Args:
            include: members of `OffloadStateTypeEnum`. None: all.
            device: "cpu"; "none" does nothing.
            pin_memory: has no effect: host memory is page-locked wherever there is a CUDA device.
            non_blocking: has no effect: the memory is free when the call returns.

        Raises UnsupportedError for "nvme", ValueError for other names, and what `ShardedModel.offload_states` raises.
        """
        if OffloadDeviceEnum(device) is OffloadDeviceEnum.nvme:
            raise UnsupportedError("offload_states(device='nvme'): there is no disk tier yet; use device='cpu'")
        if OffloadDeviceEnum(device) is OffloadDeviceEnum.cpu:
            self.model.offload_states(kinds_of(include))

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move them back; the next forward does so by itself. Collective. See `ShardedModel.reload_states`.

        non_blocking: has no effect.
        """
        self.model.reload_states()

    def destroy(self) -> None:
        """Give memory and process group back. Collective."""
        self.close()
