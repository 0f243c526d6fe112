"""Operations that random walks draw from."""

import random
from collections.abc import Callable
from typing import Any, Generic, TypeVar

W = TypeVar("W")


class Operations(Generic[W]):
    """Functions of a walk, by name, each with the weight by which it is drawn. `@operations(2)` adds one."""

    def __init__(self) -> None:
        self.by_name: dict[str, Callable[[W], None]] = {}
        self._names: list[str] = []  # each as often as its weight says

    def __call__(self, weight: int = 1) -> Callable[[Callable[[W], None]], Callable[[W], None]]:
        def add(do: Callable[[W], None]) -> Callable[[W], None]:
            self.by_name[do.__name__] = do
            self._names += [do.__name__] * weight
            return do

        return add

    def draw(self, walk: W, chance: random.Random, done: list[str]) -> None:
        """Do a random one, whose name is added to `done` before."""
        done.append(chance.choice(self._names))
        self.by_name[done[-1]](walk)


def go(walk: Any, length: int) -> None:
    """A walk of so many operations. What fails says which they were, and what was drawn before them."""
    try:
        walk.walk(length)
    except BaseException as error:
        drawn = {name: value for name, value in vars(walk).items() if name in ("options", "name", "scheduled")}
        error.add_note(f"{drawn}: {', '.join(walk.done)}")
        raise
