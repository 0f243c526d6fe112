"""The names, state dicts and attributes that a sharded model shows: those of the module that it wraps."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Self

from torch import Tensor, nn

from gemini.access.conversion import CONVERSION, changes_nothing
from gemini.access.states import States
from gemini.access.weights import load_part, load_whole_state_dict, whole_state_dict
from gemini.errors import GeminiError, UnsupportedError
from gemini.manager.chunk_manager import ChunkManager
from gemini.model.compiled import is_mark
from gemini.model.plain_copy import PlainCopies
from gemini.model.wrappers import PREPARED, is_prepared
from gemini.script import warn_at_script


class PlainView(nn.Module):
    """The part of `ShardedModel` that answers on behalf of the wrapped module."""

    module: nn.Module
    chunk_manager: ChunkManager
    _states: States
    _copies: PlainCopies
    _is_wrapped = False  # the constructor has set all attributes of this object's own

    def _show(self, module: nn.Module) -> None:
        """Answer for `module` from now on."""
        self.module = module
        # torch looks buffers of `named_buffers()` up in this set; names are those of the wrapped module.
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        # A subclass with a `forward` of its own keeps that: an attribute of the instance would hide it.
        if type(self).forward is PlainView.forward:
            self.forward = _with_signature_of(module, self.forward)  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except BaseException as error:
            # A hook of the user's may raise when ours have ended the forward: the other ranks wait in their backward. A
            # refusal of ours has changed nothing, and checkpointing ends a recomputation with an exception of its own.
            if not (isinstance(error, GeminiError) or self.chunk_manager.step.is_recomputing()):
                self.chunk_manager.communicator.publish(error)
            raise

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module. Collective. Its signature is that of the module's `forward`.

        Raises what the module raises, SlotError if views that were kept leave too few slots, and, on the other ranks of
        one that failed, RemoteRankError.
        """
        # torch runs no forward hooks after a KeyboardInterrupt: see [Note: Ended calls] in gemini/manager/calls.py.
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
            return getattr(module, name)

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


def _with_signature_of(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` with the signature of `module.forward`, by which trainers choose the inputs that they pass."""

    # Without `updated=()` attributes would be copied too, such as the marks of `torch.compile`. A function of our own,
    # because `call` is a bound method, on which `wraps` can set nothing.
    @functools.wraps(module.forward, updated=())
    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return forward
