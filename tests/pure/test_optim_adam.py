"""HybridAdam and CPUAdam as ordinary optimizers: state, groups, exchange with torch, and what they refuse."""

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from optim import CPUAdam, HybridAdam, adam_update_, to_bfloat16_half_up
from optim.square_root import prefers_wide_square_root

ORDINARY = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
BOTH = pytest.mark.parametrize("optimizer_class", [HybridAdam, CPUAdam])


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((3, 5), (7,), ())]


def set_gradients(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], seeds: range) -> None:
    for seed in seeds:
        set_gradients(params, seed)
        optimizer.step()


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
    # They are just the keyword arguments that adam_update_ wants beside the tensors and the step.
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


def test_loaded_states_of_any_stride_are_updated_in_place() -> None:
    ours, theirs = (nn.Parameter(torch.randn(4, 6).t()) for _ in range(2))
    theirs.data.copy_(ours.data)
    optimizer, reference = HybridAdam([ours], **ORDINARY), torch.optim.AdamW([theirs], **ORDINARY)
    train(reference, [theirs], range(2))
    assert not reference.state[theirs]["exp_avg"].is_contiguous()
    optimizer.load_state_dict(reference.state_dict())
    ours.data.copy_(theirs.data)
    train(optimizer, [ours], range(2, 4))
    train(reference, [theirs], range(2, 4))
    torch.testing.assert_close(optimizer.state[ours]["exp_avg"], reference.state[theirs]["exp_avg"])
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("adamw_mode", [True, False])
def test_state_dicts_go_to_and_come_from_torch(adamw_mode: bool) -> None:
    torch_class = torch.optim.AdamW if adamw_mode else torch.optim.Adam

    def ours(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return HybridAdam(params, lr=7.0)  # every hyperparameter comes with the state dict

    def torchs(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch_class(params, lr=7.0)

    straight = parameters()
    train(HybridAdam(straight, **ORDINARY, adamw_mode=adamw_mode), straight, range(6))
    start: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "ours": lambda params: HybridAdam(params, **ORDINARY, adamw_mode=adamw_mode),
        "torch": lambda params: torch_class(params, **ORDINARY),
    }
    for first in ("ours", "torch"):
        params = parameters()
        optimizer = start[first](params)
        train(optimizer, params, range(2))
        # across, then back: through a file's format, as a checkpoint would
        for make, seeds in ((ours if first == "torch" else torchs, range(2, 4)), (start[first], range(4, 6))):
            state = pickle.loads(pickle.dumps(optimizer.state_dict()))
            optimizer = make(params)
            optimizer.load_state_dict(state)
            train(optimizer, params, seeds)
        for p, q in zip(params, straight):
            torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-7)
            assert optimizer.state[p]["step"] == 6


@pytest.mark.parametrize("adamw_mode", [True, False])
def test_torchs_adam_learns_from_the_state_dict_which_of_the_two_it_continues(adamw_mode: bool) -> None:
    params = parameters()
    theirs = torch.optim.Adam(params)
    theirs.load_state_dict(HybridAdam(params, adamw_mode=adamw_mode).state_dict())
    assert theirs.param_groups[0]["decoupled_weight_decay"] is adamw_mode


def test_our_own_state_dict_restores_every_bit_in_half_precision() -> None:
    straight, resumed = parameters(torch.bfloat16), parameters(torch.bfloat16)
    train(HybridAdam(straight, **ORDINARY, bias_correction=False), straight, range(6))
    optimizer = HybridAdam(resumed, **ORDINARY, bias_correction=False)
    train(optimizer, resumed, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    again = HybridAdam(resumed)
    again.load_state_dict(state)
    assert again.state[resumed[0]]["master"].dtype == torch.float32
    train(again, resumed, range(3, 6))
    assert all(same(p, q) for p, q in zip(straight, resumed))
    assert again.state[resumed[0]]["master"] is not state["state"][0]["master"], "loaded states are copies"


def test_a_half_precision_state_of_torch_gets_fp32_moments_and_a_fresh_master() -> None:
    params = parameters(torch.bfloat16)
    theirs = torch.optim.AdamW(params, **ORDINARY)
    train(theirs, params, range(2))
    optimizer = HybridAdam(params)
    optimizer.load_state_dict(theirs.state_dict())
    state = optimizer.state[params[0]]
    assert state["exp_avg"].dtype == torch.float32
    assert torch.equal(state["exp_avg"], theirs.state[params[0]]["exp_avg"].float())
    assert "master" not in state
    train(optimizer, params, range(2, 3))
    assert optimizer.state[params[0]]["step"] == 3


def test_a_users_load_hook_is_honoured() -> None:
    params = parameters(torch.bfloat16)
    optimizer = HybridAdam(params)
    train(optimizer, params, range(1))
    state = copy.deepcopy(optimizer.state_dict())

    def zero_moments(_: torch.optim.Optimizer, loaded: dict[str, object]) -> dict[str, object]:
        loaded = copy.deepcopy(loaded)
        for entry in loaded["state"].values():  # type: ignore[attr-defined]
            entry["exp_avg"].zero_()
        return loaded

    optimizer.register_load_state_dict_pre_hook(zero_moments)
    optimizer.load_state_dict(state)
    assert not optimizer.state[params[0]]["exp_avg"].any()


@pytest.mark.parametrize("broken", [{"amsgrad": True}, {"lr": -1.0}])
def test_a_state_dict_that_cannot_be_continued_leaves_the_optimizer_as_it_was(
    broken: dict[str, object],
) -> None:
    params = parameters()
    optimizer = HybridAdam(params, **ORDINARY)
    train(optimizer, params, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(state)
    other["param_groups"][0].update(broken)
    other["state"][0]["exp_avg"].zero_()
    with pytest.raises(ValueError, match=next(iter(broken))):
        optimizer.load_state_dict(other)
    assert optimizer.param_groups[0]["lr"] == ORDINARY["lr"]
    assert same(optimizer.state[params[0]]["exp_avg"], state["state"][0]["exp_avg"])


def test_an_optimizer_survives_pickle_and_deepcopy() -> None:
    model = nn.Linear(3, 2)
    optimizer = HybridAdam(model.parameters(), **ORDINARY, adamw_mode=False)
    train(optimizer, list(model.parameters()), range(2))
    for other in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert other.param_groups[0]["adamw_mode"] is False
        params = other.param_groups[0]["params"]
        train(other, params, range(2, 3))
        assert other.state[params[0]]["step"] == 3


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
