"""Gloo ranks for tests: real processes, started once per world size, that serve many cases.

A case is a top-level function `case(rank, world_size, *args, **kwargs)`; it is sent by name, runs on every
rank, and its per-rank results come back as a list. Starting ranks with transformers costs seconds, a case
on running ranks milliseconds. A rank that raises, or a case that does not end in time, costs its group: all
ranks of that world size are killed, and the next case gets fresh ones: no test inherits another's half-
finished collective.

The parent serves the rendezvous store itself, as torchrun's agent does: no port is guessed, none can be
taken.
"""

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.harness.rank_process import RankError, run_rank

START_TIMEOUT_S = 120.0
GRACE_S = 5.0  # after one rank raised, the others may still end by themselves


class RankTimeout(RankError):
    """A case did not end in time on some rank; the message holds the stacks of those still running."""


@dataclass(frozen=True)
class Exit:
    """How a fresh rank ended."""

    exitcode: int  # negative: killed by that signal
    result: Any = None
    error: BaseException | None = None
    output: str = ""  # stdout and stderr together

    @property
    def stderr(self) -> str:
        return self.output


@dataclass
class Ranks:
    """The processes of one world size; started by the first `run`."""

    world_size: int
    _group: "_Group | None" = field(default=None, repr=False)

    def run(
        self,
        case: Callable[..., Any] | str,
        *args: Any,
        timeout_s: float = 60.0,
        fresh: bool = False,
        forked: bool = False,
        init_group: bool = True,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Results of `case(rank, world_size, *args, **kwargs)` in rank order.

        An exception in a rank is raised here, with every failed rank's traceback as a note. `fresh=True`
        runs in own short-lived processes that may die or raise, and returns a list of `Exit`; with it,
        `init_group=False` leaves the process group to the case (the environment is as torchrun sets it),
        and `env` adds variables. Fresh processes are whole interpreters, which takes seconds; where it does not
        matter how an interpreter ends, `forked=True` makes them of one that has imported what ranks need.
        """
        call = (_name_of(case), args, kwargs)
        if fresh:
            return _run_fresh(self.world_size, call, timeout_s, init_group, env or {}, forked)
        if env or forked or not init_group:
            raise ValueError("env=, forked= and init_group=False need fresh=True")
        if self._group is None:
            self._group = _Group(self.world_size)
        try:
            return self._group.run(call, timeout_s)
        except BaseException:  # also the test's own time limit
            self._group.kill()
            self._group = None
            raise

    def stop(self) -> list[int]:
        """Ends the ranks in an orderly way; returns their exit codes."""
        group, self._group = self._group, None
        return group.stop() if group else []


class RankPool:
    """`pool(world_size)` gives the `Ranks` of that size, the same for a whole pytest session."""

    def __init__(self) -> None:
        self._by_size: dict[int, Ranks] = {}

    def __call__(self, world_size: int) -> Ranks:
        return self._by_size.setdefault(world_size, Ranks(world_size))

    def stop(self) -> dict[int, list[int]]:
        return {size: codes for size, ranks in self._by_size.items() if (codes := ranks.stop())}


_living: set[Any] = set()

# Ranks that serve are forked from a process that has imported what they need and has done nothing else: no thread, no
# tensor. Fresh ones are whole interpreters, unless a case says otherwise: how those end is what most are about.
_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["tests.harness.preloaded"])
_SPAWNED = multiprocessing.get_context("spawn")


@atexit.register
def _kill_all() -> None:  # runs before multiprocessing's own exit handler, which would wait for them
    for process in list(_living):
        if process.is_alive():
            process.kill()


class _Group:
    def __init__(
        self,
        world_size: int,
        call: Any = None,
        init_group: bool = True,
        env: dict[str, str] | None = None,
        forked: bool = True,
    ) -> None:
        """Starts the processes; with `call` they run that one case and exit (fresh), else they serve."""
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.logs = [Path(self._folder.name) / f"rank{rank}.log" for rank in range(world_size)]
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        context = _FORKED if forked else _SPAWNED
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            variables = _rank_environment(rank, world_size, self._store.port) | (env or {})
            setup = (rank, world_size, str(self.logs[rank]), call is None, init_group, variables)
            process = context.Process(target=run_rank, args=(theirs, setup), name=f"rank {rank} of {world_size}")
            with _environment(variables):  # OMP_NUM_THREADS is read when torch is imported, before run_rank runs
                process.start()
            theirs.close()
            _living.add(process)
            self.pipes.append(ours)
            self.processes.append(process)
        if call is None:
            self._collect(START_TIMEOUT_S, "start of the ranks")
        else:
            for pipe in self.pipes:
                pipe.send_bytes(pickle.dumps(call))

    def run(self, call: Any, timeout_s: float) -> list[Any]:
        message = pickle.dumps(call)  # plain pickle: multiprocessing's own would share the tensors' memory
        for pipe in self.pipes:
            pipe.send_bytes(message)
        return self._collect(timeout_s, call[0])

    def _collect(self, timeout_s: float, what: str) -> list[Any]:
        answers, dead = self.answers(timeout_s, what)
        failed = [rank for rank in answers if not answers[rank][0]]  # in the order in which they failed
        if dead:  # the others' lost connections are only what follows from it
            codes = ", ".join(f"rank {rank} with {self.processes[rank].exitcode}" for rank in dead)
            error: BaseException = RankError(f"{what}: exited {codes}\n{self.log_tails(dead)}")
        elif failed:
            error = answers[failed[0]][1]
        else:
            return [answers[rank][1] for rank in range(self.world_size)]
        for rank in failed:
            error.add_note(f"---- rank {rank} of {self.world_size} ({what})\n{answers[rank][2]}")
        raise error

    def answers(
        self, timeout_s: float, what: str, grace_s: float = GRACE_S
    ) -> tuple[dict[int, tuple[bool, Any, str]], list[int]]:
        """rank -> (ok, result or exception, traceback) as they arrive; ranks that died without an answer."""
        answers: dict[int, tuple[bool, Any, str]] = {}
        dead: list[int] = []
        deadline = time.monotonic() + timeout_s
        while pending := [r for r in range(self.world_size) if r not in answers and r not in dead]:
            left_s = deadline - time.monotonic()
            ready = wait([self.pipes[rank] for rank in pending], timeout=max(0.0, left_s))
            if not ready:
                if dead or any(not ok for ok, _, _ in answers.values()):
                    return answers, dead  # these failed first; the pending ones only waited for them
                raise RankTimeout(
                    f"{what}: no answer within {timeout_s:g} s from rank{'s' * (len(pending) > 1)} "
                    f"{', '.join(map(str, pending))} of {self.world_size}\n{self.stacks(pending)}"
                )
            for rank in pending:
                if self.pipes[rank] not in ready:
                    continue
                try:
                    ok, payload, trace = pickle.loads(self.pipes[rank].recv_bytes())
                except (EOFError, ConnectionError):
                    self.processes[rank].join(10)
                    dead.append(rank)
                    ok = False
                else:
                    answers[rank] = (ok, _load(payload, trace, ok), trace)
                if not ok:
                    deadline = min(deadline, time.monotonic() + grace_s)
        return answers, dead

    def stacks(self, ranks: list[int]) -> str:
        """Every thread's stack of ranks that hang; faulthandler writes them even while the GIL is held."""
        # Before the signal, which ends a process whose faulthandler has ended.
        kernels = [_kernel_of(self.processes[rank].pid) for rank in ranks]
        forked_by = getattr(
            getattr(forkserver, "_forkserver", None), "_forkserver_pid", None
        )  # it reaps ranks, and tells us how they ended
        kernels.append(f"---- their parent: {_kernel_of(forked_by)}")
        for rank in ranks:
            with contextlib.suppress(OSError, TypeError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join([self.log_tails(ranks), *kernels])

    def log_tails(self, ranks: list[int], num_lines: int = 60) -> str:
        return "\n".join(
            f"---- output of rank {rank}\n" + "\n".join(self.output(rank).splitlines()[-num_lines:]) for rank in ranks
        )

    def output(self, rank: int) -> str:
        return self.logs[rank].read_text(errors="replace") if self.logs[rank].exists() else ""

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
        self._close()

    def stop(self) -> list[int]:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(pickle.dumps(None))
        started = time.monotonic()
        while None in (codes := [_code_of(process) for process in self.processes]):
            living = [
                each for each, code in zip(self.processes, codes, strict=True) if code is None and not _is_gone(each)
            ]
            if time.monotonic() - started > (30 if living else 240):
                break
            time.sleep(0.02)
        late = [rank for rank, code in enumerate(codes) if code is None]
        if late:
            sys.stderr.write(f"ranks {late} of {self.world_size} do not exit\n{self.stacks(late)}\n")
        self.kill()
        return [-signal.SIGKILL if code is None else code for code in codes]

    def _close(self) -> None:
        for process in self.processes:
            if _code_of(process) is None:
                process.join(10)
            _living.discard(process)
        for pipe in self.pipes:
            pipe.close()
        self._folder.cleanup()


def _kernel_of(pid: int | None) -> str:
    """Where the kernel has a process and its threads: once Python has ended, nothing else tells why it stays."""
    found = []
    with contextlib.suppress(OSError):
        for each in sorted(Path(f"/proc/{pid}/task").iterdir()):
            state, parent = (each / "stat").read_text().rpartition(")")[2].split()[:2]
            place = (each / "wchan").read_text()
            found.append(f"{(each / 'comm').read_text().strip()} {state} in {place}, child of {parent}")
    return f"---- threads of process {pid}: {'; '.join(found) or 'none'}"


def _code_of(process: Any) -> int | None:
    """The exit code of a process; None: it runs, or is gone and nobody has told its code so far.

    A zombie has ended, also where its parent has not told us: a fork server was seen in the kernel for more than a
    minute (80 s of system time in one `wait4`) while it reaped a child that was gone, and others had ended.
    """
    if process.exitcode is not None:
        return int(process.exitcode)
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] == "Z":
            return os.waitstatus_to_exitcode(int(fields[49]))
    return None


def _is_gone(process: Any) -> bool:
    """Whether the kernel knows of no such process any more."""
    return not Path(f"/proc/{process.pid}").exists()


def _run_fresh(
    world_size: int, call: Any, timeout_s: float, init_group: bool, env: dict[str, str], forked: bool
) -> list[Exit]:
    group = _Group(world_size, call, init_group, env, forked)
    try:
        started = time.monotonic()
        # Ranks that outlive a dead or raising one are the point of such a case: they get the whole time.
        answers, _ = group.answers(START_TIMEOUT_S + timeout_s, call[0], grace_s=timeout_s)
        for rank, process in enumerate(group.processes):
            process.join(max(10.0, timeout_s - (time.monotonic() - started)))
            if process.exitcode is None:
                raise RankTimeout(f"{call[0]}: rank {rank} does not exit\n{group.stacks([rank])}")
        exits = []
        for rank, process in enumerate(group.processes):
            ok, value, _ = answers.get(rank, (True, None, ""))
            result, error = (value, None) if ok else (None, value)
            exits.append(Exit(process.exitcode, result, error, group.output(rank)))
        return exits
    finally:
        group.kill()


def _name_of(case: Callable[..., Any] | str) -> str:
    if isinstance(case, str):
        return case
    if "<" in case.__qualname__:
        raise ValueError(f"{case.__qualname__} must be a top-level function: ranks import it by name")
    return f"{case.__module__}:{case.__qualname__}"


def _load(payload: bytes, trace: str, ok: bool) -> Any:
    try:
        return pickle.loads(payload)
    except Exception as problem:  # an exception class whose __init__ takes other arguments than it passes on
        return RankError(f"{problem}" if ok else trace.strip().splitlines()[-1])


def _rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is served by the parent: every rank is a client
        "OMP_NUM_THREADS": 1,
    }
    if sys.platform == "linux":
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # a host name that does not resolve is no reason to fail
    return {name: str(value) for name, value in variables.items()}


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
