"""`examples/elastic.py` as a cluster runs it: workers and machines are killed, the number of ranks changes, Slurm."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = str(ROOT / "examples" / "elastic.py")
LAUNCHER = [sys.executable, "-m", "torch.distributed.run"]
# Kills its process, or the agent of torchrun and with it a machine, when the fifth step has been saved: once.
VICTIM = f"""
import os, runpy, signal, sys
from pathlib import Path

import gemini

save, marker = gemini.save_checkpoint, Path(sys.argv[1] + ".killed")


def killing(folder, model, optimizer, **options):
    pending = save(folder, model, optimizer, **options)
    is_victim = os.environ.get("VICTIM") in (str(model.rank), "node")
    if is_victim and optimizer.last_step.number == 5 and not marker.exists():
        marker.touch()
        if os.environ["VICTIM"] == "node":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return pending


gemini.save_checkpoint = killing
runpy.run_path({EXAMPLE!r}, run_name="__main__")
"""

pytestmark = pytest.mark.soak


def start(command: Sequence[str], **variables: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def said(*started: subprocess.Popen[str], killed: bool = False) -> tuple[int, str]:
    """(number of ranks, hash) that the last rank 0 has printed. killed: the last of these processes was."""
    outputs = [process.communicate(timeout=240) for process in started]
    codes = [process.returncode for process in started]
    assert codes[: len(codes) - killed] == [0] * (len(codes) - killed), outputs
    assert not killed or codes[-1] != 0
    found = re.findall(r"on (\d) ranks, state hash: ([0-9a-f]{64})", "".join(out for out, _ in outputs))
    assert len(found) == 1, outputs
    return int(found[0][0]), found[0][1]


def torchrun(folder: Path, ranks: int, *flags: str) -> tuple[int, str]:
    command = [*LAUNCHER, "--standalone", "--nproc-per-node", str(ranks), EXAMPLE, str(folder), *flags]
    return said(start(command))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of a run on two ranks that nobody disturbs."""
    return torchrun(tmp_path_factory.mktemp("elastic") / "whole", 2)[1]


def test_a_run_goes_on_with_one_rank_and_with_two_again_to_the_same_hash(tmp_path: Path, undisturbed: str) -> None:
    torchrun(tmp_path / "run", 2, "--stop", "7")
    assert said(start([sys.executable, EXAMPLE, str(tmp_path / "run"), "--stop", "13"]))[0] == 1
    assert torchrun(tmp_path / "run", 2) == (2, undisturbed)


def elastic(tmp_path: Path, ranks: int, port: int, is_host: bool) -> list[str]:
    script = tmp_path / "victim.py"
    script.write_text(VICTIM)
    settings = f"last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=2,is_host={int(is_host)}"
    command = [*LAUNCHER, "--nnodes", "1:2", "--nproc-per-node", str(ranks), "--max-restarts", "3"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", settings]
    return [*command, str(script), str(tmp_path / "run")]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_killed_worker_is_started_again_and_the_hash_stays(tmp_path: Path, undisturbed: str, victim: str) -> None:
    run = said(start(elastic(tmp_path, 2, free_port(), is_host=True), VICTIM=victim))
    assert (tmp_path / "run.killed").exists()
    assert run == (2, undisturbed)


def test_a_killed_machine_is_left_out_and_the_hash_stays(tmp_path: Path, undisturbed: str) -> None:
    port = free_port()
    stays = start(elastic(tmp_path, 1, port, is_host=True))
    goes = start(elastic(tmp_path, 1, port, is_host=False), VICTIM="node")
    assert said(stays, goes, killed=True) == (1, undisturbed)
    assert (tmp_path / "run.killed").exists()
    assert torchrun(tmp_path / "run", 2) == (2, undisturbed)  # there is nothing left to do


def test_slurms_tasks_end_with_the_same_hash(tmp_path: Path, undisturbed: str) -> None:
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "1", "SLURM_NTASKS": "2"}
    step |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    tasks = [
        start([sys.executable, EXAMPLE, str(tmp_path / "run")], **step, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
        for rank in range(2)
    ]
    assert said(*tasks) == (2, undisturbed)
