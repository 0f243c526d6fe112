"""Measures memory from outside: the bytes of all tensor storages that operations have made and that are alive."""

import gc
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Counts after every operation, from the time it is entered on. Memory mapped from files is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __enter__(self) -> "LiveStorages":
        # What earlier tests have left to the collector would be freed inside at a moment of chance: emulated memory is
        # poisoned then, by an operation on a storage that is not of this measurement.
        gc.collect()
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                if storage.filename is None:
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.bytes_now)
        return result

    @property
    def bytes_now(self) -> int:
        self._drop_the_dead()
        return sum(num_bytes for _, num_bytes in self._alive.values())

    @property
    def num_now(self) -> int:
        self._drop_the_dead()
        return len(self._alive)

    def _drop_the_dead(self) -> None:
        self._alive = {key: found for key, found in self._alive.items() if not found[0].expired()}
