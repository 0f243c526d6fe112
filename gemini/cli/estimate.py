"""`gemini estimate MODEL`: bytes of model data a rank holds, by ZeRO stage."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemini.cli import asked
from gemini.cli.amounts import unit_of
from gemini.placement.demand import OPTIM_STATES

if TYPE_CHECKING:
    from gemini.model.estimate import MemoryEstimate
    from gemini.settings import Options

_STATES = {"param": "weights", "grad": "grads", "master": "masters", "optim": "moments"}
_COLUMNS = 80  # of a terminal in which the columns do not lose digits


def estimate(
    model: asked.MODEL,
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks, which stages divide states over.")] = 8,
    dtype: asked.DTYPE = "own",
    stage: Annotated[int | None, typer.Option(min=0, max=3, help="Only this ZeRO stage.")] = None,
    policy: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    model_data_memory: Annotated[str | None, typer.Option(help="Budget of it on a device, as in 20GiB.")] = None,
    optim_states: asked.OPTIM_STATES = OPTIM_STATES,
    optimizer: Annotated[
        str | None, typer.Option(help="In place of --optim-states: adam, 8bit or bf16 (HybridAdam's moments), or sgd.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Bytes as JSON instead of a table.")] = False,
) -> None:
    """Print what training takes on every rank: model data, by default with Adam, without activations.

    Nothing is allocated.
    """
    # Imported here, so that `--help` needs no torch.
    from rich.console import Console

    from gemini.cli.progress import working

    # Errors go to stderr, so that stdout has nothing but the table or the JSON, for a pipe.
    console = Console(stderr=True)
    with working(console, "loading torch"):
        from gemini.cli.model import dtype_option, model_named
        from gemini.errors import BudgetError
        from gemini.model.estimate import MemoryEstimate, estimate_memory

    options: Options = {
        "dtype": dtype_option(dtype),
        "tensor_placement_policy": policy,
        "model_data_memory": model_data_memory,
    }
    found: dict[int, MemoryEstimate | str] = {}
    with asked.questions_may_be_wrong(console):
        # The model is made once for all stages: importing it runs the user's code.
        with working(console, f"reading {model}"):
            named = model_named(model)
        for each in (0, 1, 2, 3) if stage is None else (stage,):
            try:
                options["stage"] = each
                found[each] = estimate_memory(
                    named, world_size=ranks, optim_states=optim_states, optimizer=optimizer, **options
                )
            except BudgetError as error:
                # A budget that is too small for one stage may be enough for a higher one, so the others are tried too.
                found[each] = str(error)
    if as_json:
        typer.echo(json.dumps({str(each): _bytes(estimated) for each, estimated in found.items()}, indent=1))
    else:
        _show(
            model,
            ranks,
            {each: estimated for each, estimated in found.items() if isinstance(estimated, MemoryEstimate)},
        )
        for each, estimated in found.items():
            if isinstance(estimated, str):
                asked.say(console, f"stage {each}: {estimated}", "red")
    # With one stage that fits the question has an answer, and the command succeeds.
    if not any(isinstance(estimated, MemoryEstimate) for estimated in found.values()):
        raise typer.Exit(1)


def _bytes(estimate: MemoryEstimate | str) -> dict[str, Any]:
    if isinstance(estimate, str):
        return {"refused": estimate}
    return {
        "parameters": estimate.num_parameters,
        "device": estimate.device,
        "least_device_bytes": estimate.least_device_bytes,
        "host": estimate.host,
    }


def _show(name: str, ranks: int, found: dict[int, MemoryEstimate]) -> None:
    """One row a stage; in less than 80 columns one column a stage. Below it, what the columns say."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    if not found:
        return
    most_bytes = max(max(estimated.device_bytes, estimated.host_bytes) for estimated in found.values())
    unit, power = unit_of(most_bytes)
    numel = next(iter(found.values())).num_parameters
    console = Console()
    title = f"{name}: {numel:,} parameters, {ranks} rank(s) (--ranks); {unit} (10**{power} bytes) on each"
    asked.say(console, title)
    lines: list[tuple[str, ...]] = [("stage", *_STATES.values(), "state", "at least", "device", "host")]
    for stage, estimated in found.items():
        total_bytes = {kind: estimated.device[kind] + estimated.host[kind] for kind in _STATES}
        by_tier = estimated.least_device_bytes, estimated.device_bytes, estimated.host_bytes
        numbers = (*total_bytes.values(), estimated.state_bytes, *by_tier)
        lines.append((str(stage), *(f"{number / 10**power:.2f}" for number in numbers)))
    head, *rows = lines if console.width >= _COLUMNS else list(zip(*lines, strict=True))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in head:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for words in _legend(found, lambda num_bytes: f"{num_bytes / 10**power:.2f} {unit}"):
        asked.say(console, words)


def _legend(found: dict[int, MemoryEstimate], words: Callable[[int], str]) -> Iterator[str]:
    yield "state: weights, gradients, masters and moments, which ZeRO divides over the ranks"
    yield "at least: what a device holds with the fewest buffers: weights are gathered again wherever they are used"
    kept = {stage: its.device_bytes - its.least_device_bytes for stage, its in found.items()}
    if any(kept.values()):
        stage, most = max(kept.items(), key=lambda pair: pair[1])
        yield f"device: without a budget; stage {stage} then keeps {words(most)} more of gathered weights"
    least = {stage: its.plan.packed_minimum_bytes for stage, its in found.items() if its.device_bytes}
    if least and all(least.values()) and any(its.host_bytes < its.state_bytes for its in found.values()):
        stage = max(least)
        yield f"with all states on the host a device needs {words(least[stage] or 0)} at stage {stage} (--policy cpu)"
