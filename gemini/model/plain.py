"""The plain face of a sharded model: gathered weights, copies, views, wrappers."""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from gemini.access.link import link_of
from gemini.access.parameter_link import ParameterLink, any_link_of, by_owner, own_grad
from gemini.access.released import CONVERSION, cannot_take, changes_nothing
from gemini.access.states import States
from gemini.access.weights import load_part, load_whole_state_dict, whole_state_dict
from gemini.building.store import built_link_of
from gemini.building.zero_init import shard_pending
from gemini.elsewhere import instead_of_torchs
from gemini.errors import GeminiError, UnsupportedError
from gemini.log import warn_at_script
from gemini.model.hooks import Handles
from gemini.model.operators import is_mark, is_parametrized, tensors_in
from gemini.model.wrap import LOST
from gemini.ranks.parts import is_dtensor
from gemini.runtime.chunk import ManagedParameter
from gemini.runtime.manager import ChunkManager
from gemini.runtime.step import Step
from gemini.settings import CASTABLE_DTYPES
from optim import HALF_DTYPES

# -- `GatheredParameters`: a context in which parameters are whole and plain, between steps, to be read or changed.


class GatheredParameters:
    """Context manager inside which the given parameters are ordinary, whole parameters on every rank.

    Entering and leaving are collective: every rank of the model's process group does both, between steps.

    Args:
        params: a parameter, several, or a module, from a `ShardedModel` or a `ZeroInitContext`. Parameters of plain
            modules are left alone.
        modifier_rank: the rank in the model's process group whose changes count. When the context ends, its values
            reach all ranks and the fp32 masters, so the next step starts from them. None: nothing may be changed.
        fwd_module: accepted and not used. DeepSpeed needs it where a module uses another module's parameters; here
            such parameters fetch themselves.
        enabled: False makes the context do nothing.

    Raises TypeError or ValueError for arguments of another kind. Entering raises SlotError if the parameters do not
    fit into the model's slots together. Leaving raises UnsupportedError if a parameter was changed without a
    `modifier_rank`. This change, and any change inside a context that an exception leaves, is undone.

    Example:
        >>> with GatheredParameters(model.module[0], modifier_rank=0), torch.no_grad():
        ...     model.module[0].weight[3] = 0
    """

    def __init__(
        self,
        params: nn.Parameter | nn.Module | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        # A tensor can be iterated, too, so it is looked for before a list.
        given: list[Tensor] = [params] if isinstance(params, Tensor) else []
        if not given:
            given.extend(params.parameters() if isinstance(params, nn.Module) else params)
        for each in given:
            if not isinstance(each, Tensor):
                raise TypeError(f"params must be parameters or a module, found {type(each).__name__}")
        if fwd_module is not None and not isinstance(fwd_module, nn.Module):
            raise TypeError(f"fwd_module must be a torch module, found {type(fwd_module).__name__}")
        # Parameters under construction may still be whole: put them onto shards, or they would have no link yet.
        if enabled:
            shard_pending(given)
        links = (any_link_of(each) for each in given) if enabled else ()
        # A tied parameter that is given twice counts once.
        self._links = list(dict.fromkeys(link for link in links if link is not None))
        self._modifier = modifier_rank
        for link in self._links:
            self._check_rank(link.owner.communicator.world_size)
        self._stack = ExitStack()
        self._before: list[Tensor] = []  # on the CPU, one for each link
        self._masters: list[Tensor | None] = []  # likewise, of this rank's part

    def _check_rank(self, world_size: int) -> None:
        rank = self._modifier
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size):
            raise ValueError(f"modifier_rank must be None or one of the {world_size} ranks, found {rank!r}")

    def __enter__(self) -> None:
        # The inner stack undoes the gathers if a later one, or a copy, fails.
        with ExitStack() as stack:
            for links in by_owner(self._links):
                stack.enter_context(links[0].gathered(links))
            with torch.no_grad():
                # The copies are on the CPU: no plan has device memory for whole parameters a second time.
                parameters = [link.managed.parameter for link in self._links]
                self._before = [parameter.detach().to("cpu", copy=True) for parameter in parameters]
                self._masters = [link.part_of_master() for link in self._links]
            self._stack = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack, torch.no_grad():
            # This comes before the comparison: a write to `.data` has left the payload as it was.
            refused = self._adopt_data()
            is_kept = error is None and refused is None
            # Without a rank whose changes count, ranks may have changed different values: undo all of them.
            pairs = zip(self._links, self._before, self._masters, strict=True)
            changed = [each for each in pairs if _differs(*each[:2])]
            if not is_kept or self._modifier is None:
                for link, before, master in changed:
                    link.undo(before, master)
            else:
                # Broadcast all parameters: only the modifying rank knows which of them it has changed.
                for link in self._links:
                    link.broadcast_from(self._modifier)
            self._before, self._masters = [], []
            if error is None and refused is not None:
                # Other ranks may wait for this one's values.
                owner = self._links[0].owner
                try:
                    with owner.communicator.publishing():
                        raise refused
                finally:
                    refused = None  # a cycle of exception and frame would keep views of slots alive
            if error is None and self._modifier is None and changed:
                names = ", ".join(repr(link.managed.name) for link, *_ in changed)
                raise UnsupportedError(
                    f"GatheredParameters(...) without modifier_rank= was left with changes to {names}, which are "
                    "undone. Name the rank whose changes count, such as modifier_rank=0"
                )

    def _adopt_data(self) -> GeminiError | None:
        """Copy values into the payload where a write to `.data` replaced the parameter's memory. Returns a refusal."""
        refused = None
        for link in self._links:
            try:
                link.adopt_data()
            except GeminiError as found:
                # Without its frames, which hold views of slots.
                refused = refused or found.with_traceback(None)
        return refused


def _differs(link: ParameterLink, before: Tensor) -> bool:
    now = link.whole().to("cpu")
    return not torch.equal(_bits(now), _bits(before))


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes. Comparing values would miss a change of -0.0, and find one in every NaN."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# -- Answers to trainers and to torch's own wrappers that are about to wrap a sharded model once more.


PREPARED = "_is_accelerate_prepared"
"""The attribute in which `Accelerator.prepare`, and so `transformers.Trainer`, looks up whether a model is prepared."""

_AUTOCAST = (
    "Accelerate's mixed_precision is not applied to a ShardedModel on several ranks: give dtype=torch.bfloat16, or "
    "another one, to ShardedModel(...), and leave mixed_precision='no' (for transformers.Trainer: bf16=False)"
)


def are_plain_processes(kind: str) -> bool:
    """Whether Accelerate's word for how processes train together stands for one process, or plain data parallelism.

    Those are NO, and MULTI_GPU, MULTI_CPU and their like. Others, such as FSDP and DEEPSPEED, shard or move models, and
    prepare and save them by functions of their own.
    """
    return kind == "NO" or kind.startswith("MULTI_")


def is_prepared(world_size: int) -> bool:
    """Whether to tell `Accelerator.prepare` that the model is prepared. On several ranks it would wrap it in DDP.

    Raises UnsupportedError if Accelerate would also put autocast around the model's forward, or is set to save and load
    models with another library's functions.
    """
    # Without a state of Accelerate, something else asks. Answer by the number of ranks alone. The shared dict is read,
    # because `AcceleratorState()` would make a state.
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is None or not accelerate.AcceleratorState._shared_state:
        return world_size > 1
    state = accelerate.AcceleratorState()
    kind: str = state.distributed_type.value
    if not are_plain_processes(kind):
        raise UnsupportedError(
            f"Accelerate is set to {kind}, whose functions cannot prepare, save or load a ShardedModel: choose its "
            "plain training on several processes (torchrun, or accelerate launch --multi_gpu), and give stage= and the "
            "budgets to ShardedModel(...)"
        )
    # Accelerate wraps nothing in a single process. Where each of several processes has a whole model of its own, this
    # answer lets DDP follow, which `refuse_wrappers` refuses by name.
    if world_size == 1 and (kind == "NO" or state.num_processes > 1):
        return False
    if state.mixed_precision != "no":
        raise UnsupportedError(_AUTOCAST)
    return True


@functools.cache
def refuse_wrappers() -> RemovableHandle:
    """Register a hook, once per process, that refuses to put a sharded model into DDP or into a model of peft's.

    The hook runs when the wrapper registers its module, before it has touched any parameter. The module may contain a
    sharded model anywhere.
    """
    return register_module_module_registration_hook(_check_wrapper)


def _check_wrapper(parent: nn.Module, name: str, module: Any) -> None:
    if isinstance(parent, DistributedDataParallel):
        _check_ddp(parent, module)
    elif type(parent).__module__.startswith("peft."):
        _check_peft(parent, module)


def _check_ddp(parent: DistributedDataParallel, module: nn.Module) -> None:
    # DDP has filled `parameters_to_ignore` by now, with names as in `module`.
    for name_of_parameter, parameter in module.named_parameters():
        if any_link_of(parameter) is not None and name_of_parameter not in parent.parameters_to_ignore:
            raise cannot_take("DistributedDataParallel", name_of_parameter)


def _check_peft(parent: nn.Module, module: Any) -> None:
    # Adapters that come into a model after it was wrapped are in no chunk, and peft freezes all else: nothing would be
    # trained. A model that is only built on shards has no chunks yet, and takes adapters.
    named = module.named_parameters() if isinstance(module, nn.Module) else ()
    name = next((name for name, parameter in named if link_of(parameter) is not None), None)
    if name is not None:
        raise UnsupportedError(
            f"peft's {type(parent).__name__} would put adapters around parameter {name!r}, which a ShardedModel shards "
            "already, and they would not be trained: adapt the plain module first, and wrap what comes of it, as in "
            "ShardedModel(peft.get_peft_model(module, config))"
        )


# -- Checks of the arguments of `ShardedModel`, before anything has changed.


def check_module(by_name: Mapping[str, nn.Parameter], ignored: Collection[nn.Parameter]) -> None:
    """Raises UnsupportedError; looks at a module's parameters without reading them. Warns of gradients they have."""
    num_gradients = 0
    for name, parameter in by_name.items():
        if parameter in ignored:
            continue
        if link_of(parameter) is not None:
            raise UnsupportedError(f"parameter {name!r} already belongs to a ShardedModel: wrap a module once")
        # Not `.grad`, which of a parameter that was built on shards is None, whatever autograd has accumulated.
        num_gradients += own_grad(parameter) is not None
        # Parameters that were built on shards have a class of ours, which the checks below would refuse.
        if built_link_of(parameter) is not None:
            continue
        # An earlier wrap failed and lost the weights. What the parameter shows is a placeholder.
        if hasattr(parameter, LOST):
            raise UnsupportedError(f"parameter {name!r} lost its values when wrapping failed: build the module again")
        if is_lazy(parameter) or parameter.is_meta:
            what = "was made on the device 'meta'" if parameter.is_meta else "gets its shape from a first batch"
            remedy = (
                "build or load the model in `with gemini.ZeroInitContext() as context:`, which shards it while its "
                "values come; context.materialize(module) calls to_empty() and reset_parameters() part by part"
                if parameter.is_meta
                else "call the plain module once before ShardedModel(...)"
            )
            raise UnsupportedError(f"parameter {name!r} has no data yet: it {what}. Do this: {remedy}")
        # A subclass, such as a DTensor or a quantised weight, may hold its values elsewhere than in strided memory.
        if type(parameter) is not nn.Parameter:
            raise UnsupportedError(f"parameter {name!r} is a {type(parameter).__name__}, not a plain nn.Parameter")
        if parameter.layout is not torch.strided:
            raise UnsupportedError(f"parameter {name!r} is {parameter.layout}; only strided tensors can be in a chunk")
    if num_gradients:
        warn_at_script(
            f"{num_gradients} parameters have a gradient of a backward before ShardedModel(...), which drops it: their "
            ".grad is None then. Call zero_grad() before the model is wrapped, or backward() after it",
        )


def check_wrapped(
    module: nn.Module, managed: Iterable[ManagedParameter], ignored: Collection[nn.Parameter], world_size: int
) -> None:
    """Check that the module still has exactly the parameters that were wrapped. Local.

    Raises GeminiError if one was added or replaced since, or moved into a parametrization on several ranks.
    """
    wrapped = {each.parameter: each.name for each in managed}
    for name, parameter in module.named_parameters():
        # A parametrization keeps the parameter object under another name, and may add buffers that differ by rank.
        known = wrapped.get(parameter)
        if known is not None and known != name and world_size > 1 and is_parametrized(name):
            raise GeminiError(
                f"parameter {known!r} became {name!r} after ShardedModel(...). On several ranks put parametrizations "
                "and pruning onto the module before it is wrapped: their buffers, which may be random, are rank 0's "
                "then"
            )
        if known is None and parameter not in ignored:
            if is_dtensor(parameter):
                raise cannot_take("fully_shard, or what else makes DTensors,", name)
            raise GeminiError(
                f"parameter {name!r} was added or replaced after ShardedModel(...) and would not be trained: "
                "change the module before it is wrapped, such as by ShardedModel(peft.get_peft_model(...)) for "
                "adapters, and values with model.load_state_dict() or in place. To "
                "change a size now, load model.state_dict() into the plain module, change that, and wrap it again"
            )


# -- `copy.deepcopy` of a sharded model, of the wrapped module, or of a part of it.
#
# The copy is plain and whole, in host memory, without our hooks: copied hooks would drive the steps of the original. It
# has the casts around modules of other dtypes than the rest (`ShardedModel(dtype={...})`), without which it cannot run.
# Therefore each module of a sharded model has a `__reduce_ex__` in its `__dict__`, where `copy.deepcopy` and pickle
# look for it. A `__deepcopy__` would be wrong: `nn.Module` has none, so a wrapper that forwards unknown attributes to
# its inner module, as in peft, would be copied by the inner module's method.


_ATTRIBUTE = "__reduce_ex__"


class PlainCopies:
    """Makes copies of the modules of one model."""

    def __init__(self, step: Step, handles: Handles) -> None:
        """handles: of the hooks that no copy has."""
        self._step = step
        self._handles = handles
        self._modules: list[weakref.ref[nn.Module]] = []

    def install(self, root: nn.Module) -> None:
        for module in root.modules():
            # Weak, since the module's own `__dict__` has the object: a strong reference would be a cycle.
            reference = weakref.ref(module)
            vars(module)[_ATTRIBUTE] = _Reduces(self, reference)
            self._modules.append(reference)

    def remove(self) -> None:
        """Remove our `__reduce_ex__` from all modules, which are then copied like any others."""
        for reference in self._modules:
            module = reference()
            if module is not None:
                vars(module).pop(_ATTRIBUTE, None)
        self._modules.clear()

    def of(self, module: nn.Module, memo: dict[int, Any]) -> Any:
        """A copy of `module` with whole CPU tensors for parameters and buffers, without our hooks. Collective.

        memo: the memo of the running `copy.deepcopy`, which keeps tied parameters tied.

        Raises UnsupportedError for a module of whose parameters this rank has a part, by tensor parallelism.
        """
        links = {link.managed.index: link for p in module.parameters() if (link := link_of(p)) is not None}
        for link in links.values():
            if link.managed.part is not None and link.managed.part.layout is not None:
                raise UnsupportedError(
                    f"copy.deepcopy() of a module with tensor parallelism: {link.managed.name!r} would be this rank's "
                    "part in it. Load model.state_dict(), which has wholes, into another plain module"
                )
        with self._step.publishing():
            self._step.check_idle("copy.deepcopy()")
            # In the order of chunks, which is the same on all ranks and fetches each chunk once.
            for index in sorted(links):
                key = id(links[index].managed.parameter)
                # The running `copy.deepcopy` may have copied a tied parameter with another part of the model.
                if key not in memo:
                    memo[key] = links[index].copy()
            # Parameters and buffers are in `memo` now, so `copy.deepcopy` takes these copies.
            for buffer in module.buffers():
                memo.setdefault(id(buffer), buffer.detach().to("cpu", copy=True))
            _leave_out(self._handles, memo)
            # Without the attribute `copy.deepcopy` copies the modules as it copies any others. With it, it would come
            # back here.
            ours = [(each, vars(each).pop(_ATTRIBUTE)) for each in module.modules() if _ATTRIBUTE in vars(each)]
            try:
                return copy.deepcopy(module, memo)
            finally:
                for each, reduces in ours:
                    vars(each)[_ATTRIBUTE] = reduces


class _Reduces:
    """The `__reduce_ex__` of one module."""

    def __init__(self, copies: PlainCopies, module: weakref.ref[nn.Module]) -> None:
        self._copies = copies
        self._module = module

    def __call__(self, protocol: Any) -> Any:
        module = self._module()
        assert module is not None, "the attribute of a module that is gone"
        return _itself, (_Copied(self._copies, module),)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse a module class with a `__deepcopy__` of its own, which would copy our hooks with the attributes."""
        raise UnsupportedError(
            "this module copies itself, with hooks of its ShardedModel: copy.deepcopy(model) instead"
        )


class _Copied:
    """What `__reduce_ex__` returns. `copy.deepcopy` copies it with its memo, and gets the plain copy of the module."""

    def __init__(self, copies: PlainCopies, module: nn.Module) -> None:
        self._copies = copies
        self._module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._copies.of(self._module, memo)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            "a module in a ShardedModel cannot be pickled: save its state_dict(), or a copy.deepcopy() of it"
        )


def _itself(module: Any) -> nn.Module:
    """What `__reduce_ex__` says to call. Raises UnsupportedError for `copy.copy`, which hands `_Copied` on as it is."""
    if isinstance(module, _Copied):
        raise UnsupportedError(
            "a shallow copy of a module would share parameters and hooks with its ShardedModel: use copy.deepcopy"
        )
    copied: nn.Module = module
    return copied


def _leave_out(handles: Handles, memo: dict[int, Any]) -> None:
    """Dictionaries of hooks are copied without ours: those would drive the steps of the original."""
    found: dict[int, tuple[dict[int, Any], set[int]]] = {}
    for handle in (*handles.of_operators, *handles.of_others):
        # torch notes `always_call` and `with_kwargs` of a hook in further dicts, under the same id.
        for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
            hooks = reference()
            if hooks is not None:
                found.setdefault(id(hooks), (hooks, set()))[1].add(handle.id)
    # A dictionary in `memo` was copied with an earlier module already.
    found = {key: each for key, each in found.items() if key not in memo}
    for key, (hooks, _) in found.items():
        memo[key] = type(hooks)()
    # A user's hook may be a method of a module, and copying it copies that module. `memo` has all dictionaries by now,
    # so none of our hooks is reached.
    for key, (hooks, ours) in found.items():
        memo[key].update({number: copy.deepcopy(hook, memo) for number, hook in hooks.items() if number not in ours})


def note_dtypes(error: BaseException, weights: Iterable[torch.dtype], inputs: Any) -> None:
    """Add to torch's error about two dtypes where they come from: 16-bit weights and the script's inputs. Local."""
    if not isinstance(error, (RuntimeError, ValueError)) or isinstance(error, GeminiError) or "type" not in str(error):
        return
    half = next((dtype for dtype in weights if dtype in HALF_DTYPES), None)
    given = next((each.dtype for each in tensors_in(inputs) if each.is_floating_point()), half)
    if half is not None and given is not half:
        ours = (
            "; or have the model cast its inputs, ShardedModel(module, cast_inputs=True) or cast_inputs=true in a "
            f"config; or its outputs back, too, ShardedModel(module, dtype={{'': {half}, '*': torch.float32}})"
        )
        error.add_note(
            f"The model's weights are {half} and an input is {given}. Cast the batch, x.to({half})"
            f"{ours * (given in CASTABLE_DTYPES)}"
        )


# -- The names, state dicts and attributes that a sharded model shows: those of the module that it wraps.


class PlainView(nn.Module):
    """The part of `ShardedModel` that answers on behalf of the wrapped module."""

    module: nn.Module
    chunk_manager: ChunkManager
    _states: States
    _copies: PlainCopies
    _casts_inputs: bool
    _is_wrapped = False  # the constructor has set all attributes of this object's own

    def _show(self, module: nn.Module) -> None:
        """Answer for `module` from now on."""
        self.module = module
        # torch looks buffers of `named_buffers()` up in this set; names are those of the wrapped module.
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        # A subclass with a `forward` of its own keeps that: an attribute of the instance would hide it.
        if type(self).forward is PlainView.forward:
            # By this signature trainers choose the inputs that they pass. Without `updated=()` attributes would be
            # copied too, such as the marks of `torch.compile`. A bound method takes no attributes, and `partial` does.
            own = functools.partial(PlainView.forward, self)
            self.forward = functools.update_wrapper(own, module.forward, updated=())  # type: ignore[method-assign]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module. Collective. Its signature is that of the module's `forward`.

        Raises what the module raises, SlotError if views that were kept leave too few slots, and, on the other ranks of
        one that failed, RemoteRankError.
        """
        # torch runs no forward hooks after a KeyboardInterrupt: see [Note: Ended calls] in gemini/runtime/calls.py.
        failures = self.chunk_manager.step.failures
        with failures.ending_calls():
            return self.module(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of the wrapped module, under its names. Local: nothing is fetched. Raises nothing."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As of the wrapped module, under its names. Local. Raises nothing."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(  # type: ignore[override]
        self,
        *args: Any,
        rank0_only: bool = False,
        destination: OrderedDict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> OrderedDict[str, Any]:
        """Whole copies of all parameters and buffers in host memory, under the plain module's names. Collective.

        Args:
            args: destination, prefix and keep_vars by position, which torch deprecates.
            rank0_only: True leaves the dict empty on all ranks but rank 0, and saves their host memory.
            destination: the dict to add to. None: a new one.
            prefix: put in front of every name.
            keep_vars: True returns the parameters and buffers themselves, which is not collective.

        Raises GeminiError inside a forward or backward.
        """
        if args:
            warn_at_script("state_dict() takes its arguments by keyword; torch will refuse others", FutureWarning)
            given = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False))
            destination, prefix = given.get("destination", destination), given.get("prefix", prefix)
            keep_vars = given.get("keep_vars", keep_vars)
        # The parameters themselves instead of copies: nothing is gathered.
        if keep_vars:
            own: Any = OrderedDict() if destination is None else destination
            return nn.Module.state_dict(self.module, destination=own, prefix=prefix, keep_vars=True)
        with self.chunk_manager.step.publishing():
            state = whole_state_dict(self.module, self._states, rank0_only, prefix)
        if destination is None:
            return state
        destination.update(state)
        # `_metadata` has the versions of the modules, by which they know the format of what they load.
        metadata = getattr(destination, "_metadata", None)  # a plain dict has none
        if metadata is not None:
            metadata.update(vars(state).get("_metadata", {}))
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Set weights, fp32 masters and buffers from whole tensors. Collective: every rank gives the same values.

        Args:
            state_dict: tensors of the parameters' shapes, of any dtype, under the plain module's names.
            strict: False passes over missing and unexpected names.
            assign: True does the same as False: the model keeps its memory and dtypes, and takes the values.

        Returns missing and unexpected names, as torch does. Raises RuntimeError, which names every wrong key and shape,
        or TypeError if `state_dict` is not a dict; nothing has changed then.
        """
        with self.chunk_manager.step.publishing():
            return load_whole_state_dict(self.module, self._states, self.trainability, state_dict, strict)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell `torch.distributed.checkpoint.state_dict` that it passes through `module`, which no name contains."""
        return dict.fromkeys((name for name, _ in self.module.named_children()), "module")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load this model as a part of a plain module: torch calls it from that module's `load_state_dict`."""
        with self.chunk_manager.step.publishing():
            # The last three are lists of missing keys, unexpected keys and errors, to which torch applies `strict`.
            load_part(self.module, self._states, self.trainability, state_dict, prefix, *rest[-3:])

    def __getattr__(self, name: str) -> Any:
        # Before `__init__` has set the manager, and for other attributes, this is ordinary forwarding.
        manager = vars(self).get("chunk_manager") if name == PREPARED else None
        if manager is not None and is_prepared(manager.communicator.world_size):
            return True
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Marks of `torch.compile` are not forwarded: other code would call the inner module directly. `self.module`
            # would come back here without end in an object whose `__init__` has not run, as `copy` and pickle make
            # them.
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or is_mark(name):
                raise
            return _forwarded(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Attributes of the wrapped module are read there, also by its forward, so they are written there.
        if self._shows(name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def _shows(self, name: str) -> bool:
        """Whether the attribute that this object has under `name` is the wrapped module's."""
        if not self._is_wrapped or name in vars(self) or name in self._modules or hasattr(type(self), name):
            return False
        return hasattr(self.module, name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As of the wrapped module, whose parameters these are. Local. Raises what torch raises.

        The next step refuses a parameter that was not in the module when it was wrapped.
        """
        self.module.register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """As of the wrapped module, whose state dict has it from then on. Local. Raises what torch raises."""
        self.module.register_buffer(name, tensor, persistent)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the plain module, whole, in host memory, without our hooks and casts. Collective."""
        return self._copies.of(self.module, memo)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError("a ShardedModel cannot be pickled: save model.state_dict() instead")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Answer `.to()`, `.float()`, `.cuda()` and the like. Raises UnsupportedError if they would change anything."""
        if not changes_nothing(fn, (*self.module.parameters(), *self.module.buffers())):
            raise UnsupportedError(CONVERSION)
        return self

    def share_memory(self) -> NoReturn:
        """Not possible. Local. Raises UnsupportedError."""
        raise UnsupportedError("share_memory() of a ShardedModel is not possible: copy.deepcopy(model) is a plain one")


def _forwarded(module: nn.Module, name: str) -> Any:
    """The wrapped module's attribute. A name of torch's own wrappers that it does not have is told what to use."""
    try:
        return getattr(module, name)
    except AttributeError as error:
        words = instead_of_torchs(name)
        if words is None:
            raise
        raise AttributeError(f"a ShardedModel has no {name!r}: {words}", name=name) from error
