"""Compiled modules: how to recognise them, and how to keep our hooks outside of what `torch.compile` traces.

[Note: Compiled modules] A compiled module is one operator: all chunks of its parameters are fetched before the
compiled call and pinned until it returns, so the compiler traces, guards and runs plain parameters. A chunk that comes
back in another slot changes nothing that guards check: a parameter keeps its class, shape, stride and identity.
Our hooks stand outside of the compiled call. Inside they would be traced: each a graph break, and an error with
`fullgraph=True`. There are four ways to compile a module:

- `torch.compile(module)` makes an `OptimizedModule`. Module hooks on that one run outside of the compiled call.
- `module.forward = torch.compile(module.forward)`. Module hooks run outside, too.
- `module.compile()` compiles `_call_impl`, which runs the module's hooks. `CompiledCall` takes its place.
- A compiled function, or `torch.compile(ShardedModel(...))`, calls the model while the compiler is on. `OuterCompiler`
  keeps the compiler off until the wrapped module is called, and then compiles that as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from gemini.memory.untraced import never_traced

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
    """Run the hooks and the call. `manager/calls.py` finds running calls by the names `_call_impl` and `self`."""
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
        # None: no compiler is on. False: the compiler only runs code that it has compiled before.
        callback = _eval_frame.get_eval_frame_callback()
        if callback is None or callback is False:
            return call(*args, **kwargs)
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
