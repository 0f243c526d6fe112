"""Which cases the golden set has: every pair of values of any two options occurs in one of them."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from tests.harness.pairwise import sampled_pairs
from tests.zoo.models import MODELS

OPTIONS: dict[str, list[Any]] = {
    "model": list(MODELS),
    "ranks": [1, 2, 3],
    "stage": [3, 2, 1, 0],
    "place": ["tight", "middle", "resident", "host"],
    "dtype": ["fp32", "bf16", "fp16"],
    "reuse": [False, True],
    "strategy": ["chunk", "tensor", "bucket"],
    "chunk": [1.0, 3.0, None],
    "optimizer": ["hybrid_adam", "adamw", "sgd"],
    "micro": ["1", "2", "no_sync"],
    "clip": [None, 0.05],
    "travels": [None, "fp32"],
    "rests": [None, "fp32"],
    "built": [False, True],
    "freezes": [False, True],
    "evaluates": [False, True],
}
"""Values by option. The first one is left out of a case's name."""

CORE = ("ranks", "stage", "place", "dtype")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train one model. What an option means is in `training.py`."""

    model: str
    ranks: int
    stage: int
    place: str  # tight: the least budget and a fiftieth; middle: halfway to resident; host: as tight, all at home there
    dtype: str
    reuse: bool  # reuse_fp16_shard
    strategy: str
    chunk: float | None  # times the model's own chunk size; None: searched
    optimizer: str
    micro: str  # micro-batches a step; no_sync: two, the first of them unsynced
    clip: float | None
    travels: str | None  # reduce_dtype
    rests: str | None  # accumulate_dtype
    built: bool  # inside a ZeroInitContext
    freezes: bool  # half of the parameters, for one step
    evaluates: bool  # between two steps

    @staticmethod
    def of(options: dict[str, Any]) -> "Case":
        return Case(**options)

    @staticmethod
    def named(name: str) -> "Case":
        """The case whose `str` this is."""
        model, *told = name.split()
        said = dict(word.split("=") for word in told)
        options = {
            name: next(value for value in values if str(value) == said.get(name, str(values[0])))
            for name, values in OPTIONS.items()
        }
        return Case.of(options | {"model": model})

    def has(self, words: Sequence[str]) -> bool:
        """Each word is the model's name, or an option=value of this case."""
        return {*words} <= {self.model, *(f"{name}={value}" for name, value in self.options.items())}

    @property
    def options(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """Every option that is not the first of its kind."""
        options = self.options
        told = (name for name in options if name == "ranks" or options[name] != OPTIONS[name][0])
        return " ".join([self.model, *(f"{name}={options[name]}" for name in told if name != "model")])

    @property
    def sibling(self) -> "Case":
        """The same training with nothing sharded and nothing moved: it must have the same bits."""
        stage = self.stage if self.model == IN_PIECES else 0  # how early ranks reduce the first piece
        return replace(self, stage=stage, place="resident", strategy="chunk", reuse=False, built=False)


IN_PIECES = "checkpoint_shared_reentrant"
"""The model whose gradients come several times in a backward."""


def is_allowed(options: dict[str, Any]) -> bool:
    """Not what gemini refuses, or torch cannot do."""
    if options["reuse"] and (options["dtype"] == "fp32" or options["rests"] == "fp32"):
        return False
    tags = MODELS[options["model"]].tags
    if "buffers" in tags and options["dtype"] != "fp32":  # torch has no batch norm in 16 bits on fp32 buffers
        return False
    # their sum depends on the chunk size, and the one that is found on the budget
    if options["model"] == IN_PIECES and options["chunk"] is None:
        return False
    if "own_dtypes" in tags:  # fp64 among them, which HybridAdam refuses
        return options["dtype"] == "fp32" and options["optimizer"] != "hybrid_adam"
    return True


def all_cases() -> list[Case]:
    """Every pair of values, and all of `CORE` with one another; sorted. They depend on `OPTIONS` alone."""
    core = itertools.product(*(OPTIONS[name] for name in CORE))
    seeds = [dict(zip(CORE, values, strict=True)) for values in core]
    cases = {Case.of(options) for options in sampled_pairs(OPTIONS, is_allowed, seeds)}
    return sorted(cases, key=sort_key)


def sort_key(case: Case) -> tuple[str, ...]:
    return tuple(str(value) for value in astuple(case))


def sample_of(cases: list[Case]) -> list[Case]:
    """Few cases in which every value of every option occurs, and every three of ranks, stage and place."""
    left = [(_parts(case), case) for case in sorted(cases, key=lambda case: (case.ranks, sort_key(case)))]
    missing = set().union(*(parts for parts, _ in left))
    chosen: list[Case] = []
    while missing:
        parts, case = max(left, key=lambda each: len(missing & each[0]))  # of equal ones the first, with fewest ranks
        missing -= parts
        chosen.append(case)
    return chosen


def _parts(case: Case) -> set[tuple[Any, ...]]:
    options = case.options
    return {*options.items(), tuple(options[name] for name in CORE[:3])}
