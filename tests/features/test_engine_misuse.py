"""What an engine and a trainer say where they are used in another way than they are meant."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini
from gemini import Engine, GeminiError, ShardedModel, Trainer, deepspeed, state_hash
from gemini.engine.trainer import Loss
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import build, inputs

CONFIG: dict[str, Any] = {"device": "emulated", "optimizer": {"type": "HybridAdam"}, "rank_timeout": 60.0}
PAIRS = [(inputs(0), inputs(1))]


def engine_of(**config: Any) -> Engine:
    return gemini.initialize(build(), criterion=nn.MSELoss(), config={**CONFIG, **config}, verbose=False)[0]


def loss_of(engine: Engine, step: int = 0) -> Tensor:
    return engine(inputs(step)).square().mean()


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("window", [1, 2])
def test_a_step_after_loss_backward_is_refused_and_training_goes_on(rank: int, world_size: int, window: int) -> None:
    """It would do nothing, for ever and without a word."""
    engine, its = (engine_of(gradient_accumulation_steps=window) for _ in range(2))
    loss_of(engine).backward()
    with pytest.raises(GeminiError, match=r"engine.backward\(loss\) did not make: call it in place of loss.backward"):
        engine.step()
    engine.zero_grad()
    for each in (engine, its):
        for micro in range(window):
            each.backward(loss_of(each, micro + rank))
            each.step()
        each.step()  # nothing is open
    assert engine.global_steps == 1
    assert state_hash(engine.model) == state_hash(its.model)


def test_after_a_backward_that_failed_there_is_nothing_to_step() -> None:
    engine = engine_of()
    loss = loss_of(engine)
    next(engine.parameters()).register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss)
    with pytest.warns(UserWarning, match="dropped"):
        engine.step()
    assert engine.global_steps == 0


def test_after_a_failure_that_drops_the_window_the_last_step_has_nothing_to_step() -> None:
    engine = engine_of(gradient_accumulation_steps=2)
    engine.backward(loss_of(engine))
    loss = loss_of(engine, 1)
    fails = next(engine.parameters()).register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    fails.remove()
    with pytest.warns(UserWarning, match="dropped"):
        engine.recover()
    engine.step(last=True)
    assert engine.global_steps == 0


def test_a_closed_engine_says_so() -> None:
    engine = engine_of()
    loss = loss_of(engine)
    engine.close()
    engine.close()
    for what, call in (
        ("a forward", lambda: loss_of(engine)),
        (r"backward\(\)", lambda: engine.backward(loss)),
        (r"step\(\)", engine.step),
        ("a forward", lambda: Trainer(engine).fit(PAIRS, 1)),
    ):
        with pytest.raises(GeminiError, match=f"{what} after close\\(\\): make another engine with initialize"):
            call()


def test_an_evaluation_inside_a_window_changes_nothing_of_it() -> None:
    engine, its = (engine_of(gradient_accumulation_steps=2) for _ in range(2))
    for each in (engine, its):
        each.backward(loss_of(each))
        each.step()
        if each is engine:
            Trainer(engine).evaluate(PAIRS, hooks=[Loss()])
        each.backward(loss_of(each, 1))
        each.step()
    assert state_hash(engine.model) == state_hash(its.model)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"optimizer": "adam"}, TypeError, "optimizer='adam' is a name, which belongs into the config"),
        ({"optimizer": 3}, TypeError, "or a callable that makes one, found 3"),
        ({"criterion": "mse"}, TypeError, "criterion must be a function of outputs and labels, found 'mse'"),
        ({"lr_scheduler": "cosine"}, TypeError, "lr_scheduler must be a schedule, or a callable that makes one"),
    ],
    ids=str,
)
def test_arguments_of_another_kind_are_refused_before_the_model_is_wrapped(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    module = build()
    with pytest.raises(error, match=words):
        gemini.initialize(module, config={"device": "emulated"}, verbose=False, **arguments)
    assert type(next(module.parameters())) is nn.Parameter


def test_a_schedule_may_be_a_class() -> None:
    class Halves(torch.optim.lr_scheduler.StepLR):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer, 1, gamma=0.5)

    for given in (Halves, partial(Halves)):
        engine = gemini.initialize(build(), lr_scheduler=given, config=CONFIG, verbose=False)[0]
        engine.backward(loss_of(engine))
        engine.step()
        assert engine.optimizer.param_groups[0]["lr"] == 0.5e-3


@pytest.mark.parametrize("kind", ["object", "class", "callable"])
def test_a_schedule_that_moves_by_a_metric_is_refused_and_may_be_made_after(kind: str) -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    module = build()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    given: Any = {"object": plateau(optimizer), "class": plateau, "callable": partial(plateau, patience=3)}[kind]
    with pytest.raises(gemini.UnsupportedError, match=r"moves by a metric.*: make it after initialize\(\)"):
        deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=given, config={"device": "emulated"})
    assert kind == "callable" or type(next(module.parameters())) is nn.Parameter
    engine = engine_of()
    schedule = plateau(engine.optimizer, patience=0, factor=0.5)
    for _ in range(2):
        schedule.step(1.0)
    assert engine.optimizer.param_groups[0]["lr"] == 0.5e-3


@pytest.mark.filterwarnings("error")
def test_a_schedule_that_the_script_moves_too_is_told() -> None:
    """As loops for Colossal-AI do after an epoch. One that is loaded before the training or turned back is no news."""
    schedule = {"type": "StepLR", "params": {"step_size": 100}}
    engine = engine_of(scheduler=schedule)
    engine.lr_scheduler.load_state_dict({**engine.lr_scheduler.state_dict(), "last_epoch": 7})
    for moves in (0, 0, 1):
        for _ in range(moves):
            engine.lr_scheduler.step()
        engine.backward(loss_of(engine))
        if moves:
            with pytest.warns(UserWarning, match=r"has moved by 1 since .*: the engine .* leave out lr_scheduler.step"):
                engine.step()
        else:
            engine.step()
    engine.lr_scheduler.load_state_dict({**engine.lr_scheduler.state_dict(), "last_epoch": 7})
    engine.backward(loss_of(engine))
    engine.step()


@pytest.mark.parametrize("kind", ["tensor", "used up"])
def test_model_parameters_that_are_none_are_refused_before_the_model_is_wrapped(kind: str) -> None:
    module = build()
    given: Any = next(module.parameters()) if kind == "tensor" else iter(())
    error, words = (TypeError, "put it in a list") if kind == "tensor" else (ValueError, "is empty: an iterator gives")
    with pytest.raises(error, match=words):
        deepspeed.initialize(model=module, model_parameters=given, config=CONFIG)
    assert type(next(module.parameters())) is nn.Parameter


def test_what_a_config_says_of_a_model_that_is_wrapped_already_is_told() -> None:
    model = ShardedModel(build(), device="emulated", stage=1)
    engine, *_ = gemini.initialize(model, config={**CONFIG, "stage": 2, "dtype": "bf16"}, verbose=False)
    assert dict(engine.config.ignored) == {
        "stage": "the model was wrapped before, with 1",
        "dtype": "the model was wrapped before, with None",
        "rank_timeout": "the model was wrapped before, with 600.0",
    }


def test_a_loss_that_is_no_tensor_is_named() -> None:
    with pytest.raises(TypeError, match=r"backward\(\) takes the loss, a tensor of one element, found float"):
        engine_of().backward(1.0)  # type: ignore[arg-type]


def test_a_name_that_nobody_knows_is_said_of_the_engine() -> None:
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'stepp'; its model: 'Mlp' object"):
        engine_of().stepp()


def test_a_generator_is_used_up_by_the_first_epoch() -> None:
    with pytest.raises(GeminiError, match="A generator gives its batches once: give a list or a DataLoader"):
        Trainer(engine_of()).fit((pair for pair in PAIRS), epochs=2)


def test_a_hook_is_an_object() -> None:
    with pytest.raises(TypeError, match="found the class Loss: make one"):
        Trainer(engine_of()).fit(PAIRS, 1, hooks=[Loss])  # type: ignore[list-item]


def test_a_criterion_with_parameters_of_its_own_is_told() -> None:
    class Weighted(nn.Module):
        def __init__(self, trains: bool) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4), requires_grad=trains)

    with pytest.warns(UserWarning, match="criterion has parameters of its own, scale, which the engine does not train"):
        gemini.initialize(nn.Linear(4, 4), criterion=Weighted(True), config={}, verbose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gemini.initialize(nn.Linear(4, 4), criterion=Weighted(False), config={}, verbose=False)
