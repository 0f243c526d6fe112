"""A directory of checkpoints, which all ranks see, and what they do on its files together."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gemini.checkpoint.manifest import MANIFEST, Manifest, read_manifest, write_durably
from gemini.errors import CheckpointError
from gemini.ranks.communicator import Communicator

# -- What each rank does on files by itself: all ranks learn of a failure, and none waits for one that has failed.


@contextmanager
def together(communicator: Communicator, what: str) -> Iterator[None]:
    """Around what each rank does on its files alone: if one fails, all raise. Collective at the end of the block.

    Raises CheckpointError with the first rank's reason on all ranks. Errors of arguments leave as they are, if all
    ranks have them. As all ranks raise, their states stay as they are for whoever catches it. Any other exception is
    published, as one that the others do not expect.
    """
    failure: Exception | None = None
    with communicator.publishing():
        try:
            yield
        except (OSError, CheckpointError, ValueError, TypeError, KeyError) as error:
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


def reason_of(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} (errno {error.errno}): {error.filename or 'a file of the checkpoint'}"
    return str(error) or repr(error)


# -- The directory of a training's checkpoints: which there are, and how one comes and goes as a whole.
#
# A checkpoint is written into a folder whose name begins with a dot, beside the others. When all of it is on the disk
# the folder gets its own name, in one operation of the file system, and `latest` follows. A crash at any moment leaves
# the earlier checkpoints, and `latest` at one that is complete. Older ones go last.


LATEST = "latest"
_PARTIAL = re.compile(r"\..+\.(partial|replaced|removed)")


@dataclass(frozen=True)
class Keep:
    """Which checkpoints of a directory stay when another one is complete.

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
            if (value is not None or name == "last") and (type(value) is not int or value < 1):
                raise ValueError(f"keep: {name} must be an integer of at least 1, found {value!r}")


class Directory:
    """The checkpoints in one directory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def partial(self, tag: str) -> Path:
        """The folder in which the checkpoint `tag` is written."""
        return self.path / f".{tag}.partial"

    def begin(self, tag: str) -> Path:
        """Make the folder in which the checkpoint `tag` is written, and remove what crashes have left. Raises OSError.

        Called by one rank; no other save of this directory may be under way.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for each in list(self.path.iterdir()):
            if not _PARTIAL.fullmatch(each.name):
                continue
            if not self._is_lost(each):
                shutil.rmtree(each)
            elif not (final := self._replaced(each)).exists():
                os.rename(each, final)
        partial = self.partial(tag)
        partial.mkdir()
        return partial

    def commit(self, tag: str) -> Path:
        """Make the complete folder of `tag` the newest checkpoint. Raises OSError. Called by one rank."""
        partial, final = self.partial(tag), self.path / tag
        _sync_folder(partial)
        replaced = self.path / f".{tag}.replaced"
        if final.exists():
            # A folder cannot be renamed onto another one: for a moment the older one has a name by which `find` still
            # finds it.
            os.rename(final, replaced)
        os.rename(partial, final)
        _sync_folder(self.path)
        beside = self.path / f".{LATEST}.new"
        write_durably(beside, f"{tag}\n".encode())
        os.replace(beside, self.path / LATEST)
        _sync_folder(self.path)
        if replaced.exists():
            shutil.rmtree(replaced)
        return final

    def abandon(self, tag: str) -> None:
        """Remove the folder of a save that has failed, as far as that is possible."""
        shutil.rmtree(self.partial(tag), ignore_errors=True)

    def find(self, tag: str | None = None) -> Path:
        """The folder of a checkpoint. tag: None for the newest one that is complete. Raises CheckpointError.

        The directory may itself be a checkpoint, if no tag is given.
        """
        if tag is not None:
            check_tag(tag)
            for name in (tag, f".{tag}.replaced"):
                if (self.path / name / MANIFEST).is_file():
                    return self.path / name
            raise CheckpointError(f"{self.path} has no complete checkpoint {tag!r}: {self._there()}")
        if (self.path / MANIFEST).is_file():
            return self.path
        try:
            named = (self.path / LATEST).read_text().strip()
        except FileNotFoundError:
            named = ""
        except NotADirectoryError:
            raise CheckpointError(f"{self.path} is a file, not a directory of checkpoints") from None
        if named:
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
        """The complete checkpoints, oldest first. Damaged manifests are passed over."""
        found = []
        for each in sorted(self.path.iterdir()) if self.path.is_dir() else ():
            if each.is_dir() and not _PARTIAL.fullmatch(each.name) and (each / MANIFEST).is_file():
                try:
                    found.append((each, read_manifest(each)))
                except CheckpointError:
                    continue
        return sorted(found, key=lambda pair: (pair[1].created, pair[0].name))

    def remove_old(self, keep: Keep, newest: str) -> None:
        """Remove the checkpoints that `keep` lets go; `newest` never goes. Raises OSError. Called by one rank."""
        others = [pair for pair in self.complete() if pair[0].name != newest][::-1]
        for newer, (path, manifest) in enumerate(others, 1):
            is_kept = keep.every is not None and manifest.step is not None and manifest.step % keep.every == 0
            if newer >= keep.last and not is_kept:
                # Its name goes first: whoever looks meanwhile, or after a crash, does not find half of a checkpoint.
                removed = self.path / f".{path.name}.removed"
                os.rename(path, removed)
                shutil.rmtree(removed)

    def _replaced(self, path: Path) -> Path:
        """The folder that had the name of `path` for a moment."""
        return self.path / path.name.removeprefix(".").removesuffix(".replaced")

    def _is_lost(self, path: Path) -> bool:
        """Whether it is an older checkpoint of a tag whose newer one a crash kept from getting its name."""
        return path.name.endswith(".replaced") and not (self._replaced(path) / MANIFEST).is_file()

    def _there(self) -> str:
        if not self.path.exists():
            return "it does not exist, or this rank cannot see it"
        names = [path.name for path, _ in self.complete()]
        if names:
            return f"it has {', '.join(names[-5:])}"
        return f"it has {', '.join(sorted(path.name for path in self.path.iterdir())[:5]) or 'nothing'}"


def check_tag(tag: str) -> str:
    """`tag`, if it can be the name of a folder. Raises ValueError."""
    if not isinstance(tag, str) or not re.fullmatch(r"[^./\\\0][^/\\\0]*", tag) or tag == LATEST:
        raise ValueError(f"tag={tag!r} cannot name a checkpoint: it is the name of its folder, as 'step_100' is")
    return tag


def _sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk: without it a rename may be lost in a crash of the machine."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
