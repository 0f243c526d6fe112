"""A collective between its start and its end."""

from collections.abc import Callable


class InFlight:
    """A collective that was started; others may be started before it is finished. Finishing launches nothing."""

    def __init__(self, finish: Callable[[], None] = lambda: None) -> None:
        self.finish = finish
