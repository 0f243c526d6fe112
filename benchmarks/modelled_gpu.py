"""Modelled steps beside those that a GPU has taken: each case is planned again as it ran.

    python -m benchmarks.modelled_gpu                     # the table of docs/benchmarks.md, in a minute, without a GPU
    python -m benchmarks.modelled_gpu --cases FILE --rates FILE

A case of `gpu_case` says its budget and its chunks, so that the plan is the one that ran, and what it has moved and
fetched ahead, which the prediction is compared with. The model knows nothing else of a case. The rates are those of a
product and of a copy alone; those of links and of the host's update are medians over the cases' own copies and updates.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.llama import SIZES, Llama, Size
from gemini import Settings
from gemini.model.estimate import packed_of
from gemini.model.workload import blocks_of, workload_of
from gemini.placement.budget import FreeBytes
from gemini.placement.cost import KERNELS, ModelledStep, Ranks, Rates, modelled_step, moves_of
from gemini.placement.demand import parse_bytes
from gemini.placement.predict import expected_schedule, predict
from gemini.placement.search import plan_training

RESULTS = Path(__file__).parent / "results"
CASES = RESULTS / "gpu_2026-11-28_dd2f700" / "cases.jsonl"
RATES = RESULTS / "h200_rates.json"
NOT_SETTINGS = ("bytes_per_parameter", "clip_grad_norm")
RAN = re.compile(r"policy (\w+), .*model data budget ([\d.]+ \w+), \d+ chunks of up to ([\d.]+ \w+)")


@dataclass(frozen=True)
class Case:
    """One case, measured and modelled."""

    name: str
    measured_s: float
    step: ModelledStep
    moved_bytes: int
    predicted_bytes: int
    ran_ahead: float  # of the fetches of all steps, those of the first one included

    @property
    def ratio(self) -> float:
        """Modelled by measured seconds."""
        return self.step.likely_seconds / self.measured_s


def cases_in(path: Path, rates: Rates) -> list[Case]:
    """Those of ours that ended, in the order of the file."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return [modelled(each, rates) for each in entries if each.get("system") == "ours" and "step_s" in each]


def modelled(entry: dict[str, Any], rates: Rates) -> Case:
    """The plan that has run, by what the case has printed of it, and its step by `rates`."""
    size = SIZES[entry["size"]]
    with torch.device("meta"):
        module = Llama(size)
    module.config = SimpleNamespace(num_attention_heads=size.heads, hidden_size=size.width)  # for products of attention
    ran = RAN.search(entry["memory_report"])
    fetched = re.search(r"(\d+) fetches, (\d+) of them ahead", entry["memory_report"])
    assert ran is not None and fetched is not None, entry["memory_report"]
    budget, chunk_bytes = (parse_bytes(words.replace(" ", ""), "") for words in ran.groups()[1:])
    assert budget is not None and chunk_bytes is not None
    given = {name: value for name, value in entry["options"].items() if name not in (*NOT_SETTINGS, "device_memory")}
    settings = Settings(
        **{**given, "tensor_placement_policy": ran[1]},
        dtype=torch.bfloat16,
        device="cuda",
        model_data_memory=budget,
        chunk_size=chunk_bytes // 2,
    ).over(1)
    plan = plan_training(packed_of(module, settings, 1), settings, FreeBytes())
    predicted = predict(plan, schedule=expected_schedule(plan, [*blocks_of(module)]))
    moves = moves_of(plan, predicted)
    return Case(
        entry["name"],
        entry["step_s"],
        step_of(module, size, moves, rates, settings.deferred_update is not False),
        sum((entry["moved_bytes"] or {}).values()),
        moves.to_device_bytes + moves.to_host_bytes,
        int(fetched[2]) / max(1, int(fetched[1])),
    )


def step_of(module: Llama, size: Size, moves: Any, rates: Rates, defers: bool) -> ModelledStep:
    """The modelled step of a batch, with every block computed again."""
    work = workload_of(module, 2)
    return modelled_step(
        moves,
        work.forward_flops(size.tokens, size.length),
        work.computed_again_flops(size.tokens, size.length),
        "bfloat16",
        rates,
        Ranks(1, 1),
        kept_bytes=work.activation_bytes(size.tokens, is_checkpointed=False),
        defers=defers,
    )


def table_of(cases: list[Case]) -> Table:
    table = Table(title="ms a step; modelled by measured rates", title_justify="left")
    for head in ("case", "measured", "modelled", "off", "products", "kernels", "link", "update", "ahead", "bounds"):
        table.add_column(head, justify="left" if head == "case" else "right")
    for case in cases:
        table.add_row(*row_of(case))
    return table


def row_of(case: Case) -> list[str]:
    parts = {name: seconds or 0.0 for name, seconds in case.step.parts.items()}
    return [
        case.name.removeprefix("ours "),
        _ms(case.measured_s),
        _ms(case.step.likely_seconds),
        f"{case.ratio - 1:+.0%}",
        _ms(parts["forward and backward"]),
        _ms(parts[KERNELS]),
        _ms(parts["host to device"] + parts["device to host"]),
        _ms(parts["update on the host"]),
        f"{case.step.ahead_share:.0%}, ran {case.ran_ahead:.0%}" if case.moved_bytes else "",
        f"{_ms(case.step.least_seconds)} to {_ms(case.step.seconds)}",
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}"


def main(
    cases: Annotated[Path, typer.Option(exists=True, help="Lines of JSON that benchmarks.gpu_case wrote.")] = CASES,
    rates: Annotated[
        Path, typer.Option(exists=True, help="Measured rates, as `gemini plan --rates` takes them.")
    ] = RATES,
) -> None:
    """Print the modelled step of every case beside the measured one."""
    found = cases_in(cases, Rates.from_json(json.loads(rates.read_text())))
    console = Console(width=160)
    console.print(table_of(found))
    for case in found:
        if case.moved_bytes and abs(case.predicted_bytes / case.moved_bytes - 1) > 0.01:
            predicted, moved = (each / 1e9 for each in (case.predicted_bytes, case.moved_bytes))
            console.print(f"{case.name}: {predicted:.1f} GB over the link are predicted, {moved:.1f} GB were moved")


if __name__ == "__main__":
    typer.run(main)
