"""`ShardedModel`: wraps a module so that its parameters live in chunks, and is used like the module."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn

from gemini.access.gradient_hooks import watch_gradients
from gemini.access.link import Link
from gemini.access.released import ReleasedParameter
from gemini.access.saved_tensors import SavedTensors
from gemini.access.state_hooks import StateHooks
from gemini.access.states import States
from gemini.access.trainability import Trainability
from gemini.access.unasked import guard_placeholders
from gemini.manager.calls import Operator
from gemini.manager.chunk_manager import ChunkManager
from gemini.manager.leftovers import Becomes
from gemini.memory.collector import uncollected
from gemini.memory.untraced import never_traced
from gemini.model.aliases import tied_aliases, warn_of_ties
from gemini.model.arguments import check_module, check_wrapped
from gemini.model.budgets import read_free
from gemini.model.first_batch import most_activations
from gemini.model.hooks import Handles, Hooks
from gemini.model.ignored import ignored_in, zero_ignored
from gemini.model.operator_table import OperatorTable
from gemini.model.operators import parameter_places
from gemini.model.plain_copy import PlainCopies
from gemini.model.plain_view import PlainView
from gemini.model.report import memory_table
from gemini.model.tensors import tensors_in
from gemini.model.wrappers import refuse_ddp
from gemini.model.wrapping import Wrapping
from gemini.monitor.device import source_of
from gemini.observe import Observer
from gemini.placement.demand import Kind, kind_named
from gemini.placement.plan import Plan
from gemini.ranks.exit_report import publish_exit
from gemini.settings import BUDGETS, Budgets, Options, Settings, Strategy
from optim.hyperparameters import refuse_unknown_arguments


class ShardedModel(PlainView):
    """A module whose training state lies in chunks, sharded over ranks and moved between device and host.

    It is called and trained like the module that it wraps, and has the module's names, attributes and state dicts.
    Where the state rests does not change any result. Sharding follows ZeRO (https://arxiv.org/abs/1910.02054), chunks
    follow PatrickStar (https://arxiv.org/abs/2108.05818). Creating and calling it is collective: every rank does both
    with equal arguments. Weights and buffers are those of rank 0.

    Args:
        module: a module on any device. Its parameter memory is freed. `requires_grad` may change between steps.
        shard_strategy: what a unit is, as in `Settings`.
        process_group: the ranks. None: all ranks of torch.distributed. Where it is not initialized and a launcher such
            as torchrun has started several ranks, they join here; GEMINI_NO_LAUNCH=1 leaves each by itself.
        settings: everything else. None: `Settings()`.
        options: fields of `Settings`, which override those of `settings`.

    Raises TypeError, ValueError or UnsupportedError for a module or options that cannot be wrapped, BudgetError if the
    model does not fit into its budgets, and DivergenceError if the ranks' modules or options differ. The module is
    unchanged then.

    Example:
        >>> model = ShardedModel(torch.nn.Linear(8, 8), stage=2, device="emulated")
    """

    @uncollected()
    def __init__(
        self,
        module: nn.Module,
        shard_strategy: Strategy = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        settings: Settings | None = None,
        **options: Unpack[Options],
    ) -> None:
        publish_exit()
        guard_placeholders()
        refuse_ddp()
        owner, others = type(self).__name__, ("module", "process_group", "settings")
        settings = Settings.of(owner, *others, settings=settings, shard_strategy=shard_strategy, **options)
        ignored = ignored_in(module, settings)
        by_name = dict(module.named_parameters())
        check_module(by_name, ignored)
        with tied_aliases(module) as ties:
            warn_of_ties(ties)
            if ties:  # a name that is ignored may be that of another parameter now
                by_name, ignored = dict(module.named_parameters()), ignored_in(module, settings)
            super().__init__()
            self._ignored = ignored
            wrapping = Wrapping(module, by_name, ignored, settings, process_group)
            try:
                with wrapping.communicator.publishing():
                    plan, refused = wrapping.plan()
                    self._show(module)
                    self._install(wrapping, wrapping.move_weights(plan))
                    if refused is not None:
                        self.chunk_manager.training.refuse(refused)
                    wrapping.end()
            except BaseException as error:
                # The failure may have come before there were any hooks.
                if "_hooks" in vars(self):
                    self._hooks.remove()
                    self._copies.remove()
                wrapping.undo(error)
                raise

    def _install(self, wrapping: Wrapping, manager: ChunkManager) -> None:
        """Make the parameters reach their chunks, and install the hooks. Local."""
        self.chunk_manager = manager
        self._states = States(manager)
        step = manager.step
        saved_tensors = SavedTensors(step)
        self._places: list[tuple[str, int]] = []  # places of parameters at their last check
        self.trainability = Trainability(manager)
        for managed in manager.parameters:
            link = Link(managed, self._states, self.trainability, saved_tensors)
            managed.parameter._gemini = link  # type: ignore[attr-defined]
            managed.parameter.__class__ = ReleasedParameter
        handles = Handles()
        self._hooks = Hooks(step, self.trainability, saved_tensors, wrapping.gathers, handles)
        self._copies = PlainCopies(step, handles)
        self._copies.install(self.module)
        for each, casting in wrapping.weights.casting.items():
            self._hooks.take_over_casts(casting.install(each))
        self._hooks.take_over(watch_gradients(step, manager.parameters))
        self._hooks.take_over(StateHooks(self._states).install(self.module))
        table = self.module, wrapping.operators, manager, self.trainability, self._hooks
        self._table = OperatorTable(*table, self._ignored)
        self._is_wrapped = True

    # -- use

    @never_traced("a ShardedModel moves parameters around: compile the model, or modules in it, by themselves", False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._table.compiler.outside(self._call_following_compilation, args, kwargs)

    def _call_following_compilation(self, *args: Any, **kwargs: Any) -> Any:
        # All of this may replace the plan, so it comes before the forward. See [Note: First batch] in free_memory.py.
        self._table.follow_compilation(self.module)
        self.chunk_manager.recorder.note_batch(sum(tensor.nbytes for tensor in tensors_in((args, kwargs))))
        if torch.is_grad_enabled() and self.trainability.asks_for_bound():
            self.trainability.note_bound(most_activations(self.module, (args, kwargs)))
        return super().__call__(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the wrapped module, as `torch.nn.Module.compile` with these arguments. Every rank calls it.

        From the next forward on the compiled module is one operator: all of its chunks are on the device at once.
        Raises nothing of its own; a model that does not fit as one operator raises BudgetError at the next forward.
        """
        self.module.compile(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which backwards do not reduce gradients over the ranks. Local, alike on every rank.

        Each rank adds up its whole gradients in host memory, in fp32, which takes 4 bytes per parameter. The next
        backward outside, step, norm or read of `.grad` reduces the sum, and is collective then. The sum travels in fp32
        unless `reduce_dtype` is given, and rests in fp32 unless `accumulate_dtype` is. Its bits differ from those of
        reducing every micro-batch. A backward inside raises BudgetError if the host has no room.
        """
        accumulation = self.chunk_manager.grads.accumulation
        with accumulation.unsynchronized():
            yield

    def check_parameters(self) -> None:
        """Check that the module still has the wrapped parameters, as every step does. Local.

        Raises GeminiError if one was added or replaced since, or moved into a parametrization on several ranks.
        """
        places = parameter_places(self.module)
        if places == self._places:  # the steady state
            return
        check_wrapped(self.module, self.chunk_manager.parameters, self._ignored, self.world_size)
        self._places = places

    @property
    def observer(self) -> Observer:
        """The observer of all moves of chunks. `model.observer.listen(...)` registers a listener."""
        return self.chunk_manager.observer

    @property
    def operators(self) -> list[Operator]:
        """The model's operators, which are fetched and released as one, in order of registration."""
        return self._table.operators

    @property
    def plan(self) -> Plan:
        """The plan in force: chunks, the tier on which each state rests, and the number of slots."""
        return self.chunk_manager.plan

    @property
    def settings(self) -> Settings:
        """The user's settings, with the budgets as they were last changed."""
        return self.plan.settings

    @property
    def world_size(self) -> int:
        """The number of ranks in the model's process group."""
        return self.chunk_manager.communicator.world_size

    @property
    def rank(self) -> int:
        """This process's rank in the model's process group."""
        return self.chunk_manager.communicator.rank

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients. Local, alike on every rank. Raises nothing of its own.

        set_to_none: False sets gradients to zero instead, also those that a step has used since they were last None.
            A step then moves a parameter without a new gradient by its moments, as in plain PyTorch.
        """
        with self.chunk_manager.step.publishing():
            self.chunk_manager.grads.end_step(Becomes.of(set_to_none))
            zero_ignored(self._ignored, set_to_none)

    def offload_states(self, include: Collection[str] | None = None) -> None:
        """Move states off the device between steps, so that another model may use it. Collective.

        They rest on the host, with the same bits, until `reload_states()`, the model's next forward or the next
        `GatheredParameters` moves them back. Weights can be read and saved meanwhile, for which a few slots take
        device memory until `offload_states()` is called again. Buffers of the module stay on the device, and so does
        the memory of weights of which the user keeps a view.

        Args:
            include: "param" (weights), "grad" (the memory of gradients), "master" (the fp32 copies of 16-bit weights),
                "optim" (what the optimizer keeps). None: all. Slots and buffers are given back in any case.

        Raises ValueError for another name, GeminiError between a backward and its step, BudgetError if the host has no
        room, and DivergenceError if ranks name other states; nothing has changed then.
        """
        kinds = tuple(Kind) if include is None else tuple(dict.fromkeys(map(kind_named, include)))
        self.chunk_manager.step.check_idle("offload_states()")
        self.trainability.offload(kinds)

    def reload_states(self) -> None:
        """Move all states back that `offload_states()` has moved. Collective. Without any it does nothing.

        Raises GeminiError between a backward and its step, and BudgetError if there is no room; nothing has changed
        then.
        """
        self.chunk_manager.step.check_idle("reload_states()")
        self.trainability.reload()

    def change_budgets(self, **budgets: Unpack[Budgets]) -> None:
        """Change the model's budgets between steps: its states move to where they rest under the new ones. Collective.

        No result changes. Chunks keep their size, so `model.plan.packed_minimum_bytes` is the least budget.

        Args:
            budgets: `device_memory`, `model_data_memory` and `host_memory` as in `Settings`; None reads what is free
                now. One that is not named stays as it is, or grows to what the host has free if nobody gave it.

        Raises TypeError or ValueError for what is not valid, GeminiError between a backward and its step, BudgetError
        if the model does not fit, and DivergenceError if ranks name other budgets; nothing has changed then.

        Example:
            >>> model = ShardedModel(torch.nn.Linear(64, 64), device="emulated")
            >>> model.change_budgets(model_data_memory="100KB")
        """
        refuse_unknown_arguments("change_budgets", [name for name in budgets if name not in BUDGETS], [*BUDGETS])
        self.chunk_manager.step.check_idle("change_budgets()")
        settings = replace(self.settings, **budgets)
        memory, communicator = self.chunk_manager.memory, self.chunk_manager.communicator
        own = memory.device.ledger.total_bytes, memory.host.ledger.total_bytes
        free = read_free(settings, own, communicator, source_of(settings.device))
        self.trainability.change_budgets(settings, free, set(budgets))

    def memory_report(self) -> str:
        """A table of this rank's memory: bytes by tier and kind, now and at the peak; slots; bytes moved. Local.

        Raises nothing of its own.
        """
        return memory_table(self.chunk_manager.memory, self.plan, self.chunk_manager.step)

    def close(self) -> None:
        """Remove all hooks and free slots and process group. Collective. The model cannot be used afterwards.

        Raises GeminiError inside a backward.
        """
        self.chunk_manager.step.check_outside_backward("close()")
        self._hooks.remove()
        self._copies.remove()
        self.chunk_manager.close()
