"""Where states rest if a config asks for the optimizer's on the host (DeepSpeed's `offload_optimizer`)."""

from gemini.placement.demand import Demand, Placement
from gemini.placement.policies import StaticPolicy, resolve_policy
from gemini.placement.policy import spend_rest


class OptimizerOnHostPolicy:
    """Optimizer state, masters and gradients rest on the host, where the update runs; parameters on the device.

    Where the device has no room for all parameters, the placement is that of "auto".
    """

    name = "optimizer_on_host"

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        """Raises BudgetError where "auto" does."""
        placement = StaticPolicy(offload_optim_frac=1.0).place(demand, None)
        if budget_bytes is not None and placement.device_bytes(demand) > budget_bytes:
            return resolve_policy("auto").place(demand, budget_bytes)
        return spend_rest(demand, placement, budget_bytes)
