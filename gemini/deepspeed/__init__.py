"""DeepSpeed's names over gemini, so that a script of its users changes its import only.

    from gemini import deepspeed

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, model_parameters=params, config="ds.json")

What differs is in docs/coming_from.md. Reading order: `initialize.py`, `engine.py`, `zero.py`, `arguments.py`.
"""

from gemini.deepspeed import ops as ops
from gemini.deepspeed import runtime as runtime
from gemini.deepspeed import utils as utils
from gemini.deepspeed import zero as zero
from gemini.deepspeed.arguments import add_config_arguments, init_distributed
from gemini.deepspeed.engine import DeepSpeedEngine
from gemini.deepspeed.initialize import initialize

__all__ = [
    "DeepSpeedEngine",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "ops",
    "runtime",
    "utils",
    "zero",
]
