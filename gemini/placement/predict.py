"""A simulated step, what it predicts, and that in words."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gemini.placement.budget import Budget
from gemini.placement.decisions import Decisions
from gemini.placement.demand import Demand, Kind, Placement, Tier, optimizer_tier, update_tier
from gemini.placement.next_use import Act, Events, Moment, PassKind, PassSchedule, Phase
from gemini.placement.packing import BYTES_PER_COLLECTIVE, ChunkFacts, Packing
from gemini.placement.payload_rules import PayloadRules
from gemini.placement.policies import (
    KINDS_IN_WORDS,
    Sizes,
    all_at_rest_on_device,
    all_on_device,
    difference_in_words,
    next_better,
    next_worse,
)
from gemini.placement.policy import PlacementPolicy, before_disk
from gemini.placement.simulate import Exchange, MoveReason, PayloadTraffic, Traffic
from gemini.placement.simulated_gradients import Gradients
from gemini.settings import Settings

# -- The simulation of a model's steps from its plan: every fetch, eviction, reduction and update, in numbers. Pure.
#
# `Simulation` follows a schedule as `runtime/step.py` follows the hooks. Payloads come and leave by the `PayloadRules`
# of a run. It opens and spills gradients by the same rules, and updates each chunk where its state rests.
# `tests/features/test_plan_is_the_run.py` compares both, byte by byte, in many random cases.


class Simulation:
    """One model on one rank, from the moment when it was wrapped.

    Args:
        plan: the plan of all simulated steps.
        schedule: the schedule of every micro-batch.
        rank: the simulated rank. Ranks differ where a chunk is updated only in part.
    """

    def __init__(self, plan: Decisions, schedule: PassSchedule, rank: int = 0) -> None:
        self.traffic = Traffic()
        self.events = Events()
        self.payloads = PayloadRules(plan.packing.chunks, self.events, plan.settings.prefetch_depth(plan.world_size))
        self.payloads.follow(plan.placement, plan.demand)
        self._counted = PayloadTraffic(plan, self.traffic)
        self.gradients = Gradients(plan, self.payloads, self.traffic, self._use, self._leave_node)
        self.places = self.gradients.places
        self._plan = plan
        self._schedule = schedule
        self._rank = rank
        self._facts: Sequence[ChunkFacts] = plan.packing.chunks
        self._optim_bytes = [chunk.home_bytes.get(Kind.OPTIM, 0) for chunk in plan.demand.chunks]
        self._uses = plan.use_order
        places = {name: (chunk.index, position) for chunk in self._facts for position, name in enumerate(chunk.names)}
        self._place_of = [places[weight.name] for weight in plan.spec.weights]  # (chunk, position)
        self._numel_of = {weight.name: weight.numel for weight in plan.spec.weights}
        self._num_updates = 0
        self._in_backward = False
        self._arriving_in: int | None = None  # the task in which a gradient arrives now

    @property
    def state(self) -> tuple[Hashable, ...]:
        """Everything that the next step depends on: steps that begin in equal states are equal."""
        # The flag stands for the traces and the order of reductions. The first step leaves them to all later ones,
        # because all follow one schedule.
        # Which slot a chunk is in does not matter: slots of one size are equal.
        there = frozenset(self.payloads.gathered), frozenset(self.payloads.nearby)
        return self._num_updates > 0, *there, self.places.state

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
        self.payloads.lift_nodes()
        self._in_backward = False
        self.gradients.end_backward()
        self.payloads.finish_ahead(self._counted)
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
        self.payloads.finish_ahead(self._counted)
        self.gradients.join_replicas()
        # Every payload is stale after the update, so all slots are free while it runs.
        for chunk, gradient in self.gradients.of.items():
            self.payloads.release(chunk)
            if not gradient.is_used:
                self.payloads.outdate(chunk)
        for chunk, gradient in self.gradients.of.items():
            if not any(gradient.got) or gradient.is_used:
                continue
            self.payloads.release(chunk)
            # A rank may hold no element of the weights that have a gradient. It updates nothing and restores a lent
            # home.
            if self._num_updated(chunk, gradient.got):
                # The update writes the new weights into their home, so nothing is left to restore there.
                self._update(chunk, self.places.tier_of(chunk), self.places.num_bytes(chunk))
                self.places.consumed(chunk)
            self.places.restore(chunk)
            # Each rank holds the weights whole and has updated only its part.
            if self._facts[chunk].home_layout.world_size < self._facts[chunk].optim_layout.world_size:
                self._make_whole(chunk)
        # A chunk that was reduced without any gradient is not updated, but its home may be lent all the same.
        for chunk in self.gradients.of:
            self.places.restore(chunk)
        self.gradients.end_step()

    # -- moments

    def _begin_forward(self) -> None:
        self.payloads.finish_ahead(self._counted)

    def _enter(self) -> None:
        if self.payloads.is_resident:
            self.payloads.gather_stale(self._counted)

    def _do(self, moment: Moment) -> None:
        payloads = self.payloads
        # Gradients arrive in any case. If everything is resident, nothing else happens inside a pass.
        if moment.act is Act.GRADIENT:
            self._arriving_in = max(0, moment.task)
            self.gradients.arrive(*self._place_of[moment.which])
            self._arriving_in = None
        elif payloads.is_resident:
            return
        elif moment.act is Act.BEGIN:
            payloads.finish_ahead(self._counted)
        elif moment.act is Act.READ:
            self._read(moment)
        elif moment.act is Act.ENTER:
            self.events.reach(moment.which, Phase.RECOMPUTE if self._in_backward else Phase.FORWARD)
            self._follow(moment)
            # Each chunk is pinned before the next one is fetched, which could evict it otherwise.
            for chunk in self._uses[moment.which]:
                self._fetch(chunk)
                payloads.pin(chunk)
            self._gather_ahead()
        else:
            payloads.unpin(self._uses[moment.which])

    def _read(self, moment: Moment) -> None:
        chunk, _ = self._place_of[moment.which]
        # A payload whose home is the device is there already, unless the home holds the chunk's gradient.
        # As in a run, where a handle names the operator in whose forward the weight was saved.
        if self.payloads.at_home[chunk] and not self.places.is_lent(chunk):
            if self._plan.world_size == 1:
                self.events.reach(moment.operator, Phase.BACKWARD)
                self._note_use(chunk)
            return
        self.events.reach(moment.operator, Phase.BACKWARD)
        self._follow(moment)
        self._fetch(chunk)
        # Pinned before gathers are started ahead, which look for slots too.
        self.payloads.pin_for_node(chunk, moment.task, moment.node)
        self._gather_ahead()

    def _follow(self, moment: Moment) -> None:
        # A task of -1 is a forward, which runs no node.
        if moment.task >= 0:
            self.payloads.follow_node(moment.task, moment.node)

    def _fetch(self, chunk: int) -> None:
        payloads, places = self.payloads, self.places
        # A payload in a slot can be read while its home is lent. Without one the gradient has to leave the home.
        if not payloads.is_there(chunk):
            places.reclaim(chunk)
        if payloads.at_home[chunk]:
            self._note_use(chunk)
            return
        payloads.touch(chunk)
        # Reductions that are due may take the home of this chunk's parameters for a gradient.
        if self._in_backward:
            self.gradients.before_touch()
            if not payloads.is_there(chunk):
                places.reclaim(chunk)
        payloads.fetch(chunk, self._counted)

    def _note_use(self, chunk: int) -> None:
        """One rank traces uses of chunks that never leave, too: it looks as many uses ahead."""
        if self._plan.world_size == 1:
            self.payloads.next_use.touch(chunk)

    def _gather_ahead(self) -> None:
        for chunk in self.payloads.to_gather(self._counted):
            self.places.reclaim(chunk)
            self.payloads.gather_ahead(chunk, self._counted)

    # -- an update

    def _num_updated(self, chunk: int, have_gradient: bytearray) -> int:
        """The number of elements of the chunk that this rank updates. have_gradient: by position of its weights."""
        facts = self._facts[chunk]
        if all(have_gradient):
            return facts.optim_layout.shard_numel
        # A layout of one rank, as at stage 0, is that of every rank and knows rank 0 only.
        rank = self._rank if facts.optim_layout.world_size > 1 else 0
        rows = zip(facts.names, facts.offsets, have_gradient, strict=True)
        pieces = (facts.optim_layout.pieces(rank, start, self._numel_of[name]) for name, start, has in rows if has)
        return sum(piece.numel for its in pieces for piece in its)

    def _use(self, chunk: int, gradient_bytes: int) -> None:
        """Update a chunk in the backward, with a gradient on the device."""
        self.payloads.release(chunk)
        self.payloads.outdate(chunk)
        if self._num_updated(chunk, self.gradients.of[chunk].fired):
            self._update(chunk, Tier.DEVICE, gradient_bytes)

    def _leave_node(self) -> None:
        # Inside a fetch they are lifted already.
        if self._arriving_in is not None:
            self.payloads.lift_nodes(self._arriving_in)

    def _update(self, chunk: int, gradient_is_at: Tier, gradient_bytes: int) -> None:
        """Copy what the update reads to the tier of the optimizer state, and what it writes back home."""
        facts, homes, traffic = self._facts[chunk], self._plan.placement.homes[chunk], self.traffic
        rests, numel = homes[Kind.OPTIM], facts.optim_layout.shard_numel
        at = update_tier(rests)
        num_bytes = self._optim_bytes[chunk]
        traffic.copy(rests, at, num_bytes, MoveReason.UPDATE)
        traffic.copy(at, rests, num_bytes, MoveReason.UPDATE)
        has_master = Kind.MASTER in homes
        if has_master:
            num_bytes = facts.master_itemsize * numel
            # The update reads and writes the master, so it travels both ways.
            traffic.copy(homes[Kind.MASTER], at, num_bytes, MoveReason.UPDATE)
            traffic.copy(at, homes[Kind.MASTER], num_bytes, MoveReason.UPDATE)
        num_bytes = facts.dtypes.weight.itemsize * numel
        # The update reads a weight only where that is the master, or the upper half of a split one. From a whole master
        # it writes the 16-bit weight without reading it.
        if not has_master or facts.splits_master:
            traffic.copy(homes[Kind.PARAM], at, num_bytes, MoveReason.UPDATE)
        traffic.copy(at, homes[Kind.PARAM], num_bytes, MoveReason.UPDATE)
        traffic.copy(gradient_is_at, at, gradient_bytes, MoveReason.UPDATE)

    def _make_whole(self, chunk: int) -> None:
        """Gather the updated parts of weights that every rank holds whole."""
        facts, home = self._facts[chunk], self._plan.placement.homes[chunk][Kind.PARAM]
        if home is Tier.HOST:
            # The gather needs memory on the device: a slot takes the place of the home.
            self.payloads.open_own_part(chunk, self._counted)
        self.traffic.exchange(Exchange.WHOLE_WEIGHT, facts.payload_bytes)
        if home is Tier.HOST:
            # This rank's part is at home already, so only the parts of the other ranks are copied there.
            of_others = facts.layout.numel - facts.layout.shard_numel
            self.traffic.copy(Tier.DEVICE, home, of_others * facts.dtypes.weight.itemsize, MoveReason.UPDATE)


# -- Predictions: the exact bytes that a step of a plan moves and holds, before anything has run.


@dataclass(frozen=True)
class Predicted:
    """One optimizer step, or one forward without gradients, on one rank.

    Args:
        copies: bytes that cross the link between the tiers, by link ("host->device", "device->host") and purpose.
        exchanged: launches and bytes of model data by what ranks exchange: a payload that is filled, or sent, counts
            with all of its bytes. Tags and flags are not counted.
        device_peak: peak bytes of model data on the device.
        host_peak: peak bytes of model data on the host.
        ahead_bytes: of the copies to the device, those of payloads that are fetched ahead, beside kernels.
    """

    copies: Mapping[tuple[str, MoveReason], int]
    exchanged: Mapping[Exchange, tuple[int, int]]
    device_peak: int
    host_peak: int
    ahead_bytes: int = 0

    @property
    def bytes_by_link(self) -> dict[str, int]:
        """Bytes over each link, for all purposes."""
        found: dict[str, int] = {}
        for (link, _), num_bytes in sorted(self.copies.items()):
            found[link] = found.get(link, 0) + num_bytes
        return found


def predict_steps(
    plan: Decisions,
    num_steps: int,
    *,
    schedule: PassSchedule | None = None,
    micro_batches: int | None = None,
    rank: int = 0,
) -> list[Predicted]:
    """Predict the first steps after a model was wrapped. A pure function: local.

    The first step differs from later ones because there is no trace yet: the least recently used chunk is evicted,
    nothing is gathered ahead, and ranks find out which gradients to expect.

    Args:
        plan: the plan of all these steps.
        num_steps: the number of steps.
        schedule: the schedule of each micro-batch. None: `PassSchedule.expected` of the model.
        micro_batches: backwards per step. None: as many as the plan is for.
        rank: the rank whose bytes are counted.
    """
    simulation = Simulation(plan, schedule or expected_schedule(plan), rank)
    return [_step(simulation, plan, micro_batches) for _ in range(num_steps)]


def predict(
    plan: Decisions, *, schedule: PassSchedule | None = None, micro_batches: int | None = None, rank: int = 0
) -> Predicted:
    """Predict the step that repeats, with the arguments of `predict_steps`. A pure function: local."""
    # Simulate until a step ends in the state in which it began.
    simulation = Simulation(plan, schedule or expected_schedule(plan), rank)
    # Where no step repeats exactly, the last of these stands for all later ones.
    for _ in range(_MOST_STEPS):
        before = simulation.state
        found = _step(simulation, plan, micro_batches)
        if simulation.state == before:
            break
    return found


def expected_schedule(plan: Decisions, recomputed: Sequence[str] = ()) -> PassSchedule:
    """`PassSchedule.expected` of the model and these modules, with the weights that the plan trains. Pure: local.

    They may differ from those that were trainable when the model was wrapped, which `plan.spec` records.
    """
    names = (name for chunk in plan.packing.chunks for name in chunk.names)
    trained = dict(zip(names, plan.trained, strict=True))
    # The flags of the plan are in the order of the chunks, and the spec has an order of its own, so weights are found
    # by name.
    weights = tuple(replace(weight, trainable=trained[weight.name]) for weight in plan.spec.weights)
    return PassSchedule.expected(replace(plan.spec, weights=weights), recomputed)


_MOST_STEPS = 4
"""Simulated until a step repeats: the first has no trace, the second begins with what the first left in the slots."""


def predict_forwards(plan: Decisions, num_forwards: int, *, schedule: PassSchedule | None = None) -> list[Predicted]:
    """Predict the first forwards without gradients after a model was wrapped. A pure function: local.

    Each forward begins with the chunks that the one before has left in the slots, so they may differ.

    Args:
        plan: the plan of all these forwards.
        num_forwards: the number of forwards.
        schedule: as for `predict_steps`; only its forward counts.
    """
    simulation = Simulation(plan, schedule or expected_schedule(plan))
    return [_forward(simulation, plan) for _ in range(num_forwards)]


def predict_inference(plan: Decisions, *, schedule: PassSchedule | None = None) -> Predicted:
    """Predict a forward without gradients, with the arguments of `predict_forwards`. A pure function: local."""
    # The first forwards differ: they begin with other chunks in the slots, and the very first one has no trace.
    return predict_forwards(plan, _MOST_STEPS, schedule=schedule)[-1]


def _step(simulation: Simulation, plan: Decisions, micro_batches: int | None) -> Predicted:
    for number in range(micro_batches or plan.demand.micro_batches):
        simulation.micro_batch(number + 1)
    simulation.update()
    return _taken(simulation, plan)


def _forward(simulation: Simulation, plan: Decisions) -> Predicted:
    simulation.infer()
    return _taken(simulation, plan)


def _taken(simulation: Simulation, plan: Decisions) -> Predicted:
    traffic, extra = simulation.traffic, simulation.places.take_peaks()
    exchanged = {what: (count, traffic.exchanged[what]) for what, count in sorted(traffic.launches.items())}
    # All that the plan counts is held throughout, so a peak is that and the most of what comes beyond the plan.
    found = Predicted(
        dict(sorted(traffic.copies.items())),
        exchanged,
        plan.device_bytes + extra[Tier.DEVICE],
        plan.host_bytes + extra[Tier.HOST],
        traffic.ahead_bytes,
    )
    traffic.clear()
    return found


# -- A plan in words: what was chosen and why, what moves in a step, the minimum and what would lower it.
#
# Each function takes numbers and yields sentences, one per line. Byte counts are exact and of one rank.


_NAMES = {
    Exchange.GATHER: "shards of weights",
    Exchange.NEARBY: "shards of weights inside the groups of a second copy",
    Exchange.REDUCE: "gradients",
    Exchange.REPLICAS: "sums of gradients over replicas",
    Exchange.MEAN_ACROSS: "sums of gradients across groups",
    Exchange.GATHER_ACROSS: "updated weights across groups",
    Exchange.WHOLE_GRADIENT: "reduced gradients",
    Exchange.WHOLE_WEIGHT: "updated weights",
}


def chunks_in_words(
    packing: Packing, stage: int, world_size: int, policy: str, infers: bool, is_first: bool, size: Sizes
) -> Iterator[str]:
    """The number of chunks, their size, and the reason for that size.

    is_first: the size was searched for the budgets of this plan, not for earlier ones.
    """
    num_weights = sum(len(chunk.names) for chunk in packing.chunks)
    num_oversize = sum(chunk.oversize for chunk in packing.chunks)
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    replicas = packing.chunks[0].layout.num_replicas if packing.chunks else 1
    if replicas > 1:
        ranks += f" ({replicas} replicas of {world_size // replicas} shards)"
    elif packing.chunks and packing.chunks[0].in_groups:
        groups = packing.chunks[0].num_groups
        ranks += f" ({groups} groups of {world_size // groups} that share weights and gradients; all share the states)"
    yield f"{num_weights} weights are planned for {ranks} at stage {stage} with tensor_placement_policy={policy!r}."
    if infers:
        yield (
            "This plan is for inference: nothing that only training needs has a place in it. Another plan comes in "
            "force when an optimizer is made, or with the first forward that builds a graph."
        )
    else:
        yield "This plan is for training."
    alone = f"; {num_oversize} of them are larger and hold one unit each" if num_oversize else ""
    yield f"They lie in {len(packing.chunks)} chunks of up to {size(packing.chunk_bytes)}{alone}."
    yield from _wires_in_words(packing)
    found = packing.searched
    if found is None:
        yield "This chunk size was given with chunk_size=."
        return
    # The size is fixed at wrapping, so a later plan has the one that was best under the budgets of that time.
    budgets = "these budgets" if is_first else "those of wrapping"
    yield (
        f"The search took this chunk size as the cheapest under {budgets}: "
        f"{size(found.padding_bytes)} of padding, {size(found.gathered_bytes)} in slots at the busiest moment, and "
        f"{found.num_collectives} collectives in a step, each counted as {size(BYTES_PER_COLLECTIVE)}."
    )


def _wires_in_words(packing: Packing) -> Iterator[str]:
    """What travels quantised, and in how many bits."""
    for what, layouts in (
        ("Weights", {chunk.fetch_layout for chunk in packing.chunks}),
        ("Gradients", {chunk.grad_layout for chunk in packing.chunks}),
    ):
        for bits in sorted({layout.wire.bits for layout in layouts if layout.wire is not None}):
            yield f"{what} travel in {bits} bits an element, which is approximate."


def states_in_words(demand: Demand, placement: Placement, budget: Budget, size: Sizes) -> Iterator[str]:
    """The bytes at rest on each tier, the slots, and the totals beside the budgets."""
    tiers = (Tier.DEVICE, Tier.HOST, Tier.DISK) if placement.disk_bytes(demand) else (Tier.DEVICE, Tier.HOST)
    for tier in tiers:
        rest = {kind: _at_rest(demand, placement, kind, tier) for kind in Kind}
        found = [f"{words} {size(rest[kind])}" for kind, words in KINDS_IN_WORDS.items() if rest[kind]]
        yield f"At rest on the {tier}: {', '.join(found) or 'nothing'}."
    if placement.kept:
        # The parameter home inside the slot is among the weights at rest, in the lines above.
        around = size(placement.around_bytes(demand))
        yield f"{len(placement.kept)} chunks keep a slot around their weights on the device: {around} more."
    for words, counts, sizes_bytes in (
        ("slot", placement.num_slots, demand.slot_bytes),
        ("gradient slot", placement.num_gradient_slots, demand.gradient_slot_bytes),
    ):
        pairs = zip(counts, sizes_bytes, strict=True)
        found = [f"{count} {words}{'s' * (count > 1)} of {size(each)}" for count, each in pairs if count]
        if found:
            yield f"The device has {' and '.join(found)}."
    if demand.scratch_bytes:
        yield f"Temporaries of reductions take {size(demand.scratch_bytes)} of the device."
        if demand.whole_scratch_bytes is not None:
            yield (
                "Gradients of the largest weights are exchanged in tiles, because the device has no room for the "
                f"{size(demand.whole_scratch_bytes)} that it takes to exchange them at once."
            )
    for tier, held, limit in (
        (Tier.DEVICE, placement.device_bytes(demand), budget.device),
        (Tier.HOST, placement.host_bytes(demand), budget.host),
        *([(Tier.DISK, placement.disk_bytes(demand), budget.disk)] if Tier.DISK in tiers else []),
    ):
        bound = "no budget was set" if limit is None else f"the budget is {size(limit)}"
        yield f"In all, the {tier} holds {size(held)}; {bound}."


def moves_in_words(demand: Demand, placement: Placement, world_size: int, infers: bool, size: Sizes) -> Iterator[str]:
    """The bytes that travel in each micro-batch and once in a step, or in each forward without gradients."""
    chunks = list(zip(demand.chunks, placement.homes, strict=True))
    from_host = [chunk for chunk, homes in chunks if homes[Kind.PARAM] is Tier.HOST]
    # `needs_slot` means that this rank has only a shard of the parameters.
    gathered = [chunk for chunk, _ in chunks if chunk.needs_slot]
    trained = [chunk for chunk, homes in chunks if Kind.GRAD in homes]
    grads = _at_rest(demand, placement, Kind.GRAD, Tier.HOST)
    # Weights travel to the update and back where they rest on another tier than the optimizer state.
    apart = [homes for _, homes in chunks if optimizer_tier(homes) is not homes[Kind.PARAM]]
    found = []
    if from_host:
        num_bytes = sum(chunk.home_bytes[Kind.PARAM] for chunk in from_host)
        found.append(f"Weights of {len(from_host)} chunks come from the host when they are used: {size(num_bytes)}.")
    if gathered:
        num_bytes = sum(chunk.payload_bytes for chunk in gathered)
        found.append(f"{len(gathered)} chunks are gathered from all ranks when they are used: {size(num_bytes)}.")
    if found and not infers:
        found.append("Backward fetches again what has left its slot since forward.")
    if world_size > 1 and trained:
        num_bytes = sum(chunk.payload_bytes for chunk in trained)
        found.append(f"Gradients of {len(trained)} chunks are exchanged with all ranks: {size(num_bytes)}.")
    if grads:
        found.append(f"Reduced gradients go to the host: {size(grads)}.")
    if apart:
        found.append(f"Of {len(apart)} chunks the update runs on the other tier: weights go there and back.")
    yield from found or [f"Nothing moves in a {'forward' if infers else 'step'}."]


def predicted_in_words(predicted: Predicted, micro_batches: int, infers: bool, size: Sizes) -> Iterator[str]:
    """The exact bytes of a predicted step. `Plan.predicted` says which assumptions make it exact.

    micro_batches: the number that the step was predicted with. infers: `predicted` is a forward without gradients.
    """
    step = f"a step of {micro_batches} micro-batches" if micro_batches > 1 else "a step"
    # A plan for inference predicts a forward without gradients, which has no micro-batches.
    step = "a forward" if infers else step
    links = predicted.bytes_by_link
    both = (("host->device", "from the host to the device"), ("device->host", "from the device to the host"))
    found = [f"{size(links[link])} {words}" for link, words in both if links.get(link)]
    if found:
        yield f"In all, {step} copies {' and '.join(found)}."
    launches = [
        f"{count} times {_NAMES[what]}, {size(num_bytes)} in all"
        for what, (count, num_bytes) in sorted(predicted.exchanged.items())
    ]
    if launches:
        yield f"Ranks exchange in {step}: {'; '.join(launches)}."


def budgets_in_words(
    demand: Demand, placement: Placement, budget: Budget, policy: PlacementPolicy, size: Sizes
) -> Iterator[str]:
    """The changes that a larger and a smaller device budget would bring, with these chunks."""
    # Policies know of no disk, which takes what they put onto the host.
    placement = before_disk(placement)
    held, there = placement.device_bytes(demand), budget.device
    # From this budget on the policy uses no more.
    everything = all_on_device(demand, policy)
    most = None if everything is None else everything.budget_bytes
    if most is None:
        yield "The policy does not say what it would do without a budget."
    elif there is None or there >= most:
        yield "More room on the device would change nothing."
    else:
        # States at rest need less than that: what is left then buys slots.
        at_rest = all_at_rest_on_device(demand, policy)
        better = next_better(demand, placement, there, policy)
        if better is not None:
            changes = difference_in_words(demand, placement, better, size)
            yield f"The next larger budget that helps is {size.at_least(better.budget_bytes)}: then {changes}."
        # With exchanges in tiles everything may rest there already, on less than it takes with exchanges at once.
        if at_rest is not None and at_rest > there and placement.host_bytes(demand):
            yield f"With a budget of {size.at_least(at_rest)} everything would rest on the device."
        yield f"With {size.at_least(most)} nothing would have to leave a slot; still more would change nothing."
    # The first change comes one byte below what the placement takes, not below the budget: what is not used can go
    # first.
    worse = next_worse(demand, placement, policy)
    changes = "there would be no placement" if worse is None else difference_in_words(demand, placement, worse, size)
    yield f"This plan takes {size.at_least(held)} of the device; a budget of that size changes nothing."
    yield f"With less, {changes}."


def other_choices(settings: Settings, is_first: bool) -> Iterator[tuple[str, Settings]]:
    """Changes of settings that may lower the minimum: each in words, with the settings that result.

    Existing chunks keep their size, so after wrapping each change means to wrap the model again.
    """
    # The words begin a sentence, which `minimum_in_words` ends.
    again = "" if is_first else "Wrapping again with "
    if not is_first:
        yield "Wrapping again", settings
    if settings.chunk_size is not None:
        yield f"{again}chunk_size=None", replace(settings, chunk_size=None)
    if settings.policy.name != "auto":
        yield f"{again}tensor_placement_policy='auto'", settings.with_policy("auto")


def minimum_in_words(
    minimum: int | None,
    others: Mapping[str, int | None],
    largest: tuple[str, int],
    infers: bool,
    is_first: bool,
    size: Sizes,
) -> Iterator[str]:
    """The least model data that the device must hold, in bytes, and what would lower it.

    others: the minimum after each change of `other_choices`. largest: the operator with the most bytes in slots, and
    these bytes. is_first: the chunk size can still change.
    """
    if minimum is None:
        yield "The policy does not say what its minimum is."
        return
    cannot = f"with a smaller budget the model cannot {'infer' if infers else 'train'}"
    the = "The" if is_first else "With these chunks the"
    yield f"{the} minimum of model data on the device is {size.at_least(minimum)}: {cannot}."
    # A user's policy may not say its minimum: then it cannot be compared.
    lower = {words: least for words, least in others.items() if least is not None and least < minimum}
    for words, least in lower.items():
        yield f"{words} would lower it to {size.at_least(least)}."
    if not lower:
        choices = "No other chunk size and no other policy" if is_first else "No wrapping with other chunks or policy"
        yield (
            f"{choices} lowers it. Smaller operators do: the largest is {largest[0]!r}, with {size(largest[1])} in "
            "slots."
        )


def _at_rest(demand: Demand, placement: Placement, kind: Kind, tier: Tier) -> int:
    return sum(
        chunk.home_bytes[kind]
        for chunk, homes in zip(demand.chunks, placement.homes, strict=True)
        if homes.get(kind) is tier
    )
