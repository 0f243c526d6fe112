"""`@on_ranks(1, 2)`: one text of a test, which runs on one rank and on several.

    @on_ranks(1, 2, soak=(3,))
    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_what_a_user_does(rank: int, world_size: int, stage: int) -> None: ...

On one rank the function runs in this process, without a process group. On several it runs on the warm gloo ranks of
`tests/harness/ranks.py`, which import its module and take the function from there: what a test module does at import it
does on every rank too. Other arguments are pickled on their way, so they are numbers, texts, settings or top-level
functions, and no fixtures that change something in this process.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import RankPool
from tests.harness.seed import seed

Case = Callable[..., None]


def on_ranks(*world_sizes: int, soak: Sequence[int] = (), timeout_s: float = 60.0) -> Callable[[Case], Case]:
    """Parametrizes a test `case(rank, world_size, ...)` over world sizes, with ids such as `1rank` and `2ranks`.

    Args:
        world_sizes: on which the test runs; marks and other parameters stand above or below this decorator.
        soak: world sizes that only `-m soak` runs.
        timeout_s: of one case on several ranks, which are killed then.

    Raises:
        TypeError: the function does not begin with `rank` and `world_size`.
    """
    sizes = [pytest.param(n, id=_id_of(n), marks=_marks_of(n, n in soak)) for n in (*world_sizes, *soak)]
    return _decorator(pytest.mark.parametrize("world_size", sizes).mark, timeout_s)


def on_ranks_with(
    name: str,
    values: dict[int, Sequence[Any]],
    soak: dict[int, Sequence[Any]] | None = None,
    ids: Callable[[Any], str] = str,
    timeout_s: float = 60.0,
) -> Callable[[Case], Case]:
    """Like `on_ranks`, for a test of which each world size runs other cases, such as fewer on more ranks.

    Args:
        name: of the argument.
        values: what it is, by world size.
        soak: what else it is in `-m soak`; values that always run may be among these.
        ids: an id for a value.
        timeout_s: of one case on several ranks.
    """
    every = [(n, value, False) for n in values for value in values[n]]
    every += [(n, value, True) for n, more in (soak or {}).items() for value in more if value not in values.get(n, ())]
    params = [pytest.param(n, value, id=f"{_id_of(n)}-{ids(value)}", marks=_marks_of(n, s)) for n, value, s in every]
    return _decorator(pytest.mark.parametrize(("world_size", name), params).mark, timeout_s)


def _decorator(parameters_mark: pytest.Mark, timeout_s: float) -> Callable[[Case], Case]:
    def decorate(case: Case) -> Case:
        parameters = list(inspect.signature(case).parameters.values())
        if [parameter.name for parameter in parameters[:2]] != ["rank", "world_size"]:
            raise TypeError(f"{case.__name__} must begin with the arguments rank and world_size")

        @functools.wraps(case)
        def test(ranks: RankPool, world_size: int, **arguments: Any) -> None:
            __tracebackhide__ = True
            if world_size == 1:
                seed(0)  # as every case on ranks starts
                case(0, 1, **arguments)
            else:
                # the name of the test is the decorated function; ranks call the one that it was made of
                name = f"{case.__module__}:{case.__qualname__}.case"
                ranks(world_size).run(name, timeout_s=timeout_s, **arguments)

        test.case = case  # type: ignore[attr-defined]
        fixture = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([fixture, *parameters[1:]])  # type: ignore[attr-defined]
        # `wraps` shares the list of marks. World sizes stand first in ids, wherever the decorator stands.
        test.pytestmark = [parameters_mark, *getattr(case, "pytestmark", ())]  # type: ignore[attr-defined]
        return test

    return decorate


def in_soak(*values: Any) -> list[Any]:
    """Values for `parametrize` that only `-m soak` runs."""
    return [pytest.param(value, marks=pytest.mark.soak) for value in values]


def gathered(value: Any) -> list[Any]:
    """What each rank gives, in rank order, on every rank. Collective where there are several ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _id_of(world_size: int) -> str:
    return "1rank" if world_size == 1 else f"{world_size}ranks"


def _marks_of(world_size: int, is_soak: bool) -> list[pytest.MarkDecorator]:
    """`-m "not ranks"` chooses what starts no processes, as `make check` does."""
    return [pytest.mark.ranks] * (world_size > 1) + [pytest.mark.soak] * is_soak


def average_gradients(module: torch.nn.Module) -> None:
    """What data-parallel training in plain PyTorch does between backward and step: `.grad` is the mean over ranks.

    On two ranks bit-equal to what a ShardedModel makes: a sum of two numbers has one order.
    """
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
