"""A directory of checkpoints has what others put there, too: a save replaces only what gemini has written."""

import builtins
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import gemini
from gemini import CheckpointError, HybridAdam, ShardedModel, ShardedOptimizer, load_checkpoint, save_checkpoint
from gemini.checkpoint import directory, writing
from gemini.checkpoint.tensor_files import TensorFile
from tests.harness.on_ranks import gathered, on_ranks
from tests.harness.shared_folder import shared_folder

Parts = tuple[ShardedModel, ShardedOptimizer]


def make(seed: int = 0, **options: Any) -> Parts:
    torch.manual_seed(seed)
    model = ShardedModel(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), device="emulated", **options)
    return model, ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2))


def step(parts: Parts) -> None:
    parts[1].backward(parts[0](torch.ones(2, 16)).square().mean())
    parts[1].step()


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def _file(path: Path) -> None:
    path.write_text("precious")


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "precious").write_text("")


def _link(path: Path) -> None:
    _folder(path.with_name("target"))
    path.symlink_to("target")


def _dangling(path: Path) -> None:
    path.symlink_to("nowhere")


THINGS: dict[str, Callable[[Path], None]] = {"file": _file, "folder": _folder, "link": _link, "dangling": _dangling}


@on_ranks(1, 2)
@pytest.mark.parametrize("thing", THINGS)
def test_what_gemini_has_not_written_keeps_a_tags_name_and_later_saves_work(
    rank: int, world_size: int, thing: str
) -> None:
    with shared_folder() as folder:
        parts = make()
        if rank == 0:
            THINGS[thing](folder / "best")
            _folder(folder / ".download.partial")
            _folder(folder / ".best.removed")
        there = names(folder) if gathered(None) else []
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"best is a \w+ that gemini has not written.*give another tag="):
                save_checkpoint(folder, *parts, tag="best")
        assert names(folder) == there
        save_checkpoint(folder, *parts, tag="other", keep=1)
        assert names(folder) == sorted([*there, "latest", "other"])
        if thing == "folder":
            assert (folder / "best" / "precious").exists()


@on_ranks(1, 2)
def test_links_are_no_checkpoints_to_count_and_keep_what_they_lead_to(rank: int, world_size: int) -> None:
    with shared_folder() as folder:
        parts = make()
        save_checkpoint(folder, *parts, tag="a")
        if rank == 0:
            (folder / "best").symlink_to("a")
            (folder / "gone").symlink_to("nowhere")
        gathered(None)
        for tag in ("b", "c", "d"):
            save_checkpoint(folder, *parts, tag=tag, keep=2)
        assert names(folder) == ["a", "best", "c", "d", "gone", "latest"]
        assert load_checkpoint(folder, *parts, tag="best").tag == "a"


@on_ranks(1, 2)
def test_a_folder_of_the_name_of_the_newest_is_named_before_anything_is_written(rank: int, world_size: int) -> None:
    with shared_folder() as folder:
        if rank == 0:
            _folder(folder / "latest")
        gathered(None)
        with pytest.raises(CheckpointError, match=r"latest is a folder that gemini has not written"):
            save_checkpoint(folder, *make())
        assert names(folder) == ["latest"]


def test_files_beside_a_checkpoint_of_the_same_tag_stay(tmp_path: Path) -> None:
    parts = make()
    path = save_checkpoint(tmp_path, *parts, tag="last")
    (path / "tokenizer.json").write_text("precious")
    save_checkpoint(tmp_path, *parts, tag="last", extra="again")
    assert (path / "tokenizer.json").read_text() == "precious"
    assert load_checkpoint(tmp_path, *parts).extra == "again" and names(tmp_path) == ["last", "latest"]


@on_ranks(1, 2)
def test_two_models_save_into_one_directory_at_once(rank: int, world_size: int) -> None:
    with shared_folder() as folder:
        one, other = make(), make(1)
        hashes = {"G": gemini.state_hash(*one), "D": gemini.state_hash(*other)}
        may_write = threading.Event()
        write = TensorFile.write

        def held(*arguments: Any) -> None:
            if threading.current_thread().name.endswith(" G"):
                assert may_write.wait(60)
            write(*arguments)

        with patch.object(TensorFile, "write", held):
            pending = save_checkpoint(folder, *one, tag="G", asynchronous=True)
            assert not isinstance(pending, Path)
            save_checkpoint(folder, *other, tag="D")
            gathered(None)
            may_write.set()
            pending.wait()
        assert names(folder) == ["D", "G", "latest"]
        for tag, expected in hashes.items():
            load_checkpoint(folder, *other, tag=tag)
            assert gemini.state_hash(*other) == expected


@pytest.mark.parametrize("content", [b"\0" * 6, b"\xff\xfe\xff", b"../x\n", b"", b"latest", b"gone\n"])
def test_a_damaged_latest_gives_way_to_the_newest_complete_checkpoint(tmp_path: Path, content: bytes) -> None:
    parts = make()
    for tag in ("a", "b"):
        save_checkpoint(tmp_path, *parts, tag=tag)
    (tmp_path / "latest").write_bytes(content)
    assert load_checkpoint(tmp_path, *parts).tag == "b"
    save_checkpoint(tmp_path, *parts, tag="c")
    assert (tmp_path / "latest").read_text() == "c\n"


def test_a_save_goes_to_the_directory_of_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    parts, may_write, write = make(), threading.Event(), TensorFile.write
    monkeypatch.setattr(TensorFile, "write", lambda *arguments: (may_write.wait(60), write(*arguments))[1])
    pending = save_checkpoint("here", *parts, asynchronous=True)
    assert not isinstance(pending, Path)
    monkeypatch.chdir("other")
    may_write.set()
    assert pending.wait().parent == tmp_path / "here" and not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize("function", ["write_durably", "rename", "replace"])
def test_a_disk_that_fails_at_the_end_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    parts = make()
    for tag in ("old", "new"):
        save_checkpoint(tmp_path, *parts, tag=tag, extra="before")
    real: Any = directory.write_durably if function == "write_durably" else getattr(os, function)

    def full(*arguments: Any) -> None:
        ends = str(arguments[0]).endswith((".partial", "latest.new")) and not str(arguments[-1]).endswith(".json")
        if ends:
            raise OSError(28, "No space left on device", str(arguments[0]))
        real(*arguments)

    with monkeypatch.context() as inside:
        inside.setattr(*((directory, function) if function == "write_durably" else (os, function)), full)
        with pytest.raises(CheckpointError, match="No space left"):
            save_checkpoint(tmp_path, *parts, tag="new", extra="after")
    assert names(tmp_path) == ["latest", "new", "old"]
    assert load_checkpoint(tmp_path, *parts).extra == "before"


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", ["OSError", "MemoryError", "SystemExit", "KeyboardInterrupt"])
def test_an_error_of_any_class_reaches_all_ranks(rank: int, world_size: int, kind: str) -> None:
    """The last rank's, whose disk takes nothing more: what it has to say goes another way."""

    def fails(*_: Any) -> None:
        raise getattr(builtins, kind)("my own")

    with shared_folder() as folder:
        parts = make()
        step(parts)
        with patch.object(writing, "write_durably", fails if rank == world_size - 1 else writing.write_durably):
            with pytest.raises((CheckpointError, MemoryError), match="my own"):
                save_checkpoint(folder, *parts)
        step(parts)
        save_checkpoint(folder, *parts, tag="it")
        assert names(folder) == ["it", "latest"]


@on_ranks(1, 2)
def test_a_failed_save_in_the_background_is_told_once_and_the_next_one_is_made(rank: int, world_size: int) -> None:
    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device", "states")

    with shared_folder() as folder:
        parts = make()
        step(parts)
        with patch.object(TensorFile, "write", fails):
            pending = save_checkpoint(folder, *parts, tag="a", asynchronous=True)
            assert not isinstance(pending, Path)
            pending.join()
            with pytest.raises(CheckpointError, match="which was being written in the background, is not complete"):
                step(parts)
        parts[1].zero_grad()
        step(parts)
        save_checkpoint(folder, *parts, tag="b")
        with patch.object(TensorFile, "write", fails):
            pending = save_checkpoint(folder, *parts, tag="c", asynchronous=True)
            assert not isinstance(pending, Path)
            pending.join()
        save_checkpoint(folder, *parts, tag="d")  # nobody has heard of it: it is said, and this one is made
        gathered(None)
        assert names(folder) == ["b", "d", "latest"]


def test_a_file_that_a_slower_rank_opens_while_a_failed_save_is_removed_leaves_nothing(tmp_path: Path) -> None:
    late = 3

    def opens_a_file_first(path: Path, *, remove: Callable[[Path], None] = Path.rmdir) -> None:
        nonlocal late
        if late and path.suffix == ".partial":
            late -= 1
            (path / "states-00001-0.safetensors").write_bytes(b"")
        remove(path)

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device", "states")

    parts = make()
    step(parts)
    with patch.object(TensorFile, "write", fails), patch.object(Path, "rmdir", opens_a_file_first):
        with pytest.raises(CheckpointError, match="No space left"):
            save_checkpoint(tmp_path, *parts, tag="a")
    assert (late, names(tmp_path)) == (0, [])


def test_what_a_crash_has_left_is_removed_and_what_is_not_ours_is_not(tmp_path: Path) -> None:
    parts = make()
    ours = save_checkpoint(tmp_path, *parts, tag="a")
    shutil.copytree(ours, tmp_path / ".b.gemini-00000001.partial")
    (tmp_path / ".b.gemini-00000002.partial").mkdir()  # before it was marked
    shutil.copytree(ours, tmp_path / ".a.gemini-00000003.replaced")
    shutil.copytree(ours, tmp_path / ".lost.replaced")  # of a version that made no marks
    (tmp_path / ".lost.replaced" / ".gemini").unlink()
    _folder(tmp_path / ".b.gemini-00000004.partial")
    save_checkpoint(tmp_path, *parts, tag="b")
    assert names(tmp_path) == [".b.gemini-00000004.partial", "a", "b", "latest", "lost"]
