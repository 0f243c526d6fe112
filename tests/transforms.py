"""The transforms of `torch.func`, as users write them over a model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from tests.zoo.mlp import inputs


def _energy(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().sum()


def _of_parameters(model: Any, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return grad(lambda given: functional_call(model, given, (inputs(0),)).square().sum())(parameters)  # type: ignore[no-any-return]


def _copies(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _per_sample(model: Any) -> Any:
    def loss(given: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, given, (x[None],)).square().sum()  # type: ignore[no-any-return]

    return vmap(grad(loss), in_dims=(None, 0))(_copies(model), inputs(0))


REVERSE: dict[str, Callable[[Any], Any]] = {  # through weights of the model, and without saved-tensor hooks
    "grad": lambda model: grad(_energy(model))(inputs(0)),
    "vmap(grad)": lambda model: vmap(grad(_energy(model)))(inputs(0)),
    "jacrev": lambda model: jacrev(model)(inputs(0)[0]),
    "hessian": lambda model: hessian(_energy(model))(inputs(0)[0]),
    "grad of parameters": lambda model: _of_parameters(model, dict(model.named_parameters())),
    "grad of a function of a weight": lambda model: grad(lambda x: (x @ model.layers[0].weight).sum())(inputs(0)),
}
ANYWHERE: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda model: vmap(model)(inputs(0)),
    "jvp": lambda model: jvp(model, (inputs(0),), (inputs(1),)),
    "jacfwd": lambda model: jacfwd(model)(inputs(0)[0]),
    "grad of copies": lambda model: _of_parameters(model, _copies(model)),
    "vmap(grad) of copies": _per_sample,
    "vectorised jacobian": lambda model: torch.autograd.functional.jacobian(model, inputs(0)[0], vectorize=True),
}
