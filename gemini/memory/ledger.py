"""The byte ledger: how many bytes of which kind a tier holds, and their peak.

Numbers only. Tiers call it where memory is taken and given back, and nothing else does. `Transfer` counts the bytes
that are copied.
"""

from collections import Counter


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

    def count_allocated(self, kind: str, num_bytes: int) -> None:
        self.num_allocations += 1
        self.bytes_by_kind[kind] += num_bytes
        self.peak_by_kind[kind] = max(self.peak_by_kind[kind], self.bytes_by_kind[kind])
        self.total_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.total_bytes)

    def count_freed(self, kind: str, num_bytes: int) -> None:
        self.bytes_by_kind[kind] -= num_bytes
        self.total_bytes -= num_bytes
        # A region that is given back twice, or as another kind, is found here.
        assert self.bytes_by_kind[kind] >= 0, f"more {kind} bytes freed than allocated"

    def count_evaded(self) -> None:
        """The host tier takes bytes that the machine did not have on this one."""
        self.num_evaded += 1

    def recount(self, was: str, kind: str, num_bytes: int) -> None:
        """Count `num_bytes` that were taken as kind `was` as `kind` from now on."""
        # The bytes stay where they are, so neither the total nor the number of allocations changes.
        self.bytes_by_kind[was] -= num_bytes
        self.bytes_by_kind[kind] += num_bytes
        self.peak_by_kind[kind] = max(self.peak_by_kind[kind], self.bytes_by_kind[kind])
