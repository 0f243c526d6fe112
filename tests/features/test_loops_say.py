"""What other libraries' loops print when a model is sharded: the table of decisions, and the sentences on request."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemini.integrations.accelerate import Accelerator
from tests.harness.logged import logged
from tests.zoo.hf_trainers import trainer
from tests.zoo.mlp import build


def by_transformers(folder: Path) -> Any:
    return trainer(folder).sharded_model


def by_accelerate(folder: Path) -> Any:
    own = Accelerator(cpu=True, gemini={"device": "emulated", "model_data_memory": "200KiB"})
    return own.prepare(build())


LOOPS = [by_transformers, by_accelerate]


@pytest.mark.parametrize("wrapped", LOOPS, ids=lambda each: each.__name__)
def test_a_loop_that_shards_a_model_prints_the_table_and_not_the_sentences(
    wrapped: Callable[[Path], Any], tmp_path: Path
) -> None:
    with logged() as text:
        model = wrapped(tmp_path)
    lines = [line.split() for line in text.getvalue().splitlines() if line.split()]
    (start,) = (number for number, line in enumerate(lines) if line[-2:] == ["gemini", "decided"])
    said = [line[0] for line in lines[start:]]
    assert [name for name in ("stage", "weights", "placement", "chunks", "on", "budget") if name not in said] == []
    assert "model.plan.explain()" in text.getvalue() and "The minimum of model data" not in text.getvalue()
    assert len(lines) - start <= 18
    assert "The minimum of model data" in model.plan.explain()
