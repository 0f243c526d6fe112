"""Which modules are operators, in which dtype they compute, and which tensors are theirs."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from gemini.access.link import external_parameters, link_of
from gemini.building.store import built_link_of
from gemini.errors import UnsupportedError
from gemini.log import warn_at_script
from gemini.memory.modes import never_traced
from gemini.placement.demand import ModelSpec, OperatorSpec, WeightSpec
from gemini.settings import CASTABLE_DTYPES, Settings, check_module, dtype_of
from optim import HALF_DTYPES

# -- Parametrizations and pruning of `torch.nn.utils`, recognised by the names of parameters.


def is_parametrized(name: str) -> bool:
    """Whether a weight is computed from it: `layer.parametrizations.weight.original`, `layer.weight_orig`."""
    return name.endswith("_orig") or "parametrizations" in name.split(".")


# -- Parameters that the user keeps out of the chunks: `ignored_parameters` of `Settings`.
#
# They stay as in a plain module: whole, on their device, with their own memory, dtype and `.grad`. They are not
# compared or reduced over ranks, and our optimizers do not step them.


def ignored_in(module: nn.Module, settings: Settings) -> frozenset[nn.Parameter]:
    """The parameters of `module` that `settings` ignore. A tied parameter is ignored if one of its names is. Local.

    Raises TypeError if `module` is no module, ValueError for a pattern that matches no parameter, and UnsupportedError
    for a parameter that was built on shards.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, found {type(module).__name__}")
    found: dict[nn.Parameter, str] = {}
    # Each pattern must match something: a misspelled one would silently put the parameter into a chunk.
    unused = dict.fromkeys(settings.ignored_parameters)
    for name, parameter in module.named_parameters(remove_duplicate=False) if unused else ():
        for pattern in settings.ignored_parameters:
            if fnmatchcase(name, pattern):
                unused.pop(pattern, None)
                found[parameter] = name
    if unused:
        raise ValueError(f"ignored_parameters: no parameter has the name {', '.join(map(repr, unused))}")
    for parameter, name in found.items():
        if built_link_of(parameter) is not None:
            raise UnsupportedError(
                f"ignored_parameters names {name!r}, which was built on shards: make its module outside of the "
                "ZeroInitContext"
            )
    return frozenset(found)


def zero_ignored(ignored: Collection[nn.Parameter], set_to_none: bool) -> None:
    """Discard the gradients of ignored parameters, as `nn.Module.zero_grad` does. Local."""
    for parameter in ignored:
        if set_to_none or parameter.grad is None:
            parameter.grad = None
        else:
            # After a backward with create_graph=True the gradient has a graph, which `zero_` would extend.
            parameter.grad.detach_()
            parameter.grad.zero_()


# -- Compiled modules: how to recognise them, and how to keep our hooks outside of what `torch.compile` traces.
#
# [Note: Compiled modules] A compiled module is one operator: all chunks of its parameters are fetched before the
# compiled call and pinned until it returns, so the compiler traces, guards and runs plain parameters. A chunk that
# comes back in another slot changes nothing that guards check: a parameter keeps its class, shape, stride and identity.
# Our hooks stand outside of the compiled call. Inside they would be traced: each a graph break, and an error with
# `fullgraph=True`. There are four ways to compile a module:
#
# - `torch.compile(module)` makes an `OptimizedModule`. Module hooks on that one run outside of the compiled call. -
# `module.forward = torch.compile(module.forward)`. Module hooks run outside, too. - `module.compile()` compiles
# `_call_impl`, which runs the module's hooks. `CompiledCall` takes its place. - A compiled function, or
# `torch.compile(ShardedModel(...))`, calls the model while the compiler is on. `OuterCompiler`   keeps the compiler off
# until the wrapped module is called, and then compiles that as a whole.


_eval_frame: Any = torch._C._dynamo.eval_frame  # importing torch._dynamo itself would take a second

# Like hooks of a module: before(module, args), and after(module, args, kwargs, output), which may replace the output.
Before = Callable[[nn.Module, Any], None]
After = Callable[[nn.Module, Any, Any, Any], Any]


def is_compiled(module: nn.Module) -> bool:
    """Whether calling the module runs a compiled function over everything in it."""
    if module._compiled_call_impl is not None:
        return True
    # `torch.compiler.disable` marks a function like `torch.compile` does, and says so in a second attribute.
    forward = module.forward
    # torch sets the attribute on an `OptimizedModule` itself, and on a function that was assigned to `forward`.
    made_by_dynamo = hasattr(forward, "_torchdynamo_orig_callable") or hasattr(module, "_torchdynamo_orig_callable")
    return made_by_dynamo and not getattr(forward, "_torchdynamo_disable", False)


def is_mark(name: str) -> bool:
    """Whether other code recognises a compiled module by this attribute. It would call the module inside ours then."""
    return name in ("_orig_mod", "get_compiler_config") or name.startswith("_torchdynamo_")


def original_of(module: Any) -> Any:
    """The module that was passed to `torch.compile(module)`. Any other object is returned as it is."""
    while isinstance(module, nn.Module) and "_orig_mod" in module._modules:
        module = module._modules["_orig_mod"]
    return module


class CompiledCall:
    """Replaces a module's compiled call by the same call with hooks around it, which the compiler does not trace."""

    def __init__(self, module: nn.Module) -> None:
        assert module._compiled_call_impl is not None
        self._module = module
        self._compiled = self._call = module._compiled_call_impl
        module._compiled_call_impl = self

    def add(self, before: Before, after: After) -> None:
        """Add hooks around all earlier ones. `after` is also called after an exception, with None as output."""
        self._call = partial(_call_impl, self._module, self._call, before, after)

    def remove(self) -> None:
        """Restore the module's own compiled call, unless other code has replaced ours meanwhile."""
        if self._module._compiled_call_impl is self:
            self._module._compiled_call_impl = self._compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


# Positional-only, so that the module's forward may have keyword arguments of these names.
def _call_impl(
    self: nn.Module, inner: Callable[..., Any], before: Before, after: After, /, *args: Any, **kwargs: Any
) -> Any:
    """Run the hooks and the call. `runtime/calls.py` finds running calls by the names `_call_impl` and `self`."""
    try:
        # `before` is inside, too: when it fails after it has entered the call, as in a fetch, `after` has to end the
        # call.
        before(self, args)
        output = inner(*args, **kwargs)
    except BaseException:
        # Module hooks with `always_call` run after an exception, too.
        after(self, args, kwargs, None)
        raise
    replaced = after(self, args, kwargs, output)
    return output if replaced is None else replaced


@never_traced("what moves a model's parameters runs as it is", calls_too=False)  # else torch says that none is on
def is_compiler_on() -> bool:
    """Whether the function that runs was called from a compiled one, by a compiler that would compile it, too."""
    # None: no compiler is on. False: the compiler only runs code that it has compiled before.
    return _eval_frame.get_eval_frame_callback() not in (None, False)


class OuterCompiler:
    """Keeps an outer compiler off while our own code runs, so that it traces only the wrapped module."""

    def __init__(self) -> None:
        self._callback: Any = None

    @property
    def is_on(self) -> bool:
        """Whether the running call of the model came from a compiled function."""
        return self._callback is not None

    @never_traced("what moves a model's parameters runs as it is", calls_too=False)
    def outside(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `call` with the compiler off. The `inside` of `compile` turns it on again for the wrapped module."""
        callback = _eval_frame.get_eval_frame_callback()
        outer, self._callback = self._callback, callback
        _eval_frame.set_eval_frame(None)
        try:
            return call(*args, **kwargs)
        finally:
            self._callback = outer
            _eval_frame.set_eval_frame(callback)

    def compile(self, module: nn.Module) -> None:
        """From now on compile the module whenever the model is called from a compiled function."""

        def inside(*args: Any, **kwargs: Any) -> Any:
            # This call of the model did not come from a compiled function: run the module uncompiled.
            if self._callback is None:
                # `module(...)` would come back here, by way of `_compiled_call_impl`.
                return module._call_impl(*args, **kwargs)
            before = _eval_frame.set_eval_frame(self._callback)
            try:
                return _call_traced(module, args, kwargs)
            finally:
                _eval_frame.set_eval_frame(before)

        # With this attribute `is_compiled` holds: the table makes the module one operator, with its hooks around
        # `inside`.
        module._compiled_call_impl = inside


def _call_traced(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A frame of our own for the compiler to start at: it skips the frames of torch's own modules."""
    return module._call_impl(*args, **kwargs)


# -- Finds and replaces tensors in inputs and outputs of modules: in containers and dataclasses, to any depth.


def tensors_in(values: Any) -> Iterator[Tensor]:
    """All tensors in containers that torch knows, in any other mappings and sets, and in dataclasses."""
    # What pytree does not know, such as a tokenizer's batch or a set, is a leaf to it.
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from tensors_in(list(leaf.values()))
        elif isinstance(leaf, (set, frozenset)):
            yield from tensors_in(list(leaf))
        elif _is_dataclass(leaf):
            for _, value in _fields(leaf):
                yield from tensors_in(value)


def map_tensors(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Apply `function` to every tensor that `tensors_in` finds, but for those in mappings that cannot be written to.

    Containers that torch knows are copied. All others are copied only if one of their tensors changes.
    """

    def each(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if isinstance(leaf, MutableMapping):
            return _map_items(function, leaf)
        if isinstance(leaf, (set, frozenset)):
            return _map_members(function, leaf)
        return _map_fields(function, leaf) if _is_dataclass(leaf) else leaf

    return pytree.tree_map(each, values)


def _map_items(function: Callable[[Tensor], Tensor], mapping: MutableMapping[Any, Any]) -> Any:
    """The mapping itself if none of its tensors changes, else a copy, such as of a tokenizer's `BatchEncoding`."""
    changed = {}
    for key, value in mapping.items():
        new = map_tensors(function, value)
        if _differ(value, new):
            changed[key] = new
    if not changed:
        return mapping
    result = copy.copy(mapping)
    for key, value in changed.items():
        result[key] = value
    return result


def _map_members(function: Callable[[Tensor], Tensor], members: Any) -> Any:
    """The set itself if none of its tensors changes, else another one."""
    mapped = [(member, map_tensors(function, member)) for member in members]
    return type(members)(new for _, new in mapped) if any(_differ(*pair) for pair in mapped) else members


def _differ(before: Any, after: Any) -> bool:
    """Whether a tensor in `after` is not the one that `before` has in its place."""
    return any(a is not b for a, b in zip(tensors_in(before), tensors_in(after), strict=True))


def _map_fields(function: Callable[[Tensor], Tensor], instance: Any) -> Any:
    """The dataclass instance itself if none of its tensors changes, else a copy that skips the constructor."""
    changed = {}
    for name, value in _fields(instance):
        new = map_tensors(function, value)
        if _differ(value, new):
            changed[name] = new
    if not changed:
        return instance
    # A copy, because the caller may hold the instance. Frozen dataclasses refuse assignments.
    result = copy.copy(instance)
    is_frozen = instance.__dataclass_params__.frozen
    for name, value in changed.items():
        if is_frozen:
            object.__setattr__(result, name, value)
        else:
            # Outputs of Hugging Face are mappings too. Their `__setattr__` keeps attribute and key in step.
            setattr(result, name, value)
    return result


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(instance: Any) -> Iterator[tuple[str, Any]]:
    """The fields that have a value. A field that the constructor does not set may have none."""
    for field in dataclasses.fields(instance):
        if hasattr(instance, field.name):
            yield field.name, getattr(instance, field.name)


# -- Modules that choose among their children by data: those that the user marks, and those with a list of experts.


Modules = type[nn.Module] | str | Iterable[type[nn.Module] | str]

# Names such as `experts`, `local_experts` and `routed_expert`.
_EXPERTS = re.compile(r"(.*_)?experts?")
_MARK = "_gemini_leaf"


def set_leaf_module(model: nn.Module, classes: Modules) -> list[nn.Module]:
    """Mark modules that choose among their children by data, such as a mixture of experts.

    A marked module is fetched as one operator, with all of its children, so that ranks that choose different children
    still fetch the same chunks. A module with a `ModuleList` called `experts` is treated so without a mark, and so is a
    module called `experts` that owns a parameter of three dimensions. Local, but every rank must mark alike, before the
    model is wrapped.

    Args:
        model: the module that will be wrapped.
        classes: one or several of: a module class, which includes its subclasses; the name of a class (`"Block"`), with
            or without its Python module (`"models.gpt.Block"`); the name of a module in the model (`"layers.3.mlp"`).

    Returns the marked modules in the model's order. Raises ValueError for a class or name that the model does not
    have, TypeError for anything but classes and strings, and UnsupportedError if the model is wrapped already; then
    nothing is marked.

    Example:
        >>> set_leaf_module(torch.nn.Sequential(torch.nn.Bilinear(8, 8, 8)), "Bilinear")
        [Bilinear(in1_features=8, in2_features=8, out_features=8, bias=True)]
    """
    return _mark(model, classes, "set_leaf_module()", True)


def unset_leaf_module(model: nn.Module, classes: Modules) -> list[nn.Module]:
    """Undo `set_leaf_module(model, classes)`, or state that modules with a list of experts always use all of them.

    The operators of such a module are then fetched one by one. Local, as `set_leaf_module`, with the same `model` and
    `classes`. Returns the modules in the model's order. Raises what `set_leaf_module` raises.

    Example:
        >>> blocks = torch.nn.Sequential(torch.nn.Bilinear(8, 8, 8))
        >>> marked = set_leaf_module(blocks, "Bilinear")
        >>> unset_leaf_module(blocks, "Bilinear") == marked
        True
    """
    return _mark(model, classes, "unset_leaf_module()", False)


def is_marked(module: nn.Module) -> bool:
    """Whether the user has marked or unmarked the module."""
    return hasattr(module, _MARK)


def chooses(module: nn.Module) -> bool:
    """Whether the module chooses among its children by data: by its mark, else if it has a list of experts."""
    if is_marked(module):
        return bool(getattr(module, _MARK))
    # A list of one expert leaves no choice.
    lists = (name for name, child in module.named_children() if isinstance(child, nn.ModuleList) and len(child) > 1)
    return any(_EXPERTS.fullmatch(name) for name in lists)


def _is_stack_of_experts(module: nn.Module, name: str) -> bool:
    """Whether the module of this name is experts in one tensor, and nobody has said whether it is a leaf.

    Forward fetches all chunks of an operator, but backward fetches by use. A loop over the experts that this rank's
    tokens chose, such as that of transformers' "eager" experts, uses them in an order that differs by rank.
    """
    if is_marked(module) or not _EXPERTS.fullmatch(name.rpartition(".")[2]):
        return False
    # A stack of one leaves no choice.
    return any(each.dim() >= 3 and len(each) > 1 for each in module.parameters(recurse=False))


def _mark(model: nn.Module, classes: Modules, function: str, mark: bool) -> list[nn.Module]:
    wanted = (classes,) if isinstance(classes, (type, str)) else tuple(classes)
    if not wanted or not all(isinstance(each, str) or _is_module_class(each) for each in wanted):
        raise TypeError(f"classes must be a module class, a name, or several of them, found {classes!r}")
    check_module("model", model)
    # Find all modules before the first is marked, so that an error marks none.
    answers = {each: [m for name, m in model.named_modules() if _is(each, name, m)] for each in wanted}
    absent = [each if isinstance(each, str) else each.__name__ for each, modules in answers.items() if not modules]
    if absent:
        present = ", ".join(dict.fromkeys(type(module).__name__ for module in model.modules()))
        raise ValueError(
            f"no module of class or name {', '.join(absent)} in {type(model).__name__}, which has {present}"
        )
    chosen = {module for modules in answers.values() for module in modules}  # membership only
    # In the order of the model, which is the same on all ranks, whatever the order of `classes`.
    found = [module for module in model.modules() if module in chosen]
    if any(link_of(parameter) is not None for module in found for parameter in module.parameters()):
        raise UnsupportedError(f"{function} after ShardedModel(...): call it on the module before it is wrapped")
    for module in found:
        setattr(module, _MARK, mark)
    return found


def _is_module_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _is(wanted: type[nn.Module] | str, name: str, module: nn.Module) -> bool:
    if not isinstance(wanted, str):
        return isinstance(module, wanted)
    kind = type(module)
    return wanted in (name, kind.__name__, f"{kind.__module__}.{kind.__qualname__}")


# -- Precision: the dtypes of a module's weights in chunks, and casts around modules of another dtype than the rest.
#
# A module for which `ShardedModel(dtype={...})` names a dtype gets its floating-point inputs in that dtype. Outputs of
# that dtype are cast back to the dtype of the first floating-point input; without one (an embedding), to the model's
# default. Tensors are found in tuples, lists, dicts and dataclasses.


_DEFAULT = "*"


class ModulePrecision(NamedTuple):
    """The dtypes of one module's parameters, and the casts around its modules that a key of `dtype={...}` matches."""

    parameters: dict[nn.Parameter, torch.dtype]
    casting: dict[nn.Module, Casting]


def weights_of(module: nn.Module, settings: Settings) -> ModulePrecision:
    """The dtype of every parameter of `module` in its chunk.

    Raises ValueError if a key matches no module, or if two keys give a tied parameter different dtypes.
    """
    parameters: dict[nn.Parameter, torch.dtype] = {}
    castings: dict[nn.Module, Casting] = {}
    names: dict[nn.Parameter, str] = {}
    by_key: dict[type[nn.Module] | str, torch.dtype | None] = (
        dict(settings.dtype) if isinstance(settings.dtype, Mapping) else {_DEFAULT: settings.dtype}
    )
    # Each key must match something: a misspelled one would silently leave a module in the default dtype.
    default = by_key.pop(_DEFAULT, None)
    unused = dict.fromkeys(by_key)

    def visit(each: nn.Module, name: str, dtype: torch.dtype | None) -> None:
        # The first matching key counts, also for all modules inside, unless a key matches those.
        key = next((key for key in by_key if _chooses(key, each, name)), None)
        if key is not None:
            unused.pop(key, None)
            dtype = by_key[key]
            # A module that keeps its own dtypes gets its inputs in that of its first parameter of 32 or 16 bits.
            own = dtype or next((p.dtype for p in each.parameters() if p.dtype in CASTABLE_DTYPES), None)
            if own is not None:
                castings.setdefault(each, Casting(own, default))
        for its_name, parameter in each.named_parameters(name, recurse=False):
            target = dtype if dtype is not None and parameter.dtype in CASTABLE_DTYPES else parameter.dtype
            # A module at several places is visited at each of them, since keys may choose different dtypes for its
            # names.
            before = parameters.setdefault(parameter, target)
            known_as = names.setdefault(parameter, its_name)
            if before is not target:
                raise ValueError(f"dtype={{...}} makes {known_as!r} {before}, and tied to it {its_name!r} {target}")
        for child_name, child in each.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name, dtype)

    visit(module, "", default)
    if unused:
        raise ValueError(f"dtype={{...}}: no module is chosen by {', '.join(map(repr, unused))}")
    dtypes = set(parameters.values())
    if settings.reuse_fp16_shard and dtypes and not dtypes.intersection(HALF_DTYPES):
        warn_at_script(
            "reuse_fp16_shard=True does nothing here, as the model has no 16-bit weights, whose memory their "
            "gradients could reuse: give dtype=torch.float16 or torch.bfloat16, or leave it out",
        )
    return ModulePrecision(parameters, castings)


def _chooses(key: type[nn.Module] | str, module: nn.Module, name: str) -> bool:
    return fnmatchcase(name, key) if isinstance(key, str) else isinstance(module, key)


def input_casting(settings: Settings, dtypes: Iterable[torch.dtype]) -> InputCasting:
    """The casts of `ShardedModel(cast_inputs=True)`. dtypes: of the weights in chunks.

    Raises ValueError unless these have one dtype.
    """
    if isinstance(settings.dtype, Mapping):
        raise ValueError(
            "cast_inputs=True casts to one dtype, and each module that dtype={...} names casts its inputs itself, '' "
            "those of the whole model: leave cast_inputs out"
        )
    found = sorted({str(dtype): dtype for dtype in dtypes if dtype.is_floating_point}.items())
    if settings.dtype is None and len(found) != 1:
        raise ValueError(
            f"cast_inputs=True needs weights of one dtype, found {' and '.join(dict(found)) or 'none'}: give dtype="
        )
    return InputCasting(settings.dtype or found[0][1])


class InputCasting:
    """The casts of what a module is called with. What it returns stays as it is."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def install(self, module: nn.Module) -> list[RemovableHandle]:
        return [module.register_forward_pre_hook(self._before, with_kwargs=True)]

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_tensors((args, kwargs), CASTABLE_DTYPES, self._dtype)


class Casting(InputCasting):
    """The casts around one module."""

    def __init__(self, dtype: torch.dtype, default: torch.dtype | None) -> None:
        super().__init__(dtype)
        self._default = default
        self._outside: list[torch.dtype | None] = []  # dtypes to cast back to, one per running call, innermost last

    def install(self, module: nn.Module) -> list[RemovableHandle]:
        # `always_call`: a call that fails must remove its entry too, or later outputs would be cast to a wrong dtype.
        # `prepend`: the user's hooks on the module see its output in the dtype that the caller gets.
        return [
            *super().install(module),
            module.register_forward_hook(self._after, prepend=True, always_call=True),
        ]

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        dtypes = (tensor.dtype for tensor in tensors_in((args, kwargs)) if tensor.dtype in CASTABLE_DTYPES)
        self._outside.append(next(dtypes, self._default))
        return super()._before(module, args, kwargs)

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        # There is no entry if an earlier pre-hook failed: torch calls this hook all the same.
        outside = self._outside.pop() if self._outside else None
        return output if outside is None else cast_tensors(output, (self._dtype,), outside)


def cast_tensors(values: Any, dtypes: tuple[torch.dtype, ...], to: torch.dtype) -> Any:
    """`values` with all tensors of one of `dtypes` cast to `to`."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(to) if tensor.dtype in dtypes else tensor

    return map_tensors(cast, values)


# -- Which modules are operators: modules that own parameters directly, and leaves, which are fetched whole.
#
# A leaf is a module that uses its children's parameters without calling the children (attention and recurrent modules
# of torch, compiled modules), or that chooses its children by data. Ranks may choose differently, so if parameters are
# gathered, all parameters of such a leaf are gathered together, in forward and backward: see hooks.py.


# `nn.MultiheadAttention` passes `out_proj.weight` to a function and never calls `out_proj`, whose hooks would not run.
_LEAVES: tuple[type[nn.Module], ...] = (nn.MultiheadAttention, nn.RNNBase)


Found = list[tuple[nn.Module, OperatorSpec]]


def find_operators(
    root: nn.Module, gathers: bool, places: dict[nn.Parameter, int], ignored: Collection[nn.Parameter] = ()
) -> Found:
    """The operators in module order, parents before children. A module at several places is one operator.

    gathers: whether parameters are gathered from other ranks, which makes modules that choose their children leaves.
        The root becomes such a leaf only by a mark, not by the names of its children.
    places: the place of each parameter in `ModelSpec.weights`. New parameters are added with the next places.
    ignored: parameters outside of all operators.
    """
    found: Found = []
    seen: set[nn.Module] = set()  # membership only

    def visit(module: nn.Module, name: str, above: tuple[int, ...], is_chosen: bool) -> None:
        if module in seen:
            return
        seen.add(module)
        # The hooks of a compiled module stand around it, so it answers for all modules inside.
        compiled = is_compiled(module)
        inside = [each for each in module.modules() if each is not root] if compiled else []
        # A leaf needs all of its chunks on the device at once, so the name of a child is not enough to make the root
        # one. A compiled module has no operators inside, so it routes if anything in it does.
        is_router = (chooses(module) and (module is not root or is_marked(module))) or any(map(chooses, inside))
        # Data also decides about everything inside a router. Where nothing is gathered, ranks may differ freely, and
        # the modules inside stay operators of their own.
        is_chosen = is_chosen or is_router
        # Some expert of a stack is used on every rank, so the gradient of the whole stack comes, chosen by no data.
        routes = gathers and (is_router or _is_stack_of_experts(module, name))
        is_leaf = routes or compiled or isinstance(module, _LEAVES)
        # Parameters of other modules that the user has registered with this one are fetched with its own.
        external = [parameter for each in (module, *inside) for parameter in external_parameters(each)]
        parameters = [each for each in (*module.parameters(recurse=is_leaf), *external) if each not in ignored]
        if parameters:
            spec = OperatorSpec(
                name,
                tuple(places.setdefault(parameter, len(places)) for parameter in parameters),
                above,
                is_chosen,
                edits_weights=getattr(module, "max_norm", None) is not None,  # embeddings that renormalise rows
                routes=routes,
                is_compiled=compiled,
            )
            found.append((module, spec))
            above = (*above, len(found) - 1)
        # Modules inside a leaf get no hooks: a fetch there would be a collective that other ranks may not reach, or
        # would be traced by the compiler.
        if is_leaf:
            return
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name, above, is_chosen)

    visit(root, "", (), False)
    return found


def parameter_places(root: nn.Module) -> list[tuple[str, int]]:
    """(name in its module, id) of all parameters. The list changes if a parameter is added, replaced or renamed.

    It takes a fraction of the time of `named_parameters()`, which composes every full name. Ids are compared on this
    rank only.
    """
    found: list[tuple[str, int]] = []
    stack, seen = [root], {id(root)}
    while stack:
        module = stack.pop()
        for name, parameter in module._parameters.items():
            if parameter is not None:
                # The chunks keep wrapped parameters alive, so the id of one is never that of a parameter which replaced
                # it.
                found.append((name, id(parameter)))
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                stack.append(child)
    return found


# -- Describes a module for planning. Reads only shapes, dtypes and flags, so it works on "meta" too.


def specs_of(module: nn.Module, settings: Settings, world_size: int) -> ModelSpec:
    """The description of a module for `plan_model`: names, shapes, dtypes and operators. Reads no values; local.

    Args:
        module: a module on any device, "meta" included.
        settings: the settings that the plan will be made with; `dtype`, `stage` and `ignored_parameters` count here.
        world_size: the number of ranks.

    Raises ValueError if a key of `dtype={...}` matches no module, two keys give a tied parameter different dtypes, or a
    pattern of `ignored_parameters` matches no parameter.

    Example:
        >>> settings = Settings(stage=2, chunk_size=4096)
        >>> spec = specs_of(torch.nn.Linear(8, 8), settings, world_size=4)
        >>> len(spec.weights)
        2
    """
    places: dict[nn.Parameter, int] = {}
    operators = find_operators(module, settings.gathers(world_size), places, ignored_in(module, settings))
    return model_spec(dict(module.named_parameters()), operators, places, weights_of(module, settings))


def model_spec(
    by_name: Mapping[str, nn.Parameter], operators: Found, places: Iterable[nn.Parameter], weights: ModulePrecision
) -> ModelSpec:
    """The specs of a module whose operators and dtypes are known.

    by_name: its parameters under their first names. places: in the order of weights.
    """
    # A tied parameter has one spec, under the first of its names, which `named_parameters()` gives.
    names = {parameter: name for name, parameter in by_name.items()}
    specs = []
    for each in places:
        dtype = weights.parameters[each]
        # The fp32 master of such a weight keeps the bits that rounding to 16 bits drops.
        is_rounded = dtype in HALF_DTYPES and each.dtype is not dtype
        specs.append(WeightSpec(names[each], tuple(each.shape), dtype_of(dtype), each.requires_grad, is_rounded))
    return ModelSpec(tuple(specs), tuple(spec for _, spec in operators))


def buffers_in_words(root: nn.Module) -> list[str]:
    """A line for each buffer and each further name of one, in the order in which ranks exchange their values."""
    names: dict[Tensor, str] = {}
    lines = []
    for name, buffer in root.named_buffers(remove_duplicate=False):
        first = names.setdefault(buffer, name)
        also = "" if first == name else f", which is {first!r}"
        lines.append(f"buffer {name!r} of shape {tuple(buffer.shape)}, {buffer.dtype}{also}")
    return lines


def describe(arguments: Sequence[str], spec: ModelSpec, built: Sequence[str], buffers: Sequence[str]) -> str:
    """What must be equal on all ranks, one fact per line, so that an error can show the first difference."""
    compiled = [operator.name for operator in spec.operators if operator.is_compiled]
    return "\n".join(
        [
            *arguments,
            *(
                f"parameter {each.name!r} of shape {each.shape}, (dtype, trainable) = {each.dtype.name, each.trainable}"
                for each in spec.weights
            ),
            *buffers,
            f"built in a ZeroInitContext: {', '.join(built) or 'nothing'}",
            f"compiled: {', '.join(compiled) or 'nothing'}",
        ]
    )
