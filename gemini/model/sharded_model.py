"""`ShardedModel`, its report, and names that are one parameter."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gemini.access.link import Link, watch_gradients
from gemini.access.released import ReleasedParameter, guard_placeholders
from gemini.access.saved_tensors import SavedLocalTensors, SavedTensors
from gemini.access.states import States
from gemini.access.weights import StateHooks
from gemini.building.store import built_link_of
from gemini.errors import GeminiError, UnsupportedError
from gemini.log import warn_at_script
from gemini.memory.memory import RankMemory
from gemini.memory.modes import never_traced, uncollected
from gemini.model.fsdp_methods import FsdpMethods
from gemini.model.hooks import Handles, Hooks, OperatorTable
from gemini.model.operators import (
    ignored_in,
    is_compiler_on,
    map_tensors,
    parameter_places,
    tensors_in,
    zero_ignored,
)
from gemini.model.plain import PlainCopies, check_module, check_wrapped, note_dtypes, refuse_wrappers
from gemini.model.tensor_parallel import local_parameters
from gemini.model.workload import most_activations
from gemini.model.wrap import LOST, Wrapping, read_free
from gemini.monitor.device import source_of
from gemini.observe import Observer
from gemini.placement.demand import Kind, format_bytes, kind_named
from gemini.placement.plan import Plan
from gemini.ranks.exit_report import publish_exit
from gemini.ranks.mesh import ranks_in
from gemini.replan.trainability import Trainability
from gemini.runtime.calls import Operator
from gemini.runtime.grads import Becomes
from gemini.runtime.manager import ChunkManager
from gemini.runtime.step import Step
from gemini.settings import BUDGETS, Budgets, DtypeLike, Options, Settings, Strategy, checked_dtype
from optim.adam import refuse_unknown_arguments

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# -- Parameters and buffers of a module that share memory without being the same object.
#
# After `a.weight.data = b.weight.data` two parameters share one memory. In chunks each would have its own copy, and
# their values would diverge at the first step. If both have the same extent, they become one parameter under two names,
# as `a.weight = b.weight` makes them. Any other overlap is refused, because no chunk can represent it.


class _Extent(NamedTuple):
    """The bytes [start, end) of its storage that a tensor spans."""

    name: str
    tensor: Tensor
    start: int
    end: int

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)

    def __str__(self) -> str:
        return f"{'parameter' if self.is_parameter else 'buffer'} {self.name!r}"

    def is_that_of(self, other: _Extent) -> bool:
        mine, theirs = self.tensor, other.tensor
        # Both lie in one storage, by which `_shared` groups, so an equal start is an equal address.
        same = mine.shape == theirs.shape and mine.stride() == theirs.stride() and mine.dtype is theirs.dtype
        return same and self.is_parameter and other.is_parameter and self.start == other.start

    def overlaps(self, other: _Extent) -> bool:
        """Whether some element belongs to both. Spans may interlock without sharing one, as columns of a matrix do."""
        # Elements of different sizes may overlap in part: treat any shared span as an overlap.
        if self.tensor.dtype is not other.tensor.dtype:
            return True
        # Mark the elements of one tensor in a mask of the common span, and look for marks at those of the other.
        itemsize, first = self.tensor.dtype.itemsize, min(self.start, other.start)
        # On the CPU whatever torch's default device is: on "meta" the mask would hold no marks.
        marks = torch.zeros((max(self.end, other.end) - first) // itemsize, dtype=torch.bool, device="cpu")

        def of(extent: _Extent) -> Tensor:
            tensor = extent.tensor
            return torch.as_strided(marks, tensor.shape, tensor.stride(), (extent.start - first) // itemsize)

        of(self).fill_(True)
        return bool(of(other).any())


class Tie(NamedTuple):
    """A parameter that was replaced by another one with the same memory."""

    owner: nn.Module
    leaf: str  # its name in its owner
    parameter: nn.Parameter
    names: tuple[str, str]  # names in the model of the parameter that stayed and of the replaced one

    def undo(self) -> None:
        """Give the owner its own parameter back, which shares its memory with the one that stayed."""
        kept = self.owner._parameters[self.leaf]
        # A wrapping that failed has given the one that stayed other memory, or has lost its values.
        if kept is not None and not hasattr(kept, LOST):
            self.parameter.data = kept.data
        setattr(self.owner, self.leaf, self.parameter)


@contextmanager
def tied_aliases(module: nn.Module) -> Iterator[list[Tie]]:
    """`tie_aliases` for good, unless the block ends with an exception: the module then has its own parameters again."""
    ties = tie_aliases(module)
    try:
        yield ties
    except BaseException:
        for tie in ties:
            tie.undo()
        raise


@contextmanager
def checked_aliases(module: nn.Module, ignored: frozenset[nn.Parameter]) -> Iterator[list[Tie]]:
    """`tied_aliases` of a module that can be wrapped. Raises what `check_module` raises, which reads no memory."""
    check_module(dict(module.named_parameters()), ignored)
    with tied_aliases(module) as ties:
        yield ties


def tie_aliases(module: nn.Module) -> list[Tie]:
    """Merge parameters that have the same memory into one parameter.

    Raises UnsupportedError with both names for any other overlap. Nothing has changed then.
    """
    ties: dict[Tensor, _Extent] = {}  # by the parameter that gives way
    for extents in _shared(module):
        reaching: list[_Extent] = []
        # Sweep over the storage: only extents that reach beyond the current start can overlap.
        for extent in sorted(extents, key=lambda each: each.start):
            reaching = [each for each in reaching if each.end > extent.start]
            for other in reaching:
                if other.is_that_of(extent):
                    _check_flags(other, extent)
                    # `extent` does not join `reaching`: `other` stands for it there, with the same bytes.
                    ties[extent.tensor] = other
                    break
                if (extent.is_parameter or other.is_parameter) and other.overlaps(extent):
                    raise UnsupportedError(
                        f"{other} and {extent} share memory, but not as one parameter under two names: a "
                        "chunk holds each by itself. Give one memory of its own (clone()), or compute it in forward"
                    )
            else:
                reaching.append(extent)
    # No overlap was refused: replace parameters now, at every place in the module that has them.
    made: list[Tie] = []
    for path, owner in module.named_modules() if ties else ():
        for leaf, parameter in list(owner._parameters.items()):
            if parameter is not None and parameter in ties:
                kept = ties[parameter]
                # Not through `_parameters`: `nn.RNNBase` has a second list of its weights, which its `__setattr__`
                # updates.
                setattr(owner, leaf, kept.tensor)
                made.append(Tie(owner, leaf, parameter, (kept.name, f"{path}.{leaf}" if path else leaf)))
    return made


def warn_of_ties(ties: Sequence[Tie]) -> None:
    """Warn about trained parameters that became one."""
    trained = [tie.names for tie in ties if tie.parameter.requires_grad]
    if trained:
        pairs = ", ".join(f"{one!r} and {other!r}" for one, other in trained)
        warn_at_script(
            f"{pairs} share their memory: each pair is one parameter under two names from now on, whose gradients are "
            "added up and stepped once. Two parameters of plain PyTorch would step that memory twice",
        )


def _shared(module: nn.Module) -> list[list[_Extent]]:
    """The tensors that share a storage with another one, by storage, in the module's order."""
    found: dict[tuple[torch.device, int], list[tuple[str, Tensor]]] = {}
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        # These have no strided memory of their own that another tensor could share.
        is_wrapper = is_traceable_wrapper_subclass(tensor)  # a quantised weight, which is left to the user
        if built_link_of(tensor) is not None or tensor.layout is not torch.strided or is_wrapper:
            continue
        # Tensors without elements share nothing, and all have the same null pointer.
        if tensor.numel():
            storage = tensor.untyped_storage()
            # On "meta" all pointers are null: an estimate goes by the storage itself.
            place = tensor.device, storage._cdata if tensor.is_meta else storage.data_ptr()
            found.setdefault(place, []).append((name, tensor))
    several = [[_extent(*each) for each in its] for its in found.values() if len(its) > 1]
    # Buffers may share memory among themselves: no chunk holds them.
    return [extents for extents in several if any(each.is_parameter for each in extents)]


def _extent(name: str, tensor: Tensor) -> _Extent:
    # In bytes, because tensors of several dtypes may view one storage.
    start = int(tensor.storage_offset()) * tensor.dtype.itemsize
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _Extent(name, tensor, start, start + span * tensor.dtype.itemsize)


def _check_flags(one: _Extent, other: _Extent) -> None:
    if one.tensor.requires_grad is not other.tensor.requires_grad:
        trained, frozen = (one, other) if one.tensor.requires_grad else (other, one)
        raise UnsupportedError(
            f"parameters {trained.name!r} and {frozen.name!r} share their memory, and only the first is trained. Give "
            "both the same requires_grad, or one of them memory of its own (clone())"
        )


# -- `memory_report()`: a table of all bytes that a model holds.


def memory_table(memory: RankMemory, plan: Plan, step: Step) -> str:
    """Bytes by tier and kind, now and at the peak; the plan; traffic over links and between ranks."""
    rows = [("tier", "kind", "now", "peak")]
    for tier in (memory.device, memory.host, *([] if memory.disk is None else [memory.disk])):
        ledger = tier.ledger
        kinds = sorted(kind for kind, peak in ledger.peak_by_kind.items() if peak)
        counts = [(kind, ledger.bytes_by_kind[kind], ledger.peak_by_kind[kind]) for kind in kinds]
        counts.append(("total", ledger.total_bytes, ledger.peak_bytes))
        rows += [(tier.name, kind, format_bytes(now), format_bytes(peak)) for kind, now, peak in counts]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    host, observer = memory.host, step.params.observer
    budget = "unlimited" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
    lines += [
        f"host memory mapped: {format_bytes(host.mapped_bytes)}, {format_bytes(host.homes.registered_bytes)} of it "
        f"pinned; {format_bytes(host.staging.mapped_bytes)} for temporaries",
        f"policy {plan.policy}, plan for {'inference' if plan.infers else 'training'}, model data budget {budget}, "
        f"{len(plan.packing.chunks)} chunks of up to {format_bytes(plan.packing.chunk_bytes)}",
        f"{observer.num_fetches} fetches, {observer.counts['prefetch']} of them ahead, {observer.counts['evict']} "
        f"evictions, {observer.counts['spill']} gradients moved to the host unreduced",
    ]
    links = sorted(memory.transfer.bytes_by_link.items())
    lines += [f"{link}: {format_bytes(num_bytes)}" for link, num_bytes in links]
    if step.communicator.world_size > 1:
        lines.append(f"to other ranks: {format_bytes(step.communicator.bytes_sent)}")
    return "\n".join(lines)


# -- `ShardedModel`: wraps a module so that its parameters live in chunks, and is used like the module.


class _CastsOutputs:
    """A forward hook that casts what the model returns."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        return map_tensors(lambda each: each.to(self._dtype) if each.is_floating_point() else each, outputs)


class ShardedModel(FsdpMethods):
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
        device_mesh: instead, the ranks as a torch `DeviceMesh`. One dimension is a process group. Of two, the first
            replicates and the second shards (HSDP): what `stage` shards lies over the second, gradients are averaged
            over all ranks, and replicas hold equal bits. n x 1 shards nothing (stage 0), 1 x n is ZeRO over n ranks.
            `optimizer_shard="all"` divides optimizer states over all of them.
            Names such as "dp", "cp" and "tp" say what a dimension divides: see docs/parallelism.md. DTensor parameters
            of another dimension (tensor parallelism) are sharded by their local tensors.
        settings: everything else. None: `Settings()`.
        cast_inputs: True casts floating-point inputs of the module's forward to the dtype of the weights, `dtype` or
            the module's own; what it returns keeps its dtype. None or False: inputs stay as they are.
        output_dtype: the dtype to which floating-point outputs of the model's call are cast. None: they stay as they
            are. Both are FSDP2's `MixedPrecisionPolicy(cast_forward_inputs=, output_dtype=)`.
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
        device_mesh: DeviceMesh | None = None,
        settings: Settings | None = None,
        cast_inputs: bool | None = None,
        output_dtype: DtypeLike | None = None,
        **options: Unpack[Options],
    ) -> None:
        publish_exit()
        guard_placeholders()
        refuse_wrappers()
        others = ("module", "process_group", "device_mesh", "settings", "cast_inputs", "output_dtype")
        owner = type(self).__name__
        settings = Settings.of(owner, *others, settings=settings, shard_strategy=shard_strategy, **options)
        if not isinstance(cast_inputs, bool | None):
            raise TypeError(f"cast_inputs must be True or False, or None, found {cast_inputs!r}")
        output_dtype = checked_dtype("output_dtype", output_dtype)
        ignored = ignored_in(module, settings)
        mesh = ranks_in(process_group, device_mesh)
        with local_parameters(module, mesh, ignored) as (local, mesh), checked_aliases(module, ignored) as ties:
            by_name = dict(module.named_parameters())
            warn_of_ties(ties)
            if ties:  # a name that is ignored may be that of another parameter now
                by_name, ignored = dict(module.named_parameters()), ignored_in(module, settings)
            super().__init__()
            self._ignored, self._casts_inputs = ignored, bool(cast_inputs)
            mesh, settings = mesh.divided(settings)
            wrapping = Wrapping(module, by_name, ignored, settings, mesh, self._casts_inputs, local)
            try:
                with wrapping.communicator.publishing():
                    plan, refused = wrapping.plan()
                    self._show(module)
                    self._install(wrapping, wrapping.move_weights(plan))
                    if refused is not None:
                        self.chunk_manager.training.refuse(refused)
                    wrapping.end()
                if output_dtype is not None:
                    # A hook: without it a call takes no longer.
                    self.register_forward_hook(_CastsOutputs(output_dtype))
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
        saved_tensors = (SavedLocalTensors if wrapping.local.are_any else SavedTensors)(step)
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
        for each, casting in wrapping.casting.items():
            self._hooks.take_over_casts(casting.install(each))
        self._hooks.take_over(watch_gradients(step, manager.parameters))
        self._hooks.take_over(StateHooks(self._states).install(self.module))
        self._hooks.take_over(wrapping.local.show(wrapping.operators, manager.chunks))
        table = self.module, wrapping.operators, manager, self.trainability, self._hooks
        self._table = OperatorTable(*table, self._ignored)
        self._is_wrapped = True

    # -- use

    @never_traced("a ShardedModel moves parameters around: compile the model, or modules in it, by themselves", False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiler_on():
            return self._table.compiler.outside(ShardedModel.__call__, (self, *args), kwargs)
        # All of this may replace the plan, so it comes before the forward. See [Note: First batch]
        # in replan/live_plan.py.
        self._table.follow_compilation(self.module)
        self.chunk_manager.recorder.note_batch(sum([tensor.nbytes for tensor in tensors_in((args, kwargs))]))
        if torch.is_grad_enabled() and self.trainability.asks_for_bound():
            self.trainability.note_bound(most_activations(self.module, (args, kwargs)))
        try:
            return super().__call__(*args, **kwargs)
        except BaseException as error:
            # A hook of the user's may raise when ours have ended the forward: the other ranks wait in their backward. A
            # refusal of ours has changed nothing, and checkpointing ends a recomputation with an exception of its own.
            if not (isinstance(error, GeminiError) or self.chunk_manager.step.is_recomputing()):
                self.chunk_manager.communicator.publish(error)
            cause = self.chunk_manager.communicator.cause_of(error)
            if cause is not None:
                raise cause from error
            if not self._casts_inputs:
                note_dtypes(error, (managed.dtype for managed in self.chunk_manager.parameters), (args, kwargs))
            raise

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
        books = self.chunk_manager.grads.books
        with books.unsynchronized():
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
        """Discard all gradients. Local, alike on every rank.

        set_to_none: False sets gradients to zero instead, also those that a step has used since they were last None.
            A step then moves a parameter without a new gradient by its moments, as in plain PyTorch.

        Raises UpdatedInBackwardError if the backward has updated weights (`update_in_backward`) and no step has
        followed, and GeminiError if that backward has failed.
        """
        self.chunk_manager.grads.refuse_discard()
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
