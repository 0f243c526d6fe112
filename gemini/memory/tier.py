"""A tier's memory and the ledger of what is in it."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gemini.errors import BudgetError
from gemini.observe import Allowed, Feed, Held, Shortage
from gemini.placement.demand import format_bytes

# -- The byte ledger: how many bytes of which kind a tier holds, and their peak.
#
# Numbers only. Tiers call it where memory is taken and given back, and nothing else does. `Transfer` counts the bytes
# that are copied.


class Ledger:
    """The bytes of one tier."""

    def __init__(self) -> None:
        self.bytes_by_kind: Counter[str] = Counter()
        self.total_bytes = 0
        self.peak_bytes = 0
        self.peak_by_kind: Counter[str] = Counter()
        self.num_allocations = 0
        self.num_evaded = 0
        """Shortages of the machine where the host tier took the bytes instead, so that model data need not shrink."""
        self.heard = Feed()

    def count_allocated(self, kind: str, num_bytes: int) -> None:
        self.num_allocations += 1
        self.bytes_by_kind[kind] += num_bytes
        self.peak_by_kind[kind] = max(self.peak_by_kind[kind], self.bytes_by_kind[kind])
        self.total_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.total_bytes)
        if self.heard:
            self.heard.tell(Held(kind, num_bytes))

    def count_freed(self, kind: str, num_bytes: int) -> None:
        self.bytes_by_kind[kind] -= num_bytes
        self.total_bytes -= num_bytes
        # A region that is given back twice, or as another kind, is found here.
        assert self.bytes_by_kind[kind] >= 0, f"more {kind} bytes freed than allocated"
        if self.heard:
            self.heard.tell(Held(kind, -num_bytes))

    def count_evaded(self) -> None:
        """The host tier takes bytes that the machine did not have on this one."""
        self.num_evaded += 1

    def recount(self, was: str, kind: str, num_bytes: int) -> None:
        """Count `num_bytes` that were taken as kind `was` as `kind` from now on."""
        # The bytes stay where they are, so neither the total nor the number of allocations changes.
        self.bytes_by_kind[was] -= num_bytes
        self.bytes_by_kind[kind] += num_bytes
        self.peak_by_kind[kind] = max(self.peak_by_kind[kind], self.bytes_by_kind[kind])
        if self.heard:
            self.heard.tell(Held(was, -num_bytes))
            self.heard.tell(Held(kind, num_bytes))


# -- The interface of a memory tier to the chunk manager: flat byte buffers, taken and given back by kind.
#
# There are two device tiers, `AcceleratorTier` (CUDA) and `EmulatedTier` (CPU memory with a hard capacity and poison),
# and the `HostTier`. Bytes are copied between tiers in transfer.py only.


class MemoryTier:
    """A kind of memory with a limited capacity."""

    def __init__(self, name: str, device: torch.device, capacity_bytes: int | None, knob: str) -> None:
        """name: "device" or "host". knob: the arguments by which a user allows more or less, for error messages."""
        self.name = name
        self.device = device
        self.capacity_bytes = capacity_bytes  # of model data; None: whatever the machine has
        self.ledger = Ledger()
        self.num_shortages = 0  # refusals by the machine of what the budget allows
        self._knob = knob

    def allocate(self, num_bytes: int, kind: str) -> Tensor:
        """A zeroed flat uint8 buffer. Raises BudgetError if the tier cannot hold it."""
        with self._allocating(num_bytes, kind):
            buffer = self._allocate(num_bytes, kind)
        # Counted last: an allocation that failed or was interrupted is not in the ledger.
        self.ledger.count_allocated(kind, num_bytes)
        return buffer

    def count_again(self, num_bytes: int, kind: str) -> None:
        """Count a buffer that was freed and is used again, since its last user has kept it. Raises BudgetError."""
        self._check_capacity(num_bytes, kind)
        self.ledger.count_allocated(kind, num_bytes)

    def _allocate(self, num_bytes: int, kind: str) -> Tensor:
        """A zeroed flat uint8 buffer from the machine."""
        raise NotImplementedError

    def free(self, buffer: Tensor, kind: str) -> None:
        """Free a buffer of `allocate`; its content is lost."""
        # The memory itself goes back when its last tensor dies: whoever calls this drops its own.
        self.ledger.count_freed(kind, buffer.nbytes)

    def trim(self) -> None:
        """Let other processes use memory that the tier keeps but does not use."""

    def allow(self, capacity_bytes: int | None) -> None:
        """Set the capacity; None: no bound. Bytes that are taken already stay, even above it."""
        self.capacity_bytes = capacity_bytes
        if self.ledger.heard:
            self.ledger.heard.tell(Allowed(capacity_bytes))

    def poison(self, buffer: Tensor) -> None:
        """Overwrite a buffer so that reads yield NaN, on tiers that can. Other tiers do nothing."""

    def check_total(self, needed_bytes: int, budget_bytes: int | None) -> None:
        """Raises BudgetError if `needed_bytes`, of all kinds together, exceed `budget_bytes`. None: no bound."""
        if budget_bytes is not None and needed_bytes > budget_bytes:
            raise self._refusal(
                f"{needed_bytes} bytes of model data would be needed, {budget_bytes} bytes are there. Allow more with "
                f"{self._knob}",
                needed_bytes,
                budget_bytes,
            )

    def _check_capacity(self, num_bytes: int, kind: str, held_bytes: int = 0) -> None:
        """Raises BudgetError if `num_bytes` more would exceed the tier's capacity.

        held_bytes: what the tier holds of the machine's memory, if that is more than its buffers in use.
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
        if self.ledger.heard:
            self.ledger.heard.tell(Shortage(words))
        return BudgetError(
            f"{self.name}: {words}",
            tier=self.name,
            needed_bytes=needed_bytes,
            budget_bytes=budget_bytes,
            is_shortage=is_shortage,
        )

    @contextmanager
    def _allocating(self, num_bytes: int, kind: str) -> Iterator[None]:
        """Around an allocation. Raises BudgetError if the budget, or the machine, has no room for it.

        Other processes and the user's own tensors use the same memory, so a budget is no promise. A caller that can use
        another tier does so on this error. The caller counts the bytes in the ledger after the block.
        """
        self._check_capacity(num_bytes, kind)
        try:
            yield
        # A mapping of the host arena fails with OSError, torch's device allocators with OutOfMemoryError, its CPU
        # allocator with RuntimeError. Other errors of these classes pass unchanged.
        except (torch.OutOfMemoryError, MemoryError, OSError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            held, less = f"{self.ledger.total_bytes} bytes are taken", f"set a budget with {self._knob}"
            if self.capacity_bytes is not None:
                held, less = f"{held} of a budget of {self.capacity_bytes}", f"allow less with {self._knob}"
            words = str(error).splitlines()[0] if str(error) else type(error).__name__
            # `take_states` compares this number before and after: a caller may catch the error and use the host
            # instead.
            self.num_shortages += 1
            raise self._refusal(
                f"no memory for {num_bytes} bytes of {kind}; {held}. Other tensors or processes have the rest: free "
                f"memory, or {less} ({words})",
                self.ledger.total_bytes + num_bytes,
                self.capacity_bytes,
                is_shortage=True,
            ) from None


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that a budget, or the machine, has no room."""
    return isinstance(error, BudgetError) or _is_out_of_memory(error)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # torch's CPU allocator raises a plain RuntimeError: only its text tells.
    return "DefaultCPUAllocator" in str(error)
