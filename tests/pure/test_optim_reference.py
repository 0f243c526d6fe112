"""The written order of Adam, bit for bit against NumPy, and close to torch's own AdamW."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import optim.master
import optim.reference
from optim import AdamPiece, adam_scalars, reference
from optim.reference import square_root_
from tests.pure.kernels import KERNELS

F32 = np.float32
ORDINARY = {"step": 3, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
SPECIAL = [
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    1e-45,
    -1e-45,
    1e-38,
    -2e-39,
    3.4e38,
    -3.4e38,
    1.0,
    -1e-20,
]


def numpy_adam(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    adamw_mode: bool = True,
    bias_correction: bool = True,
    maximize: bool = False,
    inv_scale: float = 1.0,
    clip: float = 1.0,
) -> list[np.ndarray]:
    """The written order, one rounding an operation: NumPy fp32 arrays and fp32 scalars never contract."""
    p, m, v = (t.numpy().copy() for t in (param, exp_avg, exp_avg_sq))
    g = grad.float().numpy().copy()
    b1, b2 = betas
    bc1 = 1 - b1**step if bias_correction else 1.0
    bc2 = 1 - b2**step if bias_correction else 1.0
    with np.errstate(all="ignore"):
        if maximize:
            g = -g
        g = (g * F32(inv_scale)) * F32(clip)
        if weight_decay and not adamw_mode:
            g = g + F32(weight_decay) * p
        m = F32(b1) * m + F32(1 - b1) * g
        v = F32(b2) * v + (F32(1 - b2) * g) * g
        # NumPy's fp32 sqrt is one of the ways under test, so the root is taken in fp64 here.
        root = np.sqrt(v.astype(np.float64)).astype(F32)
        d = root / F32(math.sqrt(bc2)) + F32(eps)
        if weight_decay and adamw_mode:
            p = p - F32(lr * weight_decay) * p
        p = p - (F32(lr / bc1) * m) / d
    assert p.dtype == m.dtype == v.dtype == F32
    return [p, m, v]


def adam_update_(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, **arguments: object) -> None:
    piece = AdamPiece(param, grad, exp_avg, exp_avg_sq)
    piece.check()
    reference.update([piece], adam_scalars(**arguments))  # type: ignore[arg-type]


def assert_same_bits(found: Tensor, expected: np.ndarray) -> None:
    a, b = found.numpy(), expected
    nan = np.isnan(b)
    np.testing.assert_array_equal(np.isnan(a), nan)
    np.testing.assert_array_equal(a.view(np.int32)[~nan], b.view(np.int32)[~nan])


def check(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, **arguments: object) -> None:
    expected = numpy_adam(param, grad, exp_avg, exp_avg_sq, **arguments)  # type: ignore[arg-type]
    before = grad.clone()
    for kernel in KERNELS.values():
        piece = AdamPiece(param.clone(), grad, exp_avg.clone(), exp_avg_sq.clone())
        kernel([piece], adam_scalars(**arguments))  # type: ignore[arg-type]
        for tensor, values in zip((piece.weight, piece.exp_avg, piece.exp_avg_sq), expected):
            assert_same_bits(tensor, values)
    assert torch.equal(before.view(torch.uint8), grad.view(torch.uint8)), "the gradient is only read"


def random_state(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p, g, m, v = (torch.randn(numel, generator=generator) for _ in range(4))
    return [p, g.to(dtype), m * 0.1, v.square() * 0.01]


@pytest.fixture(params=["numpy root", "fp64 root"])
def every_root(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = 1000 if request.param == "numpy root" else 0
    monkeypatch.setattr(optim.reference, "MAX_NUMPY_THREADS", threads)


@pytest.mark.usefixtures("every_root")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 2, 255, 256, 257, 1023, 1024, 1025, 4095, 4097])
def test_an_update_is_the_written_order_at_every_length(numel: int, dtype: torch.dtype) -> None:
    check(*random_state(numel, dtype=dtype), **ORDINARY)


@pytest.mark.parametrize(
    "changed",
    [
        {"weight_decay": 0.0},
        {"adamw_mode": False},
        {"adamw_mode": False, "weight_decay": 0.0},
        {"bias_correction": False},
        {"maximize": True},
        {"maximize": True, "adamw_mode": False, "inv_scale": 1 / 3},
        {"inv_scale": 1 / 3},
        {"clip": 0.7},
        {"inv_scale": 2.0**-16, "clip": 0.123},
        {"step": 1},
        {"step": 100_000},  # both corrections round to 1
        {"lr": 0.0},
        {"lr": 0.0, "eps": 0.0},
        {"betas": (0.0, 0.0)},
        {"betas": (0.95, 0.98), "eps": 1e-6, "lr": 3e-4},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_option_has_its_place_in_the_written_order(changed: dict[str, object], dtype: torch.dtype) -> None:
    check(*random_state(3000, seed=7, dtype=dtype), **{**ORDINARY, **changed})


@pytest.mark.usefixtures("every_root")
@pytest.mark.parametrize("adamw_mode", [True, False])
def test_denormal_huge_zero_infinite_and_nan_values_follow_the_written_order(adamw_mode: bool) -> None:
    columns = torch.tensor(list(itertools.product(SPECIAL, repeat=3)), dtype=torch.float32).T.contiguous()
    p, g, m = (column.clone() for column in columns)
    for v in (0.0, 1e-45, 1e-39, 1.0, 3e38, math.inf, math.nan, -1.0):
        exp_avg_sq = torch.full_like(p, v)
        check(p.clone(), g.clone(), m.clone(), exp_avg_sq, **{**ORDINARY, "adamw_mode": adamw_mode})


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.tuples(*[st.floats(width=32)] * 4), min_size=1, max_size=40),
    step=st.integers(1, 50_000),
    lr=st.floats(0, 1e3),
    beta1=st.floats(0, 0.9999),
    beta2=st.floats(0, 0.99999),
    eps=st.floats(0, 1e-2),
    weight_decay=st.floats(0, 1e2),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    inv_scale=st.floats(2.0**-32, 2.0**16),
    clip=st.floats(0, 1),
)
def test_any_values_and_hyperparameters_give_the_bits_of_the_written_order(
    values: list[tuple[float, ...]],
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    flags: tuple[bool, bool, bool],
    inv_scale: float,
    clip: float,
) -> None:
    scalars = adam_scalars(step=step, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
    if scalars.decay == 0.0 or F32(weight_decay) == 0.0:
        weight_decay = 0.0  # a decay that rounds to 0 is left out
    p, g, m, v = (torch.tensor(column, dtype=torch.float32) for column in zip(*values))
    names = ("adamw_mode", "bias_correction", "maximize")
    check(
        *(p, g, m, v.abs()),
        step=step,
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        inv_scale=inv_scale,
        clip=clip,
        **dict(zip(names, flags)),
    )


@pytest.mark.usefixtures("every_root")
@pytest.mark.parametrize("tile", [1, 7, 256, 1000, 1001, 2**20])
def test_the_border_of_a_tile_changes_no_bit(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim.master, "CPU_TILE_NUMEL_PER_THREAD", tile)
    check(*random_state(1001, seed=3), **{**ORDINARY, "inv_scale": 0.3, "adamw_mode": False})


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_lengths_around_the_real_tile_are_updated_to_their_end(offset: int) -> None:
    numel = optim.master.tile_numel(torch.device("cpu")) + offset
    check(*random_state(numel, seed=5), **ORDINARY)


def test_work_that_is_warm_reuses_its_buffers() -> None:
    state = random_state(5000)
    adam_update_(*state, **ORDINARY, inv_scale=0.5)
    before = {key: buffer.data_ptr() for key, buffer in optim.master._buffers.by_use.items()}
    adam_update_(*state, **ORDINARY, inv_scale=0.5)
    after = {key: buffer.data_ptr() for key, buffer in optim.master._buffers.by_use.items()}
    assert before
    assert before == after


def test_buffers_that_inference_mode_met_first_serve_training_later() -> None:
    optim.master._buffers.by_use.clear()
    with torch.inference_mode():
        adam_update_(*random_state(100), **ORDINARY)
    check(*random_state(100), **ORDINARY)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("exponent", [-126, 0, 1, 100])
def test_the_square_root_is_correctly_rounded_for_every_mantissa(exponent: int, wide: bool) -> None:
    # The root's mantissa depends on the mantissa and the exponent's parity alone: 0 and 1 are all there is.
    mantissas = torch.arange(0, 2**23, 1 if exponent in (0, 1) else 97, dtype=torch.int32)
    values = (mantissas + ((exponent + 127) << 23)).view(torch.float32)
    out = torch.empty_like(values)
    square_root_(out, values, torch.empty_like(values, dtype=torch.float64) if wide else None)
    # r is the nearest fp32 number to sqrt(x) exactly if x lies between the squares of r's two borders, half
    # an ulp away; those have 25 bits, so their squares are exact in fp64.
    r = out.double()
    half_up = (torch.nextafter(out, torch.tensor(math.inf)).double() - r) / 2
    half_down = (r - torch.nextafter(out, torch.tensor(0.0)).double()) / 2
    x = values.double()
    assert torch.all((r - half_down).square() <= x)
    assert torch.all(x <= (r + half_up).square())


@pytest.mark.parametrize("wide", [False, True])
def test_the_square_root_of_special_values_is_that_of_ieee_754(wide: bool) -> None:
    values = torch.tensor([0.0, -0.0, math.inf, math.nan, -1.0, 1e-45, 4e-45])
    out = torch.empty_like(values)
    square_root_(out, values, torch.empty_like(values, dtype=torch.float64) if wide else None)
    with np.errstate(invalid="ignore"):
        assert_same_bits(out, np.sqrt(values.double().numpy()).astype(F32))


@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize("num_steps", [100, 1000])
def test_many_steps_stay_within_a_few_ulp_of_torch(adamw_mode: bool, num_steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(4096, generator=generator)
    theirs = torch.nn.Parameter(start.clone())
    # torch multiplies by 1 - lr * wd, which these make exact: else its rounding alone, the same in every
    # step, would move torch's parameters by up to steps * 2**-25 of themselves.
    arguments = {"lr": 2.0**-10, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 2.0**-6}
    torch_class = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    optimizer = torch_class([theirs], foreach=False, **arguments)
    ours, m, v = start.clone(), torch.zeros(4096), torch.zeros(4096)
    for step in range(1, num_steps + 1):
        grad = torch.randn(4096, generator=generator) + 0.1
        theirs.grad = grad.clone()
        optimizer.step()
        adam_update_(ours, grad, m, v, step=step, adamw_mode=adamw_mode, **arguments)
    # A step is at most about lr = 1e-3 in size and both compute it to a few ulp (1e-3 * 3 * 2**-24 =
    # 2e-10); each also rounds the parameter, of size <= 4, to half an ulp (<= 2**-23) in its last two
    # operations. Differences of rounding add up like a random walk of such halves: 5 ulp after 100 steps and 16
    # after 1,000 (3 and 11 are found, 0.7 on average), against 50 and 500 in the worst case.
    ulp = torch.finfo(torch.float32).eps * theirs.detach().abs().clamp(min=2.0**-4)
    assert torch.all((ours - theirs.detach()).abs() <= 0.5 * math.sqrt(num_steps) * ulp)
    assert (ours - start).abs().min() > 0, "everything moved"
    # Moments: two or three roundings a step, and old ones decay with beta: 1 / (1 - 0.9) steps count for m.
    # The cancellation of gradients of size 1 sets its absolute scale.
    assert (m - optimizer.state[theirs]["exp_avg"]).abs().max() < 10 * 2**-24
    assert ((v - optimizer.state[theirs]["exp_avg_sq"]).abs() / v).max() < 100 * 2**-24


@pytest.mark.parametrize(
    ("position", "bad", "words"),
    [
        (0, torch.zeros(4, dtype=torch.bfloat16), "weight"),
        (0, torch.zeros(2, 2), "weight"),
        (1, torch.zeros(5), "grad"),
        (1, torch.zeros(4, dtype=torch.float64), "grad"),
        (2, torch.zeros(8)[::2], "exp_avg"),
        (3, torch.zeros(4, dtype=torch.float16), "exp_avg_sq"),
    ],
)
def test_tensors_that_do_not_fit_are_named(position: int, bad: Tensor, words: str) -> None:
    tensors = random_state(4)
    tensors[position] = bad
    with pytest.raises(ValueError, match=words):
        adam_update_(*tensors, **ORDINARY)


def test_step_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="from 1, found 0"):
        adam_update_(*random_state(4), **{**ORDINARY, "step": 0})
