"""Seconds that a plan takes: of models of thousands of chunks, made for the first time and made again.

    python -m benchmarks.planning              # up to 10,000 chunks
    python -m benchmarks.planning --profile    # and which functions the time of the largest goes to

Planning is a pure function of numbers, so no model is made. Processor time of this process, the least of some rounds:
other processes count less than in wall time. Cycles are not searched for meanwhile, as in `ShardedModel(...)`.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import typer

from gemini import Settings, plan_model
from gemini.memory.modes import uncollected
from gemini.placement.demand import Dtype, ModelSpec, OperatorSpec, WeightSpec
from gemini.placement.plan import Plan
from gemini.placement.planning import replan

NUMEL = 2**20  # of a weight, and of a chunk where its size is given
LIMIT_S = 1.0  # for 10,000 chunks
COUNTS = (2_500, 5_000, 10_000)


def spec_of(num_weights: int) -> ModelSpec:
    """A chain of operators that have one weight each."""
    dtype = Dtype("bfloat16", 2)
    weights = tuple(WeightSpec(f"layers.{i}.weight", (NUMEL,), dtype, True) for i in range(num_weights))
    return ModelSpec(weights, tuple(OperatorSpec(f"layers.{i}", (i,), ()) for i in range(num_weights)))


def least_seconds(function: Callable[[], object], rounds: int) -> float:
    """Of processor time."""
    found = []
    for _ in range(rounds):
        gc.collect()
        with uncollected():
            started = time.process_time()
            function()
            found.append(time.process_time() - started)
    return min(found)


def planned(num_weights: int, ranks: int, settings: Settings) -> tuple[Callable[[], Plan], Callable[[], Plan]]:
    """What makes the plan at half of what everything takes, and what makes it again for a tenth less."""
    spec = spec_of(num_weights)
    whole = plan_model(spec, settings, ranks).device_bytes
    tight = replace(settings, model_data_memory=whole // 2)
    first = plan_model(spec, tight, ranks)
    less = replace(first.budget, device=whole * 45 // 100)
    return lambda: plan_model(spec, tight, ranks), lambda: replan(first, first.trained, {}, budget=less)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Of which the least counts.")] = 5,
    profile: Annotated[bool, typer.Option("--profile", help="Say where the time of the largest goes.")] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="Few chunks, to see that it runs.")] = False,
) -> None:
    """Time plans of more and more chunks."""
    print(f"{'chunk size':12}{'ranks':>6}{'weights':>9}{'chunks':>8}{'planned':>10}{'again':>10}")
    for words, chunk_size in (("given", NUMEL), ("searched", None)):
        settings = Settings(chunk_size=chunk_size, host_memory="1000TB")
        for ranks in (1, 8):
            for count in (100,) if tiny else COUNTS:
                first, again = planned(count, ranks, settings)
                seconds = least_seconds(first, rounds), least_seconds(again, rounds)
                chunks = len(first().packing.chunks)
                verdict = f"   {'met' if max(seconds) <= LIMIT_S else 'MISSED'} (<= {LIMIT_S:g} s)"
                row = f"{words:12}{ranks:>6}{count:>9}{chunks:>8}{seconds[0]:>8.2f} s{seconds[1]:>8.2f} s"
                print(row + verdict * (count == COUNTS[-1]), flush=True)
            if profile:
                with cProfile.Profile() as profiler:
                    first()
                pstats.Stats(profiler).sort_stats("tottime").print_stats(12)


if __name__ == "__main__":
    typer.run(main)
