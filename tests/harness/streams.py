"""Streams and events of no device: what `OnStream` asks of an accelerator, counted. Copies are made at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from gemini.memory.transfer import OnStream


@dataclass(eq=False)
class Stream:
    """Notes the events that it was told to wait for. As a context it is its lane's current stream."""

    lane: CountingLane | None = None
    waited_for: list[Any] = field(default_factory=list)

    def synchronize(self) -> None:
        """Copies are made at once."""

    def wait_event(self, event: Event) -> None:
        self.waited_for.append(event)

    def __enter__(self) -> None:
        assert self.lane is not None
        self.outer, self.lane.current = self.lane.current, self

    def __exit__(self, *error: object) -> None:
        assert self.lane is not None
        self.lane.current = self.outer


@dataclass(eq=False)
class Event:
    """Tells its lane when the host waits for it."""

    lane: CountingLane
    recorded_on: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.recorded_on = stream

    def synchronize(self) -> None:
        self.lane.num_waits += 1


class CountingLane(OnStream):
    """Kernels run on `current`, which a test may change."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.current = Stream()
        self.num_waits = 0
        self.num_events = 0

    def stream(self) -> Any:
        return self.current

    def new_stream(self) -> Any:
        return Stream(self)

    def new_event(self) -> Any:
        self.num_events += 1
        return Event(self)
