"""The plot of an Adam benchmark: elements per second over threads, one panel for each kind of work.

python -m benchmarks.adam_plot adam.json adam.html     # of a file that was written before
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer

COLORS = {"bandwidth": "#9a9a9a", "ours": "#1f77b4", "fallback": "#9ecae1", "peer": "#d95f02"}
DASHES = ("solid", "dash", "dot", "dashdot")
COLUMNS = 2


def figure(result: dict[str, Any]) -> Any:
    """plotly figure of `benchmarks.adam`'s JSON. Only the best of the bandwidth loops is drawn."""
    from plotly.graph_objects import Figure, Scatter
    from plotly.subplots import make_subplots

    by_work: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for group in result["groups"]:
        by_work[group["work"]].append(group)
    rows = -(-len(by_work) // COLUMNS)
    drawn: Figure = make_subplots(rows=rows, cols=COLUMNS, subplot_titles=list(by_work), x_title="threads")
    for index, groups in enumerate(by_work.values()):
        lines = _lines(groups)
        num_by_role: dict[str, int] = defaultdict(int)
        for name, (role, points) in lines.items():
            dash = DASHES[num_by_role[role] % len(DASHES)]
            num_by_role[role] += 1
            spreads = [spread for _, spread in points]
            medians = [spread["median"] / 1e6 for spread in spreads]
            drawn.add_trace(
                Scatter(
                    x=[threads for threads, _ in points],
                    y=medians,
                    error_y={
                        "symmetric": False,
                        "array": [s["upper"] / 1e6 - median for s, median in zip(spreads, medians)],
                        "arrayminus": [median - s["lower"] / 1e6 for s, median in zip(spreads, medians)],
                    },
                    mode="lines+markers",
                    name=name,
                    legendgroup=str(index),
                    legendgrouptitle_text=groups[0]["work"],
                    line={"color": COLORS[role], "dash": dash},
                ),
                row=index // COLUMNS + 1,
                col=index % COLUMNS + 1,
            )
    drawn.update_yaxes(title_text="M elements/s", rangemode="tozero")
    drawn.update_xaxes(type="log", tickvals=sorted({group["num_threads"] for group in result["groups"]}))
    machine = result["machine"]
    title = f"Adam on the CPU: {machine['cpu']}, torch {machine['torch']}, median and quartiles"
    drawn.update_layout(title=title, height=380 * rows, template="plotly_white")
    return drawn


def _lines(groups: list[dict[str, Any]]) -> dict[str, tuple[str, list[tuple[int, dict[str, float]]]]]:
    """Case -> (role, [(threads, elements per second)]); the best loop of each group is one line."""
    lines: dict[str, tuple[str, list[tuple[int, dict[str, float]]]]] = {}
    for group in groups:
        for name, case in group["cases"].items():
            if case["role"] == "bandwidth":
                if name != group["best_loop"]:
                    continue
                name = "the machine's bandwidth"
            lines.setdefault(name, (case["role"], []))[1].append((group["num_threads"], case["elements_per_s"]))
    return lines


def write(result: dict[str, Any], path: Path) -> None:
    """HTML that needs nothing else; another ending than .html is an image, for which plotly wants kaleido."""
    drawn = figure(result)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".html":
        drawn.write_html(path)
    else:
        drawn.write_image(path)


def main(
    results: Annotated[Path, typer.Argument(help="What benchmarks.adam wrote with --json.")],
    plot: Annotated[Path, typer.Argument(help="Where the plot goes: .html, or .svg with kaleido.")],
) -> None:
    """Draw a file of results."""
    write(json.loads(results.read_text()), plot)


if __name__ == "__main__":
    typer.run(main)
