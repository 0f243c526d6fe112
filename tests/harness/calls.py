"""How much Python a model of many parameters costs: executed lines are counted, as time is noisy.

Lines are counted function by function. What looks at all chunks for each chunk then shows as a function whose lines
grow fourfold with twice the layers, however small its share of the whole is.
"""

import copy
import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gemini import (
    GatheredParameters,
    ShardedModel,
    ShardedOptimizer,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
)
from gemini.memory.modes import uncollected
from tests.zoo.mlp import adam

WIDTH = 8
CHUNK_NUMEL = 256  # each parameter is a chunk
_ROOT = Path(__file__).parents[2]
_OURS = tuple(str(_ROOT / package) for package in ("gemini", "sharding", "optim"))

Lines = Counter[str]  # by function


def lines_of(function: Callable[[], Any]) -> Lines:
    """Lines of our own Python that a call executes in this thread, those of comprehensions each time around."""
    counts: Counter[Any] = Counter()

    def note(frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        counts[frame.f_code] += 1
        return note

    gc.collect()  # of models before this one, whose ends would be counted at any place
    before = sys.gettrace()
    with uncollected():
        sys.settrace(note)
        try:
            function()
        finally:
            sys.settrace(before)
    lines: Lines = Counter()
    for code, count in counts.items():
        lines[f"{Path(code.co_filename).relative_to(_ROOT)}:{code.co_firstlineno} {code.co_name}"] += count
    assert lines, f"no line of {', '.join(_OURS)} was executed"
    return lines


class _Moved(TorchDispatchMode):
    """Counts elements that operations have written, but for views, which write none."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.count += sum(leaf.numel() for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result


def moved_by_states(num_layers: int, **arguments: Any) -> int:
    """Elements that loops of `safe_*` functions over all parameters move, gathers included.

    Lines do not show a whole chunk that is copied, joined or gathered for each of its parameters.
    """
    session = Session(num_layers, **arguments)
    for phase in ("wrap", "make_optimizer", "train"):
        getattr(session, phase)()
    with _Moved() as moved:
        session.set_each_state()
    session.backward()
    with moved:
        session.set_each_gradient()
    session.close()
    return moved.count


def growing(few: Lines, many: Lines) -> dict[str, tuple[int, int]]:
    """Functions whose lines more than double from one model to one of twice the layers.

    A bisection over chunks takes one step more, and views of a chunk are made once for every slot that it comes to.
    """
    return {name: (few[name], count) for name, count in many.items() if count > 2.5 * few[name] + 150}


class Session:
    """A chain of linear layers, and what users do with it, by phase."""

    def __init__(self, num_layers: int, **arguments: Any) -> None:
        self.module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
        if arguments.pop("tied", False):
            for one, other in zip(self.module[::2], self.module[1::2], strict=True):
                other.weight = one.weight
        self.arguments = arguments

    def wrap(self) -> None:
        self.model = ShardedModel(self.module, device="emulated", **self.arguments)

    def make_optimizer(self) -> None:
        self.optimizer = ShardedOptimizer(self.model, adam(self.model.parameters()))
        self.parameters = list(self.model.parameters())

    def backward(self) -> None:
        self.model(torch.ones(2, WIDTH, dtype=self.arguments.get("dtype"))).square().mean().backward()

    def train(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> None:
        self.state = self.model.state_dict()
        self.state_of_module = self.module.state_dict()
        self.state_of_optimizer = self.optimizer.state_dict()

    def load_state_dict(self) -> None:
        self.model.load_state_dict(self.state)
        self.optimizer.load_state_dict(self.state_of_optimizer)

    def load_into_module(self) -> None:
        self.module.load_state_dict(self.state_of_module)

    def use_each_parameter(self) -> None:
        for parameter in self.parameters:
            parameter.norm()
            safe_get_full_fp32_param(parameter)
            dict(self.optimizer.state[parameter])
            with GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
                parameter.mul_(1.5)

    def set_each_parameter(self) -> None:
        for parameter in self.parameters:
            parameter.data = torch.full(parameter.shape, 1 / WIDTH, dtype=parameter.dtype)

    def set_each_state(self) -> None:
        for parameter in self.parameters:
            value = torch.full(parameter.shape, 0.5 / WIDTH)
            safe_set_full_fp32_param(parameter, value)
            safe_set_full_optimizer_state(parameter, value, "exp_avg")
            assert torch.equal(safe_get_full_fp32_param(parameter), value)
            assert torch.equal(safe_get_full_optimizer_state(parameter, "exp_avg"), value)
            safe_set_local_fp32_param(parameter, safe_get_local_fp32_param(parameter) * 2)

    def set_each_gradient(self) -> None:
        for parameter in self.parameters:
            grad = safe_get_full_grad(parameter)
            safe_set_full_grad(parameter, grad * 2)

    def use_each_gradient(self) -> None:
        self.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for parameter in self.parameters:
            parameter.grad = None

    def freeze_and_train(self) -> None:
        for parameter in self.parameters[::2]:
            parameter.requires_grad_(False)
        self.train()
        for parameter in self.parameters[::2]:
            parameter.requires_grad_(True)
        self.train()

    def freeze_and_use_each(self) -> None:
        for parameter in self.parameters:
            parameter.requires_grad_(False)
            parameter.norm()
        for parameter in self.parameters:
            parameter.requires_grad_(True)
            parameter.norm()
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.zero_grad()

    def copy(self) -> None:
        copy.deepcopy(self.model)

    def close(self) -> None:
        self.model.close()


USES = (
    "state_dict",
    "load_state_dict",
    "load_into_module",
    "use_each_parameter",
    "set_each_parameter",
    "set_each_state",
    "use_each_gradient",
    "freeze_and_train",
    "freeze_and_use_each",
    "copy",
)


def lines_by_phase(num_layers: int, uses: Iterable[str] = USES, **arguments: Any) -> dict[str, Lines]:
    """Of wrapping a chain of linear layers, three steps of training, and `uses`."""
    session = Session(num_layers, **arguments)
    phases = ("wrap", "make_optimizer", "train", "train", "train", *uses, "close")
    return {f"{number} {phase}": lines_of(getattr(session, phase)) for number, phase in enumerate(phases)}


def growing_phases(num_layers: int, uses: Iterable[str] = USES, **arguments: Any) -> dict[str, Any]:
    """By phase, functions whose lines grow faster than the layers, twice: what is quadratic goes on growing so.

    Which chunks come to a slot for the first time in a phase depends on how many there are: that grows by leaps.
    """
    lines_by_phase(4, uses, **_scaled(arguments, 4))  # imports, caches
    few, many = (lines_by_phase(count, uses, **_scaled(arguments, count)) for count in (num_layers, 2 * num_layers))
    if not any(growing(few[phase], many[phase]) for phase in few):
        return {}
    most = lines_by_phase(4 * num_layers, uses, **_scaled(arguments, 4 * num_layers))
    found = {phase: (growing(few[phase], many[phase]), growing(many[phase], most[phase])) for phase in few}
    both = {phase: {name: now[name] for name in before if name in now} for phase, (before, now) in found.items()}
    return {phase: functions for phase, functions in both.items() if functions}


def _scaled(arguments: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """`bytes_per_layer` as a budget, and the other arguments."""
    rest = dict(arguments)
    per_layer = rest.pop("bytes_per_layer", None)
    return rest if per_layer is None else {**rest, "model_data_memory": 4096 + per_layer * num_layers}
