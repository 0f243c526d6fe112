"""The simulation of a model's steps from its plan: every fetch, eviction, reduction and update, in numbers. Pure.

`Simulation` follows a schedule as `manager/step.py` follows the hooks. It evicts by the same `NextUse` and
`EvictionQueue`, gathers equally far ahead, opens and spills gradients by the same rules, and updates each chunk where
its state rests. `tests/features/test_plan_is_the_run.py` compares both, byte by byte, in many random cases.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from gemini.placement.chunk_facts import ChunkFacts
from gemini.placement.demand import Kind, Tier
from gemini.placement.schedule import Act, Moment, Schedule
from gemini.placement.simulated_gradients import Gradients
from gemini.placement.simulated_payloads import Payloads
from gemini.placement.trace import PassKind, Phase
from gemini.placement.traffic import Exchange, Purpose, Traffic

if TYPE_CHECKING:
    from gemini.placement.plan import Plan


class Simulation:
    """One model on one rank, from the moment when it was wrapped.

    Args:
        plan: the plan of all simulated steps.
        schedule: the schedule of every micro-batch.
        rank: the simulated rank. Ranks differ where a chunk is updated only in part.
    """

    def __init__(self, plan: Plan, schedule: Schedule, rank: int = 0) -> None:
        self.traffic = Traffic()
        self.payloads = Payloads(plan, self.traffic)
        self.gradients = Gradients(plan, self.payloads, self.traffic)
        self.homes = self.gradients.homes
        self._plan = plan
        self._schedule = schedule
        self._rank = rank
        self._facts: Sequence[ChunkFacts] = plan.packing.chunks
        self._uses = plan.use_order
        chunk_of = {name: chunk.index for chunk in self._facts for name in chunk.names}
        self._chunk_of = [chunk_of[weight.name] for weight in plan.spec.weights]
        self._num_updates = 0
        self._in_backward = False
        self._nodes: dict[int, tuple[int, list[int]]] = {}  # by task: the running node, and the chunks that it pins

    @property
    def state(self) -> tuple[Hashable, ...]:
        """Everything that the next step depends on: steps that begin in equal states are equal."""
        # The flag stands for the traces and the order of reductions. The first step leaves them to all later ones,
        # because all follow one schedule.
        return self._num_updates > 0, self.payloads.state, self.homes.state

    def micro_batch(self, backward: int) -> None:
        """Simulate a forward and its backward. backward: the number of that backward since the last step, from 1."""
        self._begin_forward()
        self.payloads.next_use.begin_pass(PassKind.TRAINING)
        # The pass has begun: its trace includes the touches of what is gathered here.
        self._enter()
        for moment in self._schedule.forward:
            self._do(moment)
        self._in_backward = True
        self.gradients.begin_backward(backward)
        for moment in self._schedule.backward:
            self._do(moment)
        # The pins of the last node end before the rest is reduced, because a home is not lent while its chunk is
        # pinned.
        self._lift(0)
        self._in_backward = False
        self.gradients.end_backward()
        self.payloads.finish_ahead()
        self.payloads.next_use.end_pass(PassKind.TRAINING)

    def infer(self) -> None:
        """Simulate a forward without gradients."""
        self._begin_forward()
        self.payloads.next_use.begin_pass(PassKind.EVALUATION)
        self._enter()
        for moment in self._schedule.forward:
            self._do(moment)
        self.payloads.next_use.end_pass(PassKind.EVALUATION)

    def update(self) -> None:
        """Simulate a step of Adam."""
        self._num_updates += 1
        self.payloads.next_use.note_update()
        self.payloads.finish_ahead()
        # Every payload is stale after the update, so all slots are free while it runs.
        for chunk in self.gradients.of:
            self.payloads.release(chunk)
        for chunk, gradient in self.gradients.of.items():
            if not gradient.got:
                continue
            self.payloads.release(chunk)
            # A rank may hold no element of the weights that have a gradient. It updates nothing and restores a lent
            # home.
            if self._num_updated(chunk, gradient.got):
                # The update writes the new weights into their home, so nothing is left to restore there.
                self._update(chunk)
                self.homes.lent.discard(chunk)
            self.homes.restore(chunk)
            # Each rank holds the weights whole and has updated only its part.
            if self._facts[chunk].home_layout.world_size < self._facts[chunk].optim_layout.world_size:
                self._make_whole(chunk)
        # A chunk that was reduced without any gradient is not updated, but its home may be lent all the same.
        for chunk in self.gradients.of:
            self.homes.restore(chunk)
        self.gradients.end_step()

    # -- moments

    def _begin_forward(self) -> None:
        self.payloads.finish_ahead()

    def _enter(self) -> None:
        if self.payloads.is_resident:
            self.payloads.gather_stale()

    def _do(self, moment: Moment) -> None:
        payloads = self.payloads
        # Gradients arrive in any case. If everything is resident, nothing else happens inside a pass.
        if moment.act is Act.GRADIENT:
            self.gradients.arrive(self._chunk_of[moment.which], moment.which)
        elif payloads.is_resident:
            return
        elif moment.act is Act.BEGIN:
            payloads.finish_ahead()
        elif moment.act is Act.READ:
            self._read(moment)
        elif moment.act is Act.ENTER:
            payloads.events.reach(moment.which, Phase.RECOMPUTE if self._in_backward else Phase.FORWARD)
            self._follow(moment)
            # Each chunk is pinned before the next one is fetched, which could evict it otherwise.
            for chunk in self._uses[moment.which]:
                self._fetch(chunk)
                payloads.pin(chunk)
            self._gather_ahead()
        else:
            payloads.unpin(self._uses[moment.which])

    def _read(self, moment: Moment) -> None:
        chunk = self._chunk_of[moment.which]
        # A payload whose home is the device is there already, unless the home holds the chunk's gradient.
        if self.payloads.at_home[chunk] and chunk not in self.homes.lent:
            return
        # As in a run, where a handle names the operator in whose forward the weight was saved.
        self.payloads.events.reach(moment.operator, Phase.BACKWARD)
        self._follow(moment)
        self._fetch(chunk)
        # Pinned before gathers are started ahead, which look for slots too.
        self._nodes.setdefault(moment.task, (moment.node, []))[1].append(chunk)
        self.payloads.pin(chunk)
        self._gather_ahead()

    def _follow(self, moment: Moment) -> None:
        """Unpin the chunks of the node that ran before this moment's node, and of tasks nested in it."""
        # A task of -1 is a forward, which runs no node.
        if moment.task < 0 or not self._nodes:
            return
        if moment.task not in self._nodes or self._nodes[moment.task][0] != moment.node:
            self._lift(moment.task)

    def _lift(self, task: int) -> None:
        # Tasks are numbered by depth, so those from `task` on are the ones that were started inside its node.
        for inner in [each for each in self._nodes if each >= task]:
            self.payloads.unpin(self._nodes.pop(inner)[1])

    def _fetch(self, chunk: int) -> None:
        payloads, homes = self.payloads, self.homes
        # A payload in a slot can be read while its home is lent. Without one the gradient has to leave the home.
        if not payloads.is_there(chunk):
            homes.reclaim(chunk)
        if payloads.at_home[chunk]:
            return
        payloads.next_use.touch(chunk)
        # Reductions that are due may take the home of this chunk's parameters for a gradient.
        if self._in_backward:
            self.gradients.before_touch()
            if not payloads.is_there(chunk):
                homes.reclaim(chunk)
        payloads.fetch(chunk)

    def _gather_ahead(self) -> None:
        for chunk in self.payloads.to_gather():
            self.homes.reclaim(chunk)
            self.payloads.gather_ahead(chunk)

    # -- an update

    def _num_updated(self, chunk: int, weights: set[int]) -> int:
        """The number of elements of the chunk that this rank updates: those of weights with a gradient."""
        facts = self._facts[chunk]
        if len(weights) == len(facts.names):
            return facts.optim_layout.shard_numel
        # A layout of one rank, as at stage 0, is that of every rank and knows rank 0 only.
        rank = self._rank if facts.optim_layout.world_size > 1 else 0
        rows = dict(zip(facts.names, facts.offsets, strict=True))
        specs = [self._plan.spec.weights[weight] for weight in weights]
        pieces = (facts.optim_layout.pieces(rank, rows[spec.name], spec.numel) for spec in specs)
        return sum(piece.numel for its in pieces for piece in its)

    def _update(self, chunk: int) -> None:
        """Copy what the update reads to the tier of the optimizer state, and what it writes back home."""
        facts, homes, traffic = self._facts[chunk], self._plan.placement.homes[chunk], self.traffic
        at, numel = homes[Kind.OPTIM], facts.optim_layout.shard_numel
        has_master = Kind.MASTER in homes
        if has_master:
            num_bytes = facts.master_itemsize * numel
            # The update reads and writes the master, so it travels both ways.
            traffic.copy(homes[Kind.MASTER], at, num_bytes, Purpose.UPDATE)
            traffic.copy(at, homes[Kind.MASTER], num_bytes, Purpose.UPDATE)
        num_bytes = facts.dtypes.weight.itemsize * numel
        # The update reads a weight only where that is the master, or the upper half of a split one. From a whole master
        # it writes the 16-bit weight without reading it.
        if not has_master or facts.splits_master:
            traffic.copy(homes[Kind.PARAM], at, num_bytes, Purpose.UPDATE)
        traffic.copy(at, homes[Kind.PARAM], num_bytes, Purpose.UPDATE)
        traffic.copy(self.homes.tier_of(chunk), at, self.homes.num_bytes(chunk), Purpose.UPDATE)

    def _make_whole(self, chunk: int) -> None:
        """Gather the updated parts of weights that every rank holds whole."""
        facts, home = self._facts[chunk], self._plan.placement.homes[chunk][Kind.PARAM]
        if home is Tier.HOST:
            # The gather needs memory on the device: a slot takes the place of the home.
            self.payloads.open_own_part(chunk)
        self.traffic.exchange(Exchange.WHOLE_WEIGHT, facts.payload_bytes)
        if home is Tier.HOST:
            # This rank's part is at home already, so only the parts of the other ranks are copied there.
            of_others = facts.layout.numel - facts.layout.shard_numel
            self.traffic.copy(Tier.DEVICE, home, of_others * facts.dtypes.weight.itemsize, Purpose.UPDATE)
