"""Post-accumulate hooks on wrapped parameters: the user's run before ours, which takes the gradient away.

torch calls a parameter's hooks in the order of the dict that holds them. A hook that is registered after wrapping would
find `.grad` gone. So each parameter gets a dict that keeps our hook last. A user's hook sees, may change and, on one
rank, may drop (`parameter.grad = None`) this rank's gradient of this backward, as in plain PyTorch.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gemini.access.gradient import of_one_rank, own_grad, set_own_grad
from gemini.access.link import link_of
from gemini.chunks.chunk import ManagedParameter
from gemini.chunks.own_grad import grad_of, set_grad_of
from gemini.manager.arrivals import Waiting, graph_refused
from gemini.manager.step import Step
from gemini.memory.modes import num_modes, unseen
from gemini.memory.untraced import A_HOOK, never_traced

_WithoutTorchFunction = torch._C.DisableTorchFunctionSubclass

Hook = Callable[[Tensor], None]


def watch_gradients(step: Step, parameters: Iterable[ManagedParameter]) -> Iterator[RemovableHandle]:
    """Tell the step of every gradient of `parameters`. The caller takes the handles, which remove the hooks.

    The hooks hold nothing of the model: autograd keeps them where the cycle collector does not look.
    """
    reference = weakref.ref(step)
    of_fine: dict[int, tuple[Hook, Callable[[], None]]] = {}  # by chunk index
    for managed in parameters:
        chunk = managed.chunk
        # Integer parameters have no gradients.
        if not (chunk.dtype.is_floating_point or chunk.dtype.is_complex):
            continue
        hook: Hook = partial(_take_gradient, reference, chunk.index, managed.position)
        keep_apart = None
        if chunk.is_fine:
            if chunk.index not in of_fine:
                waiting = step.grads.arrivals.waiting_of(chunk)
                hooks = _note_gradients(reference, chunk.index, waiting), partial(_keep_apart, reference, chunk.index)
                of_fine[chunk.index] = hooks
            hook, keep_apart = of_fine[chunk.index]
        # Handles are yielded one by one, so that the caller has those before a failure and can remove their hooks.
        yield hook_last(managed.parameter, hook, keep_apart)


def _keep_apart(reference: weakref.ref[Step], index: int) -> None:
    """A parameter of chunk `index` gets a hook of the user's."""
    step = reference()
    if step is not None:
        step.grads.keep_apart(step.chunks[index])


@never_traced(A_HOOK)
def _take_gradient(reference: weakref.ref[Step], index: int, position: int, parameter: Tensor) -> None:
    """Take the gradient of the parameter at `position` of chunk `index`."""
    # A gradient that stayed in `.grad` would keep its memory, and autograd would add the next one to it.
    with _WithoutTorchFunction():
        grad = grad_of(parameter)
        set_grad_of(parameter, None)
    if grad is None:  # none came, or a user's hook dropped it
        return
    step = reference()
    assert step is not None, "a parameter keeps the Step of its model alive"
    # A gradient has a graph under create_graph=True only, and a copy into the chunk would cut it off.
    if grad.requires_grad:
        raise graph_refused(step.chunks[index].parameters[position].name)
    # Embeddings with sparse=True have sparse gradients. The chunk's payload is dense.
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    if num_modes():
        with unseen():
            step.backward.on_gradient(index, position, grad)
    # Without even a context that does nothing: this runs for every parameter.
    else:
        step.backward.on_gradient(index, position, grad)


def _note_gradients(reference: weakref.ref[Step], index: int, waiting: Waiting) -> Hook:
    """A hook for all parameters of chunk `index`: a gradient waits in `.grad` if it may. See [Note: Waiting gradients].

    The parameters share one hook: thousands of hooks with data of their own are in no cache when they are needed.
    """
    arrived, copied = waiting.arrived, waiting.copied

    @never_traced(A_HOOK)
    def note_gradient(parameter: Tensor) -> None:
        """Note that autograd has made the gradient of `parameter`."""
        identity = id(parameter)
        # An earlier gradient of this parameter was copied in this backward: this one is added to it now, for the same
        # bits.
        if copied and identity in copied:
            _take_gradient(reference, index, waiting.positions[identity], parameter)
            return
        arrived.append(identity)
        if len(arrived) < waiting.due:
            return
        step = reference()
        assert step is not None, "likewise"
        with unseen():
            waits = step.backward.wait_for_gradients(index, waiting)
        if not waits:
            # Not noted after all. `collect` may have emptied the list with the gradients that had waited before it.
            del arrived[-1:]
            _take_gradient(reference, index, waiting.positions[identity], parameter)

    return note_gradient


class GradientHooks(OrderedDict[int, Hook]):
    """A parameter's post-accumulate hooks by id. The model's own hook comes last."""

    _own_id: int | None = None
    _before_users: Callable[[], None] | None = None

    def __setitem__(self, key: int, hook: Hook) -> None:
        """Called by torch when a hook is registered."""
        if self._before_users is not None:
            self._before_users()
        super().__setitem__(key, partial(_call_guarded, hook))
        if self._own_id is not None and self._own_id in self:
            # torch calls hooks in the order in which keys came into the dict, which move_to_end() would not change.
            own = self.pop(self._own_id)
            super().__setitem__(self._own_id, own)

    def add_own(self, hook: Hook, before_users: Callable[[], None] | None) -> RemovableHandle:
        """Add the model's own hook. The handle removes it.

        before_users: called before hooks of the user's, of which there may be some already, run beside it.
        """
        if self and before_users is not None:
            before_users()
        self._before_users = before_users
        handle = RemovableHandle(self)
        self._own_id = handle.id
        super().__setitem__(handle.id, hook)
        return handle


def hook_last(parameter: nn.Parameter, hook: Hook, before_users: Callable[[], None] | None) -> RemovableHandle:
    """Register the model's own hook on a parameter, which may have hooks of the user's: see `GradientHooks.add_own`."""
    with torch._C.DisableTorchFunctionSubclass():
        # A parameter that was built in a ZeroInitContext has a `GradientHooks` from there, with the user's hooks in it.
        before = parameter._post_accumulate_grad_hooks
        hooks = before if isinstance(before, GradientHooks) else GradientHooks()
        if before and hooks is not before:
            # The handles of the user's hooks refer to the old dict: one hook calls whatever is in it.
            hooks[RemovableHandle(hooks).id] = partial(_call_all, before)
        parameter._post_accumulate_grad_hooks = hooks
    return hooks.add_own(hook, before_users)


def _call_all(hooks: dict[int, Hook], parameter: Tensor) -> None:
    # The loop runs over a copy, as a hook may remove itself.
    for hook in tuple(hooks.values()):
        hook(parameter)


def _call_guarded(hook: Hook, parameter: Tensor) -> None:
    """Call a hook of the user's on the gradient that autograd has just made."""
    link = link_of(parameter)
    if link is None:  # the model was closed
        hook(parameter)
        return
    step = link.step
    with step.publishing():
        # The model's own hook, which otherwise begins the backward, runs after this one.
        step.backward.begin()
        had = own_grad(parameter) is not None
        link.note_user_hook(runs=True)
        try:
            hook(parameter)
        except BaseException:
            # The next backward would add to it.
            set_own_grad(parameter, None)
            raise
        finally:
            link.note_user_hook(runs=False)
        if had and step.communicator.world_size > 1 and own_grad(parameter) is None:
            raise of_one_rank(link, "drops the gradient")
