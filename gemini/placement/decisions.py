"""What has been decided for a model: the values of a plan, from which a step can be predicted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gemini.placement.budget import ACTIVATION_FRACTION, Budget
from gemini.placement.demand import Demand, Kind, ModelSpec, Placement, Tier
from gemini.placement.needs import uses_of
from gemini.placement.packing import Packing
from gemini.settings import Settings


@dataclass(frozen=True)
class Decisions:
    """All decisions for a model, as one value, equal on all ranks. `Plan` adds what follows from a predicted step.

    Args:
        spec: the description of the model.
        settings: what the user chose.
        world_size: the number of ranks.
        budget: model data that a rank's device and host may hold, in bytes.
        packing: the chunks, their size in bytes, and what the search for that size found.
        trained: whether each weight is trained, in the order of the chunks.
        demand: the bytes that each chunk needs on one rank.
        placement: the tier of each state of each chunk, and the number of slots.
        hash: a 32-bit hash of everything that decides the order of collectives, which ranks compare.
        is_first: the plan was made for wrapping, when the chunk size could still be chosen.
        offloaded: states that rest on the host until the model is used again, against the policy.
        infers: the plan treats all weights as frozen. Another plan replaces it when training begins.
        activation_fraction: of the device, which its budget leaves to activations until a step has measured them.
    """

    spec: ModelSpec
    settings: Settings
    world_size: int
    budget: Budget
    packing: Packing
    trained: tuple[bool, ...]
    demand: Demand
    placement: Placement
    hash: int
    is_first: bool = True
    offloaded: frozenset[Kind] = frozenset()
    infers: bool = False
    activation_fraction: float = ACTIVATION_FRACTION

    @property
    def policy(self) -> str:
        """The name of the placement policy."""
        return self.settings.policy.name

    @property
    def budget_bytes(self) -> int | None:
        """Model data that the device may hold on each rank. None: no bound."""
        return self.budget.device

    @cached_property
    def device_bytes(self) -> int:
        """Model data that the device holds at its peak on each rank."""
        return self.placement.device_bytes(self.demand)

    @property
    def bytes_by_tier(self) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """Bytes on device, host and disk, by kind of state."""
        device, host, disk = (self.placement.bytes_by_kind(self.demand, tier) for tier in Tier)
        return device, host, disk

    @property
    def spare_device_bytes(self) -> int | None:
        """What the plan leaves of the device's budget. None: there is no bound."""
        return None if self.budget.device is None else self.budget.device - self.device_bytes

    @cached_property
    def host_bytes(self) -> int:
        """Bytes at rest on the host on each rank."""
        return self.placement.host_bytes(self.demand)

    @cached_property
    def use_order(self) -> tuple[tuple[int, ...], ...]:
        """The chunks that each operator uses, by index, in the order in which a first forward is expected."""
        return uses_of(self.packing.chunks, self.spec)
