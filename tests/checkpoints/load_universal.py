"""Has DeepSpeed itself go on from a universal checkpoint of ours, on two ranks of a CPU (DeepSpeed 0.19.8):

    DS_ACCELERATOR=cpu torchrun --standalone --nproc_per_node 2 tests/checkpoints/load_universal.py STAGE

Masters and moments must be equal, and so must the weights after the next step of both. One param group: at stage 3
DeepSpeed gives all groups the settings of the first, and with torch's AdamW one count of steps.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

import gemini
from gemini import ShardedModel, ShardedOptimizer, save_checkpoint
from gemini.checkpoint.outgoing import export_universal
from tests.checkpoints.write_deepspeed import Model
from tests.harness.shared_folder import shared_folder


def main() -> None:
    import deepspeed

    # Compiling DeepSpeed's collectives for shared memory takes minutes; without them it takes gloo's.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_backend="gloo")
    tokens = torch.arange(4).view(2, 2) + dist.get_rank()
    torch.manual_seed(0)
    model = ShardedModel(Model(), device="emulated", chunk_size=64)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = ShardedOptimizer(model, torch.optim.AdamW(trained, lr=3e-3))
    for step in range(2):
        optimizer.backward(model(tokens + step))
        optimizer.step()
    torch.manual_seed(0)  # DeepSpeed loads no frozen weights from a universal checkpoint
    module = Model()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": int(sys.argv[1]), "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0, "torch_adam": True}},
        "gradient_clipping": 0.0,
        "checkpoint": {"load_universal": True},
    }
    its = [parameter for parameter in module.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=module, model_parameters=its, config=config)
    with shared_folder() as folder:
        save_checkpoint(folder / "ours", model, optimizer)
        if dist.get_rank() == 0:
            export_universal(folder / "ours", folder / "theirs")
        dist.barrier()
        engine.load_checkpoint(str(folder / "theirs"))
    compare(engine, model, ("exp_avg", "exp_avg_sq"))
    optimizer.backward(model(tokens + 2))
    optimizer.step()
    engine.backward(engine(tokens + 2))
    engine.step()
    compare(engine, model, ())
    print(f"rank {dist.get_rank()}: equal")
    dist.barrier()


def compare(engine: torch.nn.Module, model: ShardedModel, states: tuple[str, ...]) -> None:
    """Collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            ours = model.get_parameter(name)
            assert torch.equal(
                safe_get_full_fp32_param(parameter).view(ours.shape), gemini.safe_get_full_fp32_param(ours)
            ), name
            for state in states:
                theirs = safe_get_full_optimizer_state(parameter, state).view(ours.shape)
                assert torch.equal(theirs, gemini.safe_get_full_optimizer_state(ours, state)), (name, state)


if __name__ == "__main__":
    main()
