"""What autograd and functorch keep of parameters, and get back when they ask."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gemini.access.parameter_link import any_link_of
from gemini.errors import StaleGraphError, UnsupportedError
from gemini.memory.modes import A_HOOK, never_traced, unseen, untracked, unwrapped
from gemini.ranks.parts import is_dtensor
from gemini.runtime.chunk import Chunk, ManagedParameter, ParamState
from gemini.runtime.step import Step

# -- Gradient transforms of torch.func, and which models they are refused for.
#
# [Note: Transforms] `grad`, `vjp`, `jacrev` and `hessian` refuse saved-tensor hooks, so their graph keeps views of the
# weights themselves. That is right for weights that stay where they are until a step, and refused for others.


hooks_are_allowed = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
"""False inside torch.func's gradient transforms."""


def check_operator(module: nn.Module, chunks: Iterable[Chunk]) -> None:
    """Raises UnsupportedError if a graph that `module` builds now could lose its weights, which are in `chunks`.

    `functional_call` may have put other tensors in the parameters' place; these are the user's own.
    """
    if torch.is_grad_enabled() and not hooks_are_allowed():
        links = (any_link_of(unwrapped(parameter)) for parameter in module.parameters())
        used = {link.managed.chunk for link in links if link is not None}
        check_chunks(chunk for chunk in chunks if chunk in used)


def check_chunks(chunks: Iterable[Chunk]) -> None:
    """Raises UnsupportedError if a graph that is built now could lose the weights of `chunks`."""
    if torch.is_grad_enabled() and not hooks_are_allowed():
        for chunk in chunks:
            if chunk.state is not ParamState.RESIDENT and chunk.own_slot is None:
                raise UnsupportedError(
                    f"torch.func.grad (vjp, jacrev, hessian) through {chunk.names()} is not possible while it can "
                    "leave the device, as these transforms allow no saved-tensor hooks. Keep everything resident with "
                    "tensor_placement_policy='cuda' or a larger device_memory=, or use torch.autograd.grad"
                )


# -- Saved tensors are handles: autograd keeps where a parameter's data lies, not the memory.
#
# `pack` turns a view of a slot into (chunk, size, stride, offset, updates). `unpack` fetches the chunk, wherever it now
# lies, and returns the view there. Backward therefore fetches exactly what it reads, when it reads it. A cast of a
# parameter by autocast is a handle too, and is cast again. Hooks that were on the stack before ours (checkpointing's,
# offloading's) get all other tensors.
#
# [Note: Packed objects] Autograd keeps a packed object in a node of the graph. The cycle collector does not see through
# nodes, so a packed object that refers to its own graph keeps graph and activations alive until backward runs. `pack`
# therefore returns tensors without their graph. Autograd also leaves the check of the version counter to the hooks;
# `Kept` does it.
#
# [Note: Checkpoints] Non-reentrant checkpointing counts the tensors that its hooks meet in forward and in the
# recomputation, and pairs them by that count. A weight can come to our hooks in one pass and to checkpointing's alone
# in the other: whether the parameter is plain depends on what ran before. So checkpointing is shown every tensor, even
# one that we have a handle of. If its hooks were alone in forward, it keeps what it is shown in the recomputation until
# backward reads it. It is then shown a copy: a view would keep the chunk's slot.
#
# [Note: Recomputed first] A node that unpacks its weight and then an activation would hold the weight's slot while the
# activation is recomputed, which fetches other chunks: at the smallest budget there may be no slot left for them. So a
# handle remembers an activation of the same recomputation, and unpacks that one before it fetches.


_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_graph_task = torch._C._current_graph_task_id
_NO_TASK = -1
_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Handle(NamedTuple):
    """A view of a chunk's payload, without its memory."""

    chunk: Chunk
    size: torch.Size
    stride: tuple[int, ...]
    offset_bytes: int
    dtype: torch.dtype
    num_updates: int  # `Chunk.num_updates` when it was saved
    num_edits: int  # `Chunk.num_edits` when it was saved
    operator: int
    after: weakref.ref[Foreign] | None = None  # see [Note: Recomputed first]


class CastHandle(NamedTuple):
    """A view of a parameter's cast, without its memory."""

    weight: Handle
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    num_writes: int  # of the parameter when it was saved, those through `.data` included: the cast has the old values
    parameter: ManagedParameter


class LocalHandle(NamedTuple):
    """A `DTensor` over a view of a chunk's payload, see `SavedLocalTensors`."""

    local: Handle
    spec: Any  # how the `DTensor` is divided


class Kept(NamedTuple):
    """A tensor that is not ours, without its graph."""

    tensor: Tensor
    version: int  # when it was saved; all tensors of a storage share the counter


class Foreign:
    """An object that the hooks below ours have packed."""

    __slots__ = ("__weakref__", "_early", "_packed", "_task", "hook")

    def __init__(self, packed: Any, hook: Callable[[Any], Tensor]) -> None:
        self._packed = packed
        self.hook = hook
        self._task = _NO_TASK  # the backward in which it was unpacked last
        self._early: Tensor | None = None  # unpacked before its node asked for it

    def unpack(self) -> Tensor:
        task, early = _graph_task(), self._early
        self._early = None
        # One that an earlier backward has left unused is dropped here.
        if early is not None and self._task == task:
            return early
        self._task = task
        return self.hook(self._packed)

    def unpack_early(self) -> None:
        """Unpack, and recompute, before the node asks. Once in a backward: checkpointing gives it only once."""
        task = _graph_task()
        if task not in (_NO_TASK, self._task):
            self._early = self.hook(self._packed)
            self._task = task


class SavedTensors:
    """The saved-tensor hooks of one model."""

    needs_handles = False  # also of payloads that never leave

    def __init__(self, step: Step) -> None:
        self._step = step
        self._payloads = step.payloads
        self._slots = step.params.slot_by_storage
        self._resident = step.params.resident_by_storage
        self.activation: weakref.ref[Foreign] | None = None  # the last that checkpointing packed

    def needed(self) -> bool:
        """Whether our hooks must be pushed. If torch allows none, see [Note: Transforms].

        Not if they are on top already, with the right setting of autocast. Nor if no payload ever leaves: then only
        casts need handles, since autograd would keep the cast copies.
        """
        autocasts = self._autocasts()
        stays = self._payloads.is_resident and not (autocasts or self.needs_handles)
        if not torch.is_grad_enabled() or not hooks_are_allowed() or stays:
            return False
        # With True torch tells of its hooks also while a compiler traces, when it otherwise says that there are none.
        top = _top_hooks(True)
        pack = None if top is None else top[0]
        return not (isinstance(pack, _Pack) and pack.owner is self and pack.autocasts == autocasts)

    def _autocasts(self) -> bool:
        return torch.is_autocast_enabled(self._step.params.device.device.type)

    def push(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Put our hooks on top of the stack. The caller exits what it gets."""
        hooks = self._on_top()
        hooks.__enter__()
        return hooks

    def _on_top(self) -> torch.autograd.graph.saved_tensors_hooks:
        pack = _Pack(self, _top_hooks(True), self._autocasts())
        return torch.autograd.graph.saved_tensors_hooks(pack, self.unpack)

    def pushed(self, chunks: Iterable[Chunk]) -> AbstractContextManager[None]:
        """A context for a function that uses parameters of `chunks`. Raises UnsupportedError."""
        check_chunks(chunks)
        return self._on_top() if self.needed() else nullcontext()

    def handle(self, tensor: Tensor) -> Handle | LocalHandle | None:
        """The handle of a view of a slot or of a resident chunk, or of a released parameter; None for others."""
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()._cdata
        slot = self._slots.get(storage)
        step = self._step
        # The table also has slots that are free, or that were given back.
        if slot is not None and slot.chunk is not None:
            chunk = step.chunks[slot.chunk]
        elif storage in self._resident:
            chunk = self._resident[storage]
        else:
            return self._released(tensor)
        offset_bytes = int(tensor.storage_offset()) * tensor.itemsize  # in bytes: a view may have another dtype
        updates, operator = chunk.num_updates, step.position.operator
        edits = chunk.num_edits(offset_bytes // chunk.dtype.itemsize)
        return Handle(chunk, tensor.size(), tensor.stride(), offset_bytes, tensor.dtype, updates, edits, operator)

    def _released(self, tensor: Tensor) -> Handle | None:
        """The handle of one of our parameters that shows its placeholder, as a function of the user's may save one."""
        link = any_link_of(tensor)
        if link is None or link.owner is not self._step:
            return None
        managed = link.managed
        chunk, start = managed.chunk, managed.offset * managed.dtype.itemsize
        place = managed.shape, managed.stride, start, managed.dtype
        return Handle(chunk, *place, chunk.num_updates, chunk.num_edits(managed.offset), self._step.position.operator)

    def cast_handle(self, tensor: Tensor) -> CastHandle | None:
        """The handle of a cast of one of our parameters, which was not written to in this forward; else None.

        Autocast casts a weight right before the operation that reads it, and autograd saves the cast. The cast's graph
        tells its origin: a `ToCopyBackward0` of the parameter itself.
        """
        base = tensor._base if tensor._base is not None else tensor  # a transpose of the cast may be what is saved
        node = base.grad_fn
        if node is None or node.name() != "ToCopyBackward0" or base._version != 0 or base.storage_offset() != 0:
            return None
        parameter: Any = getattr(node.next_functions[0][0], "variable", None)
        link = any_link_of(parameter) if isinstance(parameter, nn.Parameter) else None
        if link is None or link.owner is not self._step or self._step.binding.is_edited(link.managed):
            return None
        if (base.shape, base.stride(), base.device) != (parameter.shape, parameter.stride(), parameter.device):
            return None
        weight = self.handle(parameter)
        offset = int(tensor.storage_offset())
        if not isinstance(weight, Handle):
            return None
        num_writes = link.managed.version - weight.chunk.num_bumps
        shape = tensor.size(), tensor.stride(), offset
        return CastHandle(weight, base.dtype, *shape, num_writes, link.managed)

    def after_activation(
        self, handle: Handle | CastHandle | LocalHandle, below: _Hooks | None
    ) -> Handle | CastHandle | LocalHandle:
        """The handle, with the last activation that was packed by the hooks `below` in the same recomputation."""
        activation = None if self.activation is None else self.activation()
        if activation is None or below is None or activation.hook is not below[1]:
            return handle
        if isinstance(handle, CastHandle):
            return handle._replace(weight=handle.weight._replace(after=self.activation))
        if isinstance(handle, LocalHandle):
            return handle._replace(local=handle.local._replace(after=self.activation))
        return handle._replace(after=self.activation)

    @never_traced(A_HOOK)
    def unpack(self, packed: Any) -> Tensor:
        """What autograd saved. Raises StaleGraphError if it has changed since, by a step or by an edit."""
        if isinstance(packed, Kept):
            if packed.tensor._version != packed.version:  # see [Note: Packed objects]
                raise StaleGraphError(_was_modified(packed))
            return packed.tensor
        if isinstance(packed, Foreign):
            return packed.unpack()
        if isinstance(packed, CastHandle):
            weight = self.unpack(packed.weight)
            if packed.num_writes != packed.parameter.version - packed.parameter.chunk.num_bumps:
                raise StaleGraphError(
                    f"parameter {packed.parameter.name!r}, of which backward needs a cast, was written to through "
                    ".data after the forward used it. Write to it before its use, or after backward"
                )
            with torch.autocast(weight.device.type, enabled=False), torch.no_grad():
                return torch.as_strided(weight.to(packed.dtype), packed.size, packed.stride, packed.offset)
        handle: Handle = packed
        step = self._step
        chunk = handle.chunk
        # Autograd leaves version checks to the hooks: without these two, backward would read new values silently.
        if handle.num_updates != chunk.num_updates:
            step.grads.refuse_reuse(chunk)
            raise StaleGraphError(
                f"backward through a graph from before the last optimizer step: {chunk.names()} changed since. "
                "Run the forward again, or call backward before step()"
            )
        if handle.num_edits != chunk.num_edits(handle.offset_bytes // chunk.dtype.itemsize):
            raise StaleGraphError(
                f"a parameter of {chunk.names()} that backward needs was modified by an inplace operation after the "
                "forward. Edit weights after backward"
            )
        if chunk.state is ParamState.RESIDENT:
            step.backward.note_read(chunk, handle.operator)
            with unseen():
                return self._view(handle)
        # Autograd runs its nodes in grad mode only for create_graph=True.
        if torch.is_grad_enabled() and step.is_recomputing():
            raise UnsupportedError(
                f"double backward (create_graph=True) through {chunk.names()} is not possible while it can leave "
                "the device. Keep everything resident with tensor_placement_policy='cuda' or a larger device_memory=, "
                "or keep the penalty's modules outside"
            )
        activation = None if handle.after is None else handle.after()  # see [Note: Recomputed first]
        if activation is not None:
            activation.unpack_early()
        builds_graph = torch.is_grad_enabled()
        try:
            with unseen(), untracked():
                step.backward.node_fetch(chunk, handle.operator)
                return self._view(handle)
        except BaseException as error:
            step.failures.publish(error, builds_graph)
            raise

    def _view(self, handle: Handle) -> Tensor:
        """The saved tensor, in the payload where it lies now."""
        payload = handle.chunk.payload
        assert payload is not None
        storage_start = payload.storage_offset() * payload.itemsize
        flat = payload if handle.dtype is payload.dtype else payload.view(handle.dtype)
        offset = (handle.offset_bytes - storage_start) // flat.itemsize + flat.storage_offset()
        return torch.as_strided(flat, handle.size, handle.stride, offset)


class SavedLocalTensors(SavedTensors):
    """The hooks of a model with `DTensor`s over what its payloads hold (tensor parallelism).

    Autograd saves the `DTensor`, which has no memory of its own: what may leave its slot is the local tensor in it. Its
    version counter is not that of the local tensor either: only handles tell a graph from before an update.
    """

    needs_handles = True

    def handle(self, tensor: Tensor) -> Handle | LocalHandle | None:
        if not is_dtensor(tensor):
            return super().handle(tensor)
        divided: Any = tensor
        local = super().handle(divided._local_tensor)
        return LocalHandle(local, divided._spec) if isinstance(local, Handle) else None

    @never_traced(A_HOOK)
    def unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, LocalHandle):
            return super().unpack(packed)
        from torch.distributed.tensor import DTensor

        make: Any = DTensor
        whole: Tensor = make(super().unpack(packed.local), packed.spec, requires_grad=False)
        return whole


class _Pack:
    """`pack`, on top of the hooks that were active when it was pushed."""

    __slots__ = ("_below", "_checkpoints", "autocasts", "owner")

    owner: SavedTensors
    _below: _Hooks | None

    def __init__(self, owner: SavedTensors, below: _Hooks | None, autocasts: bool) -> None:
        # Our own hooks further down would pack a second time: skip them.
        while below is not None and isinstance(below[0], _Pack) and below[0].owner is owner:
            below = below[0]._below
        self.owner = owner
        self.autocasts = autocasts
        self._below = below
        self._checkpoints = below is not None and _checkpoints(below[0])

    @never_traced(A_HOOK)
    def __call__(self, tensor: Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            handle: Handle | CastHandle | LocalHandle | None = self.owner.handle(tensor)
            if handle is None and self.autocasts and tensor.grad_fn is not None:
                handle = self.owner.cast_handle(tensor)
        if handle is not None:
            if self._checkpoints:
                weight = handle.local if isinstance(handle, LocalHandle) else handle
                self._show(tensor, isinstance(weight, Handle) and weight.chunk.state is not ParamState.RESIDENT)
                return self.owner.after_activation(handle, self._below)
            return handle
        if self._below is None:
            return Kept(tensor.detach(), tensor._version)  # see [Note: Packed objects]
        foreign = Foreign(self._below[0](tensor), self._below[1])
        if self._checkpoints:
            # The reference is weak, because this object outlives the graph that the activation belongs to.
            self.owner.activation = weakref.ref(foreign)
        return foreign

    def _show(self, tensor: Tensor, moves: bool) -> None:
        """Let checkpointing count a tensor that we have a handle of; see [Note: Checkpoints]."""
        assert self._below is not None
        shown = tensor.detach()
        found = weakref.ref(shown)
        try:
            self._below[0](shown)
        # The recomputation has all it needs and stops by this exception. Its frames would keep `shown` alive.
        except BaseException as error:
            error.__traceback__ = None
            raise
        finally:
            del shown
            # If the tensor is still alive, checkpointing keeps it: it then gets memory of its own.
            kept = found() if moves else None
            if kept is not None:
                with unseen(), untracked():
                    if is_dtensor(kept):
                        divided: Any = kept
                        divided._local_tensor = divided._local_tensor.clone()
                    else:
                        kept.data = kept.clone()


def _checkpoints(pack: Callable[[Tensor], Any]) -> bool:
    """Whether `pack` is a hook of non-reentrant checkpointing, or passes tensors on to one."""
    if isinstance(pack, _Pack):
        return pack._checkpoints
    return getattr(pack, "__module__", "") == "torch.utils.checkpoint"


def _was_modified(kept: Kept) -> str:
    """Autograd's own message."""
    tensor = kept.tensor
    hint = (
        " Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {kept.version} "
        f"instead.{'' if torch.is_anomaly_enabled() else hint}"
    )
