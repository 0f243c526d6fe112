"""Who uses a chunk's payload now, what its parameters show of it, and how often it was updated and gathered.

Nothing else writes these fields. `Chunk` has them, by inheritance, and nothing is moved here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, kw_only=True)
class ChunkUse:
    """The part of a chunk's state that changes with each use."""

    bound: bool = False  # the parameters' `.data` are views of the payload
    plain: bool = False  # the parameters' class is nn.Parameter, not the released class
    pins: int = 0  # operators, functions and autograd nodes that use the payload now
    stays: bool = False  # gathered until the next update: see [Note: Staying chunks] in manager/staying.py
    num_updates: int = 0  # optimizer steps so far; backward through a graph from before the last one raises
    num_gathers: int = 0  # times that its payload was brought into a slot

    def pin(self) -> None:
        """Keep the payload from leaving: an operator, a function or an autograd node uses it. It is there already."""
        self.pins += 1

    def lift_pin(self) -> None:
        """One user of the payload is done. In a wrapped model `Victims.unpin` calls it: its queue has to know first."""
        self.pins -= 1

    def reset_pins(self, count: int = 0) -> None:
        """Leave `count` pins. Only after a failure: no record tells any more which pins are still to be lifted."""
        self.pins = count

    def note_bound(self) -> None:
        """The parameters' `.data` were made views of the payload."""
        self.bound = True

    def note_plain(self) -> None:
        """The parameters' class was made nn.Parameter, for as long as they are used."""
        self.plain = True

    def note_covered(self) -> None:
        """The parameters' class was made the released one again. They may still be views of the payload."""
        self.plain = False

    def note_unbound(self) -> None:
        """The parameters show their placeholders, and fetch themselves."""
        self.bound = self.plain = False

    def note_update(self) -> None:
        """The weights were given new values, by a step or by a user: a backward through an older graph raises."""
        self.num_updates += 1

    def count_gather(self) -> None:
        """The payload is about to be brought into a slot."""
        self.num_gathers += 1

    def decide_stay(self, stays: bool) -> None:
        """Decide whether the payload stays gathered between two updates. Equal on all ranks, after each placement."""
        self.stays = stays
