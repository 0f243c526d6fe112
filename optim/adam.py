"""`HybridAdam` and `CPUAdam`: Adam and AdamW as ordinary optimizers, in the order of `optim.reference`.

The state of a parameter has torch's format (`step`, `exp_avg`, `exp_avg_sq`), so state dicts can be exchanged with
`torch.optim.AdamW` and `Adam`. A bf16 or fp16 parameter has a further state, its fp32 `master`. It is copied from the
parameter at the first update; each update changes the master and rounds it into the parameter (see `optim.master`).
Moments are fp32 unless `state_dtype` says otherwise (see `optim.formats`); state dicts have them in fp32 in any case.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from optim.dispatch import update_pieces
from optim.formats import FORMATS, FP32, StateFormat, checked_bits, format_named, format_of_tensor
from optim.piece import (
    BLOCK,
    HALF_DTYPES,
    AdamPiece,
    adam_scalars,
    in_memory_order,
    is_dense,
    write_in_memory_order,
)

# -- Adam's hyperparameters: their valid values, and the errors for others.
#
# They are checked where they are given (constructor, `add_param_group`, `load_state_dict`) and again at every step,
# because schedulers and users write into param groups. A learning rate may be a one-element tensor, as in torch.


class AdamHyperparameters(TypedDict):
    """The keyword arguments of `adam_scalars` that a param group fixes."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    adamw_mode: bool
    bias_correction: bool
    maximize: bool


def hyperparameters(group: Mapping[str, Any]) -> AdamHyperparameters:
    """The keyword arguments of `adam_scalars` from a param group, checked, as plain numbers.

    Raises ValueError for an invalid hyperparameter.
    """
    # Groups of torch's optimizers have the key, and so may those of a state dict.
    if group.get("amsgrad"):
        raise ValueError("amsgrad must be False, found True: the maximum of past second moments is not kept")
    checked_bits(group.get("optim_bits"))
    beta1, beta2 = _pair(group["betas"])
    return AdamHyperparameters(
        lr=_number("lr", group["lr"]),
        betas=(_number("betas[0]", beta1, 1.0), _number("betas[1]", beta2, 1.0)),
        eps=_number("eps", group["eps"]),
        weight_decay=_number("weight_decay", group["weight_decay"]),
        adamw_mode=_flag("adamw_mode", group["adamw_mode"]),
        bias_correction=_flag("bias_correction", group["bias_correction"]),
        maximize=_flag("maximize", group["maximize"]),
    )


def refuse_unknown_arguments(owner: str, unknown: Iterable[str], valid: Iterable[str]) -> None:
    """Raise a TypeError that names the first unknown argument and the valid name nearest to it."""
    valid = list(valid)
    for name in unknown:
        # With a cutoff of 0 there is always a nearest name.
        nearest = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)
        raise TypeError(
            f"{owner}() has no argument {name!r}; the nearest valid name is {nearest[0]!r} (valid: {', '.join(valid)})"
        )


def _number(name: str, value: object, limit: float = math.inf) -> float:
    number = _real(value)
    # False for NaN and, with a limit of infinity, for infinity: both are refused.
    if number is None or not 0.0 <= number < limit:
        valid = "finite number >= 0" if limit == math.inf else f"number with 0 <= {name} < {limit:g}"
        raise ValueError(f"{name} must be a {valid}, found {value!r}")
    return number


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, found {value!r}")
    return value


def _pair(value: object) -> tuple[object, object]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"betas must be a pair of numbers, found {value!r}")
    return value[0], value[1]


def _real(value: object) -> float | None:
    if isinstance(value, Tensor):
        # For a learning rate on a device the host waits here, once a group and step.
        return float(value) if value.numel() == 1 and not value.is_complex() else None
    # float() accepts NumPy's scalars. It would also accept strings, which are not numbers.
    if isinstance(value, (str, bytes, bool)):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


# -- `HybridAdam` and `CPUAdam`: Adam and AdamW as ordinary optimizers, in the order of `optim.reference`.
#
# The state of a parameter has torch's format (`step`, `exp_avg`, `exp_avg_sq`), so state dicts can be exchanged with
# `torch.optim.AdamW` and `Adam`. A bf16 or fp16 parameter has a further state, its fp32
# `master`. It is copied from the parameter at the first update; each update changes the master and rounds it into the
# parameter (see `optim.master`).


FP32_STATES = ("exp_avg", "exp_avg_sq", "master")
ARGUMENTS = ("params", "lr", "betas", "eps", "weight_decay", "adamw_mode", "bias_correction", "maximize", "state_dtype")
MOMENTS = ("exp_avg", "exp_avg_sq")
ON_DISK = ("nvme_offload_fraction", "nvme_offload_dir")
"""Colossal-AI's arguments for a `ShardedOptimizer` whose states rest on a disk."""


class HybridAdam(Optimizer):
    """Adam and AdamW in one written order of operations, with the same bits on every device and in every chunking.

    An ordinary optimizer for plain models (local), and the one that `ShardedOptimizer` runs fastest. State dicts have
    torch's format. fp16 and bf16 parameters have fp32 masters. A parameter without a gradient does not move, and its
    step count does not advance.

    Args:
        params: parameters or param groups, on any device, fp32, bf16 or fp16.
        lr: learning rate.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: coefficient of the weight decay.
        adamw_mode: True decouples the weight decay (AdamW); False adds it to the gradient (Adam with L2).
        bias_correction: whether moments are corrected for their start at zero.
        maximize: whether to ascend.
        state_dtype: of both moments: None or torch.float32; torch.bfloat16, rounded to nearest even; and of tensors of
            at least 4,096 elements "bf16_stochastic", rounded at random without bias, or "8bit" (blockwise dynamic
            quantisation). All but fp32 are approximations, and the same bits wherever states rest. A param group's
            `optim_bits` (8 or 32) overrides it for its tensors. A `ShardedOptimizer` keeps embeddings in 32 bits, if
            it is "8bit" and their group says nothing; here no module is known.
        nvme_offload_fraction: of masters and moments, on the disk; Colossal-AI's name. A sharded model rests there as
            after `ShardedModel(..., disk_path=, disk_optim_frac=)`. A plain model's states stay where they are.
        nvme_offload_dir: the folder for it.

    Raises TypeError or ValueError for arguments that are not valid. `step` raises ValueError for a parameter of another
    dtype and RuntimeError for a sparse gradient, before anything moves.

    Example:
        >>> optimizer = HybridAdam(torch.nn.Linear(8, 8).parameters(), lr=1e-3, weight_decay=0.01)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adamw_mode: bool = True,
        bias_correction: bool = True,
        maximize: bool = False,
        state_dtype: str | torch.dtype | None = None,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
        **unknown: object,
    ) -> None:
        refuse_unknown_arguments(type(self).__name__, unknown, (*ARGUMENTS, *ON_DISK))
        fraction = _real(nvme_offload_fraction)
        if fraction is None or not 0.0 <= fraction <= 1.0:
            raise ValueError(f"nvme_offload_fraction must be a number from 0 to 1, found {nvme_offload_fraction!r}")
        if fraction and nvme_offload_dir is None:
            raise ValueError(f"nvme_offload_fraction={fraction:g} needs nvme_offload_dir=, a folder on a local disk")
        self.state_format: StateFormat = FP32 if state_dtype is None else format_named(state_dtype)
        self.nvme_offload_fraction, self.nvme_offload_dir = fraction, nvme_offload_dir
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"adamw_mode": adamw_mode, "bias_correction": bias_correction, "maximize": maximize}
        hyperparameters(defaults)
        super().__init__(params, defaults)

    @staticmethod
    def hyperparameters(group: dict[str, Any]) -> AdamHyperparameters:
        """A checked snapshot of a param group's hyperparameters. Local. Raises ValueError for an invalid one."""
        return hyperparameters(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add `param_group`, as in torch. Local. Raises ValueError for an invalid hyperparameter."""
        hyperparameters({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient once. Local. Returns what `closure` returns.

        Raises ValueError for a parameter of another dtype than fp32, bf16 and fp16, and RuntimeError for a sparse
        gradient, before anything moves.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Hyperparameters of every group are read and checked here, once a group and before any parameter changes.
        plan = [
            (parameter, arguments, group.get("optim_bits"))
            for group in self.param_groups
            for arguments in (hyperparameters(group),)
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        # Check all parameters before any of them is changed.
        for parameter, *_ in plan:
            self._check(parameter)
        # One launch for consecutive parameters with the same step count and hyperparameters.
        updates = [self._prepare(parameter, bits) for parameter, _, bits in plan]
        numbered = zip(updates, [arguments for _, arguments, _ in plan], strict=True)
        # Step counts differ within a group if a parameter had no gradient in some steps. `groupby` joins neighbours
        # only, so parameters stay in order.
        for (number, group), members in groupby(numbered, lambda pair: (int(pair[0].state["step"]) + 1, pair[1])):
            # The user may have written to parameters since the last update.
            update_pieces([each.piece for each, _ in members], adam_scalars(step=number, **group), absorbs=True)
        for each in updates:
            each.finish()
        return loss

    def _check(self, parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise RuntimeError(
                f"{type(self).__name__} does not support sparse gradients, "
                f"found one of a parameter of shape {tuple(parameter.shape)}"
            )
        if parameter.dtype != torch.float32 and parameter.dtype not in HALF_DTYPES:
            raise ValueError(
                f"{type(self).__name__} updates fp32, bf16 and fp16 parameters, "
                f"found {parameter.dtype} of shape {tuple(parameter.shape)}"
            )

    def _prepare(self, parameter: Tensor, bits: object) -> _Update:
        state = self.state[parameter]
        if "step" not in state:
            # On the CPU, where torch keeps it by default too: the host reads it at every step, and waits for no device.
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        its = format_of_tensor(self.state_format, bits, parameter.numel(), is_embedding=False)
        for name in MOMENTS:
            _keep_in(its, state, name, parameter)
        is_half = parameter.dtype in HALF_DTYPES
        if is_half and "master" not in state:
            # In one piece, because the update works on flat views of it.
            state["master"] = _like(parameter, torch.float32).copy_(parameter.detach())
        updated = [state["master"] if is_half else parameter, state["exp_avg"], state["exp_avg_sq"]]
        updated += [parameter] if is_half else []
        weight, exp_avg, exp_avg_sq, *half = flats = [in_memory_order(tensor.detach(), parameter) for tensor in updated]
        assert parameter.grad is not None
        piece = AdamPiece(
            weight,
            in_memory_order(parameter.grad.detach(), parameter),
            exp_avg,
            exp_avg_sq,
            half[0] if half else None,
            exp_avg_scale=state.get("exp_avg_scale"),
            exp_avg_sq_scale=state.get("exp_avg_sq_scale"),
            draws=its.draws(int(state["step"]) + 1, 0),
        )
        piece.check()
        return _Update(state, piece, parameter, list(zip(updated, flats, strict=True)))

    def state_dict(self) -> dict[str, Any]:
        """The state in the format of `torch.optim.AdamW`, moments in fp32. Local.

        `decoupled_weight_decay` tells `torch.optim.Adam` whether the state is of Adam or AdamW.

        Raises nothing of its own.
        """
        state = super().state_dict()
        for number, entry in state["state"].items():
            if any(entry[name].dtype is not torch.float32 for name in MOMENTS if name in entry):
                state["state"][number] = _in_fp32(entry)
        for group in state["param_groups"]:
            group["decoupled_weight_decay"] = group["adamw_mode"]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set all state from `state_dict`. States of half-precision parameters stay fp32. Local.

        The next step rounds moments to `state_dtype`: to the same bytes, if they were saved with it.

        State dicts of `torch.optim.AdamW` and `Adam` are accepted too. Raises ValueError for one with `amsgrad`, or
        with other param groups.
        """
        given: dict[str, Any] = {}
        # Registered last, so it sees what the user's own hooks made of the state dict.
        handle = self.register_load_state_dict_pre_hook(lambda _, loaded: given.update(loaded))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        # torch has cast every state to its parameter's dtype. Copy the fp32 ones again from the source.
        for saved_group, group in zip(given["param_groups"], self.param_groups):
            for index, parameter in zip(saved_group["params"], group["params"]):
                if index in given["state"]:
                    self._restore_state(parameter, given["state"][index])

    def _restore_state(self, parameter: Tensor, saved: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "step" in saved:
            # State dicts of old versions of torch have a plain number here.
            step = saved["step"]
            state["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
        for name in MOMENTS:
            state.pop(f"{name}_scale", None)
        for name in FP32_STATES:
            if name in saved:
                # A copy in any case: the state dict may refer to the live state of another optimizer.
                state[name] = saved[name].detach().to(parameter.device, torch.float32, copy=True)
        # An fp32 parameter is its own master.
        if parameter.dtype not in HALF_DTYPES:
            state.pop("master", None)

    def __getstate__(self) -> dict[str, Any]:
        # torch's has defaults, states and groups only.
        return {**super().__getstate__(), "state_format": self.state_format}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Groups of torch's optimizers lack keys of ours, and say by `decoupled_weight_decay` whether they are AdamW's.
        # torch's `load_state_dict` calls this without defaults. Unpickling and copying call it with defaults, on an
        # optimizer that has no attributes yet.
        defaults = state.get("defaults") or self.defaults
        for group in state["param_groups"]:
            decoupled = group.pop("decoupled_weight_decay", defaults["adamw_mode"])
            group.setdefault("adamw_mode", decoupled)
            for name, value in defaults.items():
                group.setdefault(name, value)
            hyperparameters(group)
        super().__setstate__(state)


class CPUAdam(HybridAdam):
    """`HybridAdam` for parameters in host memory only. Arguments and errors are those of `HybridAdam`.

    Local. `step` raises ValueError if a parameter with a gradient is on another device.

    Example:
        >>> linear = torch.nn.Linear(8, 8)
        >>> optimizer = CPUAdam(linear.parameters(), lr=1e-3)
        >>> linear(torch.ones(2, 8)).sum().backward()
        >>> optimizer.step()
    """

    def _check(self, parameter: Tensor) -> None:
        super()._check(parameter)
        if parameter.device.type != "cpu":
            raise ValueError(
                f"CPUAdam updates parameters on the CPU, found one of shape {tuple(parameter.shape)} "
                f"on {parameter.device}; use HybridAdam"
            )


def _keep_in(its: StateFormat, state: dict[str, Any], name: str, parameter: Tensor) -> None:
    """Have the moment of a plain parameter in this format: made of zeros, or of what a state dict has loaded."""
    stored = state.get(name)
    if stored is not None and stored.dtype is its.dtype and (not its.has_scales or _lies_like(stored, parameter)):
        return
    fresh = _like(parameter, its.dtype).zero_()
    scales = None
    if its.has_scales:
        scales = torch.zeros(-(-parameter.numel() // BLOCK), dtype=torch.float32, device=parameter.device)
    if stored is not None:
        wide = in_memory_order(_wide(state, name), parameter)
        its.write(in_memory_order(fresh, parameter), scales, name, wide)
    state.pop(f"{name}_scale", None)
    state[name] = fresh
    if scales is not None:
        state[f"{name}_scale"] = scales


def _like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for a state whose elements lie in the order of the parameter's, as those of a chunk do.

    Blocks of 8-bit moments follow it: in another order of a channels_last weight they would hold other elements.
    """
    if is_dense(parameter):
        return torch.empty_like(parameter, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)
    return torch.empty(parameter.shape, dtype=dtype, device=parameter.device)


def _lies_like(stored: Tensor, parameter: Tensor) -> bool:
    """Whether a moment's blocks hold elements that are side by side in the parameter's memory, which may be another."""
    return stored.stride() == parameter.stride() if is_dense(parameter) else stored.is_contiguous()


def _wide(state: dict[str, Any], name: str) -> Tensor:
    """A moment in fp32."""
    stored = state[name]
    its = next(each for each in FORMATS.values() if each.dtype is stored.dtype)
    wide = torch.empty_like(stored, dtype=torch.float32)
    values = its.read(in_memory_order(stored, stored), state.get(f"{name}_scale"), name)
    write_in_memory_order(wide, stored, values)
    return wide


def _in_fp32(entry: dict[str, Any]) -> dict[str, Any]:
    """A parameter's entry of a state dict, as torch has it."""
    wide = {name: _wide(entry, name) for name in MOMENTS if name in entry}
    return {name: value for name, value in (entry | wide).items() if not name.endswith("_scale")}


class _Update(NamedTuple):
    """The update of one parameter."""

    state: dict[str, Any]
    piece: AdamPiece
    parameter: Tensor
    flats: list[tuple[Tensor, Tensor]]  # (updated tensor, its elements in the order of the parameter's memory)

    def finish(self) -> None:
        """Copy what the update has worked on in copies back, and count the step."""
        for tensor, flat in self.flats:
            write_in_memory_order(tensor.detach(), self.parameter, flat)
        self.state["step"] += 1
