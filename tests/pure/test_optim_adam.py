"""HybridAdam and CPUAdam as ordinary optimizers: steps, groups, and what they refuse."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from optim import CPUAdam, HybridAdam, to_bfloat16_half_up
from optim.reference import prefers_wide_square_root
from tests.harness.adam import adam_update_
from tests.pure.optimizers import BOTH, ORDINARY, parameters, same, set_gradients, train


@BOTH
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"adamw_mode": False},
        {"bias_correction": False},
        {"maximize": True},
        {"weight_decay": 0.0},
        {"lr": torch.tensor(1e-2)},
    ],
    ids=str,
)
def test_a_step_is_the_update_of_every_parameter(optimizer_class: type[HybridAdam], changed: dict[str, object]) -> None:
    params = parameters()
    expected = [(p.detach().clone().view(-1), torch.zeros(p.numel()), torch.zeros(p.numel())) for p in params]
    arguments = {**ORDINARY, **changed}
    optimizer = optimizer_class(params, **arguments)  # type: ignore[arg-type]
    arguments["lr"] = float(arguments["lr"])  # type: ignore[arg-type]
    for step in (1, 2, 3):
        set_gradients(params, step)
        optimizer.step()
        for p, (weight, m, v) in zip(params, expected):
            assert p.grad is not None
            adam_update_(weight, p.grad.view(-1), m, v, step=step, **arguments)  # type: ignore[arg-type]
    for p, (weight, m, v) in zip(params, expected):
        state = optimizer.state[p]
        assert same(p.view(-1), weight)
        assert same(state["exp_avg"].view(-1), m)
        assert same(state["exp_avg_sq"].view(-1), v)
        assert state["step"].dtype == torch.float32
        assert state["step"].dim() == 0
        assert state["step"] == 3
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}


@BOTH
def test_a_model_that_learns_a_line_learns_it(optimizer_class: type[HybridAdam]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 32).view(-1, 1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (model(x) - (3 * x + 1)).square().mean()
        loss.backward()
        return float(loss.detach())

    losses = [optimizer.step(closure) for _ in range(200)]
    assert losses[0] is not None
    assert losses[0] > 1
    assert losses[-1] is not None
    assert losses[-1] < 1e-3


def test_a_parameter_without_gradient_does_not_move_and_its_step_does_not_count() -> None:
    params = parameters()
    optimizer = HybridAdam(params, **ORDINARY)
    train(optimizer, params, range(2))
    before, state = params[1].detach().clone(), copy.deepcopy(optimizer.state[params[1]])
    set_gradients(params, 9)
    params[1].grad = None
    optimizer.step()
    assert same(params[1], before)
    assert optimizer.state[params[1]]["step"] == state["step"] == 2
    assert same(optimizer.state[params[1]]["exp_avg"], state["exp_avg"])
    assert optimizer.state[params[0]]["step"] == 3


def test_groups_have_hyperparameters_of_their_own_and_schedulers_act_on_them() -> None:
    params = parameters()
    groups = [{"params": params[:1], "lr": 0.5}, {"params": params[1:], "weight_decay": 0.0, "name": "rest"}]
    optimizer = HybridAdam(groups, **ORDINARY)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train(optimizer, params, range(1))
    scheduler.step()
    first, second = (optimizer.hyperparameters(group) for group in optimizer.param_groups)
    assert (first["lr"], first["weight_decay"]) == (0.25, 0.1)
    assert (second["lr"], second["weight_decay"]) == (0.005, 0.0)
    # They are just the keyword arguments that adam_scalars wants beside the step.
    adam_update_(*torch.zeros(4, 3), step=1, **first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_parameter_follows_its_fp32_master(dtype: torch.dtype) -> None:
    params = parameters(dtype)
    full = [nn.Parameter(p.detach().float()) for p in params]
    half_optimizer = HybridAdam(params, lr=1e-4)
    full_optimizer = HybridAdam(full, lr=1e-4)
    for seed in range(20):
        set_gradients(params, seed)
        for p, f in zip(params, full):
            assert p.grad is not None
            f.grad = p.grad.float()
        half_optimizer.step()
        full_optimizer.step()
    for p, f in zip(params, full):
        master = half_optimizer.state[p]["master"]
        assert same(master, f)
        assert same(p, to_bfloat16_half_up(master) if dtype == torch.bfloat16 else master.half())
        assert half_optimizer.state[p]["exp_avg"].dtype == torch.float32


def test_an_edit_of_a_half_precision_parameter_reaches_its_master() -> None:
    (p,) = params = [nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]
    optimizer = HybridAdam(params, lr=1e-4)
    train(optimizer, params, range(3))
    untouched = optimizer.state[p]["master"].clone()
    with torch.no_grad():
        p[2] = 7.0
    p.data[3] = -5.0  # no version counter tells of this one
    optimizer.param_groups[0]["lr"] = 0.0
    train(optimizer, params, range(3, 4))
    assert p.tolist()[2:] == [7.0, -5.0]
    assert optimizer.state[p]["master"].tolist()[2:] == [7.0, -5.0]
    assert same(optimizer.state[p]["master"][:2], untouched[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_and_gradients_of_any_stride_are_updated(dtype: torch.dtype) -> None:
    def run(stride: Callable[[Tensor], Tensor], grad_stride: Callable[[Tensor], Tensor]) -> list[Tensor]:
        p = nn.Parameter(stride(torch.arange(24.0).view(4, 6).to(dtype)))
        optimizer = HybridAdam([p], **ORDINARY)
        for seed in range(3):
            grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
            p.grad = grad_stride(grad.to(dtype))
            optimizer.step()
        return [p.detach(), *(v for k, v in sorted(optimizer.state[p].items()) if k != "step")]

    def plain(t: Tensor) -> Tensor:
        return t

    def transposed(t: Tensor) -> Tensor:
        return t.t().contiguous().t()

    def spread(t: Tensor) -> Tensor:
        return torch.stack([t, t], dim=-1)[..., 0]

    expected = run(plain, plain)
    for stride in (transposed, spread):
        for grad_stride in (plain, transposed):
            for found, wanted in zip(run(stride, grad_stride), expected):
                assert same(found, wanted)


@BOTH
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1e-3),
        ("lr", math.nan),
        ("lr", math.inf),
        ("lr", "fast"),
        ("lr", torch.zeros(2)),
        ("eps", -1e-8),
        ("eps", None),
        ("weight_decay", -0.1),
        ("betas", (0.9,)),
        ("betas", 0.9),
        ("betas", (0.9, 1.0)),
        ("betas", (-0.1, 0.9)),
        ("adamw_mode", 1),
        ("bias_correction", None),
        ("maximize", "no"),
    ],
)
def test_a_bad_hyperparameter_is_named_with_what_was_found(
    optimizer_class: type[HybridAdam], name: str, value: object
) -> None:
    params = parameters()
    with pytest.raises(ValueError, match=rf"^{name}(\[\d\])? must be .*found "):
        optimizer_class(params, **{name: value})  # type: ignore[arg-type]
    optimizer = optimizer_class(params)
    with pytest.raises(ValueError, match=rf"^{name}"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], name: value})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0][name] = value
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=rf"^{name}"):
        train(optimizer, params, range(1))
    assert all(same(p, q) for p, q in zip(params, before))


@BOTH
def test_an_unknown_argument_names_the_nearest_valid_one(optimizer_class: type[HybridAdam]) -> None:
    with pytest.raises(TypeError, match=rf"{optimizer_class.__name__}.*'weight_decy'.*'weight_decay'"):
        optimizer_class(parameters(), weight_decy=0.1)
    with pytest.raises(TypeError, match=r"'adam_w_mode'.*'adamw_mode'"):
        optimizer_class(parameters(), adam_w_mode=True)


def test_a_refused_parameter_stops_the_step_before_anything_moves() -> None:
    good = nn.Parameter(torch.ones(3))
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    double = nn.Parameter(torch.ones(3, dtype=torch.float64))
    double.grad = torch.ones(3, dtype=torch.float64)
    for bad, error, words in ((embedding.weight, RuntimeError, "sparse"), (double, ValueError, "float64")):
        optimizer = HybridAdam([good, bad])
        good.grad = torch.ones(3)
        with pytest.raises(error, match=words):
            optimizer.step()
        assert good.tolist() == [1.0, 1.0, 1.0]
        assert good not in optimizer.state


def test_cpu_adam_refuses_parameters_elsewhere() -> None:
    elsewhere = nn.Parameter(torch.ones(3, device="meta"))
    elsewhere.grad = torch.ones(3, device="meta")
    with pytest.raises(ValueError, match=r"CPU.*meta.*HybridAdam"):
        CPUAdam([elsewhere]).step()


def test_other_devices_take_the_root_in_fp64() -> None:
    assert prefers_wide_square_root(torch.device("cuda"))


def test_an_old_graph_notices_the_update() -> None:
    # The update goes through views that share the version counter, as torch's own optimizers do.
    p = nn.Parameter(torch.ones(3))
    loss = p.square().sum()
    p.grad = torch.ones(3)
    HybridAdam([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
