"""Long work shows at a terminal, on rank 0, how far it is; short work, files of logs and other ranks show nothing."""

import io
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from gemini import load_checkpoint, save_checkpoint
from gemini import progress as bars
from tests.harness.on_ranks import on_ranks
from tests.harness.shared_folder import shared_folder
from tests.zoo import mlp


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def shown(text: io.StringIO, least_bytes: int = 0) -> Iterator[io.StringIO]:
    """What is written while every work counts as long."""
    wide = {"COLUMNS": "120", "TERM": "xterm"}
    with (
        patch.object(sys, "stderr", text),
        patch.dict("os.environ", wide),
        patch.object(bars, "LEAST_BYTES", least_bytes),
    ):
        yield text


@on_ranks(1, 2)
def test_wrapping_saving_and_loading_show_how_far_they_are_on_rank_0(rank: int, world_size: int) -> None:
    with shared_folder() as folder:
        with shown(Terminal()) as text:
            model, optimizer = mlp.sharded("smallest")
            mlp.train_step(model, optimizer)
            save_checkpoint(folder, model, optimizer, tag="first", keep=1)
            load_checkpoint(folder, model, optimizer)
        words = ("planning", "weights into chunks", "saving first", "verifying first", "loading first")
        assert [each for each in words if each in text.getvalue()] == ([] if rank else list(words))
        model.close()


@pytest.mark.parametrize(("text", "least_bytes"), [(io.StringIO(), 0), (Terminal(), 2**20)], ids=["log", "short"])
def test_a_file_of_logs_and_short_work_get_no_bar(text: io.StringIO, least_bytes: int) -> None:
    with shown(text, least_bytes):
        model, optimizer = mlp.sharded("smallest")
        save_checkpoint(tempfile.mkdtemp(), model, optimizer)
    assert text.getvalue() == ""


def test_a_bar_ends_with_all_that_there_is_to_do_and_none_stands_in_another() -> None:
    with shown(Terminal()) as text, bars.progress("outside", 3 * 10**6) as outside:
        with bars.progress("inside", 10**6) as inside:
            inside(10**6)
        for _ in range(3):
            outside(10**6)
    assert "3.0/3.0 MB" in text.getvalue() and "inside" not in text.getvalue()


def test_a_save_in_the_background_shows_nothing_over_what_training_prints() -> None:
    with shown(Terminal()) as text:
        model, optimizer = mlp.sharded("smallest")
        before = text.getvalue()
        save_checkpoint(tempfile.mkdtemp(), model, optimizer, asynchronous=True).wait()  # type: ignore[union-attr]
        assert text.getvalue() == before
