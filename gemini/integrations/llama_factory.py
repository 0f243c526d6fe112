"""LLaMA-Factory's training, sharded under a budget: its YAML file, with one key more.

    torchrun --nproc-per-node 2 -m gemini.integrations.llama_factory train.yaml

The key `gemini` has a config of ours or of DeepSpeed's, or the path of one; `deepspeed` and `fsdp` are left out.
LLaMA-Factory has no plugins: while it runs, its stages find the sharded form of their Trainers under the same names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from gemini.engine.initialize import Source
from gemini.errors import ConfigError, UnsupportedError
from gemini.integrations.transformers import sharded_class

_TRAINERS = {
    "pt": "CustomTrainer",
    "sft": "CustomSeq2SeqTrainer",
    "rm": "PairwiseTrainer",
    "dpo": "CustomDPOTrainer",
    "kto": "CustomKTOTrainer",
}


@contextmanager
def sharded_stage(stage: str, config: Source = None) -> Iterator[type]:
    """Inside, this stage of LLaMA-Factory's trains sharded. Yields the class of its Trainer. Local.

    config: None: that of `gemini.launch_from_torch(config=...)`, else all defaults. Raises UnsupportedError for a stage
    that trains more than one model.

    Example:
        >>> with sharded_stage("sft", {"device_memory": "20GiB"}):
        ...     llamafactory.train.tuner.run_exp(arguments)
    """
    if stage not in _TRAINERS:
        raise UnsupportedError(f"stage: {stage} has no sharded Trainer here: there are {', '.join(_TRAINERS)}")
    workflow = importlib.import_module(f"llamafactory.train.{stage}.workflow")
    ours = sharded_class(getattr(workflow, _TRAINERS[stage]), config)
    with ExitStack() as names:
        names.enter_context(patch.object(workflow, _TRAINERS[stage], ours))
        yield ours


def main(argv: Sequence[str] | None = None) -> Any:
    """Train as the file says. Collective: every rank runs it. Raises ConfigError without a file."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if len(arguments) != 1 or not Path(arguments[0]).is_file():
        raise ConfigError(
            f"give one file of LLaMA-Factory's, such as train.yaml; found {' '.join(arguments) or 'none'}"
        )
    given: dict[str, Any] = yaml.safe_load(Path(arguments[0]).read_text())  # JSON is YAML, too
    config = given.pop("gemini", None)
    with sharded_stage(given.get("stage", "sft"), config):
        return importlib.import_module("llamafactory.train.tuner").run_exp(given)


if __name__ == "__main__":
    main()
