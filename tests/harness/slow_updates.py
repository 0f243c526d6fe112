"""Updates by a thread that is late: whoever does not wait for it finds the weights from before."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

from gemini.memory.work import WorkThread
from gemini.optimizer import update


@dataclass
class SlowUpdates:
    """The updates of the models in this process that a thread carries out."""

    num_begun: int = 0
    may_begin: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_begin.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, no thread begins an update."""
        self.may_begin.clear()
        try:
            yield
        finally:
            self.may_begin.set()


@contextmanager
def installed(most_s: float = 0.01, seed: int = 0) -> Iterator[SlowUpdates]:
    """Inside, each piece of work begins up to `most_s` late, and each chunk takes up to a quarter of it longer."""
    chance, slow = random.Random(seed), SlowUpdates()
    begin = WorkThread.begin

    def late(self: WorkThread, work: Callable[[], None]) -> None:
        # Sums of gradients are work of the thread, too.
        is_update = isinstance(work, partial) and work.func.__name__ == "_carry_out"
        slow.num_begun += is_update

        def work_late() -> None:
            time.sleep(chance.uniform(0, most_s))
            assert not is_update or slow.may_begin.wait(60), "nobody lets the update begin"
            work()

        begin(self, work_late)

    close = update._close

    def close_late(each: update._ChunkUpdate) -> None:
        if each.ticket is not None:
            time.sleep(chance.uniform(0, most_s / 4))
        close(each)

    with mock.patch.object(WorkThread, "begin", late), mock.patch.object(update, "_close", close_late):
        yield slow
