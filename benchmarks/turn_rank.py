"""A rank of `benchmarks.before_after`: trains when it is told to, with the library of the checkout that it runs in.

Run as a file, so that it serves a checkout that does not have it. The parent's store says which case takes how many
steps; while the other checkout works, this process sleeps in the store's socket.
"""

import gc
import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    """Arguments: the group's name, the cases as JSON {name: bytes or null}, 1 for the tiny model."""
    group, cases_json, tiny = sys.argv[1:]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=1200))
    from benchmarks.cpu_cases import build, ours

    _, tokens = build(tiny == "1")
    cases = {name: ours(tiny == "1", True, budget) for name, budget in json.loads(cases_json).items()}
    port = int(os.environ["TURNS_PORT"])
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=3600))
    gc.collect()
    number = 0
    while True:
        turn = json.loads(store.get(f"{group}/{number}"))
        if turn is None:
            break
        case = cases[turn["case"]]
        for step in range(turn["steps"]):
            case.step(tokens(turn["first_step"] + step, rank))
        last = case.times[-turn["steps"] :]
        answer = [[time.forward_backward_s, time.optimizer_s, time.cpu_s] for time in last]
        store.set(f"{group}/{number}/{rank}", json.dumps([answer, case.losses[-turn["steps"] :]]))
        number += 1
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
