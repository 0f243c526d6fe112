"""A collective between its start and its end."""

from collections.abc import Callable, Sequence

import torch.distributed as dist


class InFlight:
    """A collective that was started. Others may be started before it is finished. Finishing launches nothing.

    works: the launches of the collective, which have ended when it is finished.
    """

    def __init__(self, finish: Callable[[], None] = lambda: None, works: Sequence[dist.Work] = ()) -> None:
        self.finish = finish
        self.works = works
