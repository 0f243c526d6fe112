"""What a step of a plan moves and holds, known before any of it has happened: bytes, exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gemini.placement.demand import Tier
from gemini.placement.schedule import Schedule
from gemini.placement.simulate import Simulation
from gemini.placement.traffic import Exchange, Purpose

if TYPE_CHECKING:
    from gemini.placement.plan import Plan


@dataclass(frozen=True)
class Predicted:
    """One optimizer step, or one forward without gradients, on one rank.

    Args:
        copies: bytes that cross the link between the tiers, by link ("host->device", "device->host") and purpose.
        exchanged: launches and bytes of model data by what ranks exchange: a payload that is filled, or sent, counts
            with all of its bytes. What ranks only compare is not in it.
        device_peak: bytes of model data on the device at most.
        host_peak: bytes of model data on the host at most.
    """

    copies: Mapping[tuple[str, Purpose], int]
    exchanged: Mapping[Exchange, tuple[int, int]]
    device_peak: int
    host_peak: int

    @property
    def bytes_by_link(self) -> dict[str, int]:
        """Bytes over each link, for all purposes."""
        found: dict[str, int] = {}
        for (link, _), num_bytes in sorted(self.copies.items()):
            found[link] = found.get(link, 0) + num_bytes
        return found


def predict_steps(
    plan: Plan, num_steps: int, *, schedule: Schedule | None = None, micro_batches: int | None = None, rank: int = 0
) -> list[Predicted]:
    """The first steps after a model was wrapped. A pure function: local.

    The first one differs from the others where the order of uses is not known yet: chunks leave in the order of their
    last use, nothing is gathered ahead, and ranks find out which gradients to expect.

    Args:
        plan: in force all the time.
        num_steps: how many.
        schedule: what a micro-batch does. None: as `Schedule.expected` of the model.
        micro_batches: backwards a step. None: as many as the plan is for.
        rank: the one that is looked at.
    """
    simulation = Simulation(plan, schedule or expected_schedule(plan), rank)
    return [_step(simulation, plan, micro_batches) for _ in range(num_steps)]


def predict(
    plan: Plan, *, schedule: Schedule | None = None, micro_batches: int | None = None, rank: int = 0
) -> Predicted:
    """A step like all that follow, as for `predict_steps`. A pure function: local."""
    simulation = Simulation(plan, schedule or expected_schedule(plan), rank)
    for _ in range(_MOST_STEPS):
        before = simulation.state
        found = _step(simulation, plan, micro_batches)
        if simulation.state == before:
            break
    return found


def expected_schedule(plan: Plan, recomputed: Sequence[str] = ()) -> Schedule:
    """As `Schedule.expected` of the model and these modules, with gradients of what the plan trains.

    That may be other weights than when the model was wrapped. A pure function: local.
    """
    names = (name for chunk in plan.packing.chunks for name in chunk.names)
    trained = dict(zip(names, plan.trained, strict=True))
    weights = tuple(replace(weight, trainable=trained[weight.name]) for weight in plan.spec.weights)
    return Schedule.expected(replace(plan.spec, weights=weights), recomputed)


_MOST_STEPS = 4
"""The first step finds the order of uses, the second begins with what that left in the slots."""


def predict_forwards(plan: Plan, num_forwards: int, *, schedule: Schedule | None = None) -> list[Predicted]:
    """The first forwards without gradients after a model was wrapped, one after the other. A pure function: local.

    Which chunks one finds in the slots depends on where the one before has left it: they need not be alike.

    Args:
        plan: in force all the time.
        num_forwards: how many.
        schedule: as for `predict_steps`; only its forward counts.
    """
    simulation = Simulation(plan, schedule or expected_schedule(plan))
    return [_forward(simulation, plan) for _ in range(num_forwards)]


def predict_inference(plan: Plan, *, schedule: Schedule | None = None) -> Predicted:
    """A forward without gradients like those that follow, as for `predict_forwards`. A pure function: local."""
    return predict_forwards(plan, _MOST_STEPS, schedule=schedule)[-1]


def _step(simulation: Simulation, plan: Plan, micro_batches: int | None) -> Predicted:
    for number in range(micro_batches or plan.demand.micro_batches):
        simulation.micro_batch(number + 1)
    simulation.update()
    return _taken(simulation, plan)


def _forward(simulation: Simulation, plan: Plan) -> Predicted:
    simulation.infer()
    return _taken(simulation, plan)


def _taken(simulation: Simulation, plan: Plan) -> Predicted:
    traffic, extra = simulation.traffic, simulation.homes.take_peaks()
    exchanged = {what: (count, traffic.exchanged[what]) for what, count in sorted(traffic.launches.items())}
    found = Predicted(
        dict(sorted(traffic.copies.items())),
        exchanged,
        plan.device_bytes + extra[Tier.DEVICE],
        plan.host_bytes + extra[Tier.HOST],
    )
    traffic.clear()
    return found
