"""Writes the fixtures of this folder with DeepSpeed itself, on two ranks of a CPU (DeepSpeed 0.19.8):

    DS_ACCELERATOR=cpu torchrun --standalone --nproc_per_node 2 tests/checkpoints/write_deepspeed.py FOLDER STAGE DTYPE
    python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder FOLDER/global_step3 \\
        --output_folder UNIVERSAL --num_extract_workers 1 --num_merge_workers 1
    python tests/checkpoints/write_deepspeed.py UNIVERSAL FOLDER/expected.safetensors

FOLDER/global_step3 is DeepSpeed's. expected.safetensors has its masters and moments: at stage 3 as DeepSpeed's
functions for parameters say them, at the others as its `ds_to_universal` does.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from safetensors.torch import save_file
from torch import nn


class Model(nn.Module):
    """With a tied weight, a frozen one, a buffer, and sizes that two ranks cannot halve."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7)
        self.frozen = nn.Linear(7, 5, bias=False).requires_grad_(False)
        self.up = nn.Linear(7, 9)
        self.down = nn.Linear(9, 7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.table(tokens) * self.scale[0]
        hidden = hidden + self.down(torch.relu(self.up(hidden)))
        return self.head(hidden).float().square().mean() + self.frozen(hidden).float().mean()


def gather(universal: Path, path: Path) -> None:
    found = {}
    for each in universal.glob("zero/*/*.pt"):
        value = torch.load(each, weights_only=True)
        name = each.parent.name if each.stem == "fp32" else f"{each.parent.name}.{each.stem}"
        if each.stem != "step" and (each.parent / "exp_avg.pt").exists():
            found[name] = (value["param"] if isinstance(value, dict) else value).contiguous()
    save_file(found, path)


def main() -> None:
    import deepspeed

    folder, stage, dtype = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = Model()
    decays = [parameter for parameter in model.parameters() if parameter.ndim > 1 and parameter.requires_grad]
    biases = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "bf16": {"enabled": dtype == "bf16"},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    for step in range(3):
        tokens = torch.arange(4).view(2, 2) + step + engine.global_rank
        engine.backward(engine(tokens % 11))
        engine.step()
    engine.save_checkpoint(str(folder), exclude_frozen_parameters=False)
    if stage != 3:
        return
    found = {}
    for name, parameter in engine.module.named_parameters():
        full = deepspeed.utils.safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        if full is not None:
            found[name] = full.clone()
            for state in ("exp_avg", "exp_avg_sq"):
                found[f"{name}.{state}"] = deepspeed.utils.safe_get_full_optimizer_state(parameter, state).clone()
    if engine.global_rank == 0:
        save_file(found, folder / "expected.safetensors")
    deepspeed.comm.barrier()


if __name__ == "__main__":
    main() if len(sys.argv) == 4 else gather(Path(sys.argv[1]), Path(sys.argv[2]))
