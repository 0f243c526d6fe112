"""What a plan is for: this machine, or a cluster that is described on the command line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import typer

from gemini.monitor.host import HOST_RESERVE
from gemini.monitor.monitor import MemoryMonitor
from gemini.monitor.rates import rates_of
from gemini.placement.cost import Ranks
from gemini.placement.machines import MACHINES, THIS, Machine
from gemini.placement.rates import Rates
from gemini.placement.sizes import parse_bytes

_PER_NODE = 8  # at most, of a cluster that is described by its memory alone


@dataclass(frozen=True)
class Cluster:
    """Ranks and what each of them has.

    Args:
        name: in words.
        ranks: how many, and where.
        device_bytes: of the device, activations included. None: no bound.
        host_bytes: of host memory. None: no bound was given.
        is_emulated: the device is host memory too.
        rates: None: nothing is known of them.
    """

    name: str
    ranks: Ranks
    device_bytes: int | None
    host_bytes: int | None
    is_emulated: bool
    rates: Rates | None


def described(
    ranks: int | None,
    ranks_per_node: int | None,
    machine: str,
    device_memory: str | None,
    host_memory: str | None,
    rates: str | None,
) -> Cluster:
    """The cluster that the options describe. Local; reads this machine's memory and rates if they are asked for.

    Raises typer.BadParameter.
    """
    if machine != THIS and machine not in MACHINES:
        raise typer.BadParameter(
            f"must be {THIS!r} or one of {', '.join(MACHINES)}, found {machine!r}", param_hint="--machine"
        )
    published = MACHINES.get(machine)
    device_bytes, host_bytes = _bytes(device_memory, "--device-memory"), _bytes(host_memory, "--host-memory")
    # Whoever names a device's memory describes another machine than this one.
    is_here = published is None and device_bytes is None
    # Without `--ranks` this machine has a rank for each accelerator, at least one; another machine is one full node.
    count = ranks or (max(1, torch.accelerator.device_count()) if is_here else _PER_NODE)
    per_node = ranks_per_node or (published.ranks_per_node if published else count if is_here else _filled_by(count))
    try:
        layout = Ranks(count, per_node)
    except ValueError as error:
        raise typer.BadParameter(f"{error}, or another --ranks-per-node", param_hint="--ranks") from None
    # Without an accelerator `ShardedModel` emulates the device in host memory, and `Question.plan` adds up both tiers.
    is_emulated = is_here and not torch.accelerator.is_available()
    if published is not None:
        device_bytes = published.device_bytes if device_bytes is None else device_bytes
        host_bytes = _share(published.host_bytes, layout) if host_bytes is None else host_bytes
    elif is_here:
        # What other processes hold is not available to a training either, so free memory counts, not capacity. A
        # cluster of which only device memory was told gets no bound on its host, and the answer says so.
        reading = MemoryMonitor().read()
        device_bytes = reading.device.available_bytes
        host_bytes = _share(reading.host.available_bytes, layout) if host_bytes is None else host_bytes
    if published is not None:
        name = published.name
    else:
        name = "this machine" if is_here else "as described"
    # Measuring takes a second, so whatever else may be refused was refused before.
    found = _rates(rates, published, is_here)
    return Cluster(name, layout, device_bytes, host_bytes, is_emulated, found)


def _filled_by(count: int) -> int:
    """Ranks on each node, as many as may be: nobody said how large the nodes are that `count` ranks fill."""
    return next(per_node for per_node in range(_PER_NODE, 0, -1) if count % per_node == 0)


def _share(host_bytes: int, ranks: Ranks) -> int:
    """One rank's part of a node's host memory, less what is left to the rest of the machine."""
    # `share_of_host` of the monitor divides by LOCAL_WORLD_SIZE, which no launcher has set for this command.
    return int(host_bytes * (1 - HOST_RESERVE)) // ranks.on_a_node


def _bytes(value: str | None, option: str) -> int | None:
    try:
        return parse_bytes(value, option)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _rates(wanted: str | None, published: Machine | None, is_here: bool) -> Rates | None:
    """Measured or published rates. None for a machine of which only the memory is told, unless `wanted` names some."""
    if wanted is None:
        wanted = published.name if published else "measured" if is_here else "none"
    if wanted == "none":
        return None
    if wanted == "measured":
        # Here is no process group, so the rates between ranks stay unknown, and the answer names the parts without one.
        return rates_of()
    if wanted in MACHINES:
        return MACHINES[wanted].rates
    if not wanted.endswith(".json"):
        raise typer.BadParameter(
            f"must be measured, none, one of {', '.join(MACHINES)}, or a .json file, found {wanted!r}",
            param_hint="--rates",
        )
    try:
        return Rates.from_json(json.loads(Path(wanted).read_text()))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{wanted}: {error}", param_hint="--rates") from None
