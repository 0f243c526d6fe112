"""What a reader of a training step must open: files, lines, calls and depth are counted, and may only go down.

`python -m tests.test_step_footprint` prints the table, and with `--tree` the step as a tree of calls. Counted are calls
of Python functions of this project, in the third step of a model of four operators and eight chunks; files are those
that a call enters, and lines are those of the functions. (Lines of whole files would punish files that are merged.)
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

# Today's figures: files, lines, calls, depth. They only go down: who lowers one writes the lower number here.
# (The files of some rows rose by one, twice: rules that a prediction shares are in placement/gradient_rules.py, and
# what ranks must know of the gradients is in optimizer/summary.py.)
# Targets: a step of 45 files, a fetch of 10 files and 40 calls, a gradient of 13 files, 9 deep.
NOISE = 1.02  # of lines and calls
BOUNDS: dict[tuple[int, str], dict[str, tuple[int, int, int, int]]] = {
    (1, "tight"): {
        FETCH: (8, 326, 37, 7),
        GRADIENT: (8, 205, 18, 9),
        OPERATOR: (14, 556, 74, 9),
        "backward's fetch": (8, 196, 21, 6),
        "optimizer.step()": (39, 1972, 1631, 13),
        STEP: (49, 3572, 2577, 15),
    },
    (1, "fits"): {
        GRADIENT: (8, 205, 18, 9),
        "optimizer.step()": (40, 1826, 1367, 13),
        STEP: (51, 3142, 1881, 15),
    },
    (2, "tight"): {
        FETCH: (15, 756, 103, 9),
        GRADIENT: (24, 1088, 126, 17),
        OPERATOR: (19, 1043, 258, 11),
        "backward's fetch": (21, 1030, 184, 12),
        "optimizer.step()": (43, 2044, 1439, 13),
        STEP: (56, 4631, 4039, 17),
    },
    (2, "fits"): {
        FETCH: (14, 490, 59, 9),
        GRADIENT: (24, 1088, 126, 17),
        OPERATOR: (19, 776, 207, 11),
        "backward's fetch": (21, 989, 165, 12),
        "optimizer.step()": (46, 2100, 1600, 13),
        STEP: (61, 4750, 3916, 17),
    },
}


@pytest.mark.parametrize("place", PLACES)
@on_ranks(1, 2)
def test_a_step_enters_no_more_than_it_did(rank: int, world_size: int, place: str) -> None:
    rows, bounds = measured(rank, world_size, PLACES[place]), BOUNDS[world_size, place]
    show(world_size, place, rows)
    assert rows.keys() == bounds.keys(), "what is counted has another name now: see ROWS in tests/harness/footprint.py"
    for row, (files, lines, calls, depth) in bounds.items():
        most = Footprint(files, int(lines * NOISE), int(calls * NOISE), depth)
        assert all(now <= then for now, then in zip(rows[row], most, strict=True)), f"{row}: {rows[row]} above {most}"


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
    for row, (files, lines, calls, depth) in rows.items():
        print(f"  {row:24}{files:5} files{lines:7} lines{calls:6} calls{depth:4} deep")


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
