"""Dispatch modes that follow the user's operations must not meet ours.

[Note: Modes] Selective checkpointing is a pair of dispatch modes: one counts and keeps the results of a region's
operations, the other gives results back by their count when the region is recomputed. Copies and collectives of ours
differ between the two passes, so a mode that met them would return results in place of other operations, or of a copy
that then never runs. Modes that surround a step to watch all of it (counters of memory or FLOPs) go on to see ours.
What tells them apart is what a mode says of itself to torch: `ignore_compile_internals`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.utils import _python_dispatch as dispatch

num_modes = torch._C._len_torch_dispatch_stack
"""How many modes there are now: `unseen` changes nothing where there are none."""
_SEEN: AbstractContextManager[None] = nullcontext()


def unseen() -> AbstractContextManager[None]:
    """Inside, operations are not the user's, see [Note: Modes]."""
    if not num_modes() or not any(map(_follows_the_user, dispatch._get_current_dispatch_mode_stack())):
        return _SEEN
    return _without_followers()


def _follows_the_user(mode: dispatch.TorchDispatchMode) -> bool:
    return bool(mode.ignore_compile_internals())


@contextmanager
def _without_followers() -> Iterator[None]:
    modes = [dispatch._pop_mode() for _ in range(num_modes())]
    kept = [mode for mode in modes if not _follows_the_user(mode)]
    for mode in reversed(kept):
        dispatch._push_mode(mode)
    try:
        yield
    finally:
        for _ in kept:
            dispatch._pop_mode()
        for mode in reversed(modes):
            dispatch._push_mode(mode)
