"""What a model says of the work that it did. The only file here that knows where inside gemini such numbers are kept.

Numbers that a clock has a part in (waits, milliseconds) are not measured: they differ from run to run.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemini import BudgetError, Move, ShardedModel, estimate_memory

_LAUNCHES = {  # by what they do: torch's names for it in several versions
    "broadcast": ("broadcast",),
    "all_reduce": ("all_reduce",),
    "barrier": ("barrier",),
    "all_gather": ("all_gather", "all_gather_single", "all_gather_into_tensor"),
    "all_to_all": ("all_to_all", "all_to_all_single"),
    "reduce_scatter": ("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
    "others": ("reduce", "gather", "scatter", "send", "recv", "isend", "irecv", "batch_isend_irecv"),
}


def least_budget(module: nn.Module, world_size: int, **wrap: Any) -> int:
    """The least `model_data_memory` that is accepted with these arguments."""
    try:
        estimate_memory(module, world_size=world_size, model_data_memory=0, **wrap)
    except BudgetError as error:
        if error.needed_bytes is not None:
            return error.needed_bytes
        raise
    return 0


def whole_budget(module: nn.Module, world_size: int, **wrap: Any) -> int:
    """Model data with everything resident on the device."""
    return estimate_memory(module, world_size=world_size, **wrap | {"tensor_placement_policy": "cuda"}).device_bytes


class Launches:
    """Calls of torch's collectives, by kind, and the bytes of payloads that they fill on this rank.

    Tags, flags and texts that ranks compare are calls without bytes: how long a text is says nothing of the work.
    Payloads are floating-point tensors, or exchanges of bytes.
    """

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._depth = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Inside, calls are counted, whoever makes them; one of torch's own inside another is not."""
        kinds = {name: kind for kind, names in _LAUNCHES.items() for name in names if hasattr(dist, name)}
        originals = {name: getattr(dist, name) for name in kinds}
        try:
            for name, function in originals.items():
                setattr(dist, name, self._counting(kinds[name], function))
            yield
        finally:
            for name, function in originals.items():
                setattr(dist, name, function)

    def _counting(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            if not self._depth:
                filled = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
                self._calls[kind] += 1
                self._bytes[kind] += filled.nbytes if filled is not None and _is_payload(kind, filled) else 0
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1

        return counting

    def pop_counts(self) -> dict[str, list[int]]:
        """[calls, bytes] by kind since the last time that this was asked."""
        taken = {kind: [count, self._bytes[kind]] for kind, count in sorted(self._calls.items())}
        self._calls.clear()
        self._bytes.clear()
        return taken


class Moves:
    """Every payload that enters or leaves a slot, in order."""

    def __init__(self, model: ShardedModel) -> None:
        self._digest = hashlib.sha256()
        whats = {"fetch": "fetch", "prefetch": "fetch", "release": "release", "evict": "release"}

        def note(move: Move) -> None:
            if move.what in whats:
                self._digest.update(f"{whats[move.what]} {move.chunk} {move.source} {move.target}\n".encode())

        model.observer.listen(note)

    def hash(self) -> str:
        return self._digest.hexdigest()[:10]


def _is_payload(kind: str, filled: Tensor) -> bool:
    return filled.is_floating_point() or (kind == "all_to_all" and filled.dtype == torch.uint8)


def plan_counts(model: ShardedModel) -> dict[str, Any]:
    """What was decided when the model was wrapped."""
    plan = model.plan
    slots = [*plan.placement.num_slots, *plan.placement.num_gradient_slots, len(plan.placement.kept)]
    return {
        "chunks": len(plan.packing.chunks),
        "chunk_bytes": plan.packing.chunk_bytes,
        "slots": slots,  # of both sizes, of gradients of both sizes, kept ones
    }


def work_counts(model: ShardedModel) -> dict[str, Any]:
    """What has been moved, sent and held since the model was wrapped."""
    manager, moves = model.chunk_manager, model.observer
    counts: dict[str, Any] = {
        "fetches": [moves.num_fetches, moves.counts["prefetch"]],
        "evictions": moves.counts["evict"],
        "spills": [moves.counts["spill"], manager.grads.places.peak_open],
        "links": {
            link: num_bytes
            for link, num_bytes in sorted(model.chunk_manager.memory.transfer.bytes_by_link.items())
            if num_bytes
        },
    }
    for tier in model.chunk_manager.memory.tiers:
        ledger = tier.ledger
        peaks = {str(kind): peak for kind, peak in sorted(ledger.peak_by_kind.items()) if peak}
        counts[tier.name] = {"peak": ledger.peak_bytes, "end": ledger.total_bytes, **peaks}
    return counts
