"""The Triton kernels compiled for a GPU that need not be there: what the PTX must and must not hold.

`python -m tests.triton_ptx` compiles every layout and gradient dtype; it needs Triton's interpreter to be off.
"""

import re
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from optim import triton_adam, triton_norm
from optim.piece import AdamScalars
from tests.triton_cases import LAYOUTS

FORBIDDEN = re.compile(r"\b(?:fma|mad\.\w+\.f|div\.full|div\.approx|sqrt\.approx|rsqrt|rcp|\w[\w.]*\.ftz)\b[\w.]*")
"""Contractions, inexact roots and divisions, denormals flushed to zero."""
UNROUNDED = re.compile(r"\b(?:add|sub|mul)\.f(?:32|64)\b")
"""ptxas may contract these; `add.rn.f32` it may not."""


def ptx(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, options: dict[str, Any]) -> str:
    """Pointers are taken to be aligned to 16 bytes, as a launch finds them to be."""
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name, kind in types.items() if kind[0] == "*"},
    )
    text = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    assert isinstance(text, str)
    return text


def check(name: str, text: str, *wanted: str) -> None:
    wrong = sorted(set(FORBIDDEN.findall(text) + UNROUNDED.findall(text)))
    missing = [instruction for instruction in wanted if instruction not in text]
    assert not wrong, f"{name}: {wrong}"
    assert not missing, f"{name} has no {missing}"
    print(f"as written: {name}")


def check_adam(
    layout: str, grad_dtype: Any, aligned: bool, capability: int, moments: Any = tl.float32, is_drawn: bool = False
) -> None:
    types = {"table": "*i64", "num_pieces": "i32", "maps": "*fp32", **dict.fromkeys(AdamScalars._fields, "fp32")}
    flags = dict.fromkeys(("HAS_SCALE", "HAS_CLIP", "HAS_L2", "HAS_ROOT_BIAS", "HAS_DECAY", "ABSORBS"), True)
    constants = {"GRAD_DTYPE": grad_dtype, "MOMENT_DTYPE": moments, "LAYOUT": layout, "ALIGNED": aligned}
    constants["IS_DRAWN"] = is_drawn
    constants["BLOCK"] = triton_adam.BLOCK_NUMEL
    text = ptx(triton_adam.adam_kernel, types, {**constants, **flags}, capability, triton_adam.OPTIONS)
    # Four elements of a thread are 16 bytes only in fp32.
    wide = ("ld.global.v4.b32", "st.global.v4.b32") if aligned and moments is tl.float32 else ()
    exact = ("sqrt.rn.f32", "div.rn.f32", "mul.rn.f32", "add.rn.f32", "sub.rn.f32")
    check(f"Adam, sm_{capability}, {layout}, {grad_dtype}, {moments}, {aligned=}", text, *wide, *exact)
    # The largest element of a block is found together.
    assert moments is tl.uint8 or "bar.sync" not in text, "threads exchange elements"


def check_norm(dtype: str, numel_type: str, capability: int) -> None:
    types = {"flat": f"*{dtype}", "numel": numel_type, "sums": "*fp64", "first": "*i64"}
    constants = {"IS_HALF": dtype != "fp32", "TILES": triton_norm.BLOCK_TILES}
    text = ptx(triton_norm.tile_sums_kernel, types, constants, capability, triton_norm.OPTIONS)
    lanes = () if dtype == "fp32" else ("mul.rn.f32", "add.rn.f32")
    check(f"norm, sm_{capability}, {dtype}, {numel_type}", text, "mul.rn.f64", "add.rn.f64", *lanes)


def check_limbs(capability: int) -> None:
    types = {"sums": "*fp64", "num_tiles": "i32", "limbs": "*i64"}
    constants = {"BLOCK": triton_norm.BLOCK_SUMS}
    text = ptx(triton_norm.limbs_kernel, types, constants, capability, triton_norm.OPTIONS)
    floats = re.findall(r"\b(?:add|mul)[\w.]*\.f(?:32|64)", text)
    assert not floats, f"limbs are integers: {floats}"
    check(f"limbs, sm_{capability}", text)


def main() -> None:
    for layout, grad_dtype in zip(LAYOUTS, (tl.float32, tl.int16, tl.float16, tl.int16)):
        check_adam(layout, grad_dtype, aligned=True, capability=90)
    check_adam("split", tl.int16, aligned=False, capability=90)
    for moments in (tl.int16, tl.uint8):
        for layout in ("split", "whole"):
            check_adam(layout, tl.int16, aligned=True, capability=90, moments=moments)
    check_adam("split", tl.int16, aligned=True, capability=90, moments=tl.int16, is_drawn=True)
    for dtype, numel_type in (("fp32", "i32"), ("i16", "i32"), ("fp16", "i32"), ("fp32", "i64")):
        check_norm(dtype, numel_type, capability=90)
    check_limbs(capability=90)
    check_adam("split", tl.int16, aligned=True, capability=80)
    check_norm("i16", "i32", capability=80)
    check_limbs(capability=80)


if __name__ == "__main__":
    sys.exit(main())
