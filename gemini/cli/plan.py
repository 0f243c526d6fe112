"""`gemini plan MODEL`: where a model's bytes would lie on a machine or cluster, and what a step would take there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from gemini.cli import asked
from gemini.placement.demand import OPTIM_STATES
from gemini.placement.machines import MACHINES, THIS

if TYPE_CHECKING:
    from torch import nn

    from gemini.cli.remedies import Options
    from gemini.placement.optimizers import OptimizerKind

_LENGTH = 4096  # of sequences, where the model takes as many


def plan(
    context: typer.Context,
    model: asked.MODEL,
    ranks: Annotated[int | None, typer.Option(min=1, help="Number of ranks.")] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Of them, on each node. Default: the machine's; else the most, up to 8.")
    ] = None,
    machine: Annotated[str, typer.Option(help=f"{THIS}, or a published one: {', '.join(MACHINES)}.")] = THIS,
    device_memory: Annotated[
        str | None, typer.Option(help="Of each device, activations included, as in 80GB. Default: the machine's.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Of the host, for each rank, as in 200GB. Default: the machine's share.")
    ] = None,
    disk_path: Annotated[
        str | None, typer.Option(help="A folder on a local disk here, for states without room on the host; measured.")
    ] = None,
    disk_memory: Annotated[
        str | None, typer.Option(help="Of a local disk, for each rank, as in 2TB. Default: no disk, or what is free.")
    ] = None,
    rates: Annotated[
        str | None, typer.Option(help="measured (here), a published machine, a .json file, or none.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a micro-batch on each rank.")] = 1,
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence. Default: 4096, or the most that the model takes.")
    ] = None,
    activation_checkpointing: Annotated[
        bool, typer.Option("--activation-checkpointing", help="Blocks keep their inputs and are computed again.")
    ] = False,
    experts_per_token: Annotated[
        int | None, typer.Option(min=1, help="Of a mixture, those that a token is sent to. Default: the config's.")
    ] = None,
    dtype: asked.DTYPE = "own",
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 3,
    shard_group_size: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks that share shards; others hold replicas. Default: the fastest, by the model."),
    ] = None,
    secondary_group_size: Annotated[
        int | None, typer.Option(min=2, help="Ranks, as of a node, that keep a second copy of the weights. Likewise.")
    ] = None,
    optimizer_shard: Annotated[
        str, typer.Option(help="all: optimizer states over all ranks, weights and gradients over a group's. Likewise.")
    ] = "group",
    policy: Annotated[str, typer.Option(help="auto, cpu, cuda, static or disk.")] = "auto",
    shard_param_frac: Annotated[
        float | None, typer.Option(min=0, max=1, help="static: of the weights, what is sharded. Default: 1.")
    ] = None,
    offload_optim_frac: Annotated[
        float | None, typer.Option(min=0, max=1, help="static: of optimizer state, what rests on the host. Default: 0.")
    ] = None,
    offload_param_frac: Annotated[
        float | None, typer.Option(min=0, max=1, help="static: of the weights, what rests on the host. Default: 0.")
    ] = None,
    gradient_accumulation_steps: Annotated[
        int, typer.Option(min=1, help="Micro-batches of a step, each of --batch sequences.")
    ] = 1,
    optim_states: asked.OPTIM_STATES = OPTIM_STATES,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="In place of --optim-states: adam, 8bit or bf16 (HybridAdam's moments), muon (beside adam), "
            "adafactor, sgd, momentum or amsgrad."
        ),
    ] = None,
    update_in_backward: Annotated[
        bool, typer.Option("--update-in-backward", help="Gradients take no memory: without clipping and micro-batches.")
    ] = False,
    chunk_size: Annotated[int | None, typer.Option(min=1, help="Elements of a chunk. Default: searched.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Numbers as JSON instead of tables.")] = False,
) -> None:
    """Print where training, by default with Adam, would put a model's bytes, and a modelled step time.

    Nothing is allocated.

    Exit code 1: it does not fit, and what would help is said. Exit code 2: the question is wrong.
    """
    # Imported here, so that `--help` needs no torch.
    from rich.console import Console

    from gemini.cli.progress import working

    # Refusals and progress go to stderr, so that stdout has nothing but the tables or the JSON, for a pipe.
    console = Console(stderr=True)
    with working(console, "loading torch"):
        from gemini.cli.model import NotAModel, check_name, dtype_option, model_named
        from gemini.cli.question import A_FOLDER, Batch, described
        from gemini.cli.report import answer, as_json, show, show_remedies
        from gemini.model.estimate import module_of, states_per_element
        from gemini.settings import Settings

    with asked.questions_may_be_wrong(console):
        states = _states_of(optimizer, optim_states)
        # This check comes before the machine is measured, which takes time: a misspelled name is told at once.
        check_name(model)
        # Budgets are left out: `Question` adds those of the cluster, and of other clusters that it tries.
        settings = Settings(
            dtype=dtype_option(dtype),
            stage=stage,
            shard_group_size=shard_group_size,
            secondary_group_size=secondary_group_size,
            optimizer_shard=optimizer_shard,
            tensor_placement_policy=policy,
            shard_param_frac=shard_param_frac,
            offload_optim_frac=offload_optim_frac,
            offload_param_frac=offload_param_frac,
            gradient_accumulation_steps=gradient_accumulation_steps,
            chunk_size=chunk_size,
            disk_path=disk_path if disk_memory is None else disk_path or A_FOLDER,
            update_in_backward=update_in_backward,
        )
        with working(console, "looking at the machine"):
            cluster = described(
                ranks, ranks_per_node, machine, device_memory, host_memory, rates, disk_path, disk_memory
            )
        with working(console, f"reading {model}"):
            module = module_of(model_named(model))
        if not any(True for _ in module.parameters()):
            raise NotAModel(f"{model!r} has no parameters: there is nothing to plan")
        length = sequence_length or _length_of(module)
        each = Batch(batch, length, activation_checkpointing, experts_per_token, gradient_accumulation_steps)
        with working(console, "planning"):
            asked_for = states_per_element(module, states) if isinstance(states, str) else states
            found = answer(module, settings, cluster, each, asked_for)
    given = _given(context)
    if json_:
        typer.echo(json.dumps(as_json(model, found, given), indent=1))
    else:
        show(model, found, Console(), given)
    # The answer has been shown before, because it says something of a model that does not fit too: sizes, activations,
    # and in JSON the refusal.
    if found.refusal is not None:
        if json_:
            asked.say(console, f"does not fit: {found.in_the_way}", "red")
            show_remedies(model, found, console, given)
        raise typer.Exit(1)


def _given(context: typer.Context) -> Options:
    """The options that were typed, by their names, but for those of the output."""
    found: list[tuple[str, str | None]] = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        option, value = parameter.opts[0], context.params.get(parameter.name or "")
        if source is None or source.name != "COMMANDLINE" or not option.startswith("--") or option == "--json":
            continue
        found.append((option, None if value is True else str(value)))
    return tuple(found)


def _states_of(optimizer: str | None, optim_states: int) -> int | OptimizerKind | str:
    """The optimizer by its name, or how many states it keeps. Raises ValueError for an unknown name.

    A name is left for what keeps less of some tensors than of others, by their sizes.
    """
    from gemini.model.estimate import OPTIMIZERS
    from gemini.placement.optimizers import KINDS

    if optimizer is None:
        return optim_states
    if optimizer.lower() in OPTIMIZERS and optimizer.lower() not in KINDS:
        return optimizer.lower()
    if optimizer.lower() not in KINDS:
        valid = ", ".join(dict.fromkeys([*KINDS, *OPTIMIZERS]))
        raise ValueError(f"--optimizer {optimizer} is not known (valid: {valid}): say --optim-states")
    return KINDS[optimizer.lower()]


def _length_of(module: nn.Module) -> int:
    from gemini.model.workload import text_config

    config = text_config(module)
    # A module without a config need not have tokens: each row of its batch counts as one.
    if config is None:
        return 1
    max_positions = getattr(config, "max_position_embeddings", None)
    return min(_LENGTH, max_positions) if isinstance(max_positions, int) and max_positions > 0 else _LENGTH
