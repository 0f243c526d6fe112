"""`memory_report()`: a table of all bytes that a model holds."""

from __future__ import annotations

from gemini.manager.step import Step
from gemini.memory.memory import Memory
from gemini.placement.plan import Plan
from gemini.placement.sizes import format_bytes


def memory_table(memory: Memory, plan: Plan, step: Step) -> str:
    """Bytes by tier and kind, now and at the peak; the plan; traffic over links and between ranks."""
    rows = [("tier", "kind", "now", "peak")]
    for tier in (memory.device, memory.host):
        ledger = tier.ledger
        kinds = sorted(kind for kind, peak in ledger.peak_by_kind.items() if peak)
        counts = [(kind, ledger.bytes_by_kind[kind], ledger.peak_by_kind[kind]) for kind in kinds]
        counts.append(("total", ledger.total_bytes, ledger.peak_bytes))
        rows += [(tier.name, kind, format_bytes(now), format_bytes(peak)) for kind, now, peak in counts]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    host, observer = memory.host, step.params.observer
    budget = "unlimited" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
    lines += [
        f"host memory mapped: {format_bytes(host.mapped_bytes)}, {format_bytes(host.homes.registered_bytes)} of it "
        f"pinned; {format_bytes(host.staging.mapped_bytes)} for temporaries",
        f"policy {plan.policy}, plan for {'inference' if plan.infers else 'training'}, model data budget {budget}, "
        f"{len(plan.packing.chunks)} chunks of up to {format_bytes(plan.packing.chunk_bytes)}",
        f"{observer.num_fetches} fetches, {observer.counts['prefetch']} of them ahead, {observer.counts['evict']} "
        f"evictions, {observer.counts['spill']} gradients moved to the host unreduced",
    ]
    links = sorted(memory.transfer.bytes_by_link.items())
    lines += [f"{link}: {format_bytes(num_bytes)}" for link, num_bytes in links]
    if step.communicator.world_size > 1:
        lines.append(f"to other ranks: {format_bytes(step.communicator.collectives.bytes_sent)}")
    return "\n".join(lines)
