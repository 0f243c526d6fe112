"""One training step: fetches and releases of its operators, and its backwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident

import torch
from torch import Tensor

from gemini.errors import GeminiError
from gemini.memory.modes import A_HOOK, never_traced, unseen, untracked
from gemini.memory.transfer import Region, ready
from gemini.placement.demand import Kind
from gemini.placement.gradient_rules import MAX_WAITING
from gemini.placement.next_use import PassKind, Phase
from gemini.ranks.communicator import Communicator
from gemini.runtime.arrivals import Waiting
from gemini.runtime.calls import Call, Operator, Underway, backward_runs, other_thread
from gemini.runtime.chunk import Chunk, ManagedParameter, ParamState
from gemini.runtime.grads import GradStore
from gemini.runtime.params import ParamStore, make_plain
from gemini.runtime.recorder import Recorder
from gemini.runtime.recovery import Failures
from gemini.runtime.reduce import Reductions

# -- What a fetch does to both stores: a chunk's payload comes into a slot, and gradients make way for it.
#
# Slots and buffers take their memory at the first use, all together.


class Payloads:
    """The payloads of one model on this rank. It calls both stores, in written order."""

    def __init__(self, chunks: Sequence[Chunk], params: ParamStore, grads: GradStore, reductions: Reductions) -> None:
        self.chunks = list(chunks)
        self.params = params
        self._rules = params.rules
        self.grads = grads
        self._reductions = reductions
        self.is_alone = params.communicator.world_size == 1
        # Outside of its operator a part of a tensor must not be taken for the whole: `access/link.py` has to be asked.
        self._shows_all = not params.communicator.is_divided
        self.has_room = False  # slots and buffers have their memory
        self._work = params.memory.work
        self.note_placement()

    def note_placement(self) -> None:
        """Chunks have new homes: find out which payloads never leave."""
        self.params.note_placement()
        # No payload leaves between forward and update: each is at home on this rank, or stays.
        self.is_resident = self._never_leave = self._rules.is_resident
        # Where no payload leaves, backward launches no gathers. Fetches are then no points that ranks share for
        # reductions.
        self._reductions.note_placement(self.is_resident)

    def prepare(self) -> None:
        """Take the room that a pass needs, and decide whether its operators find all payloads in place."""
        self.take_room()
        # While a thread still updates weights at home, operators fetch: each waits for its own. On several ranks where
        # payloads are decides about collectives, and how far this rank's thread has come must not.
        self.is_resident = self._never_leave and self._shows_all and not (self.is_alone and self._work.is_busy)

    def take_room(self) -> None:
        """Allocate all slots and buffers at the first use, in one go.

        A held slot takes a spare when it is replaced. That spare must not be memory that was planned for another slot.
        """
        if self.has_room:
            return
        self.has_room = True
        # Slots that an evaluation took as inference tensors could not be written to in training.
        with torch.inference_mode(False):
            self.params.slots.fill()
            self.grads.take_memory()

    def miss_room(self) -> None:
        """The plan has other slots and buffers than there are: `take_room` makes them at the next use. Local."""
        self.has_room = False

    def give_room(self) -> None:
        """Free the memory of all slots and buffers between steps, until the next use. Local."""
        self.has_room = False  # first: after an interrupt in here the next use takes what is missing
        self.params.release_all()
        self.params.forget_slots()
        self.params.slots.rest()
        self.grads.rest()

    def fetch(self, chunk: Chunk) -> Tensor:
        """The chunk's payload, (numel,) on the device. Inside of `untracked`. Collective if parameters are sharded."""
        # The home holds the gradient, which a fetch would show, or send to other ranks, as weights.
        if chunk.state is ParamState.HOLDS_GRAD:
            self.restore_parameters(chunk)
        if self.grads.books.uses_up:
            self.grads.refuse_reuse(chunk)
        if chunk.state is ParamState.RESIDENT:
            self.note_use(chunk)
            # Its update may still be under way.
            return ready(chunk.homes[Kind.PARAM])
        # The touch is recorded first: gradients whose point of reduction it is are due before the fetch.
        self._rules.touch(chunk.index)
        if self.grads.in_backward:
            self._reductions.before_touch()
            # `before_touch` may just have reduced this chunk's gradient into its parameter home.
            if chunk.state is ParamState.HOLDS_GRAD:
                self.restore_parameters(chunk)
        # The first use may come outside a forward, as by `weight.norm()` right after wrapping, where no `begin_pass`
        # took room.
        if not self.has_room:
            self.take_room()
        if chunk.payload is None:
            self._rules.fetch(chunk.index, self.params)
        assert chunk.payload is not None
        return chunk.payload

    def note_use(self, chunk: Chunk) -> None:
        """Note the use of a chunk that never leaves: one rank traces it, as it does the chunks that leave. Local.

        Several ranks do not: they need not use such chunks alike, and traces must be equal.
        """
        if self.is_alone:
            self.params.next_use.touch(chunk.index)

    def open_own_part(self, chunk: Chunk) -> Region:
        """The payload, (numel,) on the device, with only the part that this rank has just updated. Local."""
        self.take_room()
        with untracked():
            self._rules.open_own_part(chunk.index, self.params)
        return chunk.region()

    def fetch_ahead(self) -> None:
        """Start to fetch what will be used next, as far as slots are free before it is used.

        Inside of `untracked`. Collective where parameters are sharded.
        """
        if not self._rules.max_prefetch:
            return
        for index in self._rules.to_gather(self.params):
            # As in `fetch`: the other ranks would gather the gradient in place of the weights.
            if self.chunks[index].state is ParamState.HOLDS_GRAD:
                self.restore_parameters(self.chunks[index])
            self._rules.gather_ahead(index, self.params)

    def restore_parameters(self, chunk: Chunk) -> None:
        """Move a gradient out of the home of parameters that are needed before the step. Local."""
        self.grads.places.move_out(chunk.index)


# -- A backward from the side of its nodes: they fetch what they read, and gradients leave them for their chunks.
#
# begin → (node_fetch | enter_leaf | wait_for_gradients)* → end. A gradient that comes alone goes to
# `Reductions.take_gradient`.


_graph_task_id = torch._C._current_graph_task_id
_autograd_node = torch._C._current_autograd_node


class Backward:
    """The backwards of one model on this rank, one at a time."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        payloads: Payloads,
        reductions: Reductions,
        underway: Underway,
        communicator: Communicator,
        recorder: Recorder,
    ) -> None:
        self._chunks = list(chunks)
        self._payloads = payloads
        self._params = payloads.params
        self._grads = payloads.grads
        self._gradients = payloads.grads.places.gradients
        self._arrivals = payloads.grads.arrivals
        self._reductions = reductions
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
            self._reductions.begin_backward()
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
        rules, node = self._params.rules, _autograd_node()
        # This lifts the pins of the node before, of which the fetch may need the slot.
        if rules.nodes:
            rules.follow_node(task, node)
        payload = self._payloads.fetch(chunk)
        rules.pin_for_node(chunk.index, task, node)
        self._payloads.fetch_ahead()
        return payload

    def note_read(self, chunk: Chunk, operator: int) -> None:
        """Note that the running autograd node reads a payload that never leaves. Local."""
        if self._payloads.is_alone and _graph_task_id() != -1:
            self._position.set(operator, Phase.BACKWARD)
            self._payloads.note_use(chunk)

    def wait_for_gradients(self, index: int, waiting: Waiting) -> bool:
        """Let a gradient of chunk `index` wait in `.grad`, as noted in `waiting`. False if it may not wait there."""
        try:
            self.begin()
            gradient = self._gradients.get(index)
            # `due` is 0 until a gradient of the chunk waits.
            if not waiting.due and (gradient is None or not self._arrivals.begin(gradient, self._grads.num_backwards)):
                return False
            # Waiting gradients are held beyond the gradient slots: keep their number small.
            with untracked():
                if len(self._arrivals.begun) > MAX_WAITING:
                    self._reductions.collect(self._arrivals.begun[0])  # the chunk that has waited longest
                # `are_all` is False: a chunk whose slot nobody else needs is copied in several parts, the rest of which
                # is to come.
                if index in self._arrivals.begun and len(waiting.arrived) >= waiting.due:
                    self._reductions.collect(index, are_all=False)
            return True
        except BaseException as error:
            # Gradients that are left in `.grad` would be added to those of the next backward.
            self._arrivals.drop()
            self._communicator.publish(error)
            raise

    @never_traced(A_HOOK)
    def end(self) -> None:
        """The outermost graph task is done. Collective."""
        if not self._grads.in_backward:
            return
        with self._communicator.publishing(), unseen(), untracked():
            # Pins are lifted before gradients are reduced: while it is pinned, a chunk that is resident or keeps its
            # slot does not lend its home to its gradient.
            self._underway.exit_backward()
            self._position.set(0, Phase.BACKWARD)
            # Ranks are about to tell each other which gradients they have. Gradients that wait in `.grad` have set no
            # flags so far.
            self._reductions.collect_all()
            with self._grads.ending_backward():
                self._reductions.end()
            self._params.finish_prefetch()
            self._params.next_use.end_pass(PassKind.TRAINING if self._underway.awaits_backward else PassKind.BACKWARD)
            # This comes after the choice of the trace above, which depends on whether a forward still waited for this
            # backward.
            self._underway.end_backward()
            self._recorder.end_events()
            self._params.binding.cover()
            self._communicator.end_pass()


# -- `Step` carries a training step out: it fetches what operators need, and its `backward` what autograd nodes need.
#
# It is driven by the model's hooks (gemini/model) and knows phases, not modules:
#
#     begin_forward → (enter_operator → exit_operator)* → end_forward → backward: begin → ... → end
#     → ... → before_update → end_update, and between them the update of each chunk
#
# [Note: Pins] A chunk is pinned while an operator on the call stack, a function that touches released parameters, or
# the autograd node that runs right now uses it. Only unpinned chunks may leave their slots.


class Step:
    """The steps of one model on this rank. With `payloads` and `backward` it calls both stores, in written order."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        params: ParamStore,
        grads: GradStore,
        communicator: Communicator,
        recorder: Recorder,
        stage: int,
    ) -> None:
        self.chunks = list(chunks)
        self.params = params
        self.binding = params.binding
        self.grads = grads
        self.communicator = communicator
        self.position = communicator.position
        self._underway = Underway(params.rules)
        self.calls = self._underway.calls
        self.failures = Failures(self._underway, params, grads, communicator)
        self.reductions = Reductions(params, grads, self._underway, self.failures, stage)
        self.payloads = Payloads(self.chunks, params, grads, self.reductions)
        self.recorder = recorder
        self.backward = Backward(self.chunks, self.payloads, self.reductions, self._underway, communicator, recorder)

    # -- forward

    @staticmethod
    def is_recomputing() -> bool:
        """Whether a backward runs in this thread: a forward inside it recomputes a checkpointed region."""
        return _graph_task_id() != -1

    def enter_forward(self) -> tuple[Call, bool]:
        """Begin a call of the model. True, with `begin_forward` next, unless it is inside another or recomputes.

        Collective in the sense that all ranks do it. Raises GeminiError while another thread is inside a forward or
        backward, and nothing has changed then.
        """
        recomputing = self.is_recomputing()
        # A call that has ended unseen would make this one look like an inner one.
        self.failures.find()
        is_inner = recomputing or self.calls.num_forwards > 0
        if not is_inner:
            # Several ranks start together again inside `recover`. One that fails there tells the others, which would
            # wait for it.
            with self.failures.publishing():
                self.failures.recover()
            # `find` has dropped a backward that is over: this one runs in another thread.
            if self.grads.in_backward:
                raise other_thread("a backward")
            # Where every payload is in place no fetch would notice it.
            self.grads.refuse_updated("a forward")
            self._underway.enter_forward()
        return self.calls.enter(None, recomputing), not is_inner

    def begin_forward(self) -> None:
        """Bring all edits home. What is trained may change after it; then `begin_pass` is next. Local."""
        # A backward that failed before it reached the model has left its flag.
        self.grads.end_scaled_loss()
        self.position.set(0, Phase.FORWARD)
        self.params.finish_prefetch()
        self.binding.write_back_all(self._with_copies() if self.payloads.is_resident else None)
        # Where weights travel quantised, an edit counts as it arrives on all ranks, whether or not it stays in a slot.
        for chunk in self.binding.pop_overwritten():
            self.params.make_stale(chunk)

    def _with_copies(self) -> list[Chunk]:
        """The chunks whose weights are somewhere else, too: at home, or in a master.

        Edits of the others have nowhere to go before an update, which looks for them itself. To look for them in every
        forward, too, is a 50th of the time of a model of tiny operators.
        """
        return [chunk for chunk in self.chunks if chunk.slot is not None or Kind.MASTER in chunk.homes]

    def begin_pass(self) -> None:
        """Begin the pass of a forward: operators may come. Collective."""
        # This comes before the pass makes activations, which would come to lie between slots and buffers.
        self.payloads.prepare()
        if torch.is_grad_enabled():
            # Several forwards before their backward, as in a contrastive loss, are one pass: only the first one begins
            # it.
            if self._underway.begin_forward():
                self.params.next_use.begin_pass(PassKind.TRAINING)
                self.recorder.begin_events()
                self.communicator.begin_pass("forward and backward")
        else:
            # The replay follows one pass at a time: an evaluation ends the running one, and its collectives carry tags.
            self.params.next_use.begin_pass(PassKind.EVALUATION)
            self.communicator.drop_pass()
        self.position.set(0, Phase.FORWARD)  # the pass's first event
        self.params.note_forward(runs=True)
        if self.payloads.is_resident:
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

    def enter_operator(self, operator: Operator) -> Call:
        """Begin an operator's call; `fetch_operator` is next. Raises GeminiError while another thread is inside one."""
        recomputing = self.is_recomputing()
        # The root's call has looked for ended calls already.
        if not recomputing and not (self.params.in_step and get_ident() in self.calls.by_thread):
            self.failures.find()
        return self.calls.enter(operator, recomputing)

    def fetch_operator(self, call: Call) -> None:
        """Fetch, bind and pin an operator's chunks. Collective where parameters are sharded."""
        operator, pinned = call.operator, call.pinned
        assert operator is not None
        self.position.set(operator.index, Phase.RECOMPUTE if call.recomputes else Phase.FORWARD)
        # Lift the pins of the node before the one that runs it.
        if call.recomputes:
            self._underway.follow_node()
        for chunk in operator.chunks:
            # Fetched and pinned one by one: a chunk that is here must not be evicted for the operator's next one.
            self.payloads.fetch(chunk)
            self.params.rules.pin(chunk.index)
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
                with untracked():
                    self.payloads.fetch(chunk)
                self.params.rules.pin(chunk.index)
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

    # -- failures

    def publishing(self) -> AbstractContextManager[None]:
        """Around a block: an exception that leaves it is told to the other ranks."""
        return self.failures.publishing()

    def check_outside_backward(self, what: str) -> None:
        """Raises GeminiError inside a backward; one that has ended with an exception is over. Local."""
        self.failures.find()
        if self.grads.in_backward and backward_runs():
            raise GeminiError(f"{what} inside a backward")

    def check_idle(self, what: str, *, after_updates: bool = False) -> None:
        """Raises GeminiError inside a forward or backward. Recovers from an earlier failure.

        after_updates: it may come between a backward that has updated weights and its step, which is refused else.
        """
        inside = GeminiError(f"{what} inside a forward or backward of the model is not possible: call it between steps")
        self.failures.find()
        if self.calls.by_thread or self.is_recomputing():
            raise inside
        # On several ranks `recover` is what ends a failed backward, so `in_backward` is read after it.
        self.failures.recover()
        if self.grads.in_backward:
            raise inside
        if not after_updates:
            self.grads.refuse_updated(what)
        # What follows may be collective: its tags get a position that all ranks share.
        self.position.set(0, Phase.TOUCH)
