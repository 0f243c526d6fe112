"""The table that an engine shows at its start."""

import logging
import unittest
from collections.abc import Iterator
from typing import Any

import pytest

import gemini
from gemini import deepspeed
from gemini.engine import initialize
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import CHUNK_NUMEL, build, inputs

CONFIG: dict[str, Any] = {
    "zero_optimization": {"stage": 1, "contiguous_gradients": True, "reduce_bucket_size": 5e8},
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
}


@pytest.fixture
def told() -> Iterator[list[logging.LogRecord]]:
    """What the library logs, which does not reach the root's handlers."""
    records: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger("gemini")
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def test_the_table_says_settings_bytes_and_what_has_no_effect(told: list[logging.LogRecord]) -> None:
    engine, *_ = gemini.initialize(build(), config=CONFIG)
    (record,) = told
    lines = [line.strip() for line in record.getMessage().splitlines()]
    for line in (
        "stage               1, 1 rank",
        "weights             bfloat16",
        "optimizer           HybridAdam, learning rate 0.001",
        "schedule            WarmupLR",
        "gradient clipping   to a norm of 1",
        "loss scale          none",
        "batch               batches as the loader has them, 2 forwards a step",
        "placement           auto",
        "without effect      zero_optimization.contiguous_gradients: gradients are always stored in their chunk",
    ):
        assert line in lines, record.getMessage()
    assert any(line.startswith("zero_optimization.reduce_bucket_size: collectives carry one chunk") for line in lines)
    ledger = engine.chunk_manager.memory.device.ledger.bytes_by_kind
    for kind, words in (("param", "weights"), ("grad", "gradients"), ("master", "fp32 masters")):
        line = next(line for line in lines if line.startswith(words) and not line.endswith("bfloat16"))
        assert line.split(words)[1].strip() == gemini.placement.demand.format_bytes(ledger[kind])
    assert "\x1b" not in record.getMessage(), "colours in a file"


def test_the_table_says_chunks_budgets_and_the_sum_of_each_tier() -> None:
    """What the plan says is what a training holds."""
    optimizer = {"type": "HybridAdam"}
    config = {"device": "emulated", "chunk_size": CHUNK_NUMEL, "model_data_memory": "30KiB", "optimizer": optimizer}
    engine, *_ = gemini.initialize(build(), config=config, verbose=False)
    lines = [line.split() for line in initialize.in_words(engine, 120).splitlines()]
    assert ["chunks", "6", "of", "up", "to", "2048", "B,", "as", "given"] in lines
    assert [line[:3] for line in lines if line[:1] == ["budget"]] == [["budget", "30", "KiB"]]
    engine.backward(engine(inputs(0)).sum())
    engine.step()
    memory = engine.chunk_manager.memory
    held = [gemini.placement.demand.format_bytes(tier.ledger.total_bytes) for tier in (memory.device, memory.host)]
    assert ["in", "all", *held[0].split(), *held[1].split()] in lines


def test_the_table_of_an_engine_without_an_optimizer_says_what_is_held() -> None:
    config = {"device": "emulated", "chunk_size": CHUNK_NUMEL, "dtype": "bf16"}
    engine, *_ = gemini.initialize(build(), config=config, verbose=False)
    lines = [line.split() for line in initialize.in_words(engine, 120).splitlines()]
    held = gemini.placement.demand.format_bytes(engine.chunk_manager.memory.device.ledger.total_bytes)
    assert ["in", "all", *held.split(), "0", "B"] in lines
    assert not [line for line in lines if line[:1] == ["gradients"] or line[:2] == ["optimizer", "state"]]


@pytest.mark.parametrize(
    ("fp16", "words"), [({"loss_scale": 128}, "128, static"), ({"initial_scale_power": 5}, "dynamic, 32 at first")]
)
def test_the_table_says_whether_the_loss_scale_moves(fp16: dict[str, Any], words: str) -> None:
    config = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True, **fp16}, "optimizer": {"type": "Adam"}}
    engine, *_ = gemini.initialize(build(), config=config, verbose=False)
    assert f"loss scale          {words}" in [line.strip() for line in initialize.in_words(engine, 120).splitlines()]
    assert engine.loss_scale == (128.0 if "loss_scale" in fp16 else 32.0)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_the_terminal(width: int) -> None:
    engine, *_ = gemini.initialize(build(), config=CONFIG, verbose=False)
    for is_terminal in (False, True):
        text = initialize.in_words(engine, width, is_terminal)
        assert ("\x1b" in text) is is_terminal
        assert is_terminal or "zero_optimization.reduce_bucket" in "".join(text.split())
        if not is_terminal:
            assert max(map(len, text.splitlines())) <= width


def test_what_is_ignored_is_shown_as_it_is_written() -> None:
    """Square brackets are markup of the library that draws the table."""
    engine, *_ = gemini.initialize(build(), config={"stage": 1}, verbose=False)
    engine.config = engine.config.with_notes([("a[bold]b", "c[/]d :smile:")], {})
    text = initialize.in_words(engine, 120)
    assert "a[bold]b" in text
    assert "c[/]d :smile:" in text


@pytest.mark.parametrize("form", ["argument", "level"])
def test_the_table_can_be_silenced(form: str, told: list[logging.LogRecord]) -> None:
    logger = logging.getLogger("gemini")
    before = logger.level
    try:
        if form == "level":
            logger.setLevel(logging.WARNING)
        gemini.initialize(build(), config=CONFIG, verbose=form == "level")
    finally:
        logger.setLevel(before)
    assert not told
    deepspeed.initialize(model=build(), config=CONFIG)
    assert len(told) == 1


def test_a_level_that_was_chosen_before_stays() -> None:
    logging.getLogger("gemini.of_its_own").setLevel(logging.ERROR)
    gemini.get_dist_logger("gemini.of_its_own").info("nobody sees it")
    assert logging.getLogger("gemini.of_its_own").level == logging.ERROR


@on_ranks(2)
def test_one_rank_shows_the_table(rank: int, world_size: int) -> None:
    with unittest.TestCase().assertLogs("gemini") as told:
        gemini.get_dist_logger().info("started")  # assertLogs wants a line on every rank
        gemini.initialize(build(), config=CONFIG)
    assert sum("2 ranks" in line for line in told.output) == len(told.output) - 1 == (rank == 0)
