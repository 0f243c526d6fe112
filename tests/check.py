"""`make check`: the tests to run while working, in under a minute. One process a core, no ranks, no subprocesses.

A file is on the list if it is quick and guards something that any change may break; the reason stands beside it.
What it leaves out: several ranks (of tests that `@on_ranks` runs on one rank and on several it takes those on one), all
arguments of every kernel, Hugging Face models, trainers, benchmarks. `make test` has all of these.

    python tests/check.py            the list
    python tests/check.py -x -k edit     with arguments for pytest
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

CHECKED = {
    "tests/test_tiny.py": "the promise: half the memory, the same bits",
    "tests/test_house_rules.py": "direction of imports, sizes of files, mutants that still apply",
    "tests/test_state_writers.py": "a state is written by its own methods",
    "tests/test_field_owners.py": "what has a lifecycle is written by its own object, no field by another package",
    "tests/test_step_footprint.py": "files, lines, calls and depth of a step: they only go down",
    "tests/test_callbacks.py": "no object is given a function after it was made",
    "tests/test_raises.py": "public functions say what they raise",
    "tests/test_public_names.py": "what gemini exports",
    "tests/pure": "packing, placement, layouts, norm, loss scale, Adam in the written order: numbers in, numbers out",
    "tests/test_manager.py": "fetch, release, eviction and the order of reductions, by counts",
    "tests/features/test_late_copies.py": "copies that a device makes late are waited for",
    "tests/test_semantics.py": "the ordinary training loop at each placement, against plain PyTorch",
    "tests/test_optimizers.py": "schedulers, param groups, every tested torch optimizer",
    "tests/test_edits.py": "weights that are written to outside their operators reach forward, master and state dict",
    "tests/test_wrong_order.py": "stale graphs, edits before backward: an error, never a wrong gradient",
    "tests/test_resuming.py": "state dicts continue with the same bits, elsewhere too",
    "tests/test_bad_input.py": "errors name what is wrong and change nothing",
}
LEFT_OUT = {
    "tests/pure/test_cpu_kernels.py": "every argument of every C++ kernel: half a minute by itself",
}


def main() -> int:
    """pytest's exit code."""
    left_out = [f"--ignore={path}" for path in LEFT_OUT]
    chosen = ["-m", "not soak and not ranks", "-n", "2", *left_out, *CHECKED]
    return subprocess.call([sys.executable, "-m", "pytest", "-q", *sys.argv[1:], *chosen], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main())
