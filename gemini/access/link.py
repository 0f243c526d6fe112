"""What stands in the module for a parameter of a chunk, hooks of its gradient, and uses from elsewhere."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gemini.access.grad import ReducedGradient, WholeGradient, assign, has_gradient, of_one_rank
from gemini.access.parameter_link import ParameterLink, any_link_of, own_grad, set_own_grad
from gemini.access.saved_tensors import SavedTensors
from gemini.access.states import States
from gemini.errors import ReleasedParameterError, UnsupportedError
from gemini.memory.modes import A_HOOK, never_traced, num_modes, unseen, untracked
from gemini.replan.trainability import Trainability
from gemini.runtime.arrivals import Waiting, graph_refused
from gemini.runtime.chunk import ManagedParameter
from gemini.runtime.gradient import grad_of, set_grad_of
from gemini.runtime.step import Step
from optim import HALF_DTYPES

# -- `Link`: how a parameter of a `ShardedModel` reaches its memory, its states and its gradient.


class Link(ParameterLink):
    """The link of a `ShardedModel`'s parameter."""

    def __init__(
        self, managed: ManagedParameter, states: States, trainability: Trainability, saved_tensors: SavedTensors
    ) -> None:
        super().__init__(managed, states.step)
        self.states = states
        self.step = states.step
        self.trainability = trainability
        self.saved_tensors = saved_tensors
        self.in_user_hook = False  # a post-accumulate hook of the user's runs on this parameter

    def note_user_hook(self, runs: bool) -> None:
        """A post-accumulate hook of the user's runs on this parameter from now on, or has ended, also by an error."""
        self.in_user_hook = runs

    @contextmanager
    def fetched(self, links: Sequence[Link], overwrites: bool, detached: bool) -> Iterator[None]:
        # Between steps a script may look at this rank's part. In a step, or a loss, it would be taken for the whole.
        if self.step.params.in_step or (torch.is_grad_enabled() and not (detached or overwrites)):
            self._refuse_parts(links)
        with ExitStack() as stack:
            self._touch(links, stack, detached)
            # On top of all other hooks: what the function saves of the parameters must become handles.
            stack.enter_context(self.saved_tensors.pushed(link.managed.chunk for link in links))
            yield

    def _touch(self, links: Sequence[Link], stack: ExitStack, detached: bool) -> None:
        """Fetch the parameters. An error of the user's inside `fetched` is no failure of ours, and is not published."""
        with self.step.publishing(), unseen():
            raised = self.trainability.flags_raised
            # A graph is about to be built on a parameter that was just unfrozen: its gradient needs memory.
            if raised and not detached and any(link.managed.index in raised for link in links):
                self.trainability.apply_outside()
            touched = [link.managed for link in links]
            stack.enter_context(self.step.touching(touched, self.managed.operator))

    @staticmethod
    def _refuse_parts(links: Sequence[Link]) -> None:
        """Raises UnsupportedError for a part of a tensor that a function uses, and not the module that has it."""
        for link in links:
            part = link.managed.part
            if part is not None and part.is_cut:
                raise UnsupportedError(
                    f"{link.managed.name!r} is divided by tensor parallelism and used outside of the module that has "
                    "it, where only this rank's part would be seen: use it in that module's forward, or leave the "
                    "module out of parallelize_module(). Between steps torch.no_grad() shows the part"
                )

    def part_of_master(self) -> Tensor:
        access = self.states.full_precision(self.managed.chunk)
        return access.local(self.managed).to("cpu", copy=True)

    @contextmanager
    def gathered(self, links: Sequence[Link]) -> Iterator[None]:
        step = self.step
        step.check_idle("GatheredParameters")
        self.trainability.before_use()
        with ExitStack() as stack:
            self._touch(links, stack, detached=False)
            chunks = {link.managed.chunk.index: link.managed.chunk for link in links}.values()
            # What a script computes inside may be used after it, as a penalty on weights is.
            stack.enter_context(self.saved_tensors.pushed(link.managed.chunk for link in links))
            # Edits so far go home, so that the snapshots below show only what the block writes.
            step.binding.write_back_all(chunks)
            for chunk in chunks:
                # This is done for all parameters of the chunk: `touching` may have made all of them plain, and writes
                # to plain ones show only afterwards.
                for managed in chunk.parameters:
                    step.binding.before_write(managed)
            yield

    def before_write(self) -> None:
        """Raises UnsupportedError in a hook of the user's, where several ranks have parts or copies of the weights."""
        # Other ranks run other hooks: weights would differ by rank.
        if self.in_user_hook and self.owner.communicator.world_size > 1:
            raise of_one_rank(self, "writes to the weights")
        super().before_write()

    def data(self, writes: bool = True) -> Tensor:
        return self.binding.show_data(self.managed, writes)

    def before_write_through(self, results: Sequence[Tensor]) -> bool:
        is_view = super().before_write_through(results)
        # In a step autograd refuses writes to tensors that it follows.
        if is_view and not (self.step.params.in_step and all(result.requires_grad for result in results)):
            self.before_write()
        return is_view

    def keep_wide(self, value: Tensor) -> None:
        managed = self.managed
        is_wider = value.is_floating_point() and value.dtype.itemsize > managed.dtype.itemsize
        if managed.dtype in HALF_DTYPES and is_wider:
            with self.step.publishing(), untracked():
                # `expand` first: the user's `copy_` broadcasts its source, and the master takes the same values.
                flat = managed.laid_out(value.expand(managed.shape))
                self.states.full_precision(managed.chunk).set_whole(managed, flat)

    def holder_of(self, value: Tensor) -> str | None:
        chunk = self.step.params.chunk_at(value) if value.numel() else None
        if chunk is None or chunk.payload is None:
            return None
        # Only the address tells which parameter of the chunk it is: `value` may be any view.
        start = (value.data_ptr() - chunk.payload.data_ptr()) // chunk.payload.element_size()
        holder = chunk.parameter_at(start)
        # Padding behind the last element of a parameter belongs to none.
        is_of_holder = holder is not self.managed and start < holder.offset + holder.numel
        return holder.name if is_of_holder else None

    def replace_data(self, value: Tensor) -> None:
        """Raises ReleasedParameterError: a chunk has room for this shape and dtype only."""
        remedy = "To change a size, load model.state_dict() into the plain module, change that, and wrap it again"
        if value.shape == self.managed.shape:
            remedy = "A dtype is chosen by ShardedModel(..., dtype=)"
        raise ReleasedParameterError(
            f"parameter {self.managed.name!r} is {tuple(self.managed.shape)} {self.managed.dtype}; its .data cannot be "
            f"{tuple(value.shape)} {value.dtype}. {remedy}"
        )

    def gradient(self) -> Tensor | None:
        """The reduced gradient; inside a user's post-accumulate hook this rank's own, see `WholeGradient`."""
        if self.in_user_hook:
            return own_grad(self.managed.parameter)
        return ReducedGradient.of(WholeGradient(self)) if has_gradient(self) else None

    def set_gradient(self, value: Tensor | None) -> None:
        if self.in_user_hook:
            set_own_grad(self.managed.parameter, value)
        elif value is None:
            self.states.before_gradient_write()
            # A gradient that is collected later would set the flags of the discarded one again.
            self.step.reductions.collect_all()
            self.step.grads.discard(self.managed)
        elif not isinstance(value, ReducedGradient):
            assign(self, value)
        # `parameter.grad *= 2` assigns the same gradient again, which was written already.
        elif not value.is_all_of(self.managed):
            assign(self, value.plain())

    def raise_flag(self) -> None:
        self.trainability.note_raised(self.managed)

    def copy(self) -> nn.Parameter:
        """A plain parameter, whole, in host memory. Collective."""
        with self.step.publishing(), torch.no_grad():
            self.step.check_idle("copy.deepcopy()")
            whole = self.states.weights(self.managed.chunk).copies([self.managed])[self.managed.index]
        with torch._C.DisableTorchFunctionSubclass():
            return nn.Parameter(whole, requires_grad=self.managed.parameter.requires_grad)

    @property
    def describe(self) -> str:
        return f"{super().describe}, in chunk {self.managed.chunk.index}"


def link_of(parameter: Tensor) -> Link | None:
    """The link of a `ShardedModel`'s parameter (released or plain) or of its lazy detach; None for any other tensor."""
    link = any_link_of(parameter)
    return link if isinstance(link, Link) else None


# -- Post-accumulate hooks on wrapped parameters: the user's run before ours, which takes the gradient away.
#
# torch calls a parameter's hooks in the order of the dict that holds them. A hook that is registered after wrapping
# would find `.grad` gone. So each parameter gets a dict that keeps our hook last. A user's hook sees, may change and,
# on one rank, may drop (`parameter.grad = None`) this rank's gradient of this backward, as in plain PyTorch.


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
        # Waiting gradients are noted while they are attached, which ends here.
        step.reductions.collect_all()
        step.grads.arrivals.keep_apart(step.chunks[index])


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
    # `publishing()` would cost as much as all the rest, for each parameter.
    try:
        # If the user calls a module on its own, as in `model.module.head(x)`, no output of the root leads here: the
        # backward may begin with a gradient.
        if not step.grads.in_backward:
            with unseen():
                step.backward.begin()
        # Under create_graph=True a gradient without a graph may come while autograd records.
        if num_modes() or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            with unseen(), untracked():
                step.reductions.take_gradient(index, position, grad)
        # Without even a context that does nothing: this runs for every parameter.
        else:
            step.reductions.take_gradient(index, position, grad)
    except BaseException as error:
        step.communicator.publish(error)
        raise


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


# -- Parameters that a module uses although another module owns them.
#
# They fetch themselves when they are used, so registering is optional. A registered one is fetched with the module:
# inside it is a plain `nn.Parameter`, and it stays on the device until the module is done.


_EXTERNAL = "_gemini_external"


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Make `parameter`, which another module owns, part of what `module` fetches before its forward.

    Local, but every rank must register alike, before the model is wrapped. Registering is optional: a parameter that
    is not registered fetches itself when the module uses it. A registered one stays on the device until the module's
    forward, or backward, has ended.

    Args:
        module: the module that uses the parameter.
        parameter: a parameter of any other module of the model.

    Raises UnsupportedError if the model is wrapped already, and TypeError for anything but a module and a parameter.

    Example:
        >>> inner, outer = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        >>> register_external_parameter(outer, inner.weight)
        >>> model = ShardedModel(torch.nn.Sequential(inner, outer))
    """
    _check(module, parameter)
    registered = external_parameters(module)
    # By identity: `in` would compare values.
    if not any(parameter is known for known in registered):
        # In a list, a parameter does not become the module's own: `parameters()` and state dicts do not see it.
        setattr(module, _EXTERNAL, [*registered, parameter])


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter(module, parameter)`. Local; every rank must do the same, before wrapping.

    Raises ValueError if `parameter` is not registered with `module`, and what `register_external_parameter` raises.

    Example:
        >>> inner, outer = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        >>> register_external_parameter(outer, inner.weight)
        >>> unregister_external_parameter(outer, inner.weight)
    """
    _check(module, parameter)
    registered = external_parameters(module)
    remaining = [known for known in registered if known is not parameter]
    if len(remaining) == len(registered):
        raise ValueError(f"the parameter is not registered with this {type(module).__name__}")
    setattr(module, _EXTERNAL, remaining)


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    """What was registered with `module`, in that order."""
    registered: list[nn.Parameter] = getattr(module, _EXTERNAL, [])
    return registered


def _check(module: nn.Module, parameter: nn.Parameter) -> None:
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise TypeError(
            f"a module and a parameter are needed, found {type(module).__name__} and {type(parameter).__name__}"
        )
    if link_of(parameter) is not None:
        raise UnsupportedError(
            "external parameters are registered before ShardedModel(...); without that they fetch themselves"
        )
