"""`launch_from_torch`, and `launch_from_slurm` in processes that have the environment which srun gives its tasks."""

import atexit
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist

from gemini import launch

SCRIPT = textwrap.dedent(
    """
    import os
    from unittest import mock

    import torch

    import gemini
    from gemini import launch
    from tests.zoo.mlp import build, inputs

    chosen = []
    sees_one_gpu = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device_index": chosen.append,
    }
    with mock.patch.multiple(torch.accelerator, **sees_one_gpu):
        with mock.patch.object(launch, "current_device", lambda: torch.device("cpu")):
            gemini.launch_from_slurm(backend="gloo", rank_timeout=60.0, config={"device": "emulated", "stage": 3})
    engine, *_ = gemini.initialize(build())
    engine(inputs(0))
    print(gemini.state_hash(engine.model))
    print("rank", engine.model.rank, "of", engine.model.world_size, "device", chosen, "port", os.environ["MASTER_PORT"])
    engine.close()
    """
)


def tasks(**changes: str) -> list[subprocess.Popen[str]]:
    """Two tasks of one job step on this machine. The job has more of both: tasks and machines."""
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "3", "SLURM_NODEID": "0", "SLURM_NTASKS": "8"}
    step |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_NODELIST": "far[01-04]"}
    started = []
    for rank in range(2):
        its = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        environment = {name: value for name, value in os.environ.items() if name not in names}
        environment |= {**step, **its, **changes, "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment, **pipes))  # type: ignore[call-overload]
    return started


@pytest.mark.soak
@pytest.mark.ranks
def test_the_tasks_of_a_step_become_ranks_each_with_the_one_gpu_that_it_sees() -> None:
    started, hashes = tasks(), set()
    try:
        for rank, task in enumerate(started):
            shown, errors = task.communicate(timeout=120)
            assert task.returncode == 0, errors
            hashes.add(shown.splitlines()[0])
            assert f"rank {rank} of 2 device [0] port {20_000 + (os.getpid() + 3) % 10_000}" in shown
    finally:
        for task in started:
            task.kill()
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("kind", "backend"), [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl")]
)
def test_a_launch_asks_for_the_backend_of_the_accelerator_that_is_here(
    kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(launch, "current_device", lambda: torch.device(kind))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout: asked.append(backend))
    monkeypatch.setattr(atexit, "register", lambda leave: None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    launch.launch_from_torch(seed=None, verbose=False)
    assert asked == [backend]
