"""Every Adam kernel that this machine has, behind one call, and the inputs that they are compared on."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from optim import AdamPiece, adam_scalars, cpu_adam, cpu_extension, reference
from optim.piece import BLOCK

ALL_LEVELS = ("avx512", "avx2", "portable")
LEVELS = cpu_extension.levels()
Update = Callable[..., None]
KERNELS: dict[str, Update] = {
    "reference": reference.update,
    **{level: functools.partial(cpu_adam.update, level=level) for level in LEVELS},
}
ORDINARY: dict[str, Any] = {"step": 3, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
GRADS = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = ("whole", "whole and bf16", "whole and fp16", "split")
HALVES = {"whole and bf16": torch.bfloat16, "whole and fp16": torch.float16}
SPECIAL = [
    *(0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0),
    *(1e-45, -1e-45, 1e-38, -2e-39, 1.2e-38, 6e-8, 6.1e-5, -1e-20),
    *(3.4e38, -3.4e38, 3.39e38, 65504.0, 65520.0, -65519.9, 1e19, 2e19),
]


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int16)


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal bits; one NaN is as good as another, but for the one that a bf16 weight has."""
    if found.dtype is torch.uint8:
        return torch.equal(found, expected)
    if found.dtype is torch.int16 or found.dtype is torch.bfloat16:
        return torch.equal(bits_of(found), bits_of(expected))
    nan = expected.isnan()
    return torch.equal(found.isnan(), nan) and torch.equal(bits_of(found)[~nan], bits_of(expected)[~nan])


def values(numel: int, kind: str, generator: torch.Generator) -> Tensor:
    """(numel,) fp32: "random" ones of many sizes, "special" ones, or any "bits" at all."""
    if kind == "bits":
        drawn = torch.randint(-(2**31), 2**31, (numel,), generator=generator)
        return drawn.to(torch.int32).view(torch.float32)
    normal = torch.randn(numel, generator=generator)
    if kind == "special":
        chosen = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (numel,), generator=generator)]
        return torch.where(torch.rand(numel, generator=generator) < 0.8, chosen, normal)
    return normal * torch.exp(torch.randn(numel, generator=generator) * 3)


def make_piece(
    numel: int, layout: str = "whole", grad: torch.dtype = torch.float32, kind: str = "random", seed: int = 0
) -> AdamPiece:
    """Tensors of `numel` elements, drawn by `seed`."""
    generator = torch.Generator().manual_seed(seed)
    p, g, m, v = (values(numel, kind, generator) for _ in range(4))
    if kind == "random":
        m, v = m * 0.1, v.square() * 0.01
    if layout == "split":
        lo = torch.randint(-(2**15), 2**15, (numel,), generator=generator).to(torch.int16)
        weight = p.bfloat16()
        weight[::37] = 0  # with remainders that no zero has
        return AdamPiece(weight, g.to(grad), m, v, remainder=lo)
    half = None if layout == "whole" else torch.zeros(numel, dtype=HALVES[layout])
    return AdamPiece(p, g.to(grad), m, v, half)


def with_moments(piece: AdamPiece, dtype: torch.dtype) -> AdamPiece:
    """The piece with its moments rounded to fp32, bf16 or, as uint8, 8 bits."""
    if dtype is torch.bfloat16:
        return piece._replace(exp_avg=piece.exp_avg.bfloat16(), exp_avg_sq=piece.exp_avg_sq.bfloat16())
    if dtype is torch.uint8:
        first, its = quantized(piece.exp_avg, is_signed=True)
        second, theirs = quantized(piece.exp_avg_sq, is_signed=False)
        return piece._replace(exp_avg=first, exp_avg_sq=second, exp_avg_scale=its, exp_avg_sq_scale=theirs)
    return piece


def quantized(flat: Tensor, is_signed: bool) -> tuple[Tensor, Tensor]:
    """The bytes and scales of a moment."""
    codes = torch.empty(flat.numel(), dtype=torch.uint8)
    scales = torch.empty(-(-flat.numel() // BLOCK))
    reference.quantize_(codes, scales, flat, is_signed)
    return codes, scales


def copy_of(piece: AdamPiece, offset: int = 0) -> AdamPiece:
    """Memory of its own, `offset` elements into their storages."""
    return AdamPiece(
        *(torch.cat([t.new_zeros(offset), t])[offset:] if isinstance(t, Tensor) else t for t in piece)  # type: ignore[arg-type]
    )


def differing(found: AdamPiece, expected: AdamPiece) -> list[str]:
    """Names of the tensors with other bits."""
    pairs = zip(found._fields, found, expected)
    return [name for name, a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor) and not same(a, b)]


def updated(kernel: Update, piece: AdamPiece, offset: int = 0, **arguments: Any) -> AdamPiece:
    """What one update makes of a copy of the piece."""
    own = copy_of(piece, offset)
    own.check()
    kernel([own], adam_scalars(**{**ORDINARY, **arguments}))
    return own
