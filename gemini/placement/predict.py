"""Predictions: the exact bytes that a step of a plan moves and holds, before anything has run."""

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
            with all of its bytes. Tags and flags are not counted.
        device_peak: peak bytes of model data on the device.
        host_peak: peak bytes of model data on the host.
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
    """Predict the first steps after a model was wrapped. A pure function: local.

    The first step differs from later ones because there is no trace yet: the least recently used chunk is evicted,
    nothing is gathered ahead, and ranks find out which gradients to expect.

    Args:
        plan: the plan of all these steps.
        num_steps: the number of steps.
        schedule: the schedule of each micro-batch. None: `Schedule.expected` of the model.
        micro_batches: backwards per step. None: as many as the plan is for.
        rank: the rank whose bytes are counted.
    """
    simulation = Simulation(plan, schedule or expected_schedule(plan), rank)
    return [_step(simulation, plan, micro_batches) for _ in range(num_steps)]


def predict(
    plan: Plan, *, schedule: Schedule | None = None, micro_batches: int | None = None, rank: int = 0
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


def expected_schedule(plan: Plan, recomputed: Sequence[str] = ()) -> Schedule:
    """`Schedule.expected` of the model and these modules, with the weights that the plan trains. Pure: local.

    They may differ from those that were trainable when the model was wrapped, which `plan.spec` records.
    """
    names = (name for chunk in plan.packing.chunks for name in chunk.names)
    trained = dict(zip(names, plan.trained, strict=True))
    # The flags of the plan are in the order of the chunks, and the spec has an order of its own, so weights are found
    # by name.
    weights = tuple(replace(weight, trainable=trained[weight.name]) for weight in plan.spec.weights)
    return Schedule.expected(replace(plan.spec, weights=weights), recomputed)


_MOST_STEPS = 4
"""Simulated until a step repeats: the first has no trace, the second begins with what the first left in the slots."""


def predict_forwards(plan: Plan, num_forwards: int, *, schedule: Schedule | None = None) -> list[Predicted]:
    """Predict the first forwards without gradients after a model was wrapped. A pure function: local.

    Each forward begins with the chunks that the one before has left in the slots, so they may differ.

    Args:
        plan: the plan of all these forwards.
        num_forwards: the number of forwards.
        schedule: as for `predict_steps`; only its forward counts.
    """
    simulation = Simulation(plan, schedule or expected_schedule(plan))
    return [_forward(simulation, plan) for _ in range(num_forwards)]


def predict_inference(plan: Plan, *, schedule: Schedule | None = None) -> Predicted:
    """Predict a forward without gradients, with the arguments of `predict_forwards`. A pure function: local."""
    # The first forwards differ: they begin with other chunks in the slots, and the very first one has no trace.
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
    # All that the plan counts is held throughout, so a peak is that and the most of what comes beyond the plan.
    found = Predicted(
        dict(sorted(traffic.copies.items())),
        exchanged,
        plan.device_bytes + extra[Tier.DEVICE],
        plan.host_bytes + extra[Tier.HOST],
    )
    traffic.clear()
    return found
