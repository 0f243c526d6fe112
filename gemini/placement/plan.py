"""The plan of a model: how it is cut into chunks, where their states rest, and the least budget.

Plans are made by pure functions: the same specs, settings, number of ranks and free bytes give the same plan, in any
process. They read no memory and ask no other rank. `search.py` makes the first plan of a model and chooses the chunk
size, `ShardedModel` carries it out, `estimate_memory` adds up its bytes, and `replan` follows a change of what is
trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gemini.placement import predict as explain
from gemini.placement.decisions import Decisions
from gemini.placement.demand import Kind, ModelSpec
from gemini.placement.needs import packing_demand, trained_at_first
from gemini.placement.packing import Packing, packings
from gemini.placement.policies import Sizes, least_device_bytes
from gemini.placement.predict import Predicted, predict, predict_inference
from gemini.settings import Settings


@dataclass(frozen=True)
class Plan(Decisions):
    """All decisions for a model, as one value, equal on all ranks. Another set of trained weights has another plan.

    `plan_model`, `plan_inference` and `replan` make plans; `model.plan` and `estimate_memory(...).plan` show them.

    The arguments are those of `Decisions`.
    """

    @cached_property
    def minimum_bytes(self) -> int | None:
        """The least `model_data_memory` with which there is a plan, given a host with room for the rest.

        The minimum over all chunk sizes, unless the settings name one or the chunks exist already. None if a user's
        policy refuses without saying what it needs.
        """
        if self.is_first:
            return least_of_all_packings(self.spec, self.settings, self.world_size, self.infers, self._most_states)
        return self.packed_minimum_bytes

    @property
    def _most_states(self) -> float:
        return max((chunk.optim_states for chunk in self.demand.chunks), default=0)

    @cached_property
    def packed_minimum_bytes(self) -> int | None:
        """The least `model_data_memory` for the chunks of this plan. None: likewise."""
        return least_device_bytes(self.demand, self.settings.policy)

    @cached_property
    def predicted_unannounced(self) -> Predicted:
        """`predicted`, of a step with one backward more than the plan is for."""
        return predict(self, micro_batches=self.demand.micro_batches + 1)

    @cached_property
    def predicted(self) -> Predicted:
        """The bytes that each training step moves and holds; of a plan for inference, those of each forward.

        A step has `gradient_accumulation_steps` micro-batches, or as many as earlier steps have shown, at first one.
        Exact for rank 0 of a model whose operators run once each, in order, and whose backward reads all weights behind
        the first trained operator. `gemini.placement.predict` takes a recorded schedule for other models.
        """
        return predict_inference(self) if self.infers else predict(self)

    def explain(self) -> str:
        """The plan in sentences, one per line, with sizes of one rank, all in one unit.

        They tell what was chosen and why, where states rest, what a step moves, what another budget would change, and
        the minimum.

        Local; raises nothing.
        """
        settings, demand = self.settings, self.demand
        if not demand.chunks:
            return "No weights are planned: nothing rests on the device or on the host, and nothing moves."
        # Each of these packs the model again, as a rule with many chunk sizes, so they are computed only for this text.
        others = {
            words: least_of_all_packings(self.spec, changed, self.world_size, self.infers, self._most_states)
            for words, changed in explain.other_choices(settings, self.is_first)
        }
        # The operator whose chunks take the most slot bytes bounds the minimum: it needs all of them at once.
        slot_bytes = [
            sum(demand.slot_bytes[demand.chunks[index].oversize] for index in chunks) for chunks in self.use_order
        ]
        at = max(range(len(slot_bytes)), key=slot_bytes.__getitem__)
        size = Sizes(max(self.device_bytes, self.host_bytes))
        lines = [
            *explain.chunks_in_words(
                self.packing, settings.stage, self.world_size, self.policy, self.infers, self.is_first, size
            ),
            *explain.states_in_words(demand, self.placement, self.budget, size),
            *explain.moves_in_words(demand, self.placement, self.world_size, self.infers, size),
            *explain.predicted_in_words(self.predicted, demand.micro_batches, self.infers, size),
            *explain.budgets_in_words(demand, self.placement, self.budget, settings.policy, size),
            *explain.minimum_in_words(
                self.minimum_bytes,
                others,
                (self.spec.operators[at].name or "the model", slot_bytes[at]),
                self.infers,
                self.is_first,
                size,
            ),
        ]
        return "\n".join(lines)


def kept_at_first(spec: ModelSpec, packing: Packing) -> dict[int, frozenset[Kind]]:
    """The masters that even inference must keep: those that hold more than the 16-bit weights rounded from them."""
    # The masters of all other weights can be made from the weights when training begins.
    exact = {weight.name for weight in spec.weights if weight.trainable and weight.is_rounded}  # membership only
    masters = frozenset((Kind.MASTER,))
    return {chunk.index: masters for chunk in packing.chunks if not exact.isdisjoint(chunk.names)}


def least_of_all_packings(
    spec: ModelSpec, settings: Settings, world_size: int, infers: bool, optim_states: float
) -> int | None:
    """The least bytes of model data that the device needs, over all chunk sizes that may be chosen. Local.

    infers: for inference, else for training with an optimizer that keeps `optim_states` states per element. None: a
    user's policy does not say it.
    """
    found = []
    for packing in packings(spec, settings, world_size):
        # This is the minimum of a model that is being wrapped, in which frozen chunks have no states to keep.
        trained, kept = trained_at_first(spec, packing), {}
        if infers:
            trained, kept = [False] * len(trained), kept_at_first(spec, packing)
        states = [optim_states] * len(packing.chunks)
        demand = packing_demand(packing, spec, trained, kept, settings, world_size, optim_states=states)
        found.append(least_device_bytes(demand, settings.policy))
    # A user's policy may name its least for some sizes only.
    return min((num_bytes for num_bytes in found if num_bytes is not None), default=None)
