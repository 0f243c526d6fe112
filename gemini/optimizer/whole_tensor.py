"""Updates by an optimizer that treats each tensor by itself: Muon, Adafactor, LAMB, LARS, a user's own class.

Such an optimizer needs a tensor whole: it orthogonalises a matrix, or divides by a norm. At rest nothing changes for
it: gradient, master and every state that has the parameter's shape lie in shards, on the tier that the plan says, so
that they take the same bytes on every rank and follow plans, checkpoints and numbers of ranks as moments of Adam do.
For the update of a step each tensor comes to one owner rank, whole and in its true shape, and what the optimizer's own
`step()` made of it goes back into the shards:

    read      a chunk's parts of gradient, weight and states, wherever they rest
    exchange  to the owners: one launch for a window of tensors
    step      on the owner, on the device
    exchange  back: weights and states, in one launch
    write     by the chunk's update, which also updates the chunk's other parameters (`WholeTensorUpdate.update`)

One rank exchanges nothing. An exchange is made once for a step, whatever the number of micro-batches, and each tensor
is updated once in all ranks that share the shards. Which rank owns what follows from shapes (placement/owners.py), anew
in each step, since no state stays with an owner.

States of another shape than the parameter's, such as Adafactor's row and column factors, and numbers, such as step
counts, are small: every rank keeps them, beside the shards, in host memory that no plan counts.
"""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gemini.errors import UnsupportedError
from gemini.optimizer.elementwise import settings_in_words
from gemini.optimizer.given import kind_of
from gemini.optimizer.shards import EntryNames, GradientFactors, Made, RunUpdate
from gemini.optimizer.worker import Worker
from gemini.placement.owners import owners, work_of
from gemini.ranks.communicator import Communicator
from gemini.runtime.chunk import Chunk, ManagedParameter
from optim import FP32, StateFormat
from sharding import Piece

# -- Which optimizers treat each tensor by itself.


_MUON = ("torch.optim.Muon", "gemini.optimizer.muon.Muon")
_KNOWN = (*_MUON, "torch.optim.Adafactor", "transformers.optimization.Adafactor")
"""Optimizers that are tested to equal those of a plain model, by their full name."""
_NOT_BY_TENSOR = {
    "LBFGS": "it looks at all parameters together, and calls its closure several times in a step",
    "SparseAdam": "it takes sparse gradients, and gradients are summed dense here",
}
_MARK = "_gemini_per_tensor"


def per_tensor(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Say of an optimizer that it treats each tensor by itself, so that `ShardedOptimizer` gives it whole tensors.

    torch's Muon and Adafactor and transformers' Adafactor are known without it. For a class of your own it is a
    promise: the update of a parameter depends on its own gradient, weight and state alone, the state is all in
    `optimizer.state[parameter]`, and `step()` needs no closure. One that counts steps in an attribute or in a param
    group is refused; attributes that the script sets count from the next step on. Local.

    Args:
        optimizer: of the parameters of a `ShardedModel`, before `ShardedOptimizer` is made of it.

    Returns `optimizer`. Raises TypeError for what is no optimizer, and UnsupportedError for one that is known to do
    otherwise, such as LBFGS.

    Example:
        >>> optimizer = ShardedOptimizer(model, per_tensor(torch.optim.Adafactor(model.parameters())))
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"per_tensor() takes a torch optimizer, found {type(optimizer).__name__}")
    _refuse_not_by_tensor(optimizer)
    setattr(optimizer, _MARK, True)
    return optimizer


def is_per_tensor(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is known, or said, to treat each tensor by itself. Local.

    Raises UnsupportedError for one that is known to do otherwise, and for one of which a tensor alone cannot be made.
    """
    _refuse_not_by_tensor(optimizer)
    if not (getattr(optimizer, _MARK, False) or _full_name(kind_of(optimizer)) in _KNOWN):
        return False
    kind = kind_of(optimizer)
    if optimizer.state:
        raise UnsupportedError(
            f"{kind.__name__} has states before its first step. An optimizer of whole tensors makes them in step(), on "
            "the rank that updates the tensor"
        )
    for name, parameter in list(inspect.signature(kind.step).parameters.items())[1:]:
        if parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise UnsupportedError(
                f"{kind.__name__}.step() needs {name}=, which a step over shards has not: an optimizer of whole "
                "tensors takes the gradients that are there. What evaluates the model inside a step, such as SAM, is "
                "written out as two backwards in the loop"
            )
    return True


def _refuse_not_by_tensor(optimizer: torch.optim.Optimizer) -> None:
    kind = kind_of(optimizer)
    reason = next((_NOT_BY_TENSOR[each.__name__] for each in kind.__mro__ if _is_torchs(each)), None)
    if reason is not None:
        raise UnsupportedError(
            f"{kind.__name__} treats neither each element nor each tensor by itself: {reason}. Use HybridAdam, an "
            "elementwise optimizer of torch.optim, or one of whole tensors such as torch.optim.Muon"
        )


def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith("torch.optim") and kind.__name__ in _NOT_BY_TENSOR


def _full_name(kind: type) -> str:
    # torch.optim._muon.Muon and torch.optim.Muon are one class in some versions, and the second name in others.
    module = "torch.optim" if kind.__module__.startswith("torch.optim.") else kind.__module__
    return f"{module}.{kind.__qualname__}"


# -- One optimizer's rule: what it keeps of a tensor, its step on whole tensors, and the writing of what that made.


class OwnedTensor(NamedTuple):
    """A tensor as its owner has it for a step. Flat ones are (numel,), in the order of the parameter's memory."""

    managed: ManagedParameter
    group: int  # its param group
    grad: Tensor
    weight: Tensor  # fp32 or fp64; the step updates it in place
    flats: dict[str, Tensor]  # states of the parameter's shape
    scalars: Mapping[str, Any] | None  # all others; None before the first step


class WholeTensorUpdate:
    """The update of whole tensors by a `torch.optim` optimizer's own `step()`.

    To a chunk's update it is a rule as those of elementwise.py: its runs are single parameters, for which a `Made` is
    at hand, and are copied from that.
    """

    is_fused = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._kind = kind = kind_of(optimizer)
        self._is_known = _full_name(kind) in _KNOWN
        self.always_has = ("momentum_buffer",) if _full_name(kind) in _MUON else None
        self._copy = Worker(optimizer)
        self._worker = self._copy.optimizer
        self._probed: dict[tuple[Any, ...], dict[str, Any] | Exception] = {}
        self._taken: set[tuple[int, ...]] = set()  # shapes that it is known to step

    def flat_names(self, group: Mapping[str, Any], shape: Sequence[int] = ()) -> tuple[str, ...]:
        """The states of the parameter's shape that a tensor of this shape has after a step. See `AdamUpdate`."""
        its = _likeness(shape)
        found = self._probe(group, its)
        return tuple(name for name, value in (found or {}).items() if _is_flat(value, its, torch.float32))

    def format_of(self, group: Mapping[str, Any], numel: int = 0, is_embedding: bool = False) -> StateFormat:
        """See `AdamUpdate.format_of`: the optimizer reads and writes fp32."""
        return FP32

    def entry_names(self, group: Mapping[str, Any], shape: Sequence[int] = ()) -> EntryNames:
        """See `AdamUpdate.entry_names`."""
        found, flat = self._probe(group, _likeness(shape)), self.flat_names(group, shape)
        # A class of the user's may make a state in a later step than the first one.
        if found is None or not self._is_known:
            return EntryNames((), flat, None, has_other_shapes=True)
        return EntryNames(tuple(found), flat, tuple(found), has_other_shapes=True)

    def temporary_bytes(self, numel: int, dtype: torch.dtype, device: torch.device) -> int:
        """Of the writing: none. See `TensorExchange.temporary_bytes` for the step."""
        return 0

    def update(
        self, updates: Sequence[RunUpdate], groups: Sequence[Mapping[str, Any]], factors: GradientFactors
    ) -> None:
        """Write what the step has made into the runs. Those for which nothing is made try their hyperparameters."""
        for each in updates:
            if each.whole is None:
                self._probe(groups[each.run.group], _MATRIX, raises=True)
            else:
                _write(each, each.whole)

    def step(self, tensors: Sequence[OwnedTensor], groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Step these tensors, whose weights are updated in place. Returns the optimizer's entry of each."""
        shaped = [each.managed.shaped for each in tensors]
        parameters = [nn.Parameter(shape(each.weight)) for each, shape in zip(tensors, shaped, strict=True)]
        for each, shape, parameter in zip(tensors, shaped, parameters, strict=True):
            parameter.grad = shape(each.grad)
            if each.scalars is not None:
                kept = {name: shape(flat) for name, flat in each.flats.items()}
                others = {name: _to_device(value, each.weight.device) for name, value in each.scalars.items()}
                self._worker.state[parameter] = kept | others
        try:
            entries = self._step(parameters, [each.group for each in tensors], groups)
        finally:
            self._worker.state.clear()
            self._worker.param_groups.clear()
        for each, parameter in zip(tensors, parameters, strict=True):
            # An optimizer may give the parameter another tensor, `p.data = ...`, in place of writing to it.
            if parameter.data_ptr() != each.weight.data_ptr():
                each.weight.copy_(each.managed.laid_out(parameter.detach()))
        return entries

    def _step(
        self,
        parameters: Sequence[nn.Parameter],
        members: Sequence[int],
        groups: Sequence[Mapping[str, Any]],
        *,
        is_trial: bool = False,
    ) -> list[dict[str, Any]]:
        worker = self._worker
        for number in sorted(set(members)):
            # Not `foreach`, whose bits differ, and which would depend on what an owner has.
            options = {
                name: False if name in ("foreach", "fused") else value
                for name, value in groups[number].items()
                if name not in ("params", "param_names")
            }
            its = [each for each, group in zip(parameters, members, strict=True) if group == number]
            worker.param_groups.append({**options, "params": its})
        if is_trial and not self._is_known:
            self._copy.trial_step()
        else:
            self._copy.step()
        return [dict(worker.state.get(each, {})) for each in parameters]

    def refuse_shape(self, group: Mapping[str, Any], managed: ManagedParameter) -> None:
        """Raises ValueError for a parameter whose shape the optimizer does not take, where it takes matrices."""
        if managed.shape in self._taken:
            return
        its = _likeness(managed.shape)
        if self._probe(group, its) is None and self._probe(group, _MATRIX) is not None:
            error = self._outcome(group, its)
            raise ValueError(
                f"{self._kind.__name__} cannot update {managed.name!r} of shape {tuple(managed.shape)}: {error}. Move "
                "it to a param group of an optimizer that can, or freeze it"
            )
        self._taken.add(managed.shape)

    def _probe(self, group: Mapping[str, Any], shape: tuple[int, ...], raises: bool = False) -> dict[str, Any] | None:
        """The entry of a tensor of zeros after a first step; None if the optimizer does not take such a tensor.

        raises: an error of the optimizer's, which it has for hyperparameters, is passed on.
        """
        found = self._outcome(group, shape)
        if not isinstance(found, Exception):
            return found
        # What no arithmetic takes, such as a learning rate that is no number, or is not there, is no matter of shapes.
        if raises and isinstance(found, (TypeError, KeyError)):
            words = f"it has no {found}" if isinstance(found, KeyError) else f"{found}"
            raise ValueError(f"{self._kind.__name__} cannot step with {settings_in_words(group)}: {words}") from found
        # It may ask of a shape what ours is not. What its states are shows at the first step.
        return None

    def _outcome(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any] | Exception:
        """What `_probe` finds, or the optimizer's error."""
        settings = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        key = (shape, repr(settings))
        if key not in self._probed:
            if len(self._probed) >= _MOST_PROBED:  # a schedule makes other settings in each step
                self._probed.clear()
            parameter = nn.Parameter(torch.zeros(shape, device="cpu"))
            parameter.grad = torch.zeros(shape, device="cpu")
            # A user's optimizer may draw random numbers, which must not change the user's.
            try:
                with torch.random.fork_rng(devices=[]), torch.no_grad():
                    (self._probed[key],) = self._step([parameter], [0], [settings], is_trial=True)
            except UnsupportedError:
                raise
            except Exception as error:
                self._probed[key] = error.with_traceback(None)
            finally:
                self._worker.state.clear()
                self._worker.param_groups.clear()
            if not isinstance(found := self._probed[key], Exception):
                self._refuse_states(found, shape)
        return self._probed[key]

    def _refuse_states(self, entry: Mapping[str, Any] | None, shape: tuple[int, ...]) -> None:
        """Raises UnsupportedError for states that no shard can hold, and for those that no rank can be told."""
        for name, value in (entry or {}).items():
            try:
                _told(_words([value]))
            except Exception as error:
                raise UnsupportedError(
                    f"{self._kind.__name__} keeps {name!r} as a {type(value).__name__}, which other ranks cannot be "
                    "told: keep tensors, numbers, text, and tuples, lists and dicts of these"
                ) from error
            if isinstance(value, Tensor) and value.dim() and value.shape == shape and value.dtype is not torch.float32:
                raise UnsupportedError(
                    f"{self._kind.__name__} keeps {name!r} in {value.dtype} with the shape of its parameter: shards of "
                    "states are fp32. Keep it in fp32"
                )


def _likeness(shape: Sequence[int]) -> tuple[int, ...]:
    """A small shape that is like `shape`: its dimensions are equal to each other, or 1 or 0, where those of it are."""
    small = {0: 0, 1: 1} | dict(zip(dict.fromkeys(size for size in shape if size > 1), _PRIMES, strict=False))
    return tuple(small[size] for size in shape)


_MATRIX = (2, 3)
_MOST_PROBED = 256
"""Outcomes of trial steps that are kept, each a few small tensors."""
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def _is_flat(value: Any, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether a state lies in shards as the parameter does."""
    return isinstance(value, Tensor) and tuple(value.shape) == tuple(shape) and len(shape) > 0 and value.dtype is dtype


def _to_device(value: Any, device: torch.device) -> Any:
    """A copy of a state that is in no shard, where the optimizer had it: numbers stay on the host."""
    if not isinstance(value, Tensor):
        return copy.copy(value)
    return value.to(device, copy=True) if value.dim() else value.clone()


def _write(each: RunUpdate, made: Made) -> None:
    """Copy what was made into the weights and states of a run, which is one parameter."""
    run, at = each.run, 0
    parts: list[tuple[slice, slice]] = []  # (elements of the chunk's flat tensors, elements of what was made)
    for piece in made.pieces:
        parts.append((piece.in_shard, slice(at, at + piece.numel)))
        at += piece.numel
    if each.weights is not None and parts:
        weights = each.weights.load()
        for there, here in parts:
            weights[there].copy_(made.weight[here])
    for name, value in made.flats.items():
        # Flat states of a run begin with its first element.
        if name in each.flat:
            target = each.flat[name]
        elif name in each.room:
            target = each.create(name, each.room[name])
        else:
            target = each.create(name, torch.zeros(run.numel, dtype=value.dtype, device=value.device))
        for there, here in parts:
            target[there.start - run.start : there.stop - run.start].copy_(value[here])
    each.scalars = dict(made.scalars)


# -- The exchange: parts of tensors to their owners, a step there, and parts of what it made to all.


class DueTensor(NamedTuple):
    """A tensor that is due, and this rank's part of it, on the device: 1-D, in the order of its pieces."""

    chunk: Chunk
    managed: ManagedParameter
    group: int
    scalars: Mapping[str, Any] | None
    grad: Tensor
    weight: Tensor
    flats: dict[str, Tensor]

    @property
    def key(self) -> tuple[int, int]:
        """The chunk's index, and the parameter's position in it."""
        return self.chunk.index, self.managed.position

    def pieces(self, rank: int) -> list[Piece]:
        """What a rank has of the tensor, by `payload_start` counted from the tensor's first element."""
        chunk, managed = self.chunk, self.managed
        its = chunk.optim_layout.pieces(0 if chunk.is_stepped_whole else rank, managed.offset, managed.numel)
        return [piece.from_start(managed.offset) for piece in its]

    def sent(self, rank: int, owner: int) -> list[Piece]:
        """What `rank` sends to the tensor's owner. What all ranks have whole the owner has itself."""
        return [] if self.chunk.is_stepped_whole and rank != owner else self.pieces(rank)


def _alone(part: DueTensor) -> OwnedTensor:
    """The whole tensor where one rank has all of it: its part, which is a copy."""
    return OwnedTensor(part.managed, part.group, part.grad, part.weight, part.flats, part.scalars)


class WholeRules(Protocol):
    """The optimizers that step whole tensors."""

    def step(self, tensors: Sequence[OwnedTensor], groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Step tensors by the optimizers of their param groups, weights in place. Returns the entry of each. Local."""


class TensorExchange:
    """Steps tensors on their owners. All of it is collective: every rank has the same tensors in the same order."""

    def __init__(
        self,
        rules: WholeRules,
        param_groups: Sequence[Mapping[str, Any]],
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        """param_groups: those in force. device: of the exchange, and of the step."""
        self._rules = rules
        self._param_groups = param_groups
        self._communicator = communicator
        self._device = device

    def part(
        self, chunk: Chunk, run: RunUpdate, gradient: Tensor | None, weights: Tensor | None, names: Sequence[str]
    ) -> DueTensor:
        """Copy this rank's part of a run, which is one parameter, to the device.

        gradient, weights: (optim_numel,) of the chunk; None if nothing of the tensor is here. names: of its states.
        """
        managed = chunk.parameters[run.run.positions[0]]
        dtype = torch.float64 if chunk.dtype is torch.float64 else torch.float32

        def of(flat: Tensor | None, first: int = 0) -> Tensor:
            mine = [] if flat is None else [flat[p.shard_start - first :][: p.numel] for p in managed.pieces]
            # Always a copy: what was staged for this chunk is overwritten by the next.
            joined = torch.cat(mine) if mine else torch.empty(0, dtype=dtype, device=self._device)
            return joined.to(self._device, dtype)

        flats = {name: of(run.flat.get(name), run.run.start) for name in sorted(names)}
        scalars = None if run.is_new else run.scalars
        return DueTensor(chunk, managed, run.run.group, scalars, of(gradient), of(weights), flats)

    def step(self, parts: Sequence[DueTensor], factors: GradientFactors) -> dict[tuple[int, int], Made]:
        """Step tensors once, each on its owner. Returns what was made, by chunk index and position."""
        made: dict[tuple[int, int], Made] = {}
        # Ranks exchange one dtype at a time, of which there is one in nearly all models.
        for dtype in (torch.float32, torch.float64):
            alike = [part for part in parts if part.weight.dtype is dtype]
            if alike:
                made |= self._step(alike, factors)
        return made

    def _step(self, parts: Sequence[DueTensor], factors: GradientFactors) -> dict[tuple[int, int], Made]:
        ranks = self._communicator.num_shards
        owned = owners([work_of(part.managed.shape) for part in parts], ranks)
        tensors = self._gather(parts, owned) if ranks > 1 else [_alone(part) for part in parts]
        tensors = [each._replace(grad=factors.applied(each.grad)) for each in tensors]
        entries = self._rules.step(tensors, self._param_groups)
        split = [self._split(each, entry) for each, entry in zip(tensors, entries, strict=True)]
        weights = [each.weight for each in tensors]
        if ranks == 1:
            return {
                part.key: Made(part.managed.pieces, weight, *its)
                for part, weight, its in zip(parts, weights, split, strict=True)
            }
        mine = [part for part, owner in zip(parts, owned, strict=True) if owner == self._rank]
        words = self._tell(owned, split)
        return self._spread(parts, owned, list(zip(mine, weights, [flats for flats, _ in split], strict=True)), words)

    @property
    def _rank(self) -> int:
        return self._communicator.shard_rank

    def _gather(self, parts: Sequence[DueTensor], owned: Sequence[int]) -> list[OwnedTensor]:
        """The whole tensors that this rank owns."""
        me, ranks = self._rank, range(self._communicator.num_shards)
        outgoing: list[list[Tensor]] = [[] for _ in ranks]
        incoming = [0 for _ in ranks]
        for part, owner in zip(parts, owned, strict=True):
            fields = [part.grad, part.weight, *part.flats.values()]
            if part.sent(me, owner):
                outgoing[owner] += fields
            if owner == me:
                for rank in ranks:
                    incoming[rank] += len(fields) * sum(piece.numel for piece in part.sent(rank, me))
        received = self._exchange(outgoing, incoming, parts[0].weight.dtype, "tensors to their owners")
        whole: list[OwnedTensor] = []
        at = [0 for _ in ranks]
        for part, owner in zip(parts, owned, strict=True):
            if owner != me:
                continue
            fields = [part.weight.new_empty(part.managed.numel) for _ in range(2 + len(part.flats))]
            for rank in ranks:
                for flat in fields:
                    at[rank] = _place(part.sent(rank, me), flat, received[rank], at[rank])
            grad, weight, *flats = fields
            whole.append(
                OwnedTensor(
                    part.managed,
                    part.group,
                    grad,
                    weight,
                    dict(zip(part.flats, flats, strict=True)),
                    part.scalars,
                )
            )
        return whole

    def _split(self, each: OwnedTensor, entry: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """An entry as flat states, (numel,) each, and all others, which every rank keeps on the host."""
        managed, flats, scalars = each.managed, dict[str, Tensor](), dict[str, Any]()
        for name in sorted(entry):
            value = entry[name]
            if _is_flat(value, managed.shape, each.weight.dtype):
                flats[name] = managed.laid_out(value.detach())
            else:
                scalars[name] = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        return flats, scalars

    def _tell(
        self,
        owned: Sequence[int],
        of_shape: Sequence[tuple[dict[str, Tensor], dict[str, Any]]],
    ) -> list[tuple[list[str], dict[str, Any]]]:
        """The names of each tensor's flat states, and its other states, which its owner tells all ranks."""
        own = [(list(flats), scalars) for flats, scalars in of_shape]
        told = self._communicator.all_gather_bytes_of_shards(_words(own), "names of the owners' states")
        by_owner = [iter(_told(its)) for its in told]
        return [next(by_owner[owner]) for owner in owned]

    def _spread(
        self,
        parts: Sequence[DueTensor],
        owned: Sequence[int],
        mine: Sequence[tuple[DueTensor, Tensor, dict[str, Tensor]]],
        words: Sequence[tuple[list[str], dict[str, Any]]],
    ) -> dict[tuple[int, int], Made]:
        """This rank's parts of all tensors, as their owners have made them."""
        me, ranks = self._rank, range(self._communicator.num_shards)
        outgoing: list[list[Tensor]] = [[] for _ in ranks]
        for part, weight, flats in mine:
            for rank in ranks:
                pieces = part.pieces(rank)
                outgoing[rank] += [flat[piece.in_payload] for flat in (weight, *flats.values()) for piece in pieces]
        incoming = [0 for _ in ranks]
        for part, owner, (names, _) in zip(parts, owned, words, strict=True):
            incoming[owner] += (1 + len(names)) * sum(piece.numel for piece in part.pieces(me))
        received = self._exchange(outgoing, incoming, parts[0].weight.dtype, "tensors from their owners")
        made: dict[tuple[int, int], Made] = {}
        at = [0 for _ in ranks]
        for part, owner, (names, scalars) in zip(parts, owned, words, strict=True):
            numel = sum(piece.numel for piece in part.pieces(me))
            fields = []
            for _ in range(1 + len(names)):
                fields.append(received[owner][at[owner] :][:numel])
                at[owner] += numel
            made[part.key] = Made(part.managed.pieces, fields[0], dict(zip(names, fields[1:], strict=True)), scalars)
        return made

    def _exchange(
        self, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[int], dtype: torch.dtype, what: str
    ) -> Sequence[Tensor]:
        """What each rank sends this one, 1-D. outgoing: to each rank, flat. incoming: elements from each."""
        sent_numels = [sum(each.numel() for each in its) for its in outgoing]
        sent = torch.empty(sum(sent_numels), dtype=dtype, device=self._device)
        at = 0
        for each in (flat for its in outgoing for flat in its):
            sent[at : at + each.numel()].copy_(each)
            at += each.numel()
        received = torch.empty(sum(incoming), dtype=dtype, device=self._device)
        self._communicator.exchange(sent, sent_numels, received, incoming, what)
        return tuple(torch.split(received, list(incoming)))


def _words(states: Any) -> bytes:
    """States that are in no shard, as ranks tell them to each other."""
    file = io.BytesIO()
    torch.save(states, file)
    return file.getvalue()


def _told(words: bytes) -> Any:
    """What `_words` was given. Makes plain values only: no code of another rank's runs."""
    return torch.load(io.BytesIO(words), map_location="cpu", weights_only=True)


def _place(pieces: Sequence[Piece], flat: Tensor, received: Tensor, at: int) -> int:
    """Copy pieces of one tensor from element `at` of what a rank has sent. Returns where the next begins."""
    for piece in pieces:
        flat[piece.in_payload].copy_(received[at : at + piece.numel])
        at += piece.numel
    return at
