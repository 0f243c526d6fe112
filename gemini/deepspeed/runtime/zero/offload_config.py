"""What `DeepSpeedEngine.offload_states` takes, under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Container, Iterable
from enum import Enum

from gemini.placement.demand import Kind


class OffloadDeviceEnum(str, Enum):  # noqa: UP042  # as there: its members format as they do
    """Where states can go."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):  # noqa: UP042
    """The states that can leave the device.

    hp_params are the fp32 masters of 16-bit weights, lp_params the weights. The two kinds of gradient memory leave
    together.
    """

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


_KINDS = {
    OffloadStateTypeEnum.optim_states: Kind.OPTIM,
    OffloadStateTypeEnum.hp_params: Kind.MASTER,
    OffloadStateTypeEnum.lp_params: Kind.PARAM,
    OffloadStateTypeEnum.lp_grads: Kind.GRAD,
    OffloadStateTypeEnum.contiguous_grad_buffer: Kind.GRAD,
}


def kinds_of(include: Container[OffloadStateTypeEnum | str] | None) -> list[Kind]:
    """The kinds of state that `include` names; all for None. Raises ValueError for a name that is not in the enum."""
    # A container that cannot be iterated is asked below for each state, and its names stay unchecked.
    given: Iterable[OffloadStateTypeEnum | str] = include if isinstance(include, Iterable) else ()
    for name in given:
        # A list, because Python 3.11 raises TypeError for a string that is looked for in the class itself.
        if name not in list(OffloadStateTypeEnum):
            names = ", ".join(state.value for state in OffloadStateTypeEnum)
            raise ValueError(f"offload_states(include=...) has {name!r}, which is no state: name some of {names}")
    return [kind for state, kind in _KINDS.items() if include is None or state in include]
