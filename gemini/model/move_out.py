"""Moving out: if wrapping fails half way, the module gets its weights back and is as it was.

Weights that have moved are in the chunks' homes, on several ranks a part on each. All ranks have heard of the failure,
so they restart together and gather chunk by chunk. The values are then those of rank 0, as wrapping promises. Weights
that were rounded without a master (frozen ones, wrapped in a narrower dtype) stay rounded.

[Note: Nothing is lost] On several ranks a chunk is broadcast only when every rank has reached it, so every rank has all
earlier chunks at home. A rank that failed in the middle of a chunk has all of its values in the payload. It brings its
part home before the ranks gather the chunk, since the other ranks may have nothing but their parts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gemini.access.parameter_link import any_link_of
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
"""Marks a parameter whose values are gone. Without the mark its placeholder could be wrapped as if it were weights."""


class _LostWeightsError(GeminiError):
    """A rank failed in the middle of a chunk that it had not received yet."""


class MovingOut:
    """Undoes a wrapping that failed.

    `Wrapping` tells it of stores before ranks agree on the model, and of chunks before they agree on the plan.
    Therefore nothing has moved on any rank as long as one rank has no chunks.
    """

    def __init__(self, communicator: Communicator, memory: Memory) -> None:
        self.stores: list[BuildStore] = []  # stores of parameters built in a `ZeroInitContext`
        self.chunks: list[Chunk] = []
        self.moves = Moves()
        self.communicator = communicator
        self.memory = memory

    def note_stores(self, stores: list[BuildStore]) -> None:
        """Parameters of the module are in these stores."""
        self.stores = stores

    def note_chunks(self, chunks: list[Chunk]) -> None:
        """These chunks, which are empty, are about to take the parameters."""
        self.chunks = chunks

    def undo(self, error: BaseException) -> None:
        """Undo the wrapping after `error`, of which all ranks know. Collective. Adds a note to it if weights are lost.

        Raises nothing of its own: where the weights cannot be given back, that is the note.
        """
        clear_our_frames()  # collectives that they still know could not end
        # What is local comes first: it is right also if the collectives below fail.
        for managed in self._managed():
            self._make_plain(managed)
        for owner, name, buffer in self.moves.buffers:
            owner._buffers[name] = buffer
        try:
            if isinstance(error, RankLostError):
                raise RankLostError("a rank that had a part of the weights is gone")
            # A module that is wrapped inside inference_mode must get memory that it can be trained in.
            with torch.inference_mode(False), torch.no_grad():
                if self._restart():
                    self._give_back()
            # All ranks are here, so the process group of this wrap can end now.
            self.communicator.close()
        except Exception as second:
            lost = [managed for managed in self._managed() if managed.index in self.moves.originals]
            # Mark the same parameters on all ranks, or one rank would wrap the module again and wait for the others.
            if isinstance(second, _LostWeightsError):
                lost = self._managed()
            for managed in lost:
                setattr(managed.parameter, LOST, True)
            if lost:
                error.add_note(
                    f"{len(lost)} parameters could not be given back their weights ({second}): build the module again"
                )
        finally:
            # The communicator of this wrap ends. A store that still has parameters uses its own again.
            for store in self.stores:
                store.go_over(None)

    def _managed(self) -> list[ManagedParameter]:
        return [managed for chunk in self.chunks for managed in chunk.parameters]

    def _make_plain(self, managed: ManagedParameter) -> None:
        """Make it an ordinary parameter again, with its current data."""
        parameter = managed.parameter
        # A `Link` is this wrap's. A `BuiltLink` stays: the store that it leads to still has the values.
        if any_link_of(parameter) is not None and built_link_of(parameter) is None:
            parameter.__class__ = nn.Parameter
            del parameter._gemini  # type: ignore[attr-defined]
        if parameter.requires_grad is not managed.requires_grad:
            parameter.requires_grad_(managed.requires_grad)

    def _restart(self) -> bool:
        """Restart the communicators of all ranks. Returns whether anything may have moved. Collective."""
        if self.communicator.watch is not None:
            self.communicator.restart()
        # The hash is part of every tag, and only some ranks may have set it.
        self.communicator.follow_plan(0)
        has_plan, device = bool(self.chunks), self.communicator.device
        # The maxima of a flag and of its negation: whether some rank has a plan, and whether some rank has none.
        planned = torch.tensor([has_plan, not has_plan], dtype=torch.int64, device=device)
        self.communicator.all_reduce_max_(planned, "what was planned")
        some_have, some_lack = planned.tolist()
        may_have_moved = bool(some_have and not some_lack)
        # A restart drops edits that a store has not brought home. If nothing has moved, they must stay.
        for store in self.stores if may_have_moved else ():
            store.restart()
        return may_have_moved

    def _give_back(self) -> None:
        """Give every moved parameter its values back, chunk by chunk. Collective."""
        self._complete()
        moved = self._moved()
        for chunk in self.chunks:
            members = [managed for managed in chunk.parameters if managed.index in moved]
            if not members:
                continue
            # A rank that failed right after the ranks had found the chunk at home may still have links to the store.
            let_go(members)
            payloads: dict[bool, Tensor] = {}  # True: gathered from the masters
            for managed in members:
                original = self.moves.originals[managed.index]
                # A master has the bits of a wider weight that the chunk's dtype has no room for.
                exact = Kind.MASTER in chunk.homes and original.dtype is not chunk.dtype
                if exact not in payloads:
                    payloads[exact] = self._gather(chunk, exact)
                restore(managed, original, payloads[exact][managed.in_payload])
                self._done(managed)
            self._free(chunk)

    def _complete(self) -> None:
        """Bring home what this rank has received, as the ranks did that did not fail in this chunk. Local."""
        originals = self.moves.originals
        for managed in self._managed():
            if managed.index in self.moves.received and managed.index not in originals:
                set_weights(managed, managed.laid_out(managed.parameter.detach()))
                originals[managed.index] = original_of(managed)

    def _moved(self) -> set[int]:
        """The parameters, by index, whose values are at home on all ranks. Collective.

        Raises _LostWeightsError if only some ranks have the values of a parameter.
        """
        managed, originals = self._managed(), self.moves.originals
        flags = [each.index in originals for each in managed]
        rows = [flags, [not flag for flag in flags]]
        # The maxima over ranks tell for each parameter whether some rank has its values, and whether some rank lacks
        # them.
        words = torch.tensor(rows, dtype=torch.int64, device=self.communicator.device)
        self.communicator.all_reduce_max_(words, "what has moved")
        moved = set()
        for each, some_have, some_lack in zip(managed, *words.tolist(), strict=True):
            if some_have and not some_lack:
                moved.add(each.index)
            elif some_have and built_link_of(each.parameter) is not None:
                # Not all ranks had the chunk at home, so its store still has the values.
                originals.pop(each.index, None)
            elif some_have:
                raise _LostWeightsError(f"no rank has the whole of {each.name!r}")
        return moved

    def _gather(self, chunk: Chunk, of_master: bool) -> Tensor:
        """All weights of a chunk, (numel,): in fp32 from the masters, or as they are. Collective."""
        if of_master:
            part, layout = full_precision(chunk, 0, chunk.optim_numel), chunk.optim_layout
        else:
            part, layout = ready(chunk.homes[Kind.PARAM]), chunk.home_layout
        # Every rank holds it whole, such as weights below stage 3 and masters at stage 0.
        if layout.world_size == 1:
            return part[: chunk.numel]
        # This rank's part is put into the payload first, where an all-gather without a shard expects it.
        payload = torch.zeros(chunk.numel, dtype=part.dtype, device=self.communicator.device)
        for piece in layout.slices(chunk.rank):
            payload[piece.in_payload].copy_(part[piece.in_shard])
        self.communicator.all_gather(payload, None, chunk.layout, chunk.index)
        return payload

    def _done(self, managed: ManagedParameter) -> None:
        """Finish a parameter that is whole again. One that was built on shards goes back onto them: collective."""
        original = self.moves.pop_original(managed.index)
        if original.store is None or original.store.is_closed:
            return
        operator, _, name = original.built_name.rpartition(".")
        original.store.shard(operator, [(name, managed.parameter)])

    def _free(self, chunk: Chunk) -> None:
        """Free the chunk's memory before the next chunk's weights get memory of their own."""
        if chunk.own_slot is not None:
            # The parameter home is a part of this slot and must not be freed once more below.
            chunk.close_own_slot()
        if chunk.payload is not None:
            chunk.end_residence()
        for kind in list(chunk.homes):
            chunk.free_home(kind, self.memory)
