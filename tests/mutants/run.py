"""`make mutants`: puts each fault into a copy of the code and checks that its named test fails there."""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.mutants.mutant import Mutant
from tests.mutants.mutants import MUTANTS
from tests.mutants.places import Code

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300
_FAILED = 1
_NO_TESTS = 5
_PYTEST = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
_IMPORT_FROM_PATH = """# the editable install's finder would import the original
import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__name__.startswith("ScikitBuild")]
"""


def main() -> int:
    """Exit code 0 if every mutant is noticed. Arguments pick mutants by a part of their name."""
    chosen = [m for m in MUTANTS if not sys.argv[1:] or any(part in m.name for part in sys.argv[1:])]
    survivors = []
    code = Code(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        copies: Queue[Path] = Queue()
        for number in range(os.cpu_count() or 1):
            copies.put(_copied(Path(folder) / f"copy{number}"))
        with ThreadPoolExecutor(copies.qsize()) as pool:
            verdicts = pool.map(lambda number: _try(chosen[number], number, code, copies), range(len(chosen)))
            for number, (mutant, verdict) in enumerate(zip(chosen, verdicts, strict=True), 1):
                print(f"[{number}/{len(chosen)}] {verdict:9} {mutant.name} ({mutant.test})", flush=True)
                if not verdict.startswith("noticed"):
                    survivors.append(mutant.name)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants noticed")
    if survivors:
        print("not noticed: " + "; ".join(survivors))
    return 1 if survivors else 0


def _copied(copy: Path) -> Path:
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "*.egg-info", "__pycache__"))
    (copy / "sitecustomize.py").write_text(_IMPORT_FROM_PATH)
    return copy


def _try(mutant: Mutant, number: int, code: Code, copies: Queue[Path]) -> str:
    """What its test says to the mutant with this number, in one of the copies that nobody uses."""
    places = code.places(mutant)
    if len(places) != 1:
        return "STALE"
    copy = copies.get()
    path = copy / places[0].path
    original, times = path.read_bytes(), path.stat()
    try:
        path.write_bytes(places[0].mutated)
        os.utime(path, (number, number))  # by which python knows that bytecode of another mutant is not of this one
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPATH"] = str(copy)
        try:
            for cases in ("not soak", "soak"):  # those of `make test`, if the test has any there
                command = [*_PYTEST, "-m", cases, mutant.test]
                done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=TIMEOUT_S)
                if done.returncode != _NO_TESTS:
                    break
        except subprocess.TimeoutExpired:  # a fault may be a wait without end; on a busy machine it may be the machine
            return f"noticed by no end within {TIMEOUT_S} s"
        return "noticed" if done.returncode == _FAILED else f"SURVIVED ({done.returncode})"
    finally:
        path.write_bytes(original)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        copies.put(copy)


if __name__ == "__main__":
    sys.exit(main())
