"""All packings of one model with what each asks of memory, made once for plans under any budgets and policy.

Neither a packing nor its demand depends on budgets or on the policy, and both take most of the time of a plan. Whoever
plans one model several times (`gemini plan` tries each change before it advises it) passes the same `Packed` along.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gemini.placement.chunk_facts import Packing, packings
from gemini.placement.demand import OPTIM_STATES, Demand, Kind
from gemini.placement.needs import demand_of
from gemini.placement.specs import ModelSpec
from gemini.settings import Settings


class Packed:
    """The packings of `spec`, each with its demand for training on an unbounded host, the cheapest first.

    A packing is made when an iteration first comes to it, and kept for the iterations after.
    """

    def __init__(self, spec: ModelSpec, settings: Settings, world_size: int) -> None:
        """settings: all count but for the budgets and the policy."""
        self.spec = spec
        self.world_size = world_size
        self._settings = settings
        # A generator: sizes that no search comes to are never packed.
        self._unmade = packings(spec, settings, world_size)
        self._made: list[Packing] = []
        self._demanded: dict[int, list[tuple[Packing, Demand]]] = {}  # by states per element

    def __iter__(self) -> Iterator[tuple[Packing, Demand]]:
        """Iterate over `with_states` of Adam. Raises ValueError if the shard strategy loses or repeats a weight."""
        return self.with_states(OPTIM_STATES)

    def with_states(self, optim_states: int) -> Iterator[tuple[Packing, Demand]]:
        """The packings with their demands for an optimizer that keeps so many states per element. Raises likewise."""
        demanded = self._demanded.setdefault(optim_states, [])
        place = 0
        # Several iterations share these lists, and another one may have gone further, so nothing is made twice.
        while place < len(self._made) or self._makes_one_more():
            if place == len(demanded):
                packing = self._made[place]
                demanded.append((packing, self._demand_of(packing, optim_states)))
            yield demanded[place]
            place += 1

    def _makes_one_more(self) -> bool:
        packing = next(self._unmade, None)
        if packing is not None:
            self._made.append(packing)
        return packing is not None

    def _demand_of(self, packing: Packing, optim_states: int) -> Demand:
        trained, states = trained_at_first(self.spec, packing), [optim_states] * len(packing.chunks)
        # The host's budget is left out, because it is in no byte of the demand: `find_plans` adds it.
        return packing_demand(packing, self.spec, trained, {}, self._settings, self.world_size, optim_states=states)


def packing_demand(
    packing: Packing,
    spec: ModelSpec,
    trained: Sequence[bool],
    kept: Mapping[int, frozenset[Kind]],
    settings: Settings,
    world_size: int,
    max_host_bytes: int | None = None,
    micro_batches: int = 1,
    optim_states: Sequence[int] | None = None,
) -> Demand:
    """`demand_of` the chunks of `packing`. settings: all count but for the budgets and the policy."""
    # A number in the settings holds for all steps. Without one the plan counts as many micro-batches as steps have
    # shown.
    return demand_of(
        packing.chunks,
        spec,
        trained,
        kept,
        settings.stage,
        world_size,
        settings.max_live_parameters,
        micro_batches=settings.gradient_accumulation_steps or micro_batches,
        max_host_bytes=max_host_bytes,
        optim_states=optim_states,
    )


def trained_at_first(spec: ModelSpec, packing: Packing) -> list[bool]:
    """Whether each weight is trained when the model is wrapped, in the order of the chunks."""
    # `demand_of` takes the flags chunk by chunk, and packing may put weights in another order than the spec has.
    trainable = {weight.name: weight.trainable for weight in spec.weights}
    return [trainable[name] for chunk in packing.chunks for name in chunk.names]
