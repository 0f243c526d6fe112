"""The recorded results, and how new ones differ from them.

[Note: Bits of torch] What torch computes depends on its version and on the machine: another vector width sums in
another order. So the versions of both stand in the recording, and beside each result what torch alone made of the same
model and dtype (`torch_bits`), as machines with the same width may still compute otherwise. Two steps that agree prove
little: with AVX2 they had the bits of AVX512 where other batches, of other lengths, did not. Where versions are the
same and torch alone makes the same here, our bits must be the recorded ones. Elsewhere they must be those of the case's
sibling, which is run beside it: the same training with nothing sharded and nothing moved. Counts must be the recorded
ones on every machine.
"""

import json
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.golden.cases import Case, sort_key
from tests.golden.training import Result, hash_of
from tests.zoo.models import MODELS

PATH = Path(__file__).with_name("golden.json")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DECIDE_BITS = ("torch", "machine", "torch_kernels")
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Recording:
    """What `golden.json` holds."""

    commit: str  # of the code that was recorded
    recorded_with: dict[str, str]
    torch_bits: dict[str, str] = field(default_factory=dict)  # "model dtype" -> hash
    results: dict[Case, Result] = field(default_factory=dict)

    @staticmethod
    def read(path: Path = PATH) -> "Recording":
        found = json.loads(path.read_text())
        results = {Case.named(name): result for name, result in found["results"].items()}
        return Recording(found["commit"], found["recorded_with"], found["torch_bits"], results)

    def write(self, path: Path = PATH) -> None:
        """One line a case, so that a difference between two recordings is a line in git."""
        head = {"commit": self.commit, "recorded_with": self.recorded_with}
        head["torch_bits"] = dict(sorted(self.torch_bits.items()))
        lines = [f"{_dump(str(case))}:{_dump(self.results[case])}" for case in sorted(self.results, key=sort_key)]
        text = "".join(f"{_dump(name)}:{_dump(value)},\n" for name, value in head.items())
        path.write_text("{\n" + text + '"results":{\n' + ",\n".join(lines) + "\n}}\n")

    def is_of_such_a_machine(self) -> bool:
        """The versions that bits depend on are those of here."""
        here = what_computes()
        return all(self.recorded_with[name] == here[name] for name in _DECIDE_BITS)

    def has_bits_of_here(self, case: Case) -> bool:
        """torch computes the same here as where this was recorded; see [Note: Bits of torch]."""
        return self.is_of_such_a_machine() and self.torch_bits.get(_torch_key(case)) == torch_bits_here(case)

    def note_torch_bits(self, case: Case) -> None:
        self.torch_bits[_torch_key(case)] = torch_bits_here(case)


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _torch_key(case: Case) -> str:
    return f"{case.model} {case.dtype}"


def torch_bits_here(case: Case) -> str:
    """Hash of what torch alone makes of the case's model in its dtype: two steps of its own Adam, on fp32 masters."""
    return _torch_bits_here(case.model, case.dtype)


@cache
def _torch_bits_here(name: str, dtype: str) -> str:
    case = MODELS[name]
    model = case.build(DTYPES[dtype])
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [parameter.detach().float().requires_grad_() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, foreach=False)
    losses = []
    for step in range(2):
        loss = case.loss(model, case.batch(step))
        loss.backward()
        losses.append((f"loss {step}", loss))
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
    return hash_of([*losses, *((str(number), master) for number, master in enumerate(masters))])


def what_computes() -> dict[str, str]:
    """What bits may depend on, for people who wonder why they differ."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "torch_kernels": torch.backends.cpu.get_cpu_capability(),
    }


def commit_here() -> tuple[str, bool]:
    """(commit, whether nothing but the recording differs from it)."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", ".", f":!{PATH.relative_to(ROOT)}")
    return git("rev-parse", "HEAD"), not changed


def differences(was: Any, now: Any, name: str = "") -> Iterator[str]:
    """One line for each quantity that differs: its name, what it was, what it is."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in [*was, *(key for key in now if key not in was)]:
            yield from differences(was.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif was != now:
        yield f"{name}: was {_dump(was)}, is {_dump(now)}"
