"""Methods that a script for FSDP2 calls on its model, on a `ShardedModel`: each by what is here already.

Names of `FSDPModule` that have no meaning here are in `gemini/elsewhere.py`, with what to use in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from gemini.model.plain import GatheredParameters, PlainView


class UnshardHandle:
    """What `unshard(async_op=True)` returns, as FSDP2's does: `wait()` returns at once, the weights are there."""

    def wait(self) -> None:
        """Return at once. Local. Raises nothing."""


class FsdpMethods(PlainView):
    """The part of `ShardedModel` that answers to names of FSDP2's `FSDPModule`."""

    # Made when they are first needed: a model that is trained by our own names has none.
    _unsharded: ExitStack | None = None
    _unsynced: ExitStack | None = None

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Hold all weights whole on every rank, until `reshard()` or the next forward with gradients. Collective.

        As `GatheredParameters(model)` until then: weights can be read and used, forwards without gradients need no
        collective, and a change of a weight is undone and refused when they are resharded. Twice is once.

        Args:
            async_op: True returns an object with `wait()`, as FSDP2 does. The weights are there in either case.

        Raises SlotError if the weights do not fit into the model's slots together, and GeminiError inside a backward.

        Example:
            >>> model.unshard()
            >>> weight = model.module[0].weight.clone()
            >>> model.reshard()
        """
        if self._unsharded is None:
            with ExitStack() as stack:
                stack.enter_context(GatheredParameters(self))
                # Training needs slots for more than the weights, and a step writes them: a forward that leads to one
                # ends this, as FSDP2's own forward reshards what was unsharded before it.
                handle = self.register_forward_pre_hook(self._reshard_before_training)
                stack.callback(handle.remove)
                self._unsharded = stack.pop_all()
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Give the weights that `unshard()` holds back to their shards. Collective. Without any it does nothing.

        Raises UnsupportedError if a weight was changed meanwhile, which is undone.
        """
        stack, self._unsharded = self._unsharded, None
        if stack is not None:
            stack.close()

    def _reshard_before_training(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self.reshard()

    @contextmanager
    def sharded_state_dicts(self) -> Iterator[None]:
        """Context manager in which state dicts of the model and its optimizer have `DTensor`s. Collective.

        Each rank then keeps its rows of each tensor, Shard(0) over the ranks of the data, as FSDP2's are laid out:
        for `get_model_state_dict` and `get_state_dict` of torch with `full_state_dict=False`, and
        `torch.distributed.checkpoint.save` and `load` of what they return. One chunk is whole at a time. Weights that
        are trained in 16 bits are their fp32 masters, buffers and step counts are plain tensors. Loading takes wholes
        or `DTensor`s of any mesh, inside and outside. In one process without a process group all is whole.

        Raises nothing of its own; inside, `state_dict(rank0_only=True)` raises ValueError.

        Example:
            >>> from torch.distributed.checkpoint.state_dict import get_model_state_dict
            >>> with model.sharded_state_dicts():
            ...     state = get_model_state_dict(model)
        """
        with self.chunk_manager.sharding_rows():
            yield

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backwards reduce gradients over the ranks, from now on. Local, alike on every rank.

        `model.no_sync()` without a block: the backwards after False add gradients up on each rank, and the first one
        after True, a step, or a read of `.grad` reduces the sum.

        Args:
            requires_gradient_sync: False stops reducing.
            recurse: must be True: chunks are reduced whole, whichever modules they are of.

        Raises ValueError for `recurse=False`.

        Example:
            >>> for micro_batch in range(4):
            ...     model.set_requires_gradient_sync(micro_batch == 3)
            ...     optimizer.backward(model(torch.ones(2, 8, device=gemini.current_device())).sum() / 4)
        """
        if not recurse:
            raise ValueError("set_requires_gradient_sync(recurse=False) is not possible: chunks span modules")
        if self._unsynced is not None:
            self._unsynced.close()
            self._unsynced = None
        if not requires_gradient_sync:
            self._unsynced = ExitStack()
            books = self.chunk_manager.grads.books
            self._unsynced.enter_context(books.unsynchronized())

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backwards of replicas (HSDP) exchange gradients from now on. Local, alike on every rank.

        After False each group of ranks adds up by itself, and what uses gradients next has the groups exchange their
        sums once. The second and further backwards of a step do so anyhow, and with `gradient_accumulation_steps` the
        first one, too. Without replicas it has no effect.

        Args:
            requires_all_reduce: False leaves the exchange for later.
            recurse: must be True: chunks are reduced whole, whichever modules they are of.

        Raises ValueError for `recurse=False`.

        Example:
            >>> for micro_batch in range(4):
            ...     model.set_requires_all_reduce(micro_batch == 3)
            ...     optimizer.backward(model(torch.ones(2, 8, device=gemini.current_device())).sum() / 4)
        """
        if not recurse:
            raise ValueError("set_requires_all_reduce(recurse=False) is not possible: chunks span modules")
        books = self.chunk_manager.grads.books
        books.leave_replicas(not requires_all_reduce)

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """A hint without effect: the order of the first forward is what later ones fetch ahead by. Local.

        modules: of this model. Raises ValueError for another one: a script that names it trains another model.
        """
        self._check_parts("set_modules_to_forward_prefetch()", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """A hint without effect: the order of the first backward is what later ones fetch ahead by. Local.

        modules: of this model. Raises ValueError for another one: a script that names it trains another model.
        """
        self._check_parts("set_modules_to_backward_prefetch()", modules)

    def _check_parts(self, what: str, modules: Sequence[nn.Module]) -> None:
        parts = {self, *self.module.modules()}
        others = [type(each).__name__ for each in modules if each not in parts]
        if others:
            raise ValueError(f"{what}: {', '.join(others)} is not a module of this model")
