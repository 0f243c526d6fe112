"""One-line faults for the core, each with the test that must notice it. One file for each folder that is mutated.

`old` must occur exactly once in `file`, so that a mutant which the code has outgrown is an error, not a pass.
"""

from tests.mutants import (
    access,
    building,
    cli,
    engine,
    integrations,
    manager,
    manager_grads,
    memory,
    model,
    monitor,
    optim,
    optimizer,
    optimizer_state,
    placement,
    ranks,
)

FILES = (
    access,
    building,
    cli,
    engine,
    integrations,
    manager,
    manager_grads,
    memory,
    model,
    monitor,
    optim,
    optimizer,
    optimizer_state,
    placement,
    ranks,
)
MUTANTS = [mutant for file in FILES for mutant in file.MUTANTS]
