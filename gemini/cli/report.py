"""What `gemini plan` answers, as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import nn

from gemini.cli.amounts import as_option, count, in_python, in_words, unit_of
from gemini.cli.asked import say
from gemini.cli.groups import choose, predicted_of, step_of
from gemini.cli.model import with_options
from gemini.cli.question import Batch, Cluster, Question
from gemini.cli.remedies import Options, Remedy, command_of, in_the_way, larger_batch, remedies_of
from gemini.errors import BudgetError
from gemini.memory.modes import uncollected
from gemini.model.estimate import num_parameters_of, packed_of
from gemini.model.workload import gradient_bytes, workload_of
from gemini.placement.budget import ACTIVATION_FRACTION, LESS_FOR_ACTIVATIONS, Budget, FreeBytes
from gemini.placement.cost import KERNELS, ModelledStep, MovedBytes, moves_of
from gemini.placement.demand import OPTIM_STATES, Dtype, Tier
from gemini.placement.machines import MACHINES, Rates
from gemini.placement.optimizers import OptimizerKind
from gemini.placement.plan import Plan
from gemini.placement.policies import FRACTIONS, all_at_rest_on_device
from gemini.placement.predict import Predicted
from gemini.settings import Settings, dtype_of

# -- What `gemini plan` finds out of a model on a cluster: numbers, before they are shown.


@dataclass(frozen=True)
class Answer:
    """Bytes and seconds of each rank, or why there are none.

    Args:
        cluster: where.
        batch: of each rank.
        num_parameters: of the whole model; tied ones count once.
        dtype: of most of the weights, and so of products.
        activations: bytes at most of all that a step takes besides model data, without checkpointing and with it. None:
            not known.
        plan: None: it does not fit.
        refusal: why, if there is no plan.
        predicted: of a step, with the batch's checkpointing. None: no plan.
        setting: the `model_data_memory` with which `ShardedModel` makes this plan, beside `device_memory`. None: no
            plan, or no bound on the device.
        in_the_way: what does not fit, in words. None: it fits.
        remedies: what would make it fit, or what would change a plan that does.
        moves: of a step.
        step: modelled. None: no plan, or no rates.
        notes: what is not known, in words.
    """

    cluster: Cluster
    batch: Batch
    num_parameters: int
    dtype: Dtype
    activations: tuple[int | None, ...]  # two
    plan: Plan | None
    refusal: BudgetError | None
    predicted: Predicted | None
    setting: int | None
    in_the_way: str | None
    remedies: tuple[Remedy, ...]
    moves: MovedBytes | None
    step: ModelledStep | None
    notes: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Of all ranks in a step."""
        return self.batch.tokens * self.batch.micro_batches * self.cluster.ranks.count

    @property
    def activations_at_hand(self) -> int | None:
        """Bytes of activations with the batch's own choice of checkpointing. None: they are not known."""
        return self.activations[self.batch.is_checkpointed]


def answer(
    module: nn.Module,
    settings: Settings,
    cluster: Cluster,
    batch: Batch,
    optim_states: float | OptimizerKind = OPTIM_STATES,
) -> Answer:
    """Plan for `module` and model its step. Local; nothing is allocated.

    optim_states: states per element that the optimizer keeps, or the optimizer.
    Raises ValueError for settings that the module contradicts.
    """
    # Costs and prefetch are those of the machine that is asked for, and not of the one that plans.
    settings = replace(settings, device="emulated" if cluster.is_emulated else "cuda")
    # Groups that were asked for and are all ranks were asked for all the same: nothing else is tried.
    is_given = settings.shard_group_size is not None or settings.secondary_group_size is not None
    settings = settings.over(cluster.ranks.count)
    dtype = _dtype_of(module, settings)
    work = workload_of(module, dtype.itemsize, batch.experts_per_token)
    # None: weights keep their own dtypes, which may differ within a model, and so do their gradients.
    itemsize = None if settings.dtype is None else dtype.itemsize
    # Packings of large models are many objects that all stay alive: the cycle collector would visit them repeatedly.
    with uncollected():
        gradients = gradient_bytes(module, itemsize)

        def ask(its: Settings) -> Question:
            packed = packed_of(module, its, cluster.ranks.count)
            return Question(module, its, cluster, batch, dtype, work, gradients, packed, optim_states)

        question, why = (ask(settings), None) if is_given else choose(ask, settings, cluster.ranks)
        return _Answering(question, why).answer()


class _Answering:
    def __init__(self, question: Question, why: str | None) -> None:
        """why: these groups of ranks. None: there was nothing to choose."""
        self._question = question
        self._notes = [*question.workload.notes, *([] if why is None else [why])]

    def answer(self) -> Answer:
        """The plan with what it costs, or why there is none; and what would change it."""
        question, refusal, predicted, moves, step, setting = self._question, None, None, None, None, None
        plan: Plan | None = None
        blocker: str | None = None
        try:
            plan = question.plan()
        except BudgetError as error:
            refusal = error
            remedies = remedies_of(question, error)
            blocker = in_the_way(question, error, remedies)
        else:
            remedies = [*_more_on_the_device(question, plan)]
            larger = larger_batch(question, plan)
            remedies += [] if larger is None else [larger]
            predicted = predicted_of(question, plan)
            moves = moves_of(plan, predicted)
            step = self._step(moves)
            setting = self._setting(plan)
            self._notes.append(
                "Bytes that move are predicted for operators that run in the order in which the model has them."
            )
        if question.cluster.host_bytes is None:
            self._notes.append("No --host-memory was given: the host is taken to have room for all that rests there.")
        if question.activations is None:
            share = ACTIVATION_FRACTION if plan is None else plan.activation_fraction
            self._notes.append(
                "Activations are not known: their formulas do not cover this model. As ShardedModel does before the "
                f"first step, {share:.0%} of the device are left to them."
            )
        # Both figures of activations are shown, so that the reader sees what checkpointing saves before it is chosen.
        return Answer(
            cluster=question.cluster,
            batch=question.batch,
            num_parameters=num_parameters_of(question.module),
            dtype=question.dtype,
            activations=tuple(
                replace(question, batch=replace(question.batch, is_checkpointed=each)).activations
                for each in (False, True)
            ),
            plan=plan,
            refusal=refusal,
            predicted=predicted,
            setting=setting,
            in_the_way=blocker,
            remedies=tuple(remedies),
            moves=moves,
            step=step,
            notes=tuple(self._notes),
        )

    def _setting(self, plan: Plan) -> int | None:
        """The `model_data_memory` with which `ShardedModel` makes `plan`; what it does without it is a note."""
        device = self._question.cluster.device_bytes
        # Without a bound on the device, as on an emulated one, there is no budget to name.
        if device is None or plan.budget_bytes is None:
            return None
        # `ShardedModel` plans before it sees a batch, so it does not know these activations. It makes the same plan at
        # once if it is given the bytes that they leave to model data.
        given = "".join(f", {name}={value!r}" for name, value in chosen_of(plan.settings).items())
        self._notes.append(
            f"ShardedModel makes this plan with device_memory={in_python(device)}, "
            f"model_data_memory={in_python(plan.budget_bytes)}{given}."
        )
        # What fits a smaller budget fits the one that is left before a step, so nothing is tried then.
        first = Budget.of(replace(plan.settings, host_memory=None), FreeBytes(fraction=LESS_FOR_ACTIVATIONS[-1])).device
        if first is None or first >= plan.budget_bytes:
            return plan.budget_bytes
        refused = self._question.refusal_at_first()
        if refused is not None:
            self._notes.append(
                f"With device_memory={in_python(device)} alone ShardedModel leaves at least "
                f"{LESS_FOR_ACTIVATIONS[-1]:.0%} to activations until a step has run, and refuses to train: {refused}."
            )
        return plan.budget_bytes

    def _step(self, moves: MovedBytes) -> ModelledStep | None:
        question, notes = self._question, self._notes
        rates = question.cluster.rates
        if rates is None:
            notes.append(
                "Seconds and tokens/s need rates of the machine: run this command there with --rates measured, which "
                f"takes a second, or name the published ones of {', '.join(MACHINES)} (--rates rtx4090)."
            )
            return None
        try:
            step = step_of(question, moves)
        except ValueError as error:
            # The rates have none for the dtype of the products, such as float64: the plan is an answer all the same.
            notes.append(f"No step time is modelled: {error}.")
            return None
        assert step is not None  # there are rates
        if step.unknown:
            notes.append(
                f"Not in the modelled time, because these rates do not have theirs: {', '.join(step.unknown)}."
            )
        # Published rates, and rates that were measured without a process group, have no time of a launch.
        if rates.collective_s == 0 and question.cluster.ranks.count > 1:
            notes.append("Launches of collectives are not in the modelled time: these rates have none.")
        return step


def _more_on_the_device(question: Question, plan: Plan) -> Iterator[Remedy]:
    """The device with which no state rests on the host."""
    device = question.cluster.device_bytes
    if device is None or not plan.placement.host_bytes(plan.demand) or plan.settings.disk_path is not None:
        return
    least = all_at_rest_on_device(plan.demand, plan.settings.policy)
    enough = 0 if least is None else question.device_bytes_for(least)
    if enough > device:
        yield Remedy((("--device-memory", as_option(enough)),), "nothing would rest on the host")


def chosen_of(settings: Settings) -> dict[str, Any]:
    """What has a say in the plan besides memory, and is not the default."""
    names = (
        *FRACTIONS,
        "shard_group_size",
        "secondary_group_size",
        "gradient_accumulation_steps",
        "chunk_size",
        "disk_path",
        "disk_memory",
    )
    values = {name: getattr(settings, name) for name in names}
    values["optimizer_shard"] = None if settings.optimizer_shard == "group" else settings.optimizer_shard
    values["update_in_backward"] = settings.update_in_backward or None
    # Without a disk, on a host that free memory bounds, one backward in each step is what is planned for at first.
    if settings.gradient_accumulation_steps == 1 and settings.disk_path is None:
        del values["gradient_accumulation_steps"]
    return {name: value for name, value in values.items() if value is not None}


def _dtype_of(module: nn.Module, settings: Settings) -> Dtype:
    """The dtype that most of the model's elements have once it is wrapped."""
    # A model may mix dtypes, such as norms in fp32 within bf16. Matrices have most of the elements, so the commonest
    # dtype is that of the products.
    counts: Counter[Dtype] = Counter()
    for parameter in module.parameters():
        counts[dtype_of(parameter.dtype)] += parameter.numel()
    own = counts.most_common(1)[0][0] if counts else Dtype("float32", 4)
    given = settings.dtype
    return own if given is None or isinstance(given, dict) else dtype_of(given)  # type: ignore[arg-type]


# -- How `gemini plan` shows what it found: two tables and sentences, or JSON.


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


def as_json(name: str, found: Answer, given: Options = ()) -> dict[str, Any]:
    """All numbers: bytes and seconds of one rank. given: options on the command line, which commands repeat."""
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
            "disk_memory": found.cluster.disk_bytes,
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
        "in_the_way": found.in_the_way,
        "would_change": [str(each) for each in found.remedies],
        "commands": [command_of(name, given, each.options) for each in found.remedies if each.options],
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
            **dict(zip(map(str, Tier), plan.bytes_by_tier, strict=True)),
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
            "seconds": None if found.cluster.is_emulated else step.likely_seconds,
            "seconds_without_overlap": step.seconds,
            "seconds_with_all_overlap": step.least_seconds,
            "tokens_per_s_without_overlap": found.tokens / step.seconds,
            "tokens_per_s_with_all_overlap": found.tokens / step.least_seconds,
            "model_flops": step.model_flops,
            "flop_utilisation_without_overlap": step.utilisation,
            "flop_utilisation_with_all_overlap": step.most_utilisation,
        }
    return shown


def _settings_of(found: Answer, model_data_memory: int) -> dict[str, Any]:
    """The settings with which `ShardedModel` makes the same plan."""
    return {
        "device_memory": found.cluster.device_bytes,
        "model_data_memory": model_data_memory,
        "host_memory": found.cluster.host_bytes,
        **({} if found.plan is None else chosen_of(found.plan.settings)),
    }


def show(name: str, found: Answer, console: Console, given: Options = ()) -> None:
    """Print the answer for people to read. given: options on the command line, which advised commands repeat."""
    ranks, batch, plan = found.cluster.ranks, found.batch, found.plan
    nodes = f" on {ranks.num_nodes} nodes of {ranks.on_a_node}" if ranks.num_nodes > 1 else ""
    lines = [
        _verdict(found),
        f"{name}: {found.num_parameters:,} parameters, {count(ranks.count, 'rank')}{nodes} ({found.cluster.name})",
    ]
    if plan is not None:
        settings = plan.settings
        chunks = f"{count(len(plan.packing.chunks), 'chunk')} of up to {in_words(plan.packing.chunk_bytes)}"
        lines.append(f"{found.dtype.name}, stage {settings.stage}, policy {plan.policy}, {chunks}")
    checkpointed = " with activation checkpointing" if batch.is_checkpointed else ""
    times = f" in each of {batch.micro_batches} micro-batches" if batch.micro_batches > 1 else ""
    sequences = f"{count(batch.sequences, 'sequence')} of {count(batch.length, 'token')}"
    lines.append(f"{sequences} on each rank{times}{checkpointed}")
    # With `soft_wrap` the terminal breaks long lines, and rich does not: a line that is copied stays whole.
    for line in lines:
        say(console, line)
    if plan is not None:
        _show_bytes(found, console)
    whole, checked = found.activations
    others = "Activations: not known."
    if whole is not None and checked is not None:
        with_it = f"{in_words(checked)} with activation checkpointing"
        others = (
            f"Activations and gradients before their chunks take them: at most {in_words(whole)}, {with_it} (bounds)."
        )
    say(console, others)
    if plan is None or found.predicted is None:
        show_remedies(name, found, console, given)
        return
    activations = found.activations_at_hand
    # Here the words say that activations are missing, so model data alone can be shown.
    peak, beside = found.predicted.device_peak + (activations or 0), " besides activations" * (activations is None)
    of = "" if found.cluster.device_bytes is None else f" of {in_words(found.cluster.device_bytes)}"
    say(console, f"Predicted peak on the device{beside}: {in_words(peak)}{of}.")
    _show_step(found, console)
    for sentence in found.notes:
        say(console, sentence)
    show_remedies(name, found, console, given)


def _verdict(found: Answer) -> str:
    """The first line: whether it fits."""
    plan, predicted, cluster = found.plan, found.predicted, found.cluster
    if plan is None or predicted is None:
        return f"does not fit: {found.in_the_way}"
    activations = found.activations_at_hand
    held = [("device", predicted.device_peak + (activations or 0), cluster.device_bytes)]
    held += [("host", predicted.host_peak, cluster.host_bytes)]
    if plan.settings.disk_path is not None:
        held += [("disk", plan.placement.disk_bytes(plan.demand), cluster.disk_bytes)]
    parts = [
        f"{in_words(num_bytes)}{'' if there is None else f' of {in_words(there)}'} on the {tier}"
        for tier, num_bytes, there in held
        if num_bytes or tier == "device"
    ]
    unknown = "; activations are not known" if activations is None else ""
    return f"fits: {', '.join(parts)} of each rank{unknown}"


def show_remedies(name: str, found: Answer, console: Console, given: Options = ()) -> None:
    """Print what would make it fit, or change a plan that does, as commands to paste."""
    if not found.remedies:
        return
    head = "This fits too:" if found.plan is not None else "This would fit, the cheapest first; each was planned:"
    say(console, head)
    for each in found.remedies:
        if each.options:
            say(console, f"  {command_of(name, given, each.options)}", "bold")
        say(console, f"{'    ' if each.options else '  '}{each.words}")


def _show_bytes(found: Answer, console: Console) -> None:
    plan = found.plan
    assert plan is not None
    activations = found.activations_at_hand
    # Gradients that find no slot lie on the host for a part of the step, beside the homes there.
    passing = 0 if found.predicted is None else found.predicted.host_peak - plan.host_bytes
    in_all = plan.device_bytes + (activations or 0), plan.host_bytes + passing, plan.placement.disk_bytes(plan.demand)
    # Without a disk there is no column for one.
    num_tiers = len(in_all) if plan.settings.disk_path is not None else 2
    unit, power = unit_of(max(in_all))

    def cell(num_bytes: int | None) -> str:
        # An empty cell in the row "memory there is" means that no bound is known.
        return "" if num_bytes is None else f"{num_bytes / 10**power:,.2f}"

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in (f"{unit} (10**{power} bytes) on each rank", *("device", "host", "disk")[:num_tiers]):
        table.add_column(head, justify="left" if head.startswith(unit) else "right", no_wrap=True)

    def row(words: str, *cells: str) -> None:
        table.add_row(words, *cells[:num_tiers])

    for kind, words in _KINDS.items():
        held = [by_kind.get(kind, 0) for by_kind in plan.bytes_by_tier]
        # Kinds that a model does not have, such as masters beside fp32 weights, get no row.
        if any(held):
            row(words, *map(cell, held))
    if passing:
        row("gradients passing through", cell(0), cell(passing))
    row("activations, at most", "not known" if activations is None else cell(activations), "", "")
    row("in all", *map(cell, in_all))
    there = found.cluster
    row("memory there is", cell(there.device_bytes), cell(there.host_bytes), cell(there.disk_bytes))
    console.print(table)


def _show_step(found: Answer, console: Console) -> None:
    step, rates, moves = found.step, found.cluster.rates, found.moves
    # Among the notes stands why no step is modelled.
    if step is None or rates is None or moves is None:
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    # In a narrow terminal rich would cut digits off, so the rates, which are no result, are left out.
    columns = ("a step, modelled", "amount", "seconds", "rate")[: 4 if console.width >= _COLUMNS else 3]
    for head in columns:
        table.add_column(head, justify="left" if head.startswith("a step") else "right", no_wrap=True)
    for part, seconds in step.parts.items():
        shown = "not known" if seconds is None else f"{seconds:,.4g}"
        amount, rate = _amount_and_rate(part, step, moves, rates, found.dtype.name)
        table.add_row(*(part, amount, shown, rate)[: len(columns)])
    console.print(table)
    slow, fast = found.tokens / step.seconds, found.tokens / step.least_seconds
    likely = [] if found.cluster.is_emulated else [_likely(found, step)]
    ranks = found.cluster.ranks.count
    of = "" if ranks == 1 else f" on {count(ranks, 'rank')} together"
    lines = [
        *likely,
        f"{'Bounds' if likely else 'Modelled step'}: {step.seconds:.3g} s if nothing overlaps "
        f"({step.utilisation:.1%} model FLOP utilisation), {step.least_seconds:.3g} s "
        f"if all hides behind what takes longest ({step.most_utilisation:.1%}).",
        f"That is {slow:,.0f} to {fast:,.0f} tokens/s{of}.",
        f"Rates: {rates.source}.",
    ]
    for line in lines:
        say(console, line)


def _likely(found: Answer, step: ModelledStep) -> str:
    """The one figure, where the runtime lets copies and the host's update run beside kernels."""
    return (
        f"Modelled step: {step.likely_seconds:.3g} s, {found.tokens / step.likely_seconds:,.0f} tokens/s, with "
        "copies and the host's update beside kernels as they run."
    )


# The amount and the rate of each part of a modelled step that is bytes, as they are called in `MovedBytes` and `Rates`.
_PARTS = {
    "host to device": ("to_device_bytes", "to_device_bytes_per_s"),
    "device to host": ("to_host_bytes", "to_host_bytes_per_s"),
    "update on the device": ("device_update_bytes", "device_update_bytes_per_s"),
    "update on the host": ("host_update_bytes", "host_update_bytes_per_s"),
    "disk to host": ("from_disk_bytes", "disk_read_bytes_per_s"),
    "host to disk": ("to_disk_bytes", "disk_write_bytes_per_s"),
    "gathers": ("gathered_bytes", "num_gathers"),
    "exchanges": ("exchanged_bytes", "num_exchanges"),
}


def _amount_and_rate(part: str, step: ModelledStep, moves: MovedBytes, rates: Rates, dtype: str) -> tuple[str, str]:
    """What a part takes, and what that is divided by; between ranks the slower of two ways counts."""
    if part == "forward and backward":
        # `modelled_step` has refused rates without this dtype.
        return f"{step.flops / 1e12:,.4g} TFLOP", f"{rates.flops_per_s[dtype] / 1e12:,.3g} TFLOP/s"
    if part == KERNELS:
        value: float | None = rates.device_memory_bytes_per_s
        amount = int((step.parts[KERNELS] or 0.0) * rates.device_memory_bytes_per_s)
    else:
        name, other = _PARTS[part]
        amount = getattr(moves, name)
        if part in ("gathers", "exchanges"):
            ways = (("node", rates.node_bytes_per_s), ("network", rates.network_bytes_per_s))
            shown = ", ".join(f"{way} {rate / 1e9:,.3g} GB/s" for way, rate in ways if rate is not None)
            return f"{in_words(amount)} in {getattr(moves, other)} launches", shown
        value = getattr(rates, other)
    return in_words(amount), "" if value is None else f"{value / 1e9:,.3g} GB/s"
