"""The table of what the GPU's cases wrote, whichever of them exist.

    python -m benchmarks.gpu_table benchmarks/results/gpu/cases.jsonl

It reads the file of JSON lines that `benchmarks/gpu.sh` writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import case_file, overlap

COLUMNS = ("case", "steps", "step ms", "fwd+bwd ms", "optimizer ms", "tokens/s", "TFLOP/s", "device peak", "host")


def main(path: Annotated[Path, typer.Argument(help="The file of JSON lines.")]) -> None:
    """Print one row per case, then what each holds."""
    entries = case_file.read(path)
    console = Console(width=170)
    if not entries:
        console.print(f"no case in {path.name}")
        raise typer.Exit(1)
    devices = sorted({entry["device"] for entry in entries.values() if "device" in entry})
    sizes = sorted({entry["size"] for entry in entries.values() if "size" in entry})
    table = Table(
        title=f"one rank on {', '.join(devices)}; sizes {', '.join(sizes)}; medians",
        caption="TFLOP/s: 6 operations a parameter and token. host: resident set, or what the machine's use rose by",
    )
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number == 0 else "right")
    for entry in entries.values():
        table.add_row(*row(entry))
        for point in entry.get("curve", [])[1:]:
            table.add_row(*cells(f"  {point['tokens_per_step']:,} tokens a step", entry | point))
    console.print(table)
    for name, entry in entries.items():
        if entry.get("weights_hash"):
            console.print(escape(f"{name}, weights after the last step: SHA-256 {entry['weights_hash'][:16]}"))
        if entry.get("update_ms"):
            hidden = (
                f"the host's update took {entry['update_ms']:.0f} ms, and {entry['exposed_ms']:.0f} were waited for"
            )
            console.print(escape(f"{name}, last step: {hidden}"))
        if "overlap_ms" in entry:
            console.print(escape(f"{name}, one profiled {overlap.Overlap(**entry['overlap_ms']).in_words()}"))
    for system, holds in {entry["system"]: entry["holds"] for entry in entries.values() if "holds" in entry}.items():
        console.print(f"[bold]{system}[/bold] holds (bytes a parameter): {holds}")
    for entry in entries.values():
        if entry.get("options"):
            console.print(f"[bold]{entry['name']}[/bold]: {entry['options']}")


def row(entry: dict[str, Any]) -> list[str]:
    """A case's cells; of one that failed, or was killed, how far it came."""
    if "step_s" not in entry:
        reason = entry.get("error") or f"did not end: killed in phase {entry.get('phase', 'start')!r}"
        return [f"{entry['name']}\n[red]{_short(reason)}[/red]", *[""] * (len(COLUMNS) - 1)]
    name = entry["name"]
    if entry.get("error"):
        name += f"\n[red]then {_short(entry['error'])}[/red]"
    return cells(name, entry)


def cells(name: str, entry: dict[str, Any]) -> list[str]:
    """The cells of figures: of a case, or of one point of its curve."""
    tflops = 6 * entry["num_parameters"] * entry["tokens_per_s"] / 1e12
    milliseconds = (f"{entry[part] * 1e3:,.0f}" for part in ("step_s", "forward_backward_s", "optimizer_s"))
    return [
        name,
        str(entry["steps"]),
        *milliseconds,
        f"{entry['tokens_per_s']:,.0f}",
        f"{tflops:.1f}",
        _gib(entry.get("device_peak_bytes")),
        _gib(max(entry.get("host_rss_bytes") or 0, entry.get("host_taken_bytes") or 0)),
    ]


def _short(text: str) -> str:
    return escape(text.splitlines()[0][:70])


def _gib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


if __name__ == "__main__":
    typer.run(main)
