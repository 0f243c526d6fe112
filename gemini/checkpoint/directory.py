"""A directory of checkpoints, which all ranks see, and what they do on its files together."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gemini.checkpoint.manifest import MANIFEST, Manifest, read_manifest, write_durably
from gemini.errors import CheckpointError, GeminiError
from gemini.log import get_dist_logger
from gemini.memory.direct import write_all
from gemini.ranks.parts import AllRanks
from gemini.settings import check_count

# -- What each rank does on files by itself: all ranks learn of a failure, and none waits for one that has failed.


@contextmanager
def together(communicator: AllRanks, what: str) -> Iterator[None]:
    """Around what each rank does on its files alone: if one fails, all raise. Collective at the end of the block.

    Raises CheckpointError with the first rank's reason on all ranks, whatever its class: files, and the user's own
    `state_dict()`, may raise any. Errors of arguments leave as they are, if all ranks have them. As all ranks raise,
    their states stay as they are for whoever catches it. What ends a process, such as an interrupt, is published.
    """
    failure: Exception | None = None
    with communicator.publishing():
        try:
            yield
        except Exception as error:
            failure = error
    words = "" if failure is None else reason_of(failure)
    every = communicator.all_gather_bytes(words.encode(), "files of a checkpoint")
    failed = [(rank, each.decode()) for rank, each in enumerate(every) if each]
    if not failed:
        return
    if failure is not None and communicator.world_size == len(failed) and not isinstance(failure, OSError):
        raise failure
    rank, reason = failed[0]
    who = "" if communicator.world_size == 1 else f"rank {rank}: "
    raise CheckpointError(f"{what}: {who}{reason}") from failure


def reason_of(error: BaseException) -> str:
    """An error in words: with its class where the words are not ours, as "7" of a KeyError says nothing."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} (errno {error.errno}): {error.filename or 'a file of the checkpoint'}"
    if isinstance(error, (GeminiError, ValueError, TypeError)) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else repr(error)


# -- The directory of a training's checkpoints: which there are, and how one comes and goes as a whole.
#
# A checkpoint is written into a folder whose name begins with a dot, beside the others (`Draft`). When all of it is on
# the disk the folder gets its own name, in one operation of the file system, and `latest` follows. A crash at any
# moment leaves the earlier checkpoints, and `latest` at one that is complete. Older ones go last.
#
# [Note: Own folders] Users keep other things beside checkpoints, and several models may save into one directory. So
# nothing is renamed or removed but folders with the file `MARK`, or with a manifest of ours. The process that writes a
# folder has its mark locked, which a crash undoes: what is locked is under way, and everybody else leaves it alone.


LATEST = "latest"
MARK = ".gemini"  # a file that says that gemini has written the folder in which it is
_MARK_WORDS = b"gemini has written this folder, and may replace or remove it: see docs/checkpoints.md of gemini.\n"
_POINTER = "latest.new"  # in a draft: what becomes `latest`
_LEFT = re.compile(r"\.(?P<tag>.+?)(?P<draft>\.gemini-[0-9a-f]{8})?\.(?P<kind>partial|replaced|removed)")
_OWN_FILES = re.compile(r"checkpoint\.json|rank-\d+\.json(\.new)?|states-.*\.safetensors|latest\.new|\.gemini")
_LOCK_TRIES, _LOCK_PAUSE_S = 3000, 0.01
_REMOVE_TRIES = 10


@dataclass(frozen=True)
class Keep:
    """Which checkpoints of a directory stay when another one is complete.

    One to which a link in the directory leads always stays.

    Args:
        last: the newest ones, at least 1.
        every: also those whose step is a multiple of this number; None: no others.

    Raises ValueError for numbers below 1.

    Example:
        >>> keep = Keep(last=3, every=1000)
    """

    last: int
    every: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("every", self.every)):
            if value is not None or name == "last":
                check_count(f"keep: {name}", value)


class Directory:
    """The checkpoints in one directory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # Absolute from the start: a script may change its working directory while a save is under way.
        self.path = Path(path).absolute()

    def begin(self, tag: str) -> Draft:
        """Make the folder in which the checkpoint `tag` is written, and remove what crashes have left.

        Called by one rank. Raises OSError, and CheckpointError, before anything has changed, if something that gemini
        has not written has the checkpoint's name.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with self._alone():
            self._refuse_foreign(tag)
            self._clear_up(tag)
            path = self.path / f".{tag}.gemini-{secrets.token_hex(4)}.partial"
            path.mkdir()
            return Draft(self, tag, path)

    def commit(self, tag: str, draft: Path) -> Path:
        """Give the complete folder `draft` its name, and have `latest` name it. Raises OSError and CheckpointError.

        Either all of it has happened then, or none, as far as the file system lets it be undone.
        """
        final = self.path / tag
        # All bytes are written before anything changes: a full disk says so here.
        write_durably(draft / _POINTER, f"{tag}\n".encode())
        _sync_folder(draft)
        replaced = draft.with_suffix(".replaced")
        renamed: list[tuple[Path, Path]] = []
        with self._alone():
            self._refuse_foreign(tag)
            try:
                # A folder cannot be renamed onto another one: for a moment the older one has a name by which `find`
                # still finds it.
                for source, target in ([(final, replaced)] if _is_own(final) else []) + [(draft, final)]:
                    os.rename(source, target)
                    renamed.append((source, target))
                _sync_folder(self.path)
                os.replace(final / _POINTER, self.path / LATEST)
                _sync_folder(self.path)
            except OSError:
                for source, target in reversed(renamed):
                    with suppress(OSError):
                        os.rename(target, source)
                raise
        if replaced.exists():
            _remove_replaced(replaced, final)
        return final

    def find(self, tag: str | None = None) -> Path:
        """The folder of a checkpoint. tag: None for the newest one that is complete. Raises CheckpointError.

        The directory may itself be a checkpoint, if no tag is given.
        """
        if tag is not None:
            check_tag(tag)
            for path in (self.path / tag, *(path for path, left in self._left() if left == (tag, "replaced"))):
                if (path / MANIFEST).is_file():
                    return path
            raise CheckpointError(f"{self.path} has no complete checkpoint {tag!r}: {self._there()}")
        if (self.path / MANIFEST).is_file():
            return self.path
        named = self._named()
        if named is not None:
            try:
                return self.find(named)
            except CheckpointError:
                pass  # a crash came between two renames, or somebody has removed it: the newest of the others counts
        complete = self.complete()
        if not complete:
            raise CheckpointError(f"{self.path} has no complete checkpoint: {self._there()}")
        return complete[-1][0]

    def has_any(self) -> bool:
        """Whether `find()` would find one."""
        try:
            self.find()
        except CheckpointError:
            return False
        return True

    def complete(self) -> list[tuple[Path, Manifest]]:
        """The complete checkpoints, oldest first, and links to such. Damaged manifests are passed over."""
        found = []
        for each in sorted(self.path.iterdir()) if self.path.is_dir() else ():
            if each.is_dir() and not _LEFT.fullmatch(each.name) and (each / MANIFEST).is_file():
                try:
                    found.append((each, read_manifest(each)))
                except CheckpointError:
                    continue
        return sorted(found, key=lambda pair: (pair[1].created, pair[0].name))

    def remove_old(self, keep: Keep, newest: str) -> None:
        """Remove the checkpoints that `keep` lets go; `newest` never goes. Raises OSError. Called by one rank."""
        removed = []
        with self._alone():
            linked = {os.path.realpath(each) for each in self.path.iterdir() if each.is_symlink()}
            others = [pair for pair in self.complete() if pair[0].name != newest and not pair[0].is_symlink()][::-1]
            for newer, (path, manifest) in enumerate(others, 1):
                is_kept = keep.every is not None and manifest.step is not None and manifest.step % keep.every == 0
                if newer >= keep.last and not is_kept and os.path.realpath(path) not in linked:
                    # Its name goes first: whoever looks meanwhile, or after a crash, does not find half of one.
                    removed.append(self.path / f".{path.name}.gemini-{secrets.token_hex(4)}.removed")
                    os.rename(path, removed[-1])
        for path in removed:
            _remove(path)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other saves from renaming anything here meanwhile, where the file system has locks."""
        folder = os.open(self.path, os.O_RDONLY)
        try:
            # Nobody has it for long. A process that is stopped with it must not stop all others.
            for _ in range(_LOCK_TRIES):
                if _lock(folder) is not False:
                    break
                time.sleep(_LOCK_PAUSE_S)
            yield
        finally:
            _unlock(folder)

    def _refuse_foreign(self, tag: str) -> None:
        final, latest = self.path / tag, self.path / LATEST
        if os.path.lexists(final) and not _is_own(final) and not _is_empty_folder(final):
            raise CheckpointError(
                f"{final} is {_kind_of(final)} that gemini has not written, and a checkpoint of this name would "
                "replace it: give another tag=, or move it away"
            )
        if latest.is_symlink() or latest.is_dir():
            raise CheckpointError(
                f"{latest} is {_kind_of(latest)} that gemini has not written, and the name of the newest checkpoint "
                "would replace it: move it away"
            )

    def _clear_up(self, tag: str) -> None:
        """Remove what crashes have left, and give an older checkpoint its name back that has lost it to none."""
        for path, left in self._left():
            try:
                self._clear(path, left, tag)
            except OSError as error:  # such as files that another machine has open: no reason to lose a checkpoint
                get_dist_logger().warning(f"{path}, which a crash has left, cannot be removed: {reason_of(error)}")

    def _clear(self, path: Path, left: tuple[str, str], tag: str) -> None:
        its, kind = left
        if not _is_own(path):
            if _is_empty_folder(path) and ".gemini-" in path.name:
                os.rmdir(path)  # a crash came before it was marked
            return
        under_way = _is_locked(path / MARK)
        # Without locks a save takes only a save of its own name for one that has crashed.
        if under_way or (under_way is None and its != tag):
            return
        final = self.path / its
        if kind != "replaced":
            _remove(path)
        elif not os.path.lexists(final):
            os.rename(path, final)
        elif _is_own(final) and (final / MANIFEST).is_file():
            _remove_replaced(path, final)

    def _left(self) -> list[tuple[Path, tuple[str, str]]]:
        """Folders whose names say what they were, each with its tag and kind."""
        if not self.path.is_dir():
            return []
        found = [(path, _LEFT.fullmatch(path.name)) for path in sorted(self.path.iterdir())]
        return [
            (path, (match["tag"], match["kind"]))
            for path, match in found
            if match is not None and path.is_dir() and not path.is_symlink()
        ]

    def _named(self) -> str | None:
        """The tag in `latest`. None: there is none, or what a crash of the machine, or somebody else, has left."""
        try:
            return check_tag((self.path / LATEST).read_bytes().decode().strip())
        except NotADirectoryError:
            raise CheckpointError(f"{self.path} is a file, not a directory of checkpoints") from None
        except (OSError, ValueError):
            return None

    def _there(self) -> str:
        if not self.path.exists():
            return "it does not exist, or this rank cannot see it"
        names = [path.name for path, _ in self.complete()]
        if names:
            return f"it has {', '.join(names[-5:])}"
        return f"it has {', '.join(sorted(path.name for path in self.path.iterdir())[:5]) or 'nothing'}"


class Draft:
    """A checkpoint that one rank of a save has begun: it is locked until it is complete or abandoned."""

    def __init__(self, directory: Directory, tag: str, path: Path) -> None:
        """Marks and locks `path`, which is empty. Raises OSError; `path` is gone then."""
        self.path = path
        self._directory = directory
        self._tag = tag
        self._mark = -1
        try:
            self._mark = os.open(path / MARK, os.O_RDWR | os.O_CREAT, 0o644)
            _lock(self._mark)
            write_all(self._mark, memoryview(_MARK_WORDS), 0)
        except BaseException:
            self.abandon()
            raise

    def commit(self) -> Path:
        """Make it the newest checkpoint. Returns its folder. Raises OSError and CheckpointError; it is gone then."""
        try:
            final = self._directory.commit(self._tag, self.path)
        except BaseException:
            self.abandon()
            raise
        self._release()
        return final

    def abandon(self) -> None:
        """Remove it, as far as that is possible. Nothing happens to one that is complete."""
        with suppress(OSError):
            _remove(self.path)
        self._release()

    def _release(self) -> None:
        mark, self._mark = self._mark, -1
        if mark >= 0:
            _unlock(mark)


def check_tag(tag: str) -> str:
    """`tag`, if it can be the name of a folder. Raises ValueError."""
    if not isinstance(tag, str) or not re.fullmatch(r"[^./\\\0][^/\\\0]*", tag) or tag == LATEST:
        raise ValueError(f"tag={tag!r} cannot name a checkpoint: it is the name of its folder, as 'step_100' is")
    return tag


def _is_own(path: Path) -> bool:
    """Whether gemini has written this folder, which no link counts as."""
    if path.is_symlink() or not path.is_dir():
        return False
    if (path / MARK).is_file():
        return True
    try:
        read_manifest(path)  # earlier versions have made no marks
    except (CheckpointError, OSError):
        return False
    return True


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _kind_of(path: Path) -> str:
    return "a link" if path.is_symlink() else "a folder" if path.is_dir() else "a file"


def _remove_replaced(replaced: Path, final: Path) -> None:
    """Remove a checkpoint of which `final` has taken the name. Files of others in it go over to that one."""
    for each in replaced.iterdir():
        if not _OWN_FILES.fullmatch(each.name) and not os.path.lexists(final / each.name):
            os.rename(each, final / each.name)
    _remove(replaced)


def _remove(path: Path) -> None:
    """Remove a folder of ours, which another process may be removing, or writing to, too. Raises OSError."""
    tries = 0
    while path.exists():
        try:
            # What says that it is ours goes last: after a crash the next save goes on here.
            for each in sorted(path.iterdir(), key=lambda each: (each.name == MARK, each.name == MANIFEST)):
                if each.is_dir() and not each.is_symlink():
                    shutil.rmtree(each)
                else:
                    each.unlink()
            path.rmdir()
        except FileNotFoundError:
            continue
        except OSError as error:
            # A rank of a save that has failed may open its file just before it hears of that. Left here, without its
            # mark, the folder would be nobody's and stay for ever. What comes back each time is the file system's own.
            tries += 1
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or tries == _REMOVE_TRIES:
                raise


def _lock(file: int) -> bool | None:
    """Lock an open file or folder, unless another one has: False. None: the file system has no locks. Never waits."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _unlock(file: int) -> None:
    # Closing alone would leave it locked in a process that was forked meanwhile.
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def _is_locked(path: Path) -> bool | None:
    """Whether a process has this file locked. None: that cannot be known."""
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    taken = _lock(file)
    if taken:
        _unlock(file)
    else:
        os.close(file)
    return None if taken is None else not taken


def _sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk: without it a rename may be lost in a crash of the machine."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
