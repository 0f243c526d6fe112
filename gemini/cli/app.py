"""`gemini`: the commands."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gemini.cli.checkpoint import checkpoint
from gemini.cli.doctor import doctor
from gemini.cli.estimate import estimate
from gemini.cli.plan import plan

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Train models larger than the GPU they run on.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(plan)
app.command()(estimate)
app.command()(doctor)
app.add_typer(checkpoint, name="checkpoint")


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gemini {sys.modules['gemini'].__version__}")
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


if __name__ == "__main__":
    app()
