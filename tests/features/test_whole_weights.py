"""Weights that are read or written through a wrapped module are whole, or the user is told that they are not there."""

import copy
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gemini import ShardedModel
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import CHUNK_NUMEL, WIDTH, Mlp, assert_same, build, inputs, loss_of, sharded, weights_of, wrap


class Weights(Mlp):
    """With a frozen scalar, which functions of C++ take for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.75), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def _first(module: Any) -> nn.Parameter:
    weight: nn.Parameter = module.layers[0].weight
    return weight


def _saved(module: nn.Module, save: Callable[[nn.Module, str], None]) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        save(module, str(Path(folder) / "file"))
        loaded: dict[str, Tensor] = safetensors.torch.load_file(str(Path(folder) / "file"))
        return loaded


def _same_addresses(module: Any) -> bool:
    one, other = _first(module), module.layers[1].weight
    return one.data_ptr() == one.data.data_ptr() and one.data_ptr() != other.data_ptr()


def _written_through_numpy(module: Any) -> None:
    _first(module).detach().view(torch.int16).numpy()[3] = 5


def _to_a_target_network(module: Any) -> list[nn.Parameter]:
    target = build(Weights).to(_first(module).dtype)
    for mine, theirs in zip(target.parameters(), module.parameters(), strict=True):
        mine.data.mul_(0.5).add_(theirs.data, alpha=0.5)
    return list(target.parameters())


def _with_other_weights(module: Any, change: Callable[[Tensor], Tensor]) -> Tensor:
    others = {name: change(value.detach()) for name, value in module.named_parameters()}
    output: Tensor = torch.func.functional_call(module, others, (inputs(0, _first(module).dtype),))
    return output


READS: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda m: torch.tensor(_first(m)),
    "tensor of numbers": lambda m: torch.tensor([m.scale, 2.0]),
    "a number": lambda m: torch.full((2,), m.scale.requires_grad_(False)),
    "new_tensor": lambda m: torch.zeros(1).new_tensor(_first(m)),
    "as_tensor": lambda m: torch.as_tensor(_first(m), dtype=torch.float64),
    "asarray": lambda m: torch.asarray(_first(m).detach(), dtype=torch.float64),
    "constructor": lambda m: torch.Tensor(m.layers[1].bias.float()) if m.scale.dtype is torch.float32 else None,
    "tolist": lambda m: torch.tensor(_first(m).tolist()),
    "numpy": lambda m: torch.from_numpy(_first(m).detach().float().numpy().copy()),
    "dlpack": lambda m: torch.from_dlpack(_first(m).detach()).clone(),
    "equal": lambda m: torch.tensor([torch.equal(_first(m), _first(m)), torch.equal(_first(m), m.layers[1].weight)]),
    "data_ptr": lambda m: torch.tensor([len({p.data_ptr() for p in m.parameters()}), _same_addresses(m)]),
    "hstack": lambda m: torch.hstack((_first(m), m.layers[1].weight)),
    "rows": lambda m: [row.clone() for row in _first(m)],
    "same size": lambda m: torch.tensor(torch.is_same_size(_first(m), m.layers[1].weight)),
    "functional_call": lambda m: _with_other_weights(m, torch.ones_like),
    "functional_call with its own": lambda m: _with_other_weights(m, lambda value: value),
    "safetensors": lambda m: _saved(m, safetensors.torch.save_model),
    "target network": _to_a_target_network,
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "init": lambda m: (nn.init.eye_(_first(m)), nn.init.constant_(m.scale, 0.25)),
    "copy_": lambda m: _first(m).copy_(m.layers[2].weight),
    "add_": lambda m: _first(m).add_(m.layers[2].weight, alpha=2),
    "a view of .data": lambda m: _first(m).data[3].mul_(2),
    "set item": lambda m: _first(m).__setitem__(slice(0, 2), 7),
    "out": lambda m: torch.mul(m.layers[2].weight, 2, out=_first(m)),
    "numpy": _written_through_numpy,
    "vector_to_parameters": lambda m: nn.utils.vector_to_parameters(
        torch.arange(sum(p.numel() for p in m.parameters())).to(_first(m).dtype) / 64, m.parameters()
    ),
}
REFUSED: dict[str, Callable[[Any], Any]] = {
    "pickle of the model": lambda m: torch.save(m, io.BytesIO()),
    "pickle of the module": lambda m: torch.save(m.module, io.BytesIO()),
    "pickle of a weight": lambda m: torch.save(_first(m).detach(), io.BytesIO()),
    "copy": lambda m: copy.copy(_first(m)),
    "storage": lambda m: _first(m).storage(),
    "untyped_storage": lambda m: _first(m).untyped_storage().data_ptr(),
    "an address as a number": lambda m: _first(m).data_ptr() % 64,
    "an address for C": lambda m: hex(_first(m).data_ptr()),
    "share_memory": lambda m: m.module.share_memory(),
    "half": lambda m: m.module.double(),
    "safetensors of parameters": lambda m: _saved(
        m, lambda module, path: safetensors.torch.save_file(dict(module.named_parameters()), path)
    ),
    "swap_tensors": lambda m: torch.utils.swap_tensors(_first(m), m.layers[2].weight),
    "memory for a plain parameter": lambda m: setattr(nn.Linear(WIDTH, WIDTH).weight, "data", _first(m)),
    "memory for another": lambda m: setattr(nn.Linear(WIDTH, WIDTH).weight, "data", _first(m).data),
}


def _tensors(result: Any) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, Tensor):
            yield leaf.detach().clone()


def _released(dtype: torch.dtype | None) -> ShardedModel:
    model = wrap(make=Weights, dtype=dtype, chunk_size=CHUNK_NUMEL)
    with torch.no_grad():  # the last layers are in the slots, the first ones are not
        model(inputs(0, dtype))
    return model


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_what_reads_or_writes_weights_does_what_it_does_to_plain_ones(
    rank: int, world_size: int, dtype: torch.dtype | None
) -> None:
    """Each has the results, and leaves the weights, that it has of a plain module."""
    reference = build(Weights) if dtype is None else build(Weights).to(dtype)
    model = _released(dtype)
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises against torch.tensor(tensor); masters of numpy's edits
        for name, read in READS.items():
            wanted, got = list(_tensors(read(reference))), list(_tensors(read(model.module)))
            if len(wanted) != len(got) or not all(map(torch.equal, wanted, got)):
                wrong.append(name)
            with torch.no_grad():
                model(inputs(0, dtype))  # another layer is in the slots
        for name, write in WRITES.items():
            with torch.no_grad():
                for module in (reference, model.module):
                    write(module)
            wanted_state, got_state = dict(reference.state_dict()), weights_of(model)
            if not all(torch.equal(wanted_state[key], got_state[key]) for key in wanted_state):
                wrong.append(name)
            model.load_state_dict(wanted_state)
    assert not wrong, f"other results than of a plain module: {', '.join(wrong)}"
    model.close()


@on_ranks(1, 2)
def test_what_would_take_memory_that_moves_is_refused(rank: int, world_size: int) -> None:
    """What cannot work raises, by name where Python sees it, and changes nothing."""
    model = _released(None)
    told: list[str] = []
    for name, refused in REFUSED.items():
        with torch.no_grad():
            model(inputs(0))
        try:
            refused(model)
        except RuntimeError as error:
            told.append(str(error))
        else:
            raise AssertionError(f"{name} went on with placeholders")
    unnamed = [each for each in told if "ShardedModel" not in each and "'layers.0.weight'" not in each]
    assert len(unnamed) == 1, unnamed  # torch's own, of swap_tensors
    assert_same(weights_of(model), dict(build(Weights).state_dict()))
    model.close()


def test_a_traced_module_computes_with_the_weights_wherever_they_are() -> None:
    """TorchScript holds the parameters themselves, and asks nobody about them."""
    model = wrap("cpu")
    model(inputs(0))
    traced = torch.jit.trace(model.module, inputs(0))
    assert torch.equal(traced(inputs(1)), build()(inputs(1)))


def test_a_model_wrapped_and_read_in_inference_mode_has_its_weights() -> None:
    module, reference = build(), build()
    with torch.inference_mode():
        model = ShardedModel(module, device="emulated", tensor_placement_policy="cpu")
        assert torch.equal(model(inputs(0)), reference(inputs(0)))
        assert torch.equal(torch.asarray(model.layers[0].weight.detach()), reference.layers[0].weight)


def test_a_gradient_is_data_for_a_new_tensor() -> None:
    model, _ = sharded()
    loss_of(model).backward()
    reference = build()
    loss_of(reference).backward()
    with pytest.warns(UserWarning, match="copy construct"):
        got = torch.tensor(model.layers[0].weight.grad)
    assert torch.equal(got, reference.layers[0].weight.grad)


def test_an_operation_that_would_write_to_a_placeholder_is_refused() -> None:
    model = wrap()
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match=r"'layers\.0\.weight'"):
        model.layers[0].weight.detach_().zero_()


def test_a_capsule_of_a_weight_itself_has_placeholders() -> None:
    """`to_dlpack` takes the memory and asks nobody."""
    weight = wrap().layers[0].weight
    assert torch.from_dlpack(torch.utils.dlpack.to_dlpack(weight.detach())).isnan().all()
    assert torch.equal(torch.from_dlpack(weight.detach()), build().layers[0].weight)


def test_a_saved_whole_state_loads_after_refusals() -> None:
    model, file = wrap(), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    build().load_state_dict(torch.load(file))
