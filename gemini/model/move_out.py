"""Moving out: where wrapping fails half way, the module gets its weights back and is as it was.

Weights that have moved are in the chunks' homes, on several ranks a part on each, so ranks that all caught the failure
start again together and gather chunk by chunk. Values are then rank 0's, which wrapping had promised. Weights that were
rounded without a master (frozen ones, wrapped in a narrower dtype) stay rounded.

[Note: Nothing is lost] On several ranks a chunk is broadcast only when every rank has come to it, so all have the
chunks before. A rank that failed in the middle of a chunk has its values whole, from the payload. It brings its part of
them home before the others, who may have no more than their parts, gather the chunk from all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gemini.access.link import any_link_of
from gemini.building.link import built_link_of
from gemini.building.store import BuildStore
from gemini.chunks.chunk import Chunk, ManagedParameter
from gemini.errors import GeminiError, RankLostError
from gemini.manager.failures import clear_our_frames
from gemini.manager.masters import full_precision, set_weights
from gemini.memory.memory import Memory
from gemini.memory.transfer import ready
from gemini.model.move_in import Moves, let_go, original_of, restore
from gemini.placement.demand import Kind
from gemini.ranks.communicator import Communicator

LOST = "_gemini_lost"
"""Marks a parameter whose values are gone: it must not be wrapped as if its placeholder were weights."""


class _LostWeightsError(GeminiError):
    """A rank failed in the middle of a chunk, and has not received it."""


class MovingOut:
    """Undoes a wrapping that failed.

    The wrapping says how far it has come: `stores` before ranks agree on the model, `chunks` before they agree on the
    plan, so that nothing has moved on any rank while one has no chunks yet.
    """

    def __init__(self, communicator: Communicator, memory: Memory) -> None:
        self.stores: list[BuildStore] = []  # where the module was built
        self.chunks: list[Chunk] = []
        self.moves = Moves()
        self.communicator = communicator
        self.memory = memory

    def undo(self, error: BaseException) -> None:
        """After `error`, which every rank has heard of. Collective. Adds a note to it where weights are lost.

        Raises nothing of its own: where the weights cannot be given back, that is the note.
        """
        clear_our_frames()  # collectives that they still know could not end
        for managed in self._managed():
            self._make_plain(managed)
        for owner, name, buffer in self.moves.buffers:
            owner._buffers[name] = buffer
        try:
            if isinstance(error, RankLostError):
                raise RankLostError("a rank that had a part of the weights is gone")
            with torch.inference_mode(False), torch.no_grad():
                if self._restart():
                    self._give_back()
            self.communicator.close()
        except Exception as second:
            lost = [managed for managed in self._managed() if managed.index in self.moves.originals]
            if isinstance(second, _LostWeightsError):
                lost = self._managed()  # on all ranks alike: none may wait for the others to wrap it again
            for managed in lost:
                setattr(managed.parameter, LOST, True)
            if lost:
                error.add_note(
                    f"{len(lost)} parameters could not be given back their weights ({second}): build the module again"
                )
        finally:
            for store in self.stores:
                store.go_over(None)

    def _managed(self) -> list[ManagedParameter]:
        return [managed for chunk in self.chunks for managed in chunk.parameters]

    def _make_plain(self, managed: ManagedParameter) -> None:
        """An ordinary parameter, with what it has."""
        parameter = managed.parameter
        if any_link_of(parameter) is not None and built_link_of(parameter) is None:
            parameter.__class__ = nn.Parameter
            del parameter._gemini  # type: ignore[attr-defined]
        if parameter.requires_grad is not managed.requires_grad:
            parameter.requires_grad_(managed.requires_grad)

    def _restart(self) -> bool:
        """Start together with the other ranks. Returns whether anything may have moved. Collective."""
        if self.communicator.watch is not None:
            self.communicator.restart()
        self.communicator.plan_hash = 0  # some ranks may have the plan's already
        has_plan, device = bool(self.chunks), self.communicator.device
        planned = torch.tensor([has_plan, not has_plan], dtype=torch.int64, device=device)
        self.communicator.all_reduce_max_(planned, "what was planned")
        some_have, some_lack = planned.tolist()
        may_have_moved = bool(some_have and not some_lack)
        for store in self.stores if may_have_moved else ():  # else edits may wait there to be brought home
            store.restart()
        return may_have_moved

    def _give_back(self) -> None:
        """Every moved parameter gets its values. Collective."""
        self._complete()
        moved = self._moved()
        for chunk in self.chunks:
            members = [managed for managed in chunk.parameters if managed.index in moved]
            if not members:
                continue
            let_go(members)
            payloads: dict[bool, Tensor] = {}  # by: of the master
            for managed in members:
                original = self.moves.originals[managed.index]
                exact = Kind.MASTER in chunk.homes and original.dtype is not chunk.dtype
                if exact not in payloads:
                    payloads[exact] = self._gather(chunk, exact)
                restore(managed, original, payloads[exact][managed.in_payload])
                self._done(managed)
            self._free(chunk)

    def _complete(self) -> None:
        """What this rank has received comes home, as on ranks that did not fail in the middle of the chunk. Local."""
        originals = self.moves.originals
        for managed in self._managed():
            if managed.index in self.moves.received and managed.index not in originals:
                set_weights(managed, managed.laid_out(managed.parameter.detach()))
                originals[managed.index] = original_of(managed)

    def _moved(self) -> set[int]:
        """The parameters, by index, whose values are at home on all ranks. Collective."""
        managed, originals = self._managed(), self.moves.originals
        flags = [each.index in originals for each in managed]
        rows = [flags, [not flag for flag in flags]]
        words = torch.tensor(rows, dtype=torch.int64, device=self.communicator.device)
        self.communicator.all_reduce_max_(words, "what has moved")
        moved = set()
        for each, some_have, some_lack in zip(managed, *words.tolist(), strict=True):
            if some_have and not some_lack:
                moved.add(each.index)
            elif some_have and built_link_of(each.parameter) is not None:
                originals.pop(each.index, None)  # no rank has let go of it: not all had the chunk at home
            elif some_have:
                raise _LostWeightsError(f"no rank has the whole of {each.name!r}")
        return moved

    def _gather(self, chunk: Chunk, of_master: bool) -> Tensor:
        """(numel,) all weights of a chunk, as fp32 where they are the master's. Collective."""
        if of_master:
            part, layout = full_precision(chunk, 0, chunk.optim_numel), chunk.optim_layout
        else:
            part, layout = ready(chunk.homes[Kind.PARAM]), chunk.home_layout
        if layout.world_size == 1:
            return part[: chunk.numel]
        payload = torch.zeros(chunk.numel, dtype=part.dtype, device=self.communicator.device)
        for piece in layout.slices(chunk.rank):
            payload[piece.in_payload].copy_(part[piece.in_shard])
        self.communicator.all_gather(payload, None, chunk.layout, chunk.index)
        return payload

    def _done(self, managed: ManagedParameter) -> None:
        """The parameter is whole. One that was built on shards goes back onto them. Collective then."""
        original = self.moves.originals.pop(managed.index)
        if original.store is None or original.store.is_closed:
            return
        operator, _, name = original.built_name.rpartition(".")
        original.store.shard(operator, [(name, managed.parameter)])
        link = built_link_of(managed.parameter)
        if link is not None:
            link.refuse_backward()

    def _free(self, chunk: Chunk) -> None:
        """Give the chunk's memory back before the next one's weights get theirs."""
        if chunk.own_slot is not None:
            chunk.own_slot.close()
            del chunk.homes[Kind.PARAM]
            chunk.own_slot = None
        if chunk.payload is not None:
            chunk.leave_home()
        for kind in list(chunk.homes):
            self.memory.give(chunk.homes.pop(kind), kind)
