"""What is under way in a model at this moment, and the pins that it holds. See [Note: Pins] in step.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gemini.chunks.chunk import Chunk
from gemini.manager.calls import Calls, Operator
from gemini.manager.victims import Victims

_graph_task_id = torch._C._current_graph_task_id
_autograd_node = torch._C._current_autograd_node

_MOST_FORWARDS = 64  # of one pass: more of them wait for no common backward


class Underway:
    """Calls, functions that touch released parameters, autograd nodes, and the leaf that backward is in.

    A node's pins last until another node of the same graph task asks for something.
    """

    def __init__(self, chunks: Sequence[Chunk], victims: Victims) -> None:
        self._chunks = chunks
        self._victims = victims
        self.calls = Calls(victims)
        self.leaf_operator: Operator | None = None  # whose chunks, all of them, are in `leaf`
        self.leaf: list[Chunk] = []
        self.awaits_backward = False  # a forward with gradients was not followed by a backward yet
        self._num_forwards = 0  # of these
        self._has_begun = False  # the forward that was entered last is one of these
        self._touches: list[list[Chunk]] = []  # what each function that touches released parameters has pinned
        self._nodes: dict[int, tuple[object, list[Chunk]]] = {}  # by graph task: the node that runs, and what it pinned

    def enter_forward(self) -> None:
        """A forward is entered. It may be refused before it begins."""
        self._has_begun = False

    def begin_forward(self) -> bool:
        """A forward with gradients begins. True if it begins a pass: the one before had its backward, or has none.

        A script that evaluates with gradients never calls backward, and its pass would grow for ever.
        """
        self._num_forwards += 1
        self._has_begun = True
        if self.awaits_backward and self._num_forwards <= _MOST_FORWARDS:
            return False
        self.awaits_backward, self._num_forwards = True, 1
        return True

    def fail_forward(self) -> int:
        """The forward that was entered last has failed. How many forwards its pass had with it; 0 if it had none.

        A pass that had no other forward is over.
        """
        if not self._has_begun or not self.awaits_backward:
            return 0
        self.awaits_backward = self._num_forwards > 1
        return self._num_forwards

    def begin_touch(self) -> list[Chunk]:
        """A function begins; it adds the chunks that it pins."""
        pinned: list[Chunk] = []
        self._touches.append(pinned)
        return pinned

    def end_touch(self, pinned: list[Chunk]) -> None:
        """Lift a function's pins, unless a failure has lifted all pins since."""
        others = [touch for touch in self._touches if touch is not pinned]
        if len(others) < len(self._touches):
            self._touches = others
            self._victims.unpin(pinned)

    def follow_node(self) -> None:
        """Lift the pins of the node before the one that runs now, and of tasks inside it."""
        task = _graph_task_id()
        if task != -1 and self._nodes and (task not in self._nodes or self._nodes[task][0] is not _autograd_node()):
            self._lift(task)

    def pin_for_node(self, chunk: Chunk) -> None:
        """For the node that runs now, after `follow_node`."""
        task = _graph_task_id()
        if task not in self._nodes:
            self._nodes[task] = _autograd_node(), []
        chunk.pins += 1
        self._nodes[task][1].append(chunk)

    def _lift(self, task: int) -> None:
        """The node of `task`, and of every graph task started inside it, is done."""
        for inner in [t for t in self._nodes if t >= task]:
            self._victims.unpin(self._nodes.pop(inner)[1])

    def leave_leaf(self) -> None:
        """Backward asks for something outside the leaf."""
        self._victims.unpin(self.leaf)
        self.leaf_operator, self.leaf = None, []

    def leave_backward(self) -> None:
        """No node of a backward needs anything any more, nor does a leaf."""
        self.leave_leaf()
        self._lift(0)

    def forget_forward(self) -> None:
        """No call runs any more; an interrupt may have come between a pin and its record."""
        for chunk in self._chunks:
            chunk.pins = sum(touch.count(chunk) for touch in self._touches)
        self.awaits_backward = False

    def forget(self) -> None:
        """Nothing is under way or pinned any more."""
        self.calls.end_all()
        self._touches = []
        self._nodes.clear()
        self.leaf_operator, self.leaf = None, []
        self.forget_forward()
