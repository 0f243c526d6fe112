"""`gemini`: the commands."""

from __future__ import annotations

import typer

from gemini.cli.checkpoint import checkpoint
from gemini.cli.estimate import estimate
from gemini.cli.plan import plan

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Train models larger than the GPU they run on.")
app.command()(estimate)
app.command()(plan)
app.add_typer(checkpoint, name="checkpoint")


@app.callback()
def _commands() -> None:  # with one command alone typer would leave out its name
    pass


if __name__ == "__main__":
    app()
