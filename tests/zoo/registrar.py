"""A stand-in for a GPU's runtime that registers host memory as CUDA's does, and says what it was asked."""

import ctypes

from torch import Tensor

ALREADY_REGISTERED, NOT_REGISTERED, NO_MEMORY = 712, 713, 2


class Runtime:
    """Knows address ranges, as the driver does, and the last error, which the next launch raises and clears."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.ranges: dict[int, int] = {}
        self.limit_bytes = limit_bytes
        self.last_error = self.num_registered = self.num_refused = 0
        self.num_unmapped = 0  # ranges that were freed before they were unregistered

    def register(self, address: int, num_bytes: int) -> int:
        error = 0
        if any(address < start + size and start < address + num_bytes for start, size in self.ranges.items()):
            error = ALREADY_REGISTERED
        elif self.limit_bytes is not None and sum(self.ranges.values()) + num_bytes > self.limit_bytes:
            error = NO_MEMORY
        if error:
            self.last_error, self.num_refused = error, self.num_refused + 1
            return error
        self.ranges[address] = num_bytes
        self.num_registered += 1
        return 0

    def unregister(self, address: int) -> int:
        num_bytes = self.ranges.pop(address, None)
        if num_bytes is None:
            self.last_error = NOT_REGISTERED
            return NOT_REGISTERED
        self.num_unmapped += not is_mapped(address, num_bytes)
        return 0

    def launch(self) -> None:
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")

    def holds(self, tensor: Tensor) -> bool:
        start = tensor.data_ptr()
        return any(a <= start and start + tensor.nbytes <= a + size for a, size in self.ranges.items())


def is_mapped(address: int, num_bytes: int) -> bool:
    """All pages of the range belong to this process, as msync says."""
    asynchronously = 1
    return ctypes.CDLL(None).msync(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), asynchronously) == 0
