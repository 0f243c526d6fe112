"""What commands about a model have in common: options, progress, and how a wrong question ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

_NAMES = "A folder with config.json, a .json file, owner/model of the Hub, or package.module:attribute."
MODEL = Annotated[str, typer.Argument(help=_NAMES)]
DTYPE = Annotated[str, typer.Option(help="Of weights: fp32, bf16, fp16, or 'own'.")]
OPTIM_STATES = Annotated[
    int, typer.Option(min=0, help="States per element of the optimizer: 2 for Adam, 0 for SGD, 1 with momentum.")
]


def say(console: Console, words: str, style: str = "") -> None:
    """Print a line as it is: rich reads brackets in a str, such as `list[int]` in a message, as markup."""
    from rich.text import Text  # imported here, so that `--help` does not

    # With `soft_wrap` the terminal breaks long lines, and rich does not: a line that is copied stays whole.
    console.print(Text(words, style), soft_wrap=True)


@contextmanager
def questions_may_be_wrong(console: Console) -> Iterator[None]:
    """Inside, an error of the question's, such as a name that is no model, is said in red, and the exit code is 2."""
    try:
        yield
    except (ValueError, TypeError) as error:
        say(console, str(error), "red")
        raise typer.Exit(2) from None
