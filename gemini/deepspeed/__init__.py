"""DeepSpeed's names over gemini, so that a script of its users changes its import only.

    from gemini import deepspeed

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, model_parameters=params, config="ds.json")

Modules lie where DeepSpeed has them. What differs is in docs/coming_from.md; a name that is not here says what to use.
Reading order: `initialize.py`, `engine.py`, `runtime/zero/`, `comm.py`.
"""

import sys

from gemini.deepspeed import accelerator as accelerator
from gemini.deepspeed import comm as comm
from gemini.deepspeed import ops as ops
from gemini.deepspeed import runtime as runtime
from gemini.deepspeed import utils as utils
from gemini.deepspeed.accelerator import get_accelerator
from gemini.deepspeed.comm import init_distributed
from gemini.deepspeed.engine import DeepSpeedEngine, add_config_arguments, initialize
from gemini.deepspeed.runtime import zero as zero
from gemini.deepspeed.utils import log_dist, logger
from gemini.elsewhere import AbsentModules, refusing

sys.meta_path.append(AbsentModules(__name__))

__version__ = "0.19.8"
"""The version of DeepSpeed whose names these are: scripts ask it which of them there are. `gemini` has its own."""

__all__ = [
    "DeepSpeedEngine",
    "accelerator",
    "add_config_arguments",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "ops",
    "runtime",
    "utils",
    "zero",
]

__getattr__ = refusing(__name__)
