"""Where states rest if a config asks for the optimizer's on the host (DeepSpeed's `offload_optimizer`)."""

from dataclasses import dataclass

from gemini.placement.demand import Demand, Placement
from gemini.placement.policies import StaticPolicy, resolve_policy
from gemini.placement.policy import spend_rest


def offloads_params(policy: object) -> bool:
    """A config's policy puts all parameters onto the host."""
    return policy == "cpu" or (isinstance(policy, OptimizerOnHostPolicy) and policy.offloads_params)


@dataclass(frozen=True)
class OptimizerOnHostPolicy:
    """Optimizer state, masters and gradients rest on the host, where the update runs; parameters on the device.

    Where the device has no room for the rest, the placement is that of "auto", or of "cpu" with parameters on the host.

    Args:
        ratio: of the bytes of masters and moments, from the last chunk on. The rest is updated on the device.
        offloads_params: parameters rest on the host, too.
    """

    ratio: float = 1.0
    offloads_params: bool = False

    @property
    def name(self) -> str:
        """The name with the ratio, so that ranks with different ratios have different plan hashes."""
        words = [f"ratio={self.ratio}"] if self.ratio < 1 else []
        words += ["offloads_params"] if self.offloads_params else []
        return f"optimizer_on_host({', '.join(words)})" if words else "optimizer_on_host"

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        """Raises BudgetError where "auto" or "cpu" does."""
        policy = StaticPolicy(offload_optim_frac=self.ratio, offload_param_frac=float(self.offloads_params))
        # No budget is given: a placement that does not fit is no error yet, since another policy follows.
        placement = policy.place(demand, None)
        if budget_bytes is not None and placement.device_bytes(demand) > budget_bytes:
            return resolve_policy("cpu" if self.offloads_params else "auto").place(demand, budget_bytes)
        # What the budget leaves becomes slots, which save fetches.
        return spend_rest(demand, placement, budget_bytes)
