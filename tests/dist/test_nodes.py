"""Ranks in network namespaces of their own, which stand for nodes: a slow link between them, and one that is cut.

Needs root, `ip` and `tc`, and a kernel with veth; where these are missing the tests are skipped.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = ("10.231.7.1", "10.231.7.2")
SCRIPT = """
import sys

import torch
import torch.distributed as dist

import gemini
from optim import HybridAdam

rank, steps = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method="tcp://10.231.7.1:29731", rank=rank, world_size=2)
torch.manual_seed(0)
module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
model = gemini.ShardedModel(module, device="emulated", tensor_placement_policy="cpu", rank_timeout=8)
optimizer = gemini.ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-3))
for step in range(steps):
    optimizer.backward(model(torch.full((2, 64), 1.0 + rank + step)).square().mean())
    optimizer.step()
    print("step", step, flush=True)
print("hash", gemini.state_hash(model, optimizer), flush=True)
model.close()
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def two_nodes() -> Iterator[list[tuple[str, str]]]:
    """The names of two namespaces, and of the link's end in each."""
    nodes = [(f"gemini-{os.getpid()}-{each}", f"g{os.getpid()}{each}") for each in "ab"]
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("there is no ip, or no tc")
    try:
        for name, _ in nodes:
            ip("netns", "add", name)
        (one, link), (other, its) = nodes
        ip("link", "add", link, "netns", one, "type", "veth", "peer", "name", its, "netns", other)
        for (name, end), address in zip(nodes, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", end, "up")
    except subprocess.CalledProcessError as refused:
        remove(nodes)
        pytest.skip(f"no network namespaces: {refused.stderr.decode().strip()}")
    try:
        yield nodes
    finally:
        remove(nodes)


def remove(nodes: list[tuple[str, str]]) -> None:
    for name, _ in nodes:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def slow_down(node: tuple[str, str]) -> None:
    """10 ms for each packet; where the kernel has no such queue, 4 Mbit a second, with up to 200 ms of waiting."""
    name, end = node
    command = ["tc", "-n", name, "qdisc", "add", "dev", end, "root"]
    if subprocess.run([*command, "netem", "delay", "10ms"], capture_output=True, check=False).returncode:
        queue = ["tbf", "rate", "4mbit", "burst", "8kb", "latency", "200ms"]
        subprocess.run([*command, *queue], check=True, capture_output=True)


def started(nodes: list[tuple[str, str]], steps: int) -> list[subprocess.Popen[str]]:
    """A rank on each node."""
    ranks = []
    for rank, (name, end) in enumerate(nodes):
        variables = {"GLOO_SOCKET_IFNAME": end, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = ["ip", "netns", "exec", name, sys.executable, "-c", SCRIPT, str(rank), str(steps)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, env=os.environ | variables, **pipes))  # type: ignore[call-overload]
    return ranks


def hashes(slows: bool) -> set[str]:
    with two_nodes() as nodes:
        for node in nodes if slows else ():
            slow_down(node)
        ranks = started(nodes, steps=4)
        found = set()
        for each in ranks:
            out, words = each.communicate(timeout=240)
            assert each.returncode == 0, words
            found |= set(re.findall(r"hash (\w+)", out))
        return found


def test_a_slow_link_between_nodes_changes_no_bit() -> None:
    found = hashes(slows=True) | hashes(slows=False)
    assert len(found) == 1


def test_both_nodes_end_where_the_link_between_them_is_cut() -> None:
    """Each says so after `rank_timeout`, 8 s here; gloo lets its processes go within another minute."""
    with two_nodes() as nodes:
        ranks = started(nodes, steps=10**6)
        for each in ranks:
            assert each.stdout is not None
            while "step 2" not in (line := each.stdout.readline()):
                assert line, each.communicate()[1]
        name, end = nodes[1]
        ip("-n", name, "link", "set", end, "down")
        for rank, each in enumerate(ranks):
            _, words = each.communicate(timeout=8 + 60 + 30)
            assert each.returncode == 1, words
            lines = [line for line in words.splitlines() if "RankLostError" in line]
            assert lines and re.search(
                rf"rank {rank}.*(not all of them answered|the rank that holds the store is gone|lost the connection)",
                lines[-1],
            ), words
