"""What peft saves of a sharded model: adapters, without a look at the trunk, which stays in its chunks."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn


def is_adapted(model: nn.Module) -> bool:
    """Whether the model is one of peft's. Nothing is imported for the answer. Local."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def adapter_weights(model: Any) -> dict[str, Tensor]:
    """Whole copies in host memory of what peft saves of all adapters, under the names of `model.state_dict()`.

    model: a `PeftModel` whose parameters lie in chunks. Collective: peft runs prompt encoders, too.
    """
    peft = sys.modules["peft"]
    variables: dict[str, Tensor] = model.state_dict(keep_vars=True)  # gathers nothing
    saved: set[Tensor] = set()  # membership only
    for adapter in model.peft_config:
        saved.update(peft.get_peft_model_state_dict(model, state_dict=variables, adapter_name=adapter).values())
    # With `keep_vars` peft returns the parameters themselves, so they are told by identity. `copy=True` matters on a
    # CPU, where `to` alone would return memory that the next step changes.
    return {name: value.detach().to("cpu", copy=True) for name, value in variables.items() if value in saved}
