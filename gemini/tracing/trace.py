"""`gemini.trace`: what memory holds, and what moves, while training runs, as files to look at."""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

import torch

from gemini.errors import BudgetError, RemoteRankError
from gemini.memory.tier import lacks_memory
from gemini.model.sharded_model import ShardedModel
from gemini.tracing.perfetto import chrome_events, document, sums_of
from gemini.tracing.picture import page_of, script
from gemini.tracing.recording import RankTrace, TraceRecording
from gemini.tracing.timeline import TracedStep, steps_of
from gemini.tracing.torch_snapshot import snapshot_of


class Traced:
    """What `gemini.trace` has written on this rank, once its block is over.

    Attributes:
        directory: where the files are.
        picture: of memory, in HTML, for a browser. None: it was not written.
        trace_file: for ui.perfetto.dev. None: it was not written, or another rank has written it.
        snapshot: for pytorch.org/memory_viz. None: it was not written.
        steps: what each step has moved and waited for.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.picture: Path | None = None
        self.trace_file: Path | None = None
        self.snapshot: Path | None = None
        self.steps: Sequence[TracedStep] = ()

    def write(self, trace: RankTrace) -> None:
        """Write what is of this rank alone. Raises OSError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.steps = steps_of(trace)
        self.picture = self.directory / f"memory_rank{trace.rank}.html"
        self.picture.write_text(page_of(trace, f"{self.directory.name}, rank {trace.rank}"))
        self.snapshot = self.directory / f"snapshot_rank{trace.rank}.pickle"
        with self.snapshot.open("wb") as file:
            pickle.dump(snapshot_of(trace), file)

    def write_alone(self, trace: RankTrace) -> None:
        """Write everything without the other ranks. Raises OSError."""
        self.write(trace)
        self.write_trace(f"trace_rank{trace.rank}.json", [_packed(trace)])

    def write_trace(self, name: str, ranks: Sequence[bytes]) -> None:
        """Write the trace of these ranks, each as `_packed` has it. Raises OSError."""
        unpacked = [json.loads(zlib.decompress(each)) for each in ranks]
        self.trace_file = self.directory / name
        with self.trace_file.open("w") as file:
            json.dump(document([events for events, _ in unpacked], [sums for _, sums in unpacked]), file)


@contextmanager
def trace(model: ShardedModel, directory: str | PathLike[str], *, on_oom: bool = False) -> Iterator[Traced]:
    """Watch what the model does in the block, and write it into `directory` as files to look at.

    `memory_rank0.html` is a picture of memory for a browser: bytes by tier and kind at each moment with the budgets,
    what is in which slot, copies and updates. `trace.json` opens in ui.perfetto.dev: a row for each thread, link and
    slot, of all ranks. `snapshot_rank0.pickle` opens in pytorch.org/memory_viz. See "Looking at a step" in the
    documentation. Collective: every rank enters the block and leaves it, and each writes its own files; rank 0 writes
    the trace. If the block ends with an error, each rank writes what it has, the trace as `trace_rank0.json`.

    Without a block nothing is recorded, and nothing is slower. Inside, each event takes microseconds, and memory on the
    host until the end of the block: trace a few steps, behind the first ones.

    Args:
        model: a `ShardedModel`. Of an engine it is `engine.model`.
        directory: for the files, which replace those of before. It is made if it is not there.
        on_oom: True writes only if a step, or the block, ends with an error for lack of memory, a `BudgetError` or the
            machine's, also where the script catches it; of several such steps the first. Only the last steps are kept:
            the whole training may stand in the block.

    Raises TypeError for another model, and ImportError without the package plotly, before anything is recorded; OSError
    where files cannot be written.

    Example:
        >>> from tempfile import mkdtemp
        >>> with trace(model, mkdtemp()) as traced:
        ...     loss = model(torch.ones(2, 8)).sum()
        >>> traced.picture.name
        'memory_rank0.html'
    """
    if not isinstance(model, ShardedModel):
        raise TypeError(
            f"gemini.trace watches a ShardedModel, found {type(model).__name__}: wrap it first. Before it is wrapped "
            "nothing is held that could be drawn: `gemini plan` and the BudgetError say what there is no room for"
        )
    script()  # without it nothing could be written in the end
    traced = Traced(Path(directory))
    recording = TraceRecording(model.chunk_manager, keeps_all=not on_oom)
    recording.begin()
    try:
        yield traced
    except BaseException as error:
        recorded = recording.end()
        if not on_oom or _is_for_lack_of_memory(error):
            traced.write_alone(recorded)
            error.add_note(f"gemini.trace has written what memory held to {traced.picture}")
        elif recording.at_shortage is not None:
            traced.write_alone(recording.at_shortage)
        raise
    recorded = recording.end()
    if not on_oom:
        traced.write(recorded)
        ranks = model.chunk_manager.communicator.all_gather_bytes(_packed(recorded), "traces")
        if recorded.rank == 0:
            traced.write_trace("trace.json", ranks)
    elif recording.at_shortage is not None:
        traced.write_alone(recording.at_shortage)


def _packed(trace: RankTrace) -> bytes:
    """What a rank gives to the trace of all ranks."""
    return zlib.compress(json.dumps([chrome_events(trace), sums_of(trace)]).encode(), 1)


def _is_for_lack_of_memory(error: BaseException) -> bool:
    """On this rank, or on another one that says so."""
    names = BudgetError.__name__, torch.OutOfMemoryError.__name__
    return lacks_memory(error) or (isinstance(error, RemoteRankError) and any(name in str(error) for name in names))
