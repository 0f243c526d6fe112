"""One-line faults for the core, each with the test that must notice it. One file for each folder that is mutated.

A mutant's `old` must be exactly once where it says, so that a mutant which the code has outgrown is an error, no pass.
"""

from importlib import import_module
from pathlib import Path

from tests.mutants.mutant import Mutant

_NAMES = sorted(
    {path.stem for path in Path(__file__).parent.glob("[a-z]*.py")} - {"mutant", "mutants", "places", "run"}
)
MUTANTS: list[Mutant] = [each for name in _NAMES for each in import_module(f"tests.mutants.{name}").MUTANTS]
