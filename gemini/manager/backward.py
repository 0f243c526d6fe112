"""A backward from the side of its nodes: they fetch what they read, and gradients leave them for their chunks.

begin → (node_fetch | enter_leaf | on_gradient | wait_for_gradients)* → end
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gemini.chunks.chunk import Chunk
from gemini.manager.arrivals import Waiting
from gemini.manager.calls import Operator
from gemini.manager.payloads import Payloads
from gemini.manager.recorder import Recorder
from gemini.manager.underway import Underway
from gemini.memory.modes import unseen
from gemini.memory.untraced import A_HOOK, never_traced
from gemini.placement.trace import PassKind, Phase
from gemini.ranks.communicator import Communicator

_graph_task_id = torch._C._current_graph_task_id


class Backward:
    """The backwards of one model on this rank, one at a time."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        payloads: Payloads,
        underway: Underway,
        communicator: Communicator,
        recorder: Recorder,
    ) -> None:
        self._chunks = list(chunks)
        self._payloads = payloads
        self._params = payloads.params
        self._grads = payloads.grads
        self._underway = underway
        self._communicator = communicator
        self._recorder = recorder
        self._position = communicator.position

    def begin(self) -> None:
        """Begin the backward, unless it has begun. Called by each output of the root and node of ours it reaches."""
        if self._grads.in_backward:
            return
        self._grads.refuse_unscaled()
        # No forward of the model came before: this backward has a trace of its own.
        if not self._underway.awaits_backward:
            self._params.next_use.begin_pass(PassKind.BACKWARD)
        # Model data that is taken here belongs between two events, see `Recorder`.
        self._position.set(0, Phase.BACKWARD)
        # One rank alone may find no room for its gradients.
        with self._communicator.publishing():
            self._grads.begin_backward()
        self._position.set(0, Phase.BACKWARD)
        # autograd calls `end` once the outermost graph task is done: no hook of ours is certain to run last.
        torch.autograd.Variable._execution_engine.queue_callback(self.end)

    def enter_leaf(self, operator: Operator) -> None:
        """Fetch and pin a whole leaf that backward reaches. Collective.

        A rank may use a part of the leaf or nothing of it, so it must not fetch by use. The pins last until another
        chunk is asked for, which is the same point on all ranks.
        """
        self.begin()
        if self._underway.leaf_operator is operator:
            return
        # This lifts the pins of the last node and of the leaf before, whose slots the fetches below may need.
        self._underway.exit_backward()
        self._position.set(operator.index, Phase.BACKWARD)
        for chunk in operator.chunks:
            self._payloads.fetch(chunk)
            self._underway.pin_for_leaf(chunk)
            # A recomputation inside the leaf must find its parameters plain: a fetch would be a collective, at a point
            # that differs by rank.
            self._params.binding.bind(chunk)
        self._underway.enter_leaf(operator)
        self._payloads.fetch_ahead()

    def node_fetch(self, chunk: Chunk, operator: int) -> Tensor:
        """The payload for the running autograd node. It is pinned until another node of the graph task asks for one."""
        task = _graph_task_id()
        # No backward runs: someone reads grad_fn._saved_... by hand.
        if task == -1:
            return self._payloads.fetch(chunk)
        self.begin()
        # A chunk of the leaf is fetched and pinned already. Any other chunk ends the leaf.
        if self._underway.leaf:
            if chunk in self._underway.leaf:
                assert chunk.payload is not None
                return chunk.payload
            self._underway.exit_leaf()
        self._position.set(operator, Phase.BACKWARD)
        # This lifts the pins of the node before, of which the fetch may need the slot.
        self._underway.follow_node()
        payload = self._payloads.fetch(chunk)
        self._underway.pin_for_node(chunk)
        self._payloads.fetch_ahead()
        return payload

    def note_read(self, chunk: Chunk, operator: int) -> None:
        """Note that the running autograd node reads a payload that never leaves. Local."""
        if self._payloads.is_alone and _graph_task_id() != -1:
            self._position.set(operator, Phase.BACKWARD)
            self._payloads.note_use(chunk)

    def on_gradient(self, index: int, position: int, grad: Tensor) -> None:
        """Take the dense gradient of the parameter at `position` of chunk `index`."""
        # `publishing()` would cost as much as all the rest, for each parameter.
        try:
            # If the user calls a module on its own, as in `model.module.head(x)`, no output of the root leads here: the
            # backward may begin with a gradient.
            if not self._grads.in_backward:
                self.begin()
            self._grads.on_gradient(self._chunks[index], position, grad)
        except BaseException as error:
            self._communicator.publish(error)
            raise

    def wait_for_gradients(self, index: int, waiting: Waiting) -> bool:
        """Let a gradient of chunk `index` wait in `.grad`, as noted in `waiting`. False if it may not wait there."""
        try:
            self.begin()
            return self._grads.wait(self._chunks[index], waiting)
        except BaseException as error:
            # Gradients that are left in `.grad` would be added to those of the next backward.
            self._grads.arrivals.drop()
            self._communicator.publish(error)
            raise

    @never_traced(A_HOOK)
    def end(self) -> None:
        """The outermost graph task is done. Collective."""
        if not self._grads.in_backward:
            return
        with self._communicator.publishing(), unseen():
            # Pins are lifted before gradients are reduced: while it is pinned, a chunk that is resident or keeps its
            # slot does not lend its home to its gradient.
            self._underway.exit_backward()
            self._position.set(0, Phase.BACKWARD)
            self._grads.end_backward()
            self._params.finish_prefetch()
            self._params.next_use.end_pass(PassKind.TRAINING if self._underway.awaits_backward else PassKind.BACKWARD)
            # This comes after the choice of the trace above, which depends on whether a forward still waited for this
            # backward.
            self._underway.end_backward()
            self._recorder.end_pass()
            self._params.binding.cover()
            self._communicator.end_pass()
