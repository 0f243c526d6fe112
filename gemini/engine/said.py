"""The table of an engine's decisions, shown at its start: settings, bytes on each tier, and keys without effect."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gemini.dist_logger import get_dist_logger
from gemini.engine.engine import Engine
from gemini.placement.demand import Kind, Tier
from gemini.placement.sizes import format_bytes

_FILE_WIDTH = 120  # columns, if the output is not a terminal
_KINDS = {
    Kind.PARAM: "weights",
    Kind.GRAD: "gradients",
    Kind.MASTER: "fp32 masters",
    Kind.OPTIM: "optimizer state",
    "slots": "slots for weights",
    "gradient slots": "slots for gradients",
    "scratch": "buffers",
}
_OF_TRAINING = Kind.GRAD, Kind.OPTIM, "gradient slots", "scratch"


def say(engine: Engine) -> None:
    """Log the table on rank 0 at level INFO, with colours if stderr is a terminal. Local."""
    # The logger writes to stderr, wherever stdout goes.
    shows = sys.stderr.isatty()
    width = shutil.get_terminal_size().columns if shows else _FILE_WIDTH
    get_dist_logger().info(f"the engine decided\n{in_words(engine, width, shows)}", ranks=[0])


def in_words(engine: Engine, width: int, is_terminal: bool = False) -> str:
    """The table as text, `width` columns wide. Local."""
    # The console writes into a string, which rich colours only if it is forced to.
    console = Console(file=io.StringIO(), width=width, force_terminal=is_terminal)
    console.print(table_of(engine))
    assert isinstance(console.file, io.StringIO)
    # rich fills each line up to the width. A log file needs no blanks at the ends of its lines.
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def table_of(engine: Engine) -> Table:
    """One row for each decision, then the bytes of a rank, then the keys of the config that have no effect. Local."""
    table = Table(box=box.HORIZONTALS, show_header=False, caption="why: engine.model.plan.explain()")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, words in _decisions(engine):
        table.add_row(name, Text(words))
    table.add_section()
    table.add_row("on each rank", _bytes(engine))
    if engine.config.ignored:
        table.add_section()
        ignored = "\n".join(f"{key}: {instead}" for key, instead in engine.config.ignored)
        # rich reads a str as markup: what stands in brackets would be taken for a style, and not be shown.
        table.add_row("without effect", Text(ignored))
    return table


def _decisions(engine: Engine) -> Iterator[tuple[str, str]]:
    config, plan, sizes = engine.config, engine.model.plan, engine.batch_sizes
    ranks = f"{engine.model.world_size} rank{'s' * (engine.model.world_size > 1)}"
    # Chunks are asked, not the config: without `dtype` weights keep the module's own dtypes.
    dtypes = dict.fromkeys(str(chunk.dtype).removeprefix("torch.") for chunk in engine.chunk_manager.chunks)
    yield "stage", f"{engine.model.settings.stage}, {ranks}"
    yield "weights", ", ".join(dtypes)
    yield "optimizer", _optimizer(engine)
    yield "schedule", _schedule(engine)
    yield "gradient clipping", "none" if config.clip_grad_norm is None else f"to a norm of {config.clip_grad_norm:g}"
    yield "loss scale", _loss_scale(engine)
    micro = "batches as the loader has them" if sizes.micro is None else f"{sizes.micro} samples a forward"
    window = f"{sizes.accumulation} forward{'s' * (sizes.accumulation > 1)} a step"
    yield "batch", f"{micro}, {window}" + (f", {sizes.train} samples a step over all ranks" if sizes.train else "")
    yield "placement", plan.policy
    how = "as given" if plan.packing.searched is None else "searched"
    yield "chunks", f"{len(plan.packing.chunks)} of up to {format_bytes(plan.packing.chunk_bytes)}, {how}"


def _optimizer(engine: Engine) -> str:
    if engine.optimizer is None:
        return "none: this engine evaluates"
    # A schedule keeps the optimizer's own rate in `initial_lr`; `lr` has its first rate already, which is 0 in a
    # warmup.
    rates = dict.fromkeys(f"{group.get('initial_lr', group['lr']):g}" for group in engine.optimizer.param_groups)
    name = "as given" if engine.config.optimizer is None else engine.config.optimizer.type
    return f"{name}, learning rate {', '.join(rates)}"


def _loss_scale(engine: Engine) -> str:
    configured = engine.config.loss_scale
    if engine.loss_scale == 1.0:
        return "none"
    return f"{engine.loss_scale:g}, static" if configured.is_static else f"dynamic, {engine.loss_scale:g} at first"


def _schedule(engine: Engine) -> str:
    named = engine.config.scheduler
    if engine.lr_scheduler is None:
        return "none: the learning rate stays"
    if not engine.moves_schedule:
        return "as given: lr_scheduler.step() moves it"
    return type(engine.lr_scheduler).__name__ if named is None else named.type


def _bytes(engine: Engine) -> Table:
    """The bytes of one rank. Rows: states, slots and buffers. Columns: tiers."""
    plan = engine.model.plan
    found = {tier: plan.placement.bytes_by_kind(plan.demand, tier) for tier in Tier}
    # A plan counts what training with Adam takes until an optimizer comes, and this engine trains nothing.
    if engine.optimizer is None:
        for of_tier in found.values():
            of_tier |= dict.fromkeys(_OF_TRAINING, 0)
    table = Table.grid(padding=(0, 2))
    table.add_column()
    for _ in Tier:
        table.add_column(justify="right")
    table.add_row("", *(str(tier) for tier in Tier))
    for kind, words in _KINDS.items():
        # A kind without bytes gets no row: weights of fp32 have no masters, and one rank may need no slots.
        numbers = [of_tier.get(kind, 0) for of_tier in found.values()]
        if any(numbers):
            table.add_row(words, *(format_bytes(number) if number else "" for number in numbers))
    table.add_row("in all", *(format_bytes(sum(of_tier.values())) for of_tier in found.values()))
    budgets = plan.budget.device, plan.budget.host
    table.add_row("budget", *("none" if budget is None else format_bytes(budget) for budget in budgets))
    return table
