"""`Step` carries a training step out: it fetches what operators need, and its `backward` what autograd nodes need.

It is driven by the model's hooks (gemini/model) and knows phases, not modules:

    begin_forward → (enter_operator → exit_operator)* → end_forward → backward: begin → ... → end
    → ... → before_update → (before_chunk_update+ → after_chunk_update+)* → end_update

[Note: Pins] A chunk is pinned while an operator on the call stack, a function that touches released parameters, or
the autograd node that runs right now uses it. Only unpinned chunks may leave their slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from gemini.chunks.chunk import Chunk, ManagedParameter
from gemini.chunks.param_state import ParamState
from gemini.errors import GeminiError
from gemini.manager.backward import Backward
from gemini.manager.calls import Call, Operator, backward_runs, other_thread
from gemini.manager.failures import Failures
from gemini.manager.grads import GradStore
from gemini.manager.params import ParamStore
from gemini.manager.payloads import Payloads
from gemini.manager.recorder import Recorder
from gemini.manager.staying import make_plain
from gemini.manager.underway import Underway
from gemini.placement.demand import Kind
from gemini.placement.trace import PassKind, Phase
from gemini.ranks.communicator import Communicator

_graph_task_id = torch._C._current_graph_task_id


class Step:
    """The steps of one model on this rank. With `payloads` and `backward` it calls both stores, in written order."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        params: ParamStore,
        grads: GradStore,
        communicator: Communicator,
        recorder: Recorder,
    ) -> None:
        self.chunks = list(chunks)
        self.params = params
        self.binding = params.binding
        self.grads = grads
        self.communicator = communicator
        self.position = communicator.position
        self._underway = Underway(self.chunks, params.victims)
        self.calls = self._underway.calls
        self.failures = Failures(self._underway, params, grads, communicator)
        self.payloads = Payloads(self.chunks, params, grads)
        self.recorder = recorder
        self.backward = Backward(self.chunks, self.payloads, self._underway, communicator, recorder)

    @property
    def is_resident(self) -> bool:
        """No payload leaves between forward and update: each is at home on this rank, or stays."""
        return self.payloads.is_resident

    # -- forward

    @staticmethod
    def is_recomputing() -> bool:
        """Whether a backward runs in this thread: a forward inside it recomputes a checkpointed region."""
        return _graph_task_id() != -1

    def enter_forward(self, module: nn.Module) -> tuple[Call, bool]:
        """Begin a call of the model. True, with `begin_forward` next, unless it is inside another or recomputes.

        Collective in the sense that all ranks do it. Raises GeminiError while another thread is inside a forward or
        backward, and nothing has changed then.
        """
        recomputing = self.is_recomputing()
        # A call that has ended unseen would make this one look like an inner one.
        self.failures.find(module)
        is_inner = recomputing or self.calls.num_forwards > 0
        if not is_inner:
            # Several ranks start together again inside `recover`. One that fails there tells the others, which would
            # wait for it.
            with self.publishing():
                self.failures.recover()
            # `find` has dropped a backward that is over: this one runs in another thread.
            if self.grads.in_backward:
                raise other_thread("a backward")
            self._underway.enter_forward()
        return self.calls.enter(module, None, recomputing), not is_inner

    def begin_forward(self) -> None:
        """Bring all edits home. What is trained may change after it; then `begin_pass` is next. Local."""
        # A backward that failed before it reached the model has left its flag.
        self.grads.end_scaled_loss()
        self.position.set(0, Phase.FORWARD)
        self.params.finish_prefetch()
        self.binding.write_back_all(self._with_copies() if self.is_resident else None)

    def _with_copies(self) -> list[Chunk]:
        """The chunks whose weights are somewhere else, too: at home, or in a master.

        Edits of the others have nowhere to go before an update, which looks for them itself. To look for them in every
        forward, too, is a 50th of the time of a model of tiny operators.
        """
        return [chunk for chunk in self.chunks if chunk.slot is not None or Kind.MASTER in chunk.homes]

    def begin_pass(self) -> None:
        """Begin the pass of a forward: operators may come. Collective."""
        # This comes before the pass makes activations, which would come to lie between slots and buffers.
        self.payloads.take_room()
        if torch.is_grad_enabled():
            # Several forwards before their backward, as in a contrastive loss, are one pass: only the first one begins
            # it.
            if self._underway.begin_forward():
                self.params.next_use.begin_pass(PassKind.TRAINING)
                self.recorder.begin_pass()
                self.communicator.begin_pass("forward and backward")
        else:
            # The replay follows one pass at a time: an evaluation ends the running one, and its collectives carry tags.
            self.params.next_use.begin_pass(PassKind.EVALUATION)
            self.communicator.drop_pass()
        self.position.set(0, Phase.FORWARD)  # the pass's first event
        self.params.note_forward(runs=True)
        if self.is_resident:
            make_plain(self.chunks, self.params)

    def end_forward(self) -> bool:
        """The model's forward ended, with or without an exception. False if it had not begun."""
        if self.calls.exit(None) is None:
            return False
        if not self.calls.num_forwards and not self.is_recomputing():
            # Only the outermost forward ends here: an inner one, or the recomputation of a checkpoint, is followed by
            # more operators.
            self.params.next_use.end_pass(PassKind.EVALUATION)  # does nothing in a training pass
            self.params.note_forward(runs=False)
            # The script's own code comes next, such as a loss that reads a weight. Its chunk may leave its slot from
            # here on, so parameters must fetch themselves again.
            self.binding.cover()
        return True

    def enter_operator(self, module: nn.Module, operator: Operator) -> Call:
        """Begin an operator's call; `fetch_operator` is next. Raises GeminiError while another thread is inside one."""
        recomputing = self.is_recomputing()
        # The root's call has looked for ended calls already. `find` walks the stacks of all threads, which is too slow
        # for each operator.
        if not recomputing and not (self.params.in_step and self.calls.depth()):
            self.failures.find(module)
        return self.calls.enter(module, operator, recomputing)

    def fetch_operator(self, call: Call) -> None:
        """Fetch, bind and pin an operator's chunks. Collective where parameters are sharded."""
        operator, pinned = call.operator, call.pinned
        assert operator is not None
        self.position.set(operator.index, Phase.RECOMPUTE if self.is_recomputing() else Phase.FORWARD)
        # In a recomputation: lift the pins of the node before the one that runs it.
        self._underway.follow_node()
        for chunk in operator.chunks:
            # Fetched and pinned one by one: a chunk that is here must not be evicted for the operator's next one.
            self.payloads.fetch(chunk)
            chunk.pin()
            pinned.append(chunk)
            if not chunk.plain:
                self.binding.bind(chunk)
        # This comes last: the operator's own chunks are pinned by now, so that no prefetch evicts one of them.
        self.payloads.fetch_ahead()

    def exit_operator(self, operator: Operator) -> None:
        """The operator is done, or failed: its chunks may leave."""
        chunks = self.calls.exit(operator)
        if chunks and not self.params.in_step:
            # Calls around this one may use the same chunks.
            self._after_use([chunk for chunk in chunks if not self.calls.is_pinned(chunk)])

    def _after_use(self, chunks: Sequence[Chunk]) -> None:
        """Outside a forward, keep parameters plain only while something uses them.

        In a recomputation this matters to what follows in the checkpointed region: if a weight is still plain,
        checkpointing's hooks are the only ones that meet it, and keep a view of its slot. The leaf that backward is in
        stays plain: touching it would be a collective, at a point that differs by rank.
        """
        if self.is_recomputing() and not self.params.in_step:
            for chunk in chunks:
                # A view of a chunk at home, or of one that stays, does no harm: its memory is not reused before an
                # update.
                if chunk.plain and chunk.may_leave and chunk not in self._underway.leaf:
                    self.binding.cover_chunk(chunk)
        elif not self.params.in_step and not self.calls.by_thread:
            self.binding.cover()

    @contextmanager
    def touching(self, touched: Sequence[ManagedParameter], operator: int) -> Iterator[None]:
        """Inside, a function uses parameters outside their operators. Collective where parameters are sharded."""
        self.failures.find()
        # Recovering empties all slots and lifts all pins, which a forward or a recomputation around this function still
        # uses.
        if not self.calls.num_forwards and not self.is_recomputing():
            self.failures.recover()
        touch = self._underway.begin_touch()
        before = self.position.now
        self.position.set(operator, Phase.TOUCH)
        bound: list[Chunk] = []
        # In a step a chunk is made plain once. In a loop over parameters outside of it, whole chunks would be made
        # plain and covered again at each parameter: there only the parameters that are used are made plain.
        alone = not (self.params.in_step or self.calls.by_thread or self.is_recomputing())
        try:
            # In the order of chunks, whatever the order of arguments: fetches are collectives.
            for chunk in [self.chunks[index] for index in sorted({each.chunk.index for each in touched})]:
                self.payloads.fetch(chunk)
                chunk.pin()
                touch.note_pin(chunk)
                if not chunk.plain and not (alone and self.binding.shows_payload(chunk)):
                    self.binding.bind(chunk)
                    bound.append(chunk)
            with self.binding.plain(touched):
                yield
        finally:
            # A failure may have lifted all pins meanwhile.
            if self._underway.unpin_touch(touch):
                # What the operator around saves from here on must name that operator again: handles keep the position's
                # operator.
                self.position.return_to(before)
                self._after_use(bound)
                self._underway.end_touch(touch)  # last: what is interrupted in here is found by `Failures.find`

    # -- around the step

    def before_update(self) -> None:
        """Bring home everything that an update reads: edits are written back. Collective.

        Prefetches end first: one that arrived later would show the weights from before the update as current.
        """
        # An update belongs to no operator. What a rank has called alone meanwhile, such as `safe_get_local_*`, may have
        # moved its position, and tags with different positions are a divergence.
        self.position.set(0, Phase.STEP)
        self.params.finish_prefetch()
        self.params.next_use.note_update()
        self.binding.write_back_all()
        # The update changes all weights: beside older ones, every element would count as edited later.
        self.binding.snapshots.drop_all(self.chunks)
        self.communicator.begin_pass("step")

    def end_update(self) -> None:
        """All chunks are updated, or the step was skipped."""
        self.communicator.end_pass()

    def before_chunk_update(self, chunk: Chunk) -> None:
        """The home will get new values: drop a payload in a slot. Called before, since both may be one memory."""
        if chunk.may_leave:
            self.params.slots.release(chunk)
        # A chunk that stays has its home inside its slot, in which parameters keep their views: it is only marked as
        # stale.
        elif chunk.slot is not None:
            self.binding.outdate(chunk)

    def after_chunk_update(self, chunk: Chunk) -> None:
        """The chunk's home has new values: a payload at home gets a new version."""
        chunk.note_update()
        if chunk.state is ParamState.RESIDENT:
            # Autograd has saved resident weights as they are. Only a higher version makes it refuse a graph from before
            # the update. Without the line after it the next write-back would take this bump for an edit of the user's.
            chunk.bump_versions()
            self.binding.rebase_versions(chunk)

    # -- failures

    def publishing(self) -> AbstractContextManager[None]:
        """Around a block: an exception that leaves it is told to the other ranks."""
        return self.failures.publishing()

    def check_outside_backward(self, what: str) -> None:
        """Raises GeminiError inside a backward; one that has ended with an exception is over. Local."""
        self.failures.find()
        if self.grads.in_backward and backward_runs():
            raise GeminiError(f"{what} inside a backward")

    def check_idle(self, what: str) -> None:
        """Raises GeminiError inside a forward or backward. Recovers from an earlier failure."""
        inside = GeminiError(f"{what} inside a forward or backward of the model is not possible: call it between steps")
        self.failures.find()
        if self.calls.by_thread or self.is_recomputing():
            raise inside
        # On several ranks `recover` is what ends a failed backward, so `in_backward` is read after it.
        self.failures.recover()
        if self.grads.in_backward:
            raise inside
        # What follows may be collective: its tags get a position that all ranks share.
        self.position.set(0, Phase.TOUCH)
