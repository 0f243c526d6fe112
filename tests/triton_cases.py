"""What the Triton kernels must do, bit for bit that of the written order, as cases for any device they run on.

`TRITON_INTERPRET=1 python -m tests.triton_cases` runs all of them on the CPU in Triton's interpreter, and with a
number behind it one in so many.
"""

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optim import AdamPiece, absorb_edits_, adam_scalars, norm, reference, round_master_, triton_adam, triton_norm
from optim.master import join_master_, split_master_
from optim.piece import BLOCK, GRAD_DTYPES, Draws, Spans

Case = Callable[[torch.device], None]

LAYOUTS = ("whole", "whole, bf16", "whole, fp16", "split")
NUMELS = (1, 0, 1025, 257, triton_adam.BLOCK_NUMEL)  # of the pieces of one list
ALIGNED, UNALIGNED = (0,) * 5, (1, 3, 1, 2, 5)  # where a piece's tensors begin, in elements
PAD = 16  # elements before and behind each tensor, which no kernel may touch

ADAM: dict[str, Any] = {"step": 3, "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": ADAM,
    "adamw, scaled and clipped": {**ADAM, "inv_scale": 1 / 3, "clip": 0.7},
    "L2, clipped": {**ADAM, "adamw_mode": False, "clip": 0.3},
    "L2, scaled, maximize": {**ADAM, "adamw_mode": False, "maximize": True, "inv_scale": 2.0**-16},
    "bare": {**ADAM, "bias_correction": False, "weight_decay": 0.0},
    "late, maximize": {**ADAM, "step": 200_000, "maximize": True},  # the second moment's correction is 1
    "tiny scalars": {**ADAM, "lr": 1e-39, "eps": 1e-42, "betas": (0.0, 1 - 1e-7)},
    "no eps": {**ADAM, "eps": 0.0, "step": 1, "adamw_mode": False},
}
SPECIAL_BITS = (
    *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x0000FFFF),
    *(0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7F800001),
    *(0x3F800000, 0x3F808000, 0x3F807FFF, 0xBF808000, 0x3F818000, 0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001),
)


def values(numel: int, seed: int) -> Tensor:
    """fp32: one third of ordinary size, one third of every exponent, one third special."""
    generator = torch.Generator().manual_seed(seed)
    ordinary = torch.randn(numel, generator=generator)
    exponents = torch.randint(-140, 128, (numel,), generator=generator)
    wide = torch.ldexp(torch.rand(numel, generator=generator) - 0.5, exponents)
    special = torch.from_numpy(np.array(SPECIAL_BITS, dtype=np.uint32).view(np.float32))
    special = special[torch.randint(len(special), (numel,), generator=generator)]
    kind = torch.arange(numel) * 3 // max(numel, 1)
    return torch.where(kind == 0, ordinary, torch.where(kind == 1, wide, special))


def assert_same(found: Tensor, expected: Tensor, what: str) -> None:
    """Equal bits; NaNs of any bits are equal too, but in bf16, where a rounded NaN is 0x7fc0."""
    found = found.cpu()
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.itemsize]
    same = found.view(bits) == expected.view(bits)
    if found.dtype in (torch.float32, torch.float16):
        same |= found.isnan() & expected.isnan()
    where = same.logical_not().nonzero().flatten()[:5]
    assert not where.numel(), f"{what} at {where.tolist()}: {found[where]} instead of {expected[where]}"


class Trial:
    """A piece in padded memory on a device, and a copy on the CPU that the written order updates."""

    def __init__(
        self,
        layout: str,
        grad_dtype: torch.dtype,
        numel: int,
        offsets: tuple[int, ...],
        seed: int,
        edited: bool = False,
    ) -> None:
        """edited: the 16-bit copy is the rounded master, and some elements of it were written to since."""
        self.layout = layout
        self.numel = numel
        self.edited = edited
        master, grad, exp_avg, exp_avg_sq = (values(numel, 10 * seed + i) for i in range(4))
        fields = {"weight": master, "grad": grad.to(grad_dtype), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq.abs()}
        if layout == "split":
            weight, remainder = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
            split_master_(weight, remainder, master)
            fields |= {"weight": weight, "remainder": remainder}
        elif layout != "whole":
            fields["half"] = torch.zeros(numel, dtype=torch.bfloat16 if layout == "whole, bf16" else torch.float16)
            if edited:
                round_master_(fields["half"], master)
                fields["half"][::3] = values(numel, 10 * seed + 9)[::3].to(fields["half"].dtype)
        self.spans = {name: slice(PAD + o, PAD + o + numel) for name, o in zip(fields, offsets)}
        self.expected = {name: torch.full((numel + 2 * PAD + 8,), 7, dtype=t.dtype) for name, t in fields.items()}
        for name, tensor in fields.items():
            self.expected[name][self.spans[name]] = tensor
        self.found: dict[str, Tensor] = {}

    def piece(self, device: torch.device) -> AdamPiece:
        self.found = {name: buffer.to(device, copy=True) for name, buffer in self.expected.items()}
        return AdamPiece(**{name: buffer[self.spans[name]] for name, buffer in self.found.items()})

    def check(self, options: dict[str, Any]) -> None:
        """After the kernel's update: all memory, padding too, is what the written order makes of it."""
        field = {name: buffer[self.spans[name]] for name, buffer in self.expected.items()}
        master = field["weight"]
        if self.layout == "split":
            master = torch.empty(self.numel)
            join_master_(master, field["weight"], field["remainder"])
        if self.edited and "half" in field:
            absorb_edits_(master, field["half"])
        plain = AdamPiece(master, field["grad"], field["exp_avg"], field["exp_avg_sq"])
        reference.update([plain], adam_scalars(**options))
        if self.layout == "split":
            split_master_(field["weight"], field["remainder"], master)
        elif "half" in field:
            round_master_(field["half"], master)
        for name, expected in self.expected.items():
            assert_same(self.found[name], expected, f"{name} of {self.numel} elements")


@contextmanager
def launches(kernel: Any) -> Iterator[list[None]]:
    """A list that gets one entry a launch."""
    counted: list[None] = []

    def count(*_: Any, **__: Any) -> None:
        counted.append(None)

    kernel.add_pre_run_hook(count)
    try:
        yield counted
    finally:
        kernel.pre_run_hooks.remove(count)


def adam(
    device: torch.device,
    *,
    layout: str,
    grad_dtype: torch.dtype,
    options: dict[str, Any],
    offsets: tuple[int, ...] = ALIGNED,
    numels: tuple[int, ...] = NUMELS,
) -> None:
    """One list of pieces that differ in length alone: one launch."""
    trials = [Trial(layout, grad_dtype, numel, offsets, seed) for seed, numel in enumerate(numels)]
    with launches(triton_adam.adam_kernel) as launched:
        triton_adam.update([trial.piece(device) for trial in trials], adam_scalars(**options))
    assert len(launched) == 1
    for trial in trials:
        trial.check(options)


def edited_weights(device: torch.device, *, layout: str) -> None:
    """Edits of 16-bit weights reach their masters in the same launch."""
    trials = [Trial(layout, torch.float32, numel, UNALIGNED, seed, edited=True) for seed, numel in enumerate(NUMELS)]
    with launches(triton_adam.adam_kernel) as launched:
        triton_adam.update([trial.piece(device) for trial in trials], adam_scalars(**ADAM), absorbs=True)
    assert len(launched) == 1
    for trial in trials:
        trial.check(ADAM)


def small_moments(
    device: torch.device, *, layout: str, dtype: torch.dtype, options: dict[str, Any], is_drawn: bool = False
) -> None:
    """Moments of 8 or 16 bits, whole pieces and spans of one: one launch, the bits of the reference."""
    pieces = []
    for seed, numel in enumerate((1, 0, 1025, 257, 5 * triton_adam.BLOCK_NUMEL)):
        weight, grad, exp_avg, exp_avg_sq = (values(numel, 10 * seed + i) for i in range(4))
        # Ordinary values first: a block with a special one is NaN as a whole.
        grad = torch.where(grad.abs() < 1e4, grad, 1.0) if seed != 3 else grad
        half = remainder = None
        if layout == "split":
            master, weight = weight, torch.empty(numel, dtype=torch.bfloat16)
            remainder = torch.empty(numel, dtype=torch.int16)
            split_master_(weight, remainder, master)
        elif layout != "whole":
            half = torch.zeros(numel, dtype=torch.bfloat16 if layout == "whole, bf16" else torch.float16)
        moments, scales = [], []
        for its, is_signed in ((exp_avg * 0.1, True), (exp_avg_sq.abs(), False)):
            its = torch.where(its.abs() < 1e4, its, 0.25)
            its[5::331] = torch.inf  # which 8 bits store as zero
            moments.append(its.to(dtype) if dtype is torch.bfloat16 else torch.empty(numel, dtype=torch.uint8))
            scales.append(None if dtype is torch.bfloat16 else torch.empty(-(-numel // BLOCK)))
            if scales[-1] is not None:
                reference.quantize_(moments[-1], scales[-1], its, is_signed)
        spans = Spans([(256, 300), (1024, 1), (1536, 2000)]) if seed == 4 else None
        draws = Draws(reference.key_of_draws(3, seed), 2**32 - 300) if is_drawn else None
        pieces.append(AdamPiece(weight, grad, *moments, half, remainder, spans, *scales, draws))

    def copied(piece: AdamPiece, to: torch.device) -> AdamPiece:
        return AdamPiece(*(each.to(to, copy=True) if isinstance(each, Tensor) else each for each in piece))

    found, expected = ([copied(piece, to) for piece in pieces] for to in (device, torch.device("cpu")))
    for piece in found:
        piece.check()
    with launches(triton_adam.adam_kernel) as launched:
        triton_adam.update(found, adam_scalars(**options))
    assert len(launched) == 1
    reference.update(expected, adam_scalars(**options))
    for one, other in zip(found, expected, strict=True):
        for name, its, theirs in zip(AdamPiece._fields, one, other, strict=True):
            if isinstance(its, Tensor) and its.dtype is torch.uint8:
                assert torch.equal(its.cpu(), theirs), f"{name} of {its.numel()} elements"
            elif isinstance(its, Tensor):
                assert_same(its, theirs, f"{name} of {its.numel()} elements")


def mixed_list(device: torch.device) -> None:
    """Pieces of every kind in one list, twice: one launch a kind."""
    kinds = list(product(LAYOUTS, GRAD_DTYPES)) * 2
    trials = [Trial(layout, dtype, 30 + seed, UNALIGNED, seed) for seed, (layout, dtype) in enumerate(kinds)]
    with launches(triton_adam.adam_kernel) as launched:
        triton_adam.update([trial.piece(device) for trial in trials], adam_scalars(**ADAM))
    assert len(launched) == len(kinds) // 2
    for trial in trials:
        trial.check(ADAM)


def nothing_to_do(device: torch.device) -> None:
    with launches(triton_adam.adam_kernel) as launched:
        triton_adam.update([], adam_scalars(**ADAM))
        triton_adam.update([Trial("split", torch.float32, 0, ALIGNED, 0).piece(device)], adam_scalars(**ADAM))
    assert not launched


def several_devices(device: torch.device) -> None:
    """A piece elsewhere at the end of the list: ValueError, and the one before it is as it was."""
    trial = Trial("whole", torch.float32, 40, ALIGNED, 1)
    elsewhere = Trial("whole", torch.float32, 40, ALIGNED, 2).piece(torch.device("meta"))
    try:
        triton_adam.update([trial.piece(device), elsewhere], adam_scalars(**ADAM))
    except ValueError:
        for name, expected in trial.expected.items():
            assert_same(trial.found[name], expected, name)
    else:
        raise AssertionError("accepted")


FILLS: dict[str, Callable[[int], Tensor]] = {
    "ordinary": lambda numel: _normal(numel),
    "every exponent": lambda numel: torch.ldexp(_normal(numel), torch.arange(numel) * 37 % 250 - 140),
    "an exponent a tile": lambda numel: torch.ldexp(_normal(numel), torch.arange(numel) // norm.TILE * 67 % 260 - 140),
    "about 2**-80": lambda numel: _normal(numel) * 2.0**-44,
    "small": lambda numel: _normal(numel) * 1e-7,
    "denormal": lambda numel: torch.full((numel,), 2.0**-133) * (torch.arange(numel) % 5),
    "zeros": torch.zeros,
    "special": lambda numel: values(numel, numel),
}
NORM_NUMELS = (0, 1, 255, 256, 257, 4097)
"""Every other one begins at an odd address."""


def _normal(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


def norm_of(device: torch.device, *, dtype: torch.dtype, fill: str, numels: tuple[int, ...] = NORM_NUMELS) -> None:
    """Limbs that hold something already get what the reference adds; the index is the reference's."""
    expected = torch.arange(norm.NUM_LIMBS)
    limbs = expected.to(device, copy=True)
    for start, numel in enumerate(numels):
        flat = FILLS[fill](numel + start % 2).to(dtype)
        index = triton_norm.accumulate_sum_of_squares_(limbs, flat.to(device)[start % 2 :])
        expected_index = norm.accumulate_sum_of_squares_(expected, flat[start % 2 :])
        assert index.item() == expected_index.item(), f"index of {numel} elements"
        assert_same(limbs, expected, f"limbs of {numel} elements")


def norm_of_bad_elements(device: torch.device, *, dtype: torch.dtype) -> None:
    """Infinities and NaNs alone and together, in one tile and in several programs' tiles."""
    for bad in ({5000: torch.inf}, {3: -torch.inf, 5: torch.nan}, {9999: torch.nan, 8192: torch.inf, 4100: torch.inf}):
        flat = FILLS["ordinary"](10_000).to(dtype)
        for i, value in bad.items():
            flat[i] = value
        expected = norm.zero_norm_limbs()
        limbs = norm.zero_norm_limbs(device)
        index = triton_norm.accumulate_sum_of_squares_(limbs, flat.to(device))
        assert index.item() == norm.accumulate_sum_of_squares_(expected, flat).item() == min(bad)
        assert_same(limbs, expected, f"limbs with {bad}")


def norm_in_few_programs(device: torch.device) -> None:
    """A program of the second kernel that has several blocks of sums to add."""
    most = triton_norm.MAX_LIMB_PROGRAMS
    triton_norm.MAX_LIMB_PROGRAMS = 2
    try:
        numel = 5 * triton_norm.BLOCK_SUMS * norm.TILE + 300
        norm_of(device, dtype=torch.bfloat16, fill="an exponent a tile", numels=(numel,))
    finally:
        triton_norm.MAX_LIMB_PROGRAMS = most


def _all_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {
        "mixed list": mixed_list,
        "nothing to do": nothing_to_do,
        "several devices": several_devices,
    }
    for layout in LAYOUTS:
        cases[f"{layout}, edited"] = partial(edited_weights, layout=layout)
    for layout, dtype, (name, options) in product(LAYOUTS, GRAD_DTYPES, OPTIONS.items()):
        cases[f"{layout}, {dtype}, {name}"] = partial(adam, layout=layout, grad_dtype=dtype, options=options)
    for layout, dtype, name in product(LAYOUTS, (torch.uint8, torch.bfloat16), ("adamw, scaled and clipped", "bare")):
        small = partial(small_moments, layout=layout, dtype=dtype, options=OPTIONS[name])
        cases[f"{layout}, moments of {dtype}, {name}"] = small
    for layout in LAYOUTS:
        drawn = partial(small_moments, layout=layout, dtype=torch.bfloat16, options=OPTIONS["bare"], is_drawn=True)
        cases[f"{layout}, moments that are rounded stochastically"] = drawn
    for layout, dtype in product(LAYOUTS, GRAD_DTYPES):
        unaligned = partial(adam, layout=layout, grad_dtype=dtype, options=ADAM, offsets=UNALIGNED)
        cases[f"{layout}, {dtype}, unaligned"] = unaligned
    for dtype, fill in product(GRAD_DTYPES, FILLS):
        cases[f"norm, {dtype}, {fill}"] = partial(norm_of, dtype=dtype, fill=fill)
    for dtype in GRAD_DTYPES:
        cases[f"norm, {dtype}, bad elements"] = partial(norm_of_bad_elements, dtype=dtype)
    return {**cases, "norm, few programs": norm_in_few_programs}


CASES = _all_cases()


def main(every: int) -> int:
    """Number of cases that failed, of one in `every`; each with its traceback."""
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    failed, chosen = 0, dict(islice(CASES.items(), 0, None, every))
    for name, case in chosen.items():
        start = time.perf_counter()
        try:
            case(torch.device("cpu"))
        except Exception:
            failed += 1
            print(f"FAILED {name}\n{traceback.format_exc()}")
        print(f"{time.perf_counter() - start:6.2f} s  {name}")
    print(f"{failed} of {len(chosen)} cases failed")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1), 1))
