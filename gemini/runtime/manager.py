"""The chunk manager: the owner of a model's chunks, of their memory, of what ranks agree on, and of every move of them.

Its parts refer downwards only: `step` calls both stores in written order, the stores know memory and communicator, and
nothing below knows the manager. See "The objects of a wrapped model" in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from gemini.errors import BudgetError, UnsupportedError
from gemini.memory.memory import RankMemory
from gemini.memory.transfer import Background, Scratch
from gemini.monitor.device import DeviceSource
from gemini.monitor.live import LiveMemory
from gemini.observe import Observer
from gemini.placement.budget import is_less
from gemini.placement.demand import Tier
from gemini.placement.next_use import PassKind, Trace
from gemini.placement.payload_rules import PayloadRules
from gemini.placement.plan import Plan
from gemini.placement.policy import placement_in_words
from gemini.ranks.communicator import Communicator
from gemini.ranks.row_shards import RowShards
from gemini.runtime.binding import Binding
from gemini.runtime.chunk import Chunk, ManagedParameter
from gemini.runtime.grad_places import GradPlaces
from gemini.runtime.grads import GradStore
from gemini.runtime.migrate import Migration, StateStore
from gemini.runtime.params import ParamStore
from gemini.runtime.recorder import Recorder
from gemini.runtime.step import Step
from gemini.runtime.training import LeftGradients, MicroBatches, TrainingState


class OptimizerPart(Protocol):
    """The interface of the model's optimizer to chunks and parameters."""

    @property
    def states(self) -> StateStore:
        """The optimizer's state of each chunk."""

    def factors_to_come(self, managed: ManagedParameter) -> tuple[float, float]:
        """What the step will multiply stored gradients by, as far as known: (1 / loss scale, clip coefficient)."""

    def before_gradient_write(self) -> None:
        """A gradient is about to change: apply the clip coefficient to it, and drop the norm. Local."""


class ChunkManager:
    """Owns the chunks of one model on this rank, with their memory, and makes every move of them.

    `ShardedModel` makes it, as `model.chunk_manager`. Its attributes may be read, and are not for writing. Local.

    Args:
        chunks: with their homes and the values in them.
        memory: what the homes were taken of.
        plan: says where states rest, how many slots there are, and how much scratch.
        communicator: of the ranks that share the chunks.
        released_class: of parameters outside their operators.
        device: whose memory is read from step to step.

    Attributes:
        chunks: all chunks of the model, in the order of `model.plan`.
        parameters: all parameters of the chunks, by index.
        memory: the tiers with their ledgers, copies between them, and the slots.
        plan: the one in force; `model.plan`.
        communicator: collectives, and what ranks agree on.
        observer: is told of every move; `model.observer`.
        live: what the device has for the model, read at each step.
        micro_batches: how many a step has, as steps show.
        params: the payloads in their slots, and what parameters show.
        grads: gradients on their way, and at rest.
        recorder: measures the bytes beside the model data at each event of a step, for `trace`.
        training: what only training needs beside the weights; there once an optimizer or a backward has come.
        step: what happens to chunks in a forward, a backward and an update, in written order.
        background: a checkpoint that is written while training goes on.
        optimizer: the model's optimizer, as far as chunks need it. None before there is one.
        row_shards: cuts tensors of state dicts into rows of each rank, inside `sharding_rows()`. None: they are whole.

    Raises nothing of its own: slots and scratch take their memory at the first use.

    Example:
        >>> manager = model.chunk_manager
        >>> manager.chunks[0].names()
        '0.weight, 0.bias, 1.weight and 1 more'
        >>> bytes_by_kind = manager.memory.device.ledger.bytes_by_kind
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        memory: RankMemory,
        plan: Plan,
        communicator: Communicator,
        released_class: type[nn.Parameter],
        device: DeviceSource,
    ) -> None:
        placement, demand, stage = plan.placement, plan.demand, plan.settings.stage
        self.chunks = list(chunks)
        self.parameters = [each for chunk in chunks for each in chunk.parameters]
        self.memory = memory
        self.communicator = communicator
        self.plan = plan
        self.observer = Observer()
        self.live = LiveMemory(device, memory.device.ledger)
        self.micro_batches = MicroBatches(demand.micro_batches)
        self.optimizer: OptimizerPart | None = None
        self.background = Background()
        self.row_shards: RowShards | None = None
        self._made_row_shards: RowShards | None = None
        binding = Binding(self.chunks, memory, released_class)
        depth = plan.settings.prefetch_depth(plan.world_size)
        rules = PayloadRules(self.chunks, communicator.position.events, depth)
        rules.follow(placement, demand)
        self.params = ParamStore(self.chunks, memory, communicator, binding, self.observer, rules)
        # The numbers of slots are set here. Their memory is taken at the first use, see `Payloads.take_room`.
        memory.slots.open(demand.slot_bytes, placement.num_slots)
        memory.gradient_slots.open(demand.gradient_slot_bytes, placement.num_gradient_slots)
        is_alone = communicator.world_size == 1
        # Pinning waits for the device, which on several ranks may wait for a collective that waits for this rank.
        pins = is_alone and memory.device.device.type != "cpu"
        # ZeRO divides gradients over ranks from stage 2 on.
        places = GradPlaces(self.params, keeps_whole=stage <= 1 or is_alone, pins=pins)
        scratch = Scratch(memory.device, demand.scratch_bytes)
        self.training = TrainingState(self.chunks, memory, places)
        self.training.follow(demand, placement, plan.infers)
        has_several = (plan.settings.gradient_accumulation_steps or 1) > 1
        self.grads = GradStore(places, scratch, self.training, is_alone=is_alone, has_several=has_several)
        self.recorder = Recorder(device, memory.device.ledger, communicator.position)
        self.step = Step(self.chunks, self.params, self.grads, communicator, self.recorder, stage)

    @property
    def trace(self) -> Trace:
        """What training passes did so far: touches in order, and non-model bytes by event. Local; raises nothing."""
        touches = self.params.next_use.touches(PassKind.TRAINING)
        operators = tuple(self.communicator.position.operators)
        return Trace(operators, tuple(touches), dict(self.recorder.non_model_bytes))

    def change_plan(self, plan: Plan, shown: str, change: str, remedy: str) -> None:
        """Put another plan for the same chunks in force: homes, slots and scratch follow it. Collective, between steps.

        shown: what was done, for the error of ranks that did something else. change, remedy: see `Communicator.agree`.
        Raises BudgetError if there is no room for it, and DivergenceError if ranks differ; nothing has changed then.
        """
        refused = self.try_plan(plan, shown, change, remedy)
        if refused is not None:
            raise refused

    def try_plan(self, plan: Plan, shown: str, change: str, remedy: str) -> BudgetError | None:
        """Do what `change_plan` does, but if one rank lacks memory all keep the plan in force: moved states move back.

        A budget is no promise of the machine's: another process may have taken what was free when the plan was made.
        Collective, between steps. shown, change, remedy: as for `change_plan`. Returns None, or why all ranks stay:
        `is_shortage` is equal on all of them. Raises DivergenceError if ranks differ; nothing has changed then.
        """
        # The way back gets the same object: a move that ends half way has not brought back all that it set aside.
        left = LeftGradients(self.grads.places)
        before, migrate = self.plan, self._migration(plan, self.plan, left)
        # A state that moves is on both tiers for a moment.
        self.memory.allow(before.budget.wider(plan.budget))
        try:
            self._agree_on(plan, shown, change, remedy)
            error = self.agree_on_room(_refusal_of(lambda: migrate.check_room(self._states, plan.budget)))
            if error is not None:
                return error
            # From here states move. Any other error than a lack of memory leaves them half moved, on this rank alone,
            # or all moved where another plan than theirs is in force.
            # `moving` keeps temporaries of the move out of the measured peak of activations.
            with self.step.failures.tearing(), self.live.moving():
                known = dict(self.grads.places.gradients)
                error = self.agree_on_room(_refusal_of(lambda: self._carry_out(plan, migrate)))
                if error is not None:
                    self._carry_out(before, self._migration(before, plan, left), is_way_back=True)
                    # Moving back made new `ChunkGradient`s: give them what the old ones knew.
                    for index, gradient in known.items():
                        self.grads.of(self.chunks[index]).replace(gradient)
                    return error
                # Tags have the new hash from here on, and not before: all that ranks have agreed on so far belongs to
                # the old plan.
                self.communicator.follow_plan(plan.hash)
                self.adopt(plan)
        finally:
            # `self.plan` is the new plan only if every rank could follow it.
            self.memory.allow(self.plan.budget)
        return None

    def adopt(self, plan: Plan) -> None:
        """Put `plan` in force. Nothing has to move for it any more. Local; raises nothing."""
        self.training.follow(plan.demand, plan.placement, plan.infers)
        self.memory.allow(plan.budget)
        self.plan = plan

    @contextmanager
    def sharding_rows(self) -> Iterator[None]:
        """Inside, state dicts have `DTensor`s of each rank's rows. Collective to enter the first time.

        Raises nothing of its own.
        """
        communicator = self.communicator
        if self._made_row_shards is None:
            group, device = communicator.users_group, communicator.device
            self._made_row_shards = RowShards(group, communicator.parts, device.type)
        before, self.row_shards = self.row_shards, self._made_row_shards
        try:
            yield
        finally:
            self.row_shards = before

    @property
    def is_in_use(self) -> bool:
        """A payload is in use now, as in the body of GatheredParameters: nothing may move. Local."""
        return any(self.params.rules.pins)

    @property
    def _states(self) -> StateStore | None:
        return None if self.optimizer is None else self.optimizer.states

    def _migration(self, plan: Plan, before: Plan, left: LeftGradients) -> Migration:
        """The move from plan `before` to `plan`."""
        homes = (before.demand, before.placement), (plan.demand, plan.placement)
        return Migration(self.step, *homes, left, trains=self.training.is_there)

    def _agree_on(self, plan: Plan, shown: str, change: str, remedy: str) -> None:
        words = f"{shown}; {placement_in_words(plan.placement, plan.budget_bytes)}"
        # The hash has a fixed width, so that the bytes that ranks exchange do not depend on its value.
        self.communicator.agree(f"{plan.hash:010d} {shown}".encode(), change, words, remedy)

    def agree_on_room(self, error: BudgetError | None) -> BudgetError | None:
        """Agree on whether some rank lacks memory: if one does, none goes on. Collective; raises nothing of its own.

        error: this rank's, if any. Returns None on all ranks, or an error on all of them with equal `is_shortage`.
        """
        # The worst code counts: 1 is a shortage of the device, after which model data may shrink; 2 is any other
        # refusal.
        code = 0 if error is None else 1 if error.is_shortage and error.tier == Tier.DEVICE else 2
        codes = torch.tensor([code], dtype=torch.int64, device=self.communicator.device)
        self.communicator.all_reduce_max_(codes, "room for what training needs")
        worst = int(codes)
        if worst == 0:
            return None
        refusal = error or BudgetError("another rank has no memory for it, and says so itself", tier=Tier.DEVICE)
        return refusal.as_shortage(worst == 1)

    def _carry_out(self, plan: Plan, migrate: Migration, is_way_back: bool = False) -> None:
        # `trained` has one flag for each parameter, in the order of chunks. They come first, because the move gives
        # gradients to the chunks that are trainable by then.
        flags = iter(plan.trained)
        for chunk in self.chunks:
            its_flags = [next(flags) for _ in chunk.parameters]
            chunk.follow_plan(trainable=any(its_flags))
        # Sums of micro-batches, and gradients that left a lent home, are not in the plan: a smaller budget may lack the
        # room for these although every state stays where it is. The next step takes it again, or takes it of the host.
        # A way back starts with states that may be half moved, also between plans with the same homes.
        if migrate.changes or is_way_back or is_less(plan.budget.device, self.plan.budget.device):
            migrate.carry_out(self._states)

    def give_room(self) -> None:
        """Free the memory of all slots and buffers until the model is used again. Between steps. Local.

        Raises nothing of its own. A slot that a view holds stays until the view dies.
        """
        with self.step.publishing():
            self.step.payloads.give_room()
        # Otherwise torch's caching allocator would keep the freed memory for this process.
        self.memory.device.trim()

    def attach(self, optimizer: OptimizerPart) -> None:
        """Make the model's optimizer known to its chunks. Local. Raises UnsupportedError for a second one."""
        self.refuse_second()
        self.optimizer = optimizer
        self.grads.expect_scaled_losses()

    def detach(self) -> None:
        """The model has no optimizer any more, whose states are freed, and may get another. Local; raises nothing."""
        self.optimizer = None

    def refuse_second(self) -> None:
        """Raises UnsupportedError if the model has an optimizer. Local."""
        if self.optimizer is not None:
            raise UnsupportedError(
                "this model has a ShardedOptimizer already: make one of a list of optimizers, or close() that one"
            )

    def close(self) -> None:
        """Give slots and process group back. Collective. Raises nothing of its own."""
        self.background.join()  # a checkpoint that is being written reads the homes
        self.memory.work.close()
        if self.memory.disk is not None:
            self.memory.disk.close()
        # A `.grad` that is a view of a home would keep the home in memory for as long as its parameter lives.
        self.grads.detach_homes()
        self.step.failures.note_close()
        self.params.slots.close()
        self.memory.gradient_slots.close()
        self.communicator.close()


def _refusal_of(change: Callable[[], None]) -> BudgetError | None:
    """The BudgetError that `change` raises, or None."""
    try:
        change()
    except BudgetError as refusal:
        return refusal
    return None
