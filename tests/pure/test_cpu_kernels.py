"""The CPU extension: every level, thread count and cut gives the reference's bits, for any input."""

import functools
import multiprocessing
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim import AdamPiece, HybridAdam, adam_scalars, cpu_adam, cpu_extension, reference
from tests.harness.adam import adam_update_
from tests.pure.kernels import (
    GRADS,
    HALVES,
    LAYOUTS,
    LEVELS,
    ORDINARY,
    copy_of,
    differing,
    make_piece,
    updated,
    values,
)

LENGTHS = [*range(1, 258), *(2**k + d for k in range(9, 14) for d in (-1, 0, 1)), 2**15 + 1, 2**16 - 1]

pytestmark = pytest.mark.skipif(not LEVELS, reason="gemini was installed without its CPU kernels")


def check(level: str, piece: AdamPiece, offset: int = 0, num_threads: int = 2, **arguments: Any) -> None:
    def kernel(pieces: list[AdamPiece], scalars: Any) -> None:
        cpu_adam.update(pieces, scalars, level=level, num_threads=num_threads)

    expected = updated(reference.update, piece, **arguments)
    assert differing(updated(kernel, piece, offset, **arguments), expected) == []
    assert differing(expected, piece), "nothing was updated"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("grad", GRADS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_length_and_start(layout: str, grad: torch.dtype, level: str) -> None:
    for length in LENGTHS:
        check(level, make_piece(length, layout, grad, seed=length), offset=length % 4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["special", "bits"])
@pytest.mark.parametrize("grad", GRADS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_denormal_huge_infinite_and_nan_values(layout: str, grad: torch.dtype, kind: str, level: str) -> None:
    for options in ({}, {"clip": 0.3, "inv_scale": 2.0**-16}, {"adamw_mode": False}, {"weight_decay": 0.0}):
        check(level, make_piece(20_000, layout, grad, kind), **options)


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    grad=st.sampled_from(GRADS),
    kind=st.sampled_from(["random", "special", "bits"]),
    numel=st.integers(1, 3000),
    offset=st.integers(0, 17),
    num_threads=st.integers(1, 4),
    seed=st.integers(0, 2**31),
    step=st.integers(1, 200_000),
    lr=st.floats(0, 10, width=32),
    betas=st.tuples(st.floats(0, 0.9999), st.floats(0, 0.99999)),
    eps=st.sampled_from([0.0, 1e-15, 1e-8, 1e-3]),
    weight_decay=st.sampled_from([0.0, 1e-4, 0.1]),
    adamw_mode=st.booleans(),
    bias_correction=st.booleans(),
    maximize=st.booleans(),
    inv_scale=st.sampled_from([1.0, 1 / 3, 2.0**-24]),
    clip=st.sampled_from([1.0, 0.123]),
)
def test_all_arguments(
    layout: str, grad: torch.dtype, kind: str, numel: int, offset: int, num_threads: int, seed: int, **arguments: Any
) -> None:
    piece = make_piece(numel, layout, grad, kind, seed=seed)
    expected = updated(reference.update, piece, **arguments)
    for name in LEVELS:

        def kernel(pieces: list[AdamPiece], scalars: Any, name: str = name) -> None:
            cpu_adam.update(pieces, scalars, level=name, num_threads=num_threads)

        assert differing(updated(kernel, piece, offset, **arguments), expected) == [], name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_number_of_threads(layout: str, num_threads: int) -> None:
    check(LEVELS[0], make_piece(500_001, layout, torch.bfloat16), num_threads=num_threads)


def test_several_pieces_in_one_call(level: str) -> None:
    lengths = [5, 0, 40_000, 1, 0, 32_768, 70_001, 3]
    pieces = [make_piece(n, LAYOUTS[i % 4], GRADS[i % 3], seed=i) for i, n in enumerate(lengths)]
    ours, theirs = [copy_of(piece) for piece in pieces], [copy_of(piece) for piece in pieces]
    cpu_adam.update(ours, adam_scalars(**ORDINARY), level=level, num_threads=3)
    reference.update(theirs, adam_scalars(**ORDINARY))
    for a, b in zip(ours, theirs):
        assert differing(a, b) == []
    cpu_adam.update([], adam_scalars(**ORDINARY))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_half_precision_copy_may_replace_the_gradient(dtype: torch.dtype, level: str) -> None:
    piece = make_piece(70_003, "whole and bf16" if dtype is torch.bfloat16 else "whole and fp16", dtype)
    expected = updated(reference.update, piece)
    for kernel in (reference.update, functools.partial(cpu_adam.update, level=level, num_threads=2)):
        own = copy_of(piece)
        own = own._replace(half=own.grad)
        own.check()
        kernel([own], adam_scalars(**ORDINARY))
        assert differing(own._replace(grad=expected.grad), expected) == []


def test_every_fp16_gradient(level: str) -> None:
    grad = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    check(level, make_piece(2**16)._replace(grad=grad))


@pytest.mark.parametrize("layout", ["whole and bf16", "whole and fp16", "split"])
def test_halves_of_any_master(layout: str, level: str) -> None:
    piece = make_piece(2**20, layout, kind="bits", seed=9)
    unmoved = {"lr": 0.0, "weight_decay": 0.0}
    expected = updated(reference.update, piece._replace(grad=torch.zeros(2**20)), **unmoved)
    found = updated(lambda p, s: cpu_adam.update(p, s, level=level), piece._replace(grad=torch.zeros(2**20)), **unmoved)
    assert differing(found, expected) == []
    if layout in HALVES and level == LEVELS[0]:
        assert expected.half is not None
        assert torch.equal(expected.half.isnan(), expected.weight.isnan())


def test_a_thread_that_flushes_denormals_gets_the_same_bits(level: str) -> None:
    piece = make_piece(40_000, "split", torch.float16, "special")
    expected = updated(reference.update, piece)
    assert torch.set_flush_denormal(True)
    try:
        found = updated(lambda p, s: cpu_adam.update(p, s, level=level, num_threads=1), piece)
        tiny = torch.tensor(1e-38) * torch.tensor(0.1)
        assert float(tiny) == 0.0, "the thread is as it was"
    finally:
        torch.set_flush_denormal(False)
    assert differing(found, expected) == []


def test_threads_may_update_at_once_while_the_main_thread_works() -> None:
    pieces = [make_piece(300_000, "split", torch.bfloat16, seed=i) for i in range(4)]
    expected = [updated(reference.update, piece) for piece in pieces]
    found: list[AdamPiece | None] = [None] * 4

    def work(i: int) -> None:
        for _ in range(20):
            found[i] = updated(lambda p, s: cpu_adam.update(p, s, num_threads=2), pieces[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    turns = 0
    while any(thread.is_alive() for thread in threads):
        turns += 1
        torch.ones(10).sum()
    assert turns > 20, "the kernels hold the GIL"
    for a, b in zip(found, expected):
        assert a is not None
        assert differing(a, b) == []


def _update_in_child() -> None:
    check(LEVELS[0], make_piece(300_000, "split"), num_threads=2)


def test_a_forked_child_has_threads_of_its_own() -> None:
    check(LEVELS[0], make_piece(300_000, "split"), num_threads=2)
    child = multiprocessing.get_context("fork").Process(target=_update_in_child)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_the_share_of_threads() -> None:
    cpu_extension.set_num_threads(3)
    try:
        assert cpu_extension.num_threads() == 3
    finally:
        cpu_extension.set_num_threads(None)
    code = """
import os
from optim import num_threads
for variables in ({"LOCAL_WORLD_SIZE": "1000"}, {"GEMINI_NUM_THREADS": "5", "LOCAL_WORLD_SIZE": "2"}):
    child = os.fork()  # the number is settled at the first use in a process
    if not child:
        os.environ.update(variables)
        print(num_threads(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    assert _python(code).stdout.split() == ["1", "5"]
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="whole number >= 1"):
            cpu_extension.set_num_threads(wrong)  # type: ignore[arg-type]


def _python(code: str, variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    import os

    environment = {**os.environ, **(variables or {})}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )


def test_without_the_extension_steps_are_the_same_and_it_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    code = """
import torch
from optim import HybridAdam, clip_grad_norm_
torch.manual_seed(0)
weights = [torch.nn.Parameter(torch.randn(1000).bfloat16()), torch.nn.Parameter(torch.randn(77))]
optimizer = HybridAdam(weights, lr=1e-2)
for _ in range(3):
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    norm = clip_grad_norm_(weights, 1.0)
    optimizer.step()
print(float(norm), *(weight.detach().double().sum().item() for weight in weights))
"""
    without = _python("import sys; sys.modules['optim._cpu'] = None" + code)
    exec(code, {})  # here, where the extension is: another interpreter takes seconds to import torch
    with_it = capfd.readouterr()
    assert without.stdout == with_it.out
    assert without.stderr.count("without its CPU kernels") == 1
    assert "CPU kernels" not in with_it.err


def test_autograd_is_told_what_was_written() -> None:
    piece = make_piece(10, "split")
    before = [t._version for t in piece if t is not None]
    adam_update_(*piece[:4], remainder=piece.remainder, **ORDINARY)
    written = [t._version > old for t, old in zip((t for t in piece if t is not None), before)]
    assert written == [True, False, True, True, True]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight": torch.zeros(4, dtype=torch.float16)}, "weight must be one of"),
        ({"half": torch.zeros(4)}, "half must be one of"),
        ({"half": torch.zeros(5, dtype=torch.bfloat16)}, "half must match weight .4 elements"),
        ({"remainder": torch.zeros(4, dtype=torch.int16)}, "weight must be one of .torch.bfloat16"),
        ({"grad": torch.zeros(4, device="meta")}, "grad must match weight .4 elements on cpu.* on meta"),
        ({"exp_avg": torch.zeros(8)[::2]}, "exp_avg must be 1-D and contiguous"),
        ({"exp_avg_sq": torch.zeros(2, 2)}, "exp_avg_sq must be 1-D and contiguous"),
    ],
)
def test_tensors_that_do_not_fit_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_piece(4)._replace(**changes).check()


def test_tensors_that_overlap_are_named() -> None:
    memory = torch.zeros(100)
    piece = AdamPiece(memory[:10], memory[10:20], memory[19:29], memory[40:50])
    with pytest.raises(ValueError, match="grad and exp_avg share memory"):
        piece.check()
    with pytest.raises(ValueError, match="share memory"):
        make_piece(4)._replace(grad=memory[:4], exp_avg=memory[:4]).check()
    AdamPiece(memory[:10], memory[10:20], memory[20:30], memory[40:50]).check()
    both = make_piece(4, "whole and bf16")._replace(remainder=torch.zeros(4, dtype=torch.int16))
    with pytest.raises(ValueError, match="exclude each other"):
        both.check()


def test_a_level_that_the_machine_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one that this machine has \(.*portable\), found \"sse9\""):
        cpu_adam.update([make_piece(4)], adam_scalars(**ORDINARY), level="sse9")


def test_plain_training_in_bf16_uses_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(reference, "update", lambda pieces, scalars: calls.extend(pieces))
    weight = torch.nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    weight.grad = torch.ones(300, dtype=torch.bfloat16)
    HybridAdam([weight], lr=0.5).step()
    assert not calls
    assert bool((weight < 0.6).all())


# ---- the long ones


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_thousand_steps(layout: str) -> None:
    start = make_piece(5_003, layout, torch.bfloat16)
    pieces = {name: copy_of(start) for name in ("reference", *LEVELS)}
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 1001):
        grad = values(5_003, "random", generator).bfloat16()
        scalars = adam_scalars(**{**ORDINARY, "step": step, "clip": 0.9})
        for name, piece in pieces.items():
            piece.grad.copy_(grad)
            if name == "reference":
                reference.update([piece], scalars)
            else:
                cpu_adam.update([piece], scalars, level=name, num_threads=1 + step % 3)
    for name in LEVELS:
        assert differing(pieces[name], pieces["reference"]) == [], name
