"""What the chunk manager asks of a tier of memory: flat byte buffers, taken and given back by kind.

Two tiers are device memory, `AcceleratorTier` (CUDA) and `EmulatedTier` (CPU memory with a hard capacity and poison).
`HostTier` is the third. Bytes cross between tiers in transfer.py only.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gemini.errors import BudgetError
from gemini.memory.ledger import Ledger
from gemini.placement.sizes import format_bytes


class MemoryTier:
    """A kind of memory that can be filled up."""

    def __init__(self, name: str, device: torch.device, capacity_bytes: int | None, knob: str) -> None:
        """name: "device" or "host". knob: the arguments with which a user allows more or less."""
        self.name = name
        self.device = device
        self.capacity_bytes = capacity_bytes  # of model data; None: whatever the machine has
        self.ledger = Ledger()
        self.num_shortages = 0  # how often the machine had no memory for what the budget allows
        self._knob = knob

    def take(self, num_bytes: int, kind: str) -> Tensor:
        """A zeroed flat uint8 buffer. Raises BudgetError if the tier cannot hold it."""
        with self._allocating(num_bytes, kind):
            buffer = self._allocate(num_bytes, kind)
        self.ledger.take(kind, num_bytes)  # what was interrupted, or failed, is not counted
        return buffer

    def _allocate(self, num_bytes: int, kind: str) -> Tensor:
        """A zeroed flat uint8 buffer of the machine's memory."""
        raise NotImplementedError

    def give(self, buffer: Tensor, kind: str) -> None:
        """Give a buffer from `take` back; its content is gone."""
        self.ledger.give(kind, buffer.nbytes)

    def trim(self) -> None:
        """Let other processes have what is not in use, where the tier keeps any of it."""

    def poison(self, buffer: Tensor) -> None:
        """Mark a buffer's content as gone, where the tier can (a read of it then yields NaN)."""

    def check_total(self, needed_bytes: int, budget_bytes: int | None) -> None:
        """Raises BudgetError if so many bytes of all kinds together are more than `budget_bytes`. None: no bound."""
        if budget_bytes is not None and needed_bytes > budget_bytes:
            raise self._refusal(
                f"{needed_bytes} bytes of model data would be needed, {budget_bytes} bytes are there. Allow more with "
                f"{self._knob}",
                needed_bytes,
                budget_bytes,
            )

    def _check_capacity(self, num_bytes: int, kind: str, held_bytes: int = 0) -> None:
        """Raises BudgetError if `num_bytes` more would pass the tier's capacity.

        held_bytes: of the machine's memory, where that is more than the buffers that are taken.
        """
        taken_bytes = max(held_bytes, self.ledger.total_bytes)
        if self.capacity_bytes is None or taken_bytes + num_bytes <= self.capacity_bytes:
            return
        held = ", ".join(f"{k} {format_bytes(b)}" for k, b in sorted(self.ledger.bytes_by_kind.items()) if b)
        raise self._refusal(
            f"{num_bytes} bytes of {kind} do not fit: {taken_bytes} of {self.capacity_bytes} bytes are taken "
            f"({held or 'nothing'}). Allow more with {self._knob}",
            taken_bytes + num_bytes,
            self.capacity_bytes,
        )

    def _refusal(
        self, words: str, needed_bytes: int, budget_bytes: int | None, is_shortage: bool = False
    ) -> BudgetError:
        return BudgetError(
            f"{self.name}: {words}",
            tier=self.name,
            needed_bytes=needed_bytes,
            budget_bytes=budget_bytes,
            is_shortage=is_shortage,
        )

    @contextmanager
    def _allocating(self, num_bytes: int, kind: str) -> Iterator[None]:
        """A take within the budget. Raises BudgetError also where the machine, not the budget, has no memory left.

        Other processes and the user's own tensors take of the same memory, so a budget is no promise. Who can do with
        another tier does so then; whoever calls books the bytes after this block.
        """
        self._check_capacity(num_bytes, kind)
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError, OSError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            held, less = f"{self.ledger.total_bytes} bytes are taken", f"set a budget with {self._knob}"
            if self.capacity_bytes is not None:
                held, less = f"{held} of a budget of {self.capacity_bytes}", f"allow less with {self._knob}"
            words = str(error).splitlines()[0] if str(error) else type(error).__name__
            self.num_shortages += 1
            raise self._refusal(
                f"no memory for {num_bytes} bytes of {kind}; {held}. Other tensors or processes have the rest: free "
                f"memory, or {less} ({words})",
                self.ledger.total_bytes + num_bytes,
                self.capacity_bytes,
                is_shortage=True,
            ) from None


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return "DefaultCPUAllocator" in str(error)  # a plain RuntimeError
