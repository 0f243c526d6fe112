"""`B(A(x))` of two engines, with one `B.backward(loss)`: each steps when its own window is full."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini
from gemini import Engine, GeminiError
from optim import HybridAdam
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import assert_same, build, inputs, weights_of

CONFIG: dict[str, Any] = {
    "device": "emulated",
    "rank_timeout": 60.0,
    "optimizer": {"type": "HybridAdam", "params": {"lr": 1e-2}},
}
PLACES: dict[str, dict[str, Any]] = {
    "free": {},
    "cpu": {"tensor_placement_policy": "cpu"},
    "chunks": {"chunk_size": 512},
}


def engine_of(window: int = 1, **config: Any) -> Engine:
    return gemini.initialize(
        build(), config={**CONFIG, "gradient_accumulation_steps": window, **config}, verbose=False
    )[0]


def loss_of(first: Any, second: Any, micro: int) -> Tensor:
    loss: Tensor = second(first(inputs(micro))).square().mean()
    return loss


@on_ranks(1, 2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("window", [1, 3])
def test_two_engines_in_a_chain_train_as_two_plain_modules(rank: int, world_size: int, window: int, place: str) -> None:
    first, second = engine_of(window, **PLACES[place]), engine_of(window, **PLACES[place])
    modules: list[nn.Module] = [build(), build()]
    optimizers = [HybridAdam(module.parameters(), lr=1e-2) for module in modules]
    for micro in range(2 * window):
        loss, plain = loss_of(first, second, micro), loss_of(*modules, micro)
        assert torch.equal(loss, plain)
        second.backward(loss)
        (plain / window if window > 1 else plain).backward()
        # In another order than that of the chain, and after every micro-batch.
        first.step()
        second.step()
        assert first.is_window_open() == second.is_window_open() == ((micro + 1) % window > 0)
        if not first.is_window_open():
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert first.global_steps == second.global_steps == 2
    assert first.micro_steps == second.micro_steps == 2 * window
    for engine, module in zip((first, second), modules, strict=True):
        assert_same(weights_of(engine.model), weights_of(module))


@on_ranks(1, 2)
def test_windows_of_other_sizes_are_refused_and_both_can_go_on(rank: int, world_size: int) -> None:
    """The loss is divided once, so it would be the mean over one window and the sum over the other."""
    first, second, its = engine_of(2), engine_of(1), engine_of(2)
    second.backward(loss_of(first, second, 0))
    second.step()
    before = weights_of(first.model)
    with pytest.raises(GeminiError, match=r"divided by 1, for a window of 2: give both .* same gradient_accumulation"):
        first.step()
    assert_same(weights_of(first.model), before)
    first.discard_window()
    for engine in (first, its):
        for micro in range(2):
            engine.backward(engine(inputs(micro)).square().mean())
            engine.step()
    assert_same(weights_of(first.model), weights_of(its.model))


def test_a_script_that_divides_by_itself_may_have_windows_of_other_sizes() -> None:
    first, second, its = engine_of(2), engine_of(1), [engine_of(2), engine_of(2)]
    for micro in range(2):
        second.backward(loss_of(first, second, micro) / 2, divide=False)
        first.step()
        its[1].backward(loss_of(its[0], its[1], micro))
        its[0].step()
    assert first.global_steps == its[0].global_steps == 1
    assert_same(weights_of(first.model), weights_of(its[0].model))


def test_in_fp16_each_engine_has_a_loss_scale_of_its_own() -> None:
    first, second = engine_of(dtype="fp16"), engine_of(dtype="fp16")
    loss = second(first(inputs(0).half())).float().square().mean()
    with pytest.raises(GeminiError, match="Of models in a chain each has a loss scale of its own: train them in bf16"):
        second.backward(loss)


def test_a_backward_that_fails_drops_the_windows_that_it_fed() -> None:
    """Else one would be full a micro-batch before the other."""
    first, second = engine_of(2), engine_of(2)
    its = [engine_of(2), engine_of(2)]
    second.backward(loss_of(first, second, 9))
    loss = loss_of(first, second, 0)
    loss.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        second.backward(loss)
    assert not first.is_window_open() and not second.is_window_open()
    for pair in ([first, second], its):
        for micro in range(2):
            pair[1].backward(loss_of(pair[0], pair[1], micro))
            for engine in pair:
                engine.step()
    for one, other in zip((first, second), its, strict=True):
        assert one.global_steps == 1
        assert_same(weights_of(one.model), weights_of(other.model))


@on_ranks(1, 2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("window", [1, 2])
def test_gradients_that_a_generator_leaves_in_its_discriminator_are_dropped(
    rank: int, world_size: int, window: int, place: str
) -> None:
    """A GAN: without the drop the critic trains on what the generator wants of it."""
    generator, critic = engine_of(window, **PLACES[place]), engine_of(window, **PLACES[place])
    modules: list[nn.Module] = [build(), build()]
    optimizers = [HybridAdam(module.parameters(), lr=1e-2) for module in modules]
    for micro in range(2):
        critic.zero_grad()
        for part in range(window):
            critic.backward(critic(inputs(micro + part)).square().mean())
            critic.step()
        for part in range(window):
            generator.backward(loss_of(generator, critic, micro + part))
            generator.step()
        # The same by hand.
        optimizers[1].zero_grad()
        for part in range(window):
            (modules[1](inputs(micro + part)).square().mean() / window).backward()
        optimizers[1].step()
        for part in range(window):
            (loss_of(*modules, micro + part) / window).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    assert generator.global_steps == critic.global_steps == 2
    for engine, module in zip((generator, critic), modules, strict=True):
        assert_same(weights_of(engine.model), weights_of(module))


@on_ranks(1, 2)
def test_zero_grad_drops_a_window_that_is_complete_and_says_that_it_keeps_another(rank: int, world_size: int) -> None:
    engine, its = engine_of(2), engine_of(2)
    for micro in (5, 6):  # full, and no step follows
        engine.backward(engine(inputs(micro)).square().mean())
    engine.zero_grad()
    assert not engine.is_window_open() and all(each.grad is None for each in engine.model.parameters())
    engine.backward(engine(inputs(0)).square().mean())
    with pytest.warns(UserWarning, match=r"zero_grad\(\) keeps the gradients of a window.*\(1\).*discard_window"):
        engine.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.zero_grad()  # said once
    engine.backward(engine(inputs(1)).square().mean())
    engine.step()
    for micro in range(2):
        its.backward(its(inputs(micro)).square().mean())
        its.step()
    assert_same(weights_of(engine.model), weights_of(its.model))
