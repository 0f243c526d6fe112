"""What ranks of `benchmarks.launch.run_ranks` run in tests. It imports nothing that a rank would wait for."""

import time


def raising(rank: int, world_size: int, who: int) -> str:
    """Its rank; rank `who` raises."""
    if rank == who:
        raise ValueError(f"rank {rank} of {world_size} gives up")
    return f"rank {rank}"


def sleeping(rank: int, world_size: int) -> None:
    """Ends too late."""
    time.sleep(600)
