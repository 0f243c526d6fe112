"""What a reader of a training step must follow: lines, calls, moves between files and depth may only go down.

`python -m tests.test_step_footprint` prints the table, and with `--tree` the step as a tree of calls. Counted are calls
of Python functions of this project, in the third step of a model of four operators and eight chunks; lines are those of
the functions that are entered. The number of files is only shown: files may be pasted together, and nothing is shorter.
"""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.footprint import FETCH, GRADIENT, OPERATOR, STEP, Footprint, measured, step_tree
from tests.harness.on_ranks import on_ranks
from tests.harness.ranks import Ranks

PLACES: dict[str, dict[str, Any]] = {"tight": {"model_data_memory": 150_000}, "fits": {}}

# Today's figures: lines, calls, moves, depth. They only go down: who lowers one writes the lower number here.
# Targets of a step of two ranks, tight, that are not met: 3,700 lines, 2,900 moves, 10 deep; of a fetch 40 calls.
NOISE = 1.02  # of lines, calls and moves
BOUNDS: dict[tuple[int, str], dict[str, tuple[int, int, int, int]]] = {
    (1, "tight"): {
        FETCH: (284, 21, 30, 5),
        GRADIENT: (220, 12, 20, 6),
        OPERATOR: (509, 51, 72, 7),
        "backward's fetch": (171, 13, 14, 4),
        "optimizer.step()": (2149, 988, 1142, 11),
        STEP: (3877, 1671, 2113, 11),
    },
    (1, "fits"): {
        GRADIENT: (220, 12, 20, 6),
        "optimizer.step()": (1974, 720, 910, 11),
        STEP: (3439, 1125, 1494, 11),
    },
    (2, "tight"): {
        FETCH: (720, 67, 82, 7),
        GRADIENT: (941, 74, 94, 9),
        OPERATOR: (962, 168, 216, 9),
        "backward's fetch": (915, 112, 128, 10),
        "optimizer.step()": (2197, 781, 992, 11),
        STEP: (4697, 2393, 3043, 11),
    },
    (2, "fits"): {
        FETCH: (442, 34, 40, 7),
        GRADIENT: (941, 74, 94, 9),
        OPERATOR: (696, 124, 156, 9),
        "backward's fetch": (867, 102, 114, 10),
        "optimizer.step()": (2260, 914, 1182, 11),
        STEP: (4829, 2334, 3001, 11),
    },
}


@pytest.mark.parametrize("place", PLACES)
@on_ranks(1, 2)
def test_a_step_enters_no_more_than_it_did(rank: int, world_size: int, place: str) -> None:
    rows, bounds = measured(rank, world_size, PLACES[place]), BOUNDS[world_size, place]
    show(world_size, place, rows)
    assert rows.keys() == bounds.keys(), "what is counted has another name now: see ROWS in tests/harness/footprint.py"
    for row, (lines, calls, moves, depth) in bounds.items():
        most = int(lines * NOISE), int(calls * NOISE), int(moves * NOISE), depth
        assert all(now <= then for now, then in zip(rows[row], most, strict=False)), f"{row}: {rows[row]} above {most}"


@on_ranks(2)
def test_the_map_shows_the_calls_of_a_step(rank: int, world_size: int) -> None:
    """Names, files and nesting are compared, numbers of calls are not."""
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()
    shown = re.search(r"```text\n(loss = model\(batch\)\n.*?)```", page, re.S)
    assert shown is not None
    now = "\n".join(step_tree(rank, world_size, PLACES["tight"]))
    assert re.sub(r" x\d+", "", shown[1]).split() == re.sub(r" x\d+", "", now).split(), f"the step is now:\n{now}"


def show(world_size: int, place: str, rows: dict[str, Footprint]) -> None:
    print(f"{world_size} rank{'s' * (world_size > 1)}, {place}")
    for row, (lines, calls, moves, depth, files) in rows.items():
        print(f"  {row:24}{lines:7} lines{calls:6} calls{moves:6} moves{depth:4} deep{files:4} files")


def main() -> None:
    """Print the table, or the tree."""
    two = Ranks(2)
    if "--tree" in sys.argv[1:]:
        print("\n".join(two.run(step_tree, PLACES["tight"])[0]))
        two.stop()
        return
    for world_size, place in BOUNDS:
        arguments = PLACES[place]
        show(world_size, place, two.run(measured, arguments)[0] if world_size == 2 else measured(0, 1, arguments))
    two.stop()


if __name__ == "__main__":
    main()
