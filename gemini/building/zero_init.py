"""`ZeroInitContext` builds models sharded; `ColoInitContext` is Colossal-AI's name for it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from gemini.access.parameter_link import any_link_of
from gemini.access.released import LazyDetach, ReleasedParameter, guard_placeholders
from gemini.building.store import BuildStore
from gemini.errors import UnsupportedError
from gemini.launch import check_group
from gemini.log import warn_at_script
from gemini.memory.disk import DiskTier
from gemini.memory.memory import choose_tiers, resolve_device
from gemini.monitor.live import MemoryMonitor
from gemini.placement.demand import Tier
from gemini.ranks.exit_report import publish_exit
from gemini.ranks.mesh import ranks_in
from gemini.settings import DtypeLike, check_module, checked_dtype
from optim import in_memory_order, round_master_
from optim.adam import refuse_unknown_arguments
from sharding import ShardStrategy, resolve_strategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# -- Arguments of Colossal-AI's `ZeroInitContext`, of any release, which ours has under another name or not at all.
#
# with ZeroInitContext(convert_fp16=True, target_device=0, shard_strategy=TensorShardStrategy(), seed=42): ...


_WITHOUT_EFFECT = {
    "convert_cuda": "target_device says where the model runs",
    "rm_torch_payload_on_the_fly": "the whole weights of an operator are freed when the next operator is built",
    "shard_grad": "ShardedModel(stage=) says whether gradients are sharded",
}
_FLAGS = ("convert_fp16", "bf16", *_WITHOUT_EFFECT)
NAMES = (*_FLAGS, "model_numel_tensor", "seed", "default_dtype", "dp_process_group")


@dataclass(frozen=True)
class ColossalArguments:
    """The values of these arguments, merged with those of our own."""

    dtype: torch.dtype | None
    process_group: dist.ProcessGroup | None
    default_dtype: torch.dtype | None = None
    seed: int | None = None
    num_elements: Tensor | None = None  # one integer of the user's, to which the elements of all parameters are added

    @staticmethod
    def of(
        given: Mapping[str, Any], dtype: torch.dtype | None, process_group: dist.ProcessGroup | None
    ) -> ColossalArguments:
        """Merge `given`, arguments by a name of `NAMES`, with those that were given under our own names.

        Warns of arguments without effect. Raises TypeError or ValueError for values that are invalid or contradict each
        other.
        """
        for name in _FLAGS:
            if not isinstance(given.get(name, False), bool):
                raise TypeError(f"{name} must be True or False, found {given[name]!r}")
        for name, half in (("convert_fp16", torch.float16), ("bf16", torch.bfloat16)):
            if given.get(name):
                # Both flags together end here, too, because the first one has set `dtype`.
                if dtype not in (None, half):
                    raise ValueError("dtype, convert_fp16 and bf16 ask for different dtypes: give one of them")
                dtype = half
        group = given.get("dp_process_group")
        if None not in (group, process_group) and group is not process_group:
            raise ValueError("process_group and dp_process_group are different groups: give one of them")
        seed, count = given.get("seed"), given.get("model_numel_tensor")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"seed must be an integer or None, found {seed!r}")
        if count is not None and not (
            isinstance(count, Tensor) and count.numel() == 1 and not count.is_floating_point()
        ):
            raise TypeError(f"model_numel_tensor must be a tensor of one integer, found {count!r}")
        default_dtype = checked_dtype("default_dtype", given.get("default_dtype"))
        for name, instead in _WITHOUT_EFFECT.items():
            if given.get(name):
                warn_at_script(f"ZeroInitContext({name}=True) has no effect: {instead}")
        return ColossalArguments(dtype, group if process_group is None else process_group, default_dtype, seed, count)

    @contextmanager
    def in_force(self, device: torch.device) -> Iterator[None]:
        """A context with the requested default dtype and random seed. It restores both of torch's. Local."""
        # `fork_rng` restores the CPU's generator as well, and asks for a device type even without accelerators.
        before, accelerators = torch.get_default_dtype(), [] if device.type == "cpu" else [device]
        kind = device.type if accelerators else "cuda"
        # Without a seed the build draws from the script's own generators, as a build without the context does.
        with torch.random.fork_rng(accelerators, enabled=self.seed is not None, device_type=kind):
            if self.seed is not None:
                torch.manual_seed(self.seed)
            torch.set_default_dtype(self.default_dtype or before)
            try:
                yield
            finally:
                torch.set_default_dtype(before)


# -- `ZeroInitContext`: a model is sharded while it is built, so that no rank ever holds it whole.
#
# torch calls a hook for every parameter and every child that a module registers. The parameters of an operator stay
# plain while it initialises itself. They go onto shards when the first parameter of the next operator arrives, or when
# the context ends. From then on they fetch themselves when something reads or writes them (`released.py`), and rank 0's
# values win. The context removes its hooks at its end and leaves torch unchanged.


_HOMES = ("auto", "host", "device", "disk")
_SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"
_active: list[ZeroInitContext] = []  # innermost last: it takes the parameters


class ZeroInitContext:
    """Context manager inside which a model is sharded while it is built or loaded, so that no rank holds it whole.

    Modules are built, loaded and initialised by ordinary code, with the values and the random numbers of a build
    without the context; rank 0's values win. Afterwards wrap the model in `ShardedModel`, in the same process group.
    Hugging Face's `from_pretrained` works inside: tensors are read one after the other. Collective: every rank enters,
    builds the same model, and leaves.

    Args:
        target_device: where the model will run. None: the current accelerator, else the CPU. Weights are initialised
            where the model's code makes them, so this does not change their values.
        shard_strategy: how each operator's parameters are divided over the ranks. None: in one piece.
        shard_param: False leaves parameters whole and ordinary, and only moves and casts them when the context ends.
        dtype: the dtype to which fp32, fp16 and bf16 weights are cast when the context ends. None: they are not cast.
        process_group: the ranks. None: all that were started, which join here if they have not met (`ShardedModel`).
        device_mesh: instead, the ranks as a torch `DeviceMesh`. While the model is built, shards lie over all of them.
        home: where shards rest: "host", "device", "disk", or "auto", which takes at most half of the device's free
            memory. `ShardedModel` moves them to where its plan wants them.
        disk_path: with home="disk": a folder on a local disk. Its file has no name, and ends with the build.
        enabled: False makes the context do nothing.
        rank_timeout: seconds after which a rank that does not answer counts as lost.
        colossal: arguments of Colossal-AI's context. `convert_fp16=True` and `bf16=True` are `dtype`, and
            `dp_process_group` is `process_group`. `seed` seeds the random numbers inside, `default_dtype` is torch's
            inside, and the number of elements is added to `model_numel_tensor`. `convert_cuda`, `shard_grad` and
            `rm_torch_payload_on_the_fly` have no effect, which a warning says.

    Raises TypeError or ValueError for arguments that are not valid, and UnsupportedError when a context is entered
    twice. An exception inside is raised on the other ranks as RemoteRankError.

    Example:
        >>> with ZeroInitContext():
        ...     module = torch.nn.Transformer(d_model=64, nhead=4)
        >>> model = ShardedModel(module)
    """

    def __init__(
        self,
        target_device: int | str | torch.device | None = None,
        shard_strategy: ShardStrategy | type[ShardStrategy] | str | None = None,
        shard_param: bool = True,
        *,
        dtype: DtypeLike | None = None,
        process_group: dist.ProcessGroup | None = None,
        device_mesh: DeviceMesh | None = None,
        home: str = "auto",
        disk_path: str | Path | None = None,
        enabled: bool = True,
        rank_timeout: float = 600.0,
        **colossal: Any,
    ) -> None:
        valid = [name for name in inspect.signature(ZeroInitContext).parameters if name != "colossal"]
        refuse_unknown_arguments("ZeroInitContext", (each for each in colossal if each not in NAMES), valid)
        dtype = checked_dtype("dtype", dtype)
        for name, value in (("shard_param", shard_param), ("enabled", enabled)):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, found {value!r}")
        if home not in _HOMES:
            raise ValueError(f"home must be one of {', '.join(map(repr, _HOMES))}, found {home!r}")
        if (home == "disk") != (disk_path is not None):
            raise ValueError(f"home='disk' and disk_path= belong together, found {home!r} and {disk_path!r}")
        check_group(process_group)
        self._colossal = ColossalArguments.of(colossal, dtype, process_group)
        self._device = resolve_device(target_device, "target_device")
        self._strategy = resolve_strategy("bucket" if shard_strategy is None else shard_strategy)
        self._shards = shard_param
        self._dtype = self._colossal.dtype
        given = self._colossal.num_elements
        self.model_numel_tensor = torch.zeros(1, dtype=torch.int64, device="cpu") if given is None else given
        """The number of elements of all parameters that were built, in Colossal-AI's form: a tensor of one integer."""
        self._group, self._mesh = self._colossal.process_group, device_mesh
        self._home = home
        self._disk_path = disk_path
        self._enabled = enabled
        self._rank_timeout_s = rank_timeout
        self._store: BuildStore | None = None
        self._module: nn.Module | None = None  # the operator under construction
        self._pending: dict[str, nn.Parameter] = {}  # its parameters, which are still whole
        self._whole: list[nn.Parameter] = []  # all parameters, if shard_param is False
        self._stack = ExitStack()

    def __enter__(self) -> ZeroInitContext:
        if not self._enabled:
            return self
        if self._store is not None or self in _active:
            raise UnsupportedError("a ZeroInitContext is entered once: make a new one")
        # Other ranks must hear of a rank whose script ends inside the context: they may wait for it in a collective.
        publish_exit()
        guard_placeholders()
        group = ranks_in(self._group, self._mesh).group
        if self._shards:
            device, _ = choose_tiers(self._device)
            disk = None if self._disk_path is None else DiskTier(Path(self._disk_path))
            self._store = BuildStore(group, self._strategy, self._home_of(), device, self._rank_timeout_s, disk)
            # Without shards every parameter is a plain one, which `nn.Parameter(p)` takes as it is.
            self._stack.enter_context(_copying_parameters())
        for handle in (
            register_module_parameter_registration_hook(self._on_parameter),
            register_module_module_registration_hook(self._on_module),
        ):
            self._stack.callback(handle.remove)
        self._stack.enter_context(self._colossal.in_force(self._device))
        _active.append(self)
        self._stack.callback(_active.remove, self)
        # transformers would load tensors in several threads. Sharding is collective, and needs one order on all ranks.
        if _SEQUENTIAL not in os.environ:
            os.environ[_SEQUENTIAL] = "1"
            self._stack.callback(os.environ.pop, _SEQUENTIAL, None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._enabled:
            return
        # Leaving the stack removes all hooks, whatever happens below.
        with self._stack:
            if self._store is None:
                if error is None:
                    self._move_whole()
                return
            if error is not None:
                # Other ranks may wait for this one in a collective: they raise RemoteRankError instead.
                self._store.communicator.publish(error)
                return
            # The last operator is complete too: no other one comes whose first parameter would say so.
            self._shard_pending(None)
            self._store.finish(self._dtype)

    def convert(self, module: nn.Module) -> nn.Module:
        """Shard a module that was built outside, operator by operator, and return it. Collective; inside the context.

        A module that becomes a child of another one inside the context is sharded without this call. Raises TypeError
        for anything but a module, and UnsupportedError outside the context.
        """
        check_module("module", module)
        if self not in _active:
            raise UnsupportedError("convert() works inside its ZeroInitContext only")
        self._on_module(module, "", module)
        return module

    def materialize(self, module: nn.Module) -> nn.Module:
        """Give a module that was made on the device "meta" its values, and shard it, part by part. Collective.

        Each part that has parameters or buffers of its own on "meta" gets memory, as by `to_empty()`, and its values by
        its own `reset_parameters()`, in the order of `module.modules()`: those of a script that does so for FSDP2. Tied
        parameters stay tied, and have the values of the first part. The memory is on torch's default device.

        module: on "meta", wholly or in part; a part without tensors there is left alone. Returns the module. Raises
        TypeError for anything but a module, and UnsupportedError outside the context, or for a part without
        `reset_parameters()`; nothing has changed then.

        Example:
            >>> with torch.device("meta"):
            ...     module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
            >>> with ZeroInitContext() as context:
            ...     model = ShardedModel(context.materialize(module))
        """
        check_module("module", module)
        if self._enabled and self not in _active:
            raise UnsupportedError("materialize() works inside its ZeroInitContext only")
        parts = [(name, part) for name, part in module.named_modules() if _on_meta(part)]
        without = [f"{name or 'the module'} ({type(part).__name__})" for name, part in parts if not _resets(part)]
        if without:
            raise UnsupportedError(
                f"{', '.join(without)} has tensors on the device 'meta' and no reset_parameters() that would give them "
                "values: add one, or build the model inside the context without torch.device('meta')"
            )
        for _, part in parts:
            # A part whose only parameter is tied to that of an earlier one has its values already.
            if _on_meta(part):
                self._materialize(module, part)
        return module

    def _materialize(self, module: nn.Module, part: nn.Module) -> None:
        device = torch.get_default_device()
        made: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in part.parameters(recurse=False):
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        # Whoever shares a parameter on "meta" gets the one with values.
        for other in module.modules() if made else ():
            others = other._parameters
            others.update({name: made[old] for name, old in others.items() if old is not None and old in made})
        buffers = part._buffers
        on_meta = {name: old for name, old in buffers.items() if old is not None and old.is_meta}
        buffers.update({name: torch.empty_like(old, device=device) for name, old in on_meta.items()})
        part.reset_parameters()  # type: ignore[operator]
        for name, parameter in part.named_parameters(recurse=False):
            self._on_parameter(part, name, parameter)

    # -- parameters as they come

    def _on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        # An inner context takes the parameters. One that is on shards already is tied, or was moved by its parent.
        if _active[-1] is not self or type(parameter) is not nn.Parameter:
            return
        # Without values there is nothing to shard. `from_pretrained` replaces a meta parameter by a real one later.
        if parameter.is_meta or is_lazy(parameter) or parameter.layout is not torch.strided:
            return
        if self._store is None:
            self._whole.append(parameter)
            return
        # The first parameter of another operator: the one before is complete.
        if module is not self._module:
            self._shard_pending(module)
        # A parameter that is registered again under another name must not be sharded twice.
        self._pending = {key: other for key, other in self._pending.items() if other is not parameter}
        self._pending[name] = parameter

    def _on_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        """Take the parameters of a child that no hook has seen: a deep copy, or a module from outside."""
        for part in () if child is None else child.modules():
            for its_name, parameter in part.named_parameters(recurse=False):
                if not any(parameter is known for known in self._pending.values()):
                    self._on_parameter(part, its_name, parameter)

    def _shard_pending(self, following: nn.Module | None) -> None:
        """Put the complete operator onto shards; `following` is the next one. Collective."""
        operator, self._module = type(self._module).__name__, following
        # While something uses a parameter on shards its class is `nn.Parameter` too. Only its link tells.
        parameters = [(name, p) for name, p in self._pending.items() if any_link_of(p) is None]
        self._pending = {}
        self.model_numel_tensor.add_(sum(parameter.numel() for _, parameter in parameters))
        if parameters and self._store is not None:
            # The number tells operators of one class apart: under construction a module has no name in the model yet.
            self._store.shard(f"{operator} {self._store.num_operators}", parameters)

    def _move_whole(self) -> None:
        with torch.no_grad():
            # A child's parameters were registered again with each of its parents: take each one once.
            for parameter in dict.fromkeys(self._whole):
                self.model_numel_tensor.add_(parameter.numel())
                moved = parameter.data.to(self._device)
                if self._dtype is not None and moved.dtype in (torch.float32, torch.float16, torch.bfloat16):
                    # The rounding is that of shards (`BuiltChunks.cast`), so `shard_param` changes no bit.
                    # `empty_like` has the strides that torch's own cast gives: a channels_last weight stays one.
                    rounded = torch.empty_like(moved, dtype=self._dtype)
                    round_master_(in_memory_order(rounded, rounded), in_memory_order(moved.float(), rounded))
                    moved = rounded
                # `.data` keeps the parameter itself, to which tied modules and the user may refer.
                parameter.data = moved
        self._whole = []

    def _home_of(self) -> Callable[[int], Tier]:
        if self._home == "disk":
            return lambda num_bytes: Tier.DISK
        # The emulated device lies in host memory, too.
        if self._home == "host" or self._device.type == "cpu":
            return lambda num_bytes: Tier.HOST
        if self._home == "device":
            return lambda num_bytes: Tier.DEVICE
        monitor = MemoryMonitor(self._device)
        free_bytes = monitor.read_device().available_bytes
        # This is None of accelerators other than CUDA's: nobody knows of how much a half could be taken.
        if free_bytes is None:
            return lambda num_bytes: Tier.HOST
        # Half of what is free now: it does not become less with what the build itself takes.
        half = free_bytes // 2
        # Read again for each shard: earlier shards, and tensors of the user's, have taken their part of the memory.
        return lambda size: Tier.DEVICE if (monitor.read_device().available_bytes or 0) - size > half else Tier.HOST


def _on_meta(part: nn.Module) -> bool:
    own = (*part.parameters(recurse=False), *part.buffers(recurse=False))
    return any(each.is_meta for each in own)


def _resets(part: nn.Module) -> bool:
    return callable(getattr(part, "reset_parameters", None))


def shard_pending(parameters: list[Tensor]) -> None:
    """Shard the operator that is being built now, if one of `parameters` belongs to it. Collective if so.

    For `GatheredParameters` inside a context.
    """
    context = _active[-1] if _active else None
    if context is not None and any(known is each for known in context._pending.values() for each in parameters):
        context._shard_pending(None)


@contextmanager
def _copying_parameters() -> Iterator[None]:
    """A context in which `nn.Parameter(p)` copies the values of a parameter that fetches itself.

    torch would share the memory, and refuses to do so for a class such as ours. Parametrizations call it.
    """
    # Read from `__dict__`, because the staticmethod has to be put back, and the attribute is the function in it.
    original = nn.Parameter.__dict__["__new__"]

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if isinstance(data, (ReleasedParameter, LazyDetach)):
            data = data.detach().clone()
        return original(cls, data, requires_grad)

    nn.Parameter.__new__ = new  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Parameter.__new__ = original  # type: ignore[method-assign]
