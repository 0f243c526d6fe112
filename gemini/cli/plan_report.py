"""How `gemini plan` shows what it found: two tables and sentences, or JSON."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gemini.cli.answer import Answer, chosen_of
from gemini.cli.options import with_options
from gemini.placement.demand import Tier
from gemini.placement.rates import Rates
from gemini.placement.sizes import format_bytes

_KINDS = {
    "param": "weights",
    "grad": "gradients",
    "master": "fp32 masters",
    "optim": "moments",
    "slots": "slots",
    "gradient slots": "gradient slots",
    "scratch": "scratch",
}
_COLUMNS = 110  # of a terminal in which rates are shown too
_UNITS = (("GB", 9), ("MB", 6), ("KB", 3))


def as_json(name: str, found: Answer) -> dict[str, Any]:
    """All numbers: bytes and seconds of one rank."""
    ranks, plan, step = found.cluster.ranks, found.plan, found.step
    # Where activations are not known, the peak of model data alone is no peak of the device: it stays None in JSON.
    activations = found.activations_at_hand
    shown: dict[str, Any] = {
        "model": name,
        "parameters": found.num_parameters,
        "dtype": found.dtype.name,
        "cluster": {
            "name": found.cluster.name,
            "ranks": ranks.count,
            "ranks_per_node": ranks.on_a_node,
            "nodes": ranks.num_nodes,
            "device_memory": found.cluster.device_bytes,
            "host_memory": found.cluster.host_bytes,
            "rates": None if found.cluster.rates is None else found.cluster.rates.to_json(),
        },
        "batch": {
            "sequences": found.batch.sequences,
            "sequence_length": found.batch.length,
            "gradient_accumulation_steps": found.batch.micro_batches,
            "activation_checkpointing": found.batch.is_checkpointed,
        },
        "activations_at_most": dict(zip(("whole", "checkpointed"), found.activations, strict=True)),
        "fits": plan is not None,
        "would_change": list(found.knobs),
        "notes": list(found.notes),
    }
    if found.refusal is not None:
        refusal = found.refusal
        shown["refused"] = {
            "tier": refusal.tier,
            "needed_bytes": refusal.needed_bytes,
            "budget_bytes": refusal.budget_bytes,
            "enough_bytes": refusal.enough_bytes,
            "message": with_options(str(refusal)),
        }
    # A plan always comes with its prediction and its moves, which the types do not say.
    if plan is not None and found.moves is not None and found.predicted is not None:
        shown |= {
            "stage": plan.settings.stage,
            "policy": plan.policy,
            "chunks": len(plan.packing.chunks),
            "chunk_bytes": plan.packing.chunk_bytes,
            "device": plan.placement.bytes_by_kind(plan.demand, Tier.DEVICE),
            "host": plan.placement.bytes_by_kind(plan.demand, Tier.HOST),
            "model_data_budget": plan.budget_bytes,
            "wrap_with": {} if found.setting is None else _settings_of(found, found.setting),
            "model_data_minimum_with_these_chunks": plan.packed_minimum_bytes,
            "device_peak": None if activations is None else found.predicted.device_peak + activations,
            "host_peak": found.predicted.host_peak,
            "moves": vars(found.moves),
        }
    if step is not None:
        shown["modelled"] = {
            "seconds_by_part": dict(step.parts),
            "seconds_without_overlap": step.seconds,
            "seconds_with_all_overlap": step.least_seconds,
            "model_flops": step.model_flops,
            "flop_utilisation_without_overlap": step.utilisation,
            "flop_utilisation_with_all_overlap": step.most_utilisation,
        }
    return shown


def _settings_of(found: Answer, model_data_memory: int) -> dict[str, float | None]:
    """The settings with which `ShardedModel` makes the same plan."""
    return {
        "device_memory": found.cluster.device_bytes,
        "model_data_memory": model_data_memory,
        "host_memory": found.cluster.host_bytes,
        **({} if found.plan is None else chosen_of(found.plan.settings)),
    }


def show(name: str, found: Answer, console: Console) -> None:
    """Print the answer for people to read."""
    ranks, batch, plan = found.cluster.ranks, found.batch, found.plan
    nodes = f" on {ranks.num_nodes} nodes of {ranks.on_a_node}" if ranks.num_nodes > 1 else ""
    lines = [
        f"{name}: {found.num_parameters:,} parameters, {_count(ranks.count, 'rank')}{nodes} ({found.cluster.name})"
    ]
    if plan is not None:
        settings = plan.settings
        chunks = f"{_count(len(plan.packing.chunks), 'chunk')} of up to {format_bytes(plan.packing.chunk_bytes)}"
        lines.append(f"{found.dtype.name}, stage {settings.stage}, policy {plan.policy}, {chunks}")
    checkpointed = " with activation checkpointing" if batch.is_checkpointed else ""
    times = f" in each of {batch.micro_batches} micro-batches" if batch.micro_batches > 1 else ""
    sequences = f"{_count(batch.sequences, 'sequence')} of {_count(batch.length, 'token')}"
    lines.append(f"{sequences} on each rank{times}{checkpointed}")
    # With `soft_wrap` the terminal breaks long lines, and rich does not: a line that is copied stays whole.
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    if plan is not None:
        _show_bytes(found, console)
    whole, checked = found.activations
    others = "Activations: not known."
    if whole is not None and checked is not None:
        with_it = f"{_gb(checked)} with activation checkpointing"
        others = f"Activations and gradients before their chunks take them: at most {_gb(whole)}, {with_it} (bounds)."
    console.print(Text(others), soft_wrap=True)
    # What is refused is said by the command itself, on stderr.
    if plan is None or found.predicted is None:
        return
    activations = found.activations_at_hand
    # Here the words say that activations are missing, so model data alone can be shown.
    peak, beside = found.predicted.device_peak + (activations or 0), " besides activations" * (activations is None)
    of = "" if found.cluster.device_bytes is None else f" of {_gb(found.cluster.device_bytes)}"
    console.print(Text(f"Predicted peak on the device{beside}: {_gb(peak)}{of}."), soft_wrap=True)
    _show_step(found, console)
    for sentence in (*found.knobs, *found.notes):
        console.print(Text(sentence), soft_wrap=True)


def _show_bytes(found: Answer, console: Console) -> None:
    plan = found.plan
    assert plan is not None
    on_device, on_host = (plan.placement.bytes_by_kind(plan.demand, tier) for tier in Tier)
    activations = found.activations_at_hand
    # Gradients that find no slot lie on the host for a part of the step, beside the homes there.
    passing = 0 if found.predicted is None else found.predicted.host_peak - plan.host_bytes
    tier_bytes = plan.device_bytes + (activations or 0), plan.host_bytes + passing
    # One unit for the whole table, by its largest sum, so that the digits of rows can be compared.
    unit, power = next((each for each in _UNITS if max(tier_bytes) >= 10 ** each[1]), _UNITS[-1])

    def cell(num_bytes: int | None) -> str:
        # An empty cell in the row "there" means that no bound is known.
        return "" if num_bytes is None else f"{num_bytes / 10**power:,.2f}"

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in (f"{unit} (10**{power} bytes) on each rank", "device", "host"):
        table.add_column(head, justify="left" if head.startswith(unit) else "right", no_wrap=True)
    for kind, words in _KINDS.items():
        # Kinds that a model does not have, such as masters beside fp32 weights, get no row.
        if on_device.get(kind) or on_host.get(kind):
            table.add_row(words, cell(on_device.get(kind, 0)), cell(on_host.get(kind, 0)))
    if passing:
        table.add_row("gradients passing through", cell(0), cell(passing))
    table.add_row("activations, at most", "not known" if activations is None else cell(activations), "")
    table.add_row("in all", cell(tier_bytes[0]), cell(tier_bytes[1]))
    table.add_row("there", cell(found.cluster.device_bytes), cell(found.cluster.host_bytes))
    console.print(table)


def _show_step(found: Answer, console: Console) -> None:
    step, rates, moves = found.step, found.cluster.rates, found.moves
    # Among the notes stands why no step is modelled.
    if step is None or rates is None or moves is None:
        return
    # The keys are those of `ModelledStep.parts`, which leaves out collectives where there is one rank.
    amounts = {
        "forward and backward": f"{step.flops / 1e12:,.4g} TFLOP",
        "host to device": _gb(moves.to_device_bytes),
        "device to host": _gb(moves.to_host_bytes),
        "gathers": f"{_gb(moves.gathered_bytes)} in {moves.num_gathers} launches",
        "exchanges": f"{_gb(moves.exchanged_bytes)} in {moves.num_exchanges} launches",
        "update on the device": _gb(moves.device_update_bytes),
        "update on the host": _gb(moves.host_update_bytes),
    }
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    # In a narrow terminal rich would cut digits off, so the rates, which are no result, are left out.
    columns = ("a step, modelled", "amount", "seconds", "rate")[: 4 if console.width >= _COLUMNS else 3]
    for head in columns:
        table.add_column(head, justify="left" if head.startswith("a step") else "right", no_wrap=True)
    for part, seconds in step.parts.items():
        shown = "not known" if seconds is None else f"{seconds:,.4g}"
        cells = part, amounts[part], shown, _rate(part, found.dtype.name, rates)
        table.add_row(*cells[: len(columns)])
    console.print(table)
    lines = [
        f"Modelled step: {step.seconds:.3g} s if nothing overlaps ({step.utilisation:.1%} model FLOP utilisation), "
        f"{step.least_seconds:.3g} s if all hides behind what takes longest ({step.most_utilisation:.1%}).",
        f"Rates: {rates.source}.",
    ]
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _rate(part: str, dtype: str, rates: Rates) -> str:
    """What its amount is divided by; between ranks the slower of two ways counts."""
    if part == "forward and backward":
        # `modelled_step` has refused rates without this dtype.
        return f"{rates.flops_per_s[dtype] / 1e12:,.3g} TFLOP/s"
    if part in ("gathers", "exchanges"):
        ways = (("node", rates.node_bytes_per_s), ("network", rates.network_bytes_per_s))
        return ", ".join(f"{name} {value / 1e9:,.3g} GB/s" for name, value in ways if value is not None)
    value = {
        "host to device": rates.to_device_bytes_per_s,
        "device to host": rates.to_host_bytes_per_s,
        "update on the device": rates.device_update_bytes_per_s,
        "update on the host": rates.host_update_bytes_per_s,
    }[part]
    return f"{value / 1e9:,.3g} GB/s"


def _gb(num_bytes: int) -> str:
    unit, power = next((each for each in _UNITS if num_bytes >= 10 ** each[1]), ("B", 0))
    return f"{num_bytes / 10**power:,.4g} {unit}"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
