"""Tracks what is under way in a model at this moment, and the pins that it holds. See [Note: Pins] in step.py."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from gemini.chunks.chunk import Chunk
from gemini.manager.calls import Calls, Operator
from gemini.manager.victims import Victims

_graph_task_id = torch._C._current_graph_task_id
_autograd_node = torch._C._current_autograd_node

# Of one pass: this many forwards do not wait for a common backward, so the next one begins a new pass.
_MOST_FORWARDS = 64


class Touch:
    """A function that touches released parameters. Its frame alone holds this, so an interrupt cannot leave it open."""

    __slots__ = ("__weakref__", "pinned")

    def __init__(self) -> None:
        self.pinned: list[Chunk] = []

    def note_pin(self, chunk: Chunk) -> None:
        """The function has pinned the chunk, until it ends."""
        self.pinned.append(chunk)

    def note_unpinned(self) -> None:
        """Nothing of what the function had pinned is pinned any more."""
        self.pinned.clear()


class Underway:
    """Running calls, functions that touch released parameters, autograd nodes, and the leaf that backward is in.

    A node's pins last until another node of the same graph task asks for something.
    """

    def __init__(self, chunks: Sequence[Chunk], victims: Victims) -> None:
        self._chunks = chunks
        self._victims = victims
        self.calls = Calls(victims)
        self.leaf_operator: Operator | None = None  # the leaf that backward is in; all its chunks are in `leaf`
        self.leaf: list[Chunk] = []
        self.awaits_backward = False  # a forward with gradients has had no backward yet
        self._num_forwards = 0  # forwards with gradients of the running pass
        self._has_begun = False  # the forward that was entered last has begun, with gradients
        self._touches: list[weakref.ref[Touch]] = []
        self._nodes: dict[int, tuple[object, list[Chunk]]] = {}  # by graph task: the node that runs, and what it pinned

    def enter_forward(self) -> None:
        """A forward is entered. It may be refused before it begins."""
        # A forward that is refused before `begin_forward` belongs to no pass: `fail_forward` must not end one for it.
        self._has_begun = False

    def begin_forward(self) -> bool:
        """Count a forward with gradients. True if it begins a pass: the last pass had its backward, or will have none.

        A script that evaluates with gradients never calls backward, and its pass would grow for ever.
        """
        self._num_forwards += 1
        self._has_begun = True
        if self.awaits_backward and self._num_forwards <= _MOST_FORWARDS:
            return False
        self.awaits_backward, self._num_forwards = True, 1
        return True

    def fail_forward(self) -> int:
        """The forward that was entered last has failed. Returns the number of its pass's forwards, 0 without a pass.

        A pass whose only forward failed is over.
        """
        if not self._has_begun or not self.awaits_backward:
            return 0
        self.awaits_backward = self._num_forwards > 1
        return self._num_forwards

    def begin_touch(self) -> Touch:
        """A function begins. It notes in the returned object which chunks it pins, and holds that until its end."""
        touch = Touch()
        self._touches.append(weakref.ref(touch))
        return touch

    def unpin_touch(self, touch: Touch) -> bool:
        """Lift a function's pins; `end_touch` is next. False if a failure has ended it meanwhile."""
        is_open = any(reference() is touch for reference in self._touches)
        if is_open:
            self._victims.unpin(touch.pinned)
            touch.note_unpinned()
        return is_open

    def end_touch(self, touch: Touch) -> None:
        """A function has ended."""
        # References that are dead stay in the list: they tell `has_lost_touch` of a function that was interrupted.
        self._touches = [reference for reference in self._touches if reference() is not touch]

    @property
    def is_touched(self) -> bool:
        """Whether a function uses parameters outside their operators."""
        return any(reference() is not None for reference in self._touches)

    @property
    def has_lost_touch(self) -> bool:
        """A function was interrupted before its end: nobody holds its `Touch`. `forget_forward` lifts its pins."""
        return any(reference() is None for reference in self._touches)

    def follow_node(self) -> None:
        """If another autograd node runs now, lift the pins of the last one and of graph tasks started inside it."""
        task = _graph_task_id()
        if task != -1 and self._nodes and (task not in self._nodes or self._nodes[task][0] is not _autograd_node()):
            # If `task` asks for the first time, this lifts pins that a graph task inside it has left.
            self._lift(task)

    def pin_for_node(self, chunk: Chunk) -> None:
        """Pin the chunk for the running node. Call `follow_node` before."""
        task = _graph_task_id()
        if task not in self._nodes:
            # The record holds the node itself, so that no later node can have its identity.
            self._nodes[task] = _autograd_node(), []
        chunk.pin()
        self._nodes[task][1].append(chunk)

    def _lift(self, task: int) -> None:
        """Lift the pins of the node of `task`, which is done, and of every graph task started inside it."""
        # Graph tasks are numbered in the order of their start: inner ones have larger numbers.
        # A graph task that reentrant checkpointing starts inside a node is over by the time that another node of `task`
        # runs.
        for inner in [t for t in self._nodes if t >= task]:
            self._victims.unpin(self._nodes.pop(inner)[1])

    def pin_for_leaf(self, chunk: Chunk) -> None:
        """Pin a chunk of the leaf that backward is about to enter. Call `exit_leaf` before the first."""
        chunk.pin()
        self.leaf.append(chunk)

    def enter_leaf(self, operator: Operator) -> None:
        """Backward is in this leaf, all of whose chunks are pinned."""
        self.leaf_operator = operator

    def exit_leaf(self) -> None:
        """Lift the leaf's pins: backward asks for something outside of it."""
        self._victims.unpin(self.leaf)
        # Without an operator the next output of the same leaf enters it again.
        self.leaf_operator, self.leaf = None, []

    def exit_backward(self) -> None:
        """Lift all pins of backward: of its nodes and of a leaf."""
        self.exit_leaf()
        # No graph task has a smaller number: these are the pins of all nodes.
        self._lift(0)

    def end_backward(self) -> None:
        """The backward that the pass's forwards waited for is done: the next forward begins a pass."""
        self.awaits_backward = False

    def forget_forward(self) -> None:
        """Leave only the pins of touching functions: no call runs, and an interrupt may have lost the record of one."""
        # A function may run around all of this, such as the body of `GatheredParameters`: its chunks stay pinned.
        touches = [touch for reference in self._touches if (touch := reference()) is not None]
        for chunk in self._chunks:
            chunk.reset_pins(sum(touch.pinned.count(chunk) for touch in touches))
        self._touches = [weakref.ref(touch) for touch in touches]
        self.awaits_backward = False

    def reset(self) -> None:
        """Forget everything that was under way, and lift all pins."""
        # Calls go first: if `forget_forward` had set the pins to zero before, the end of a call would lift one too
        # many.
        self.calls.end_all()
        self._touches = []
        self._nodes.clear()
        self.leaf_operator, self.leaf = None, []
        self.forget_forward()
