"""REF: the same training in plain PyTorch, written out, that every feature is compared with.

`train_plain` runs each rank's batch through one model, adds the gradients in rank order, divides by the world
size and steps; with several micro-batches each one's gradient is reduced at once and added (fp32). In half
precision (`train_mixed`) the module is cast; the written Adam steps fp32 masters, the weights as given.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tests.harness.adam import adam_update_
from tests.harness.runs import Grads, Run
from tests.zoo.models import ModelCase

OptimizerName = Literal["hybrid_adam", "adamw", "sgd"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train; the same object can describe the sharded run."""

    steps: int = 3
    world_size: int = 1
    dtype: torch.dtype | None = None  # None keeps the model's own
    optimizer: OptimizerName = "hybrid_adam"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    adamw_mode: bool = True
    bias_correction: bool = True
    maximize: bool = False
    momentum: float = 0.9  # sgd
    accumulation: int = 1  # micro-batches a step; each loss is divided by it
    clip: float | None = None  # largest global norm
    norm_type: float = 2.0
    loss_scale: float = 1.0  # half precision: static
    reduce_dtype: torch.dtype | None = None  # of what ranks send; None: the gradient's own
    accumulate_dtype: torch.dtype | None = None  # None: at least fp32 when there are several micro-batches
    shard_group: int | None = None  # ranks whose gradients are added first, before the groups' sums; None: all
    knows_several: bool = False  # groups add up from the first micro-batch on, else from the second on
    concatenated: bool = False  # one forward on the whole batch instead of one a rank: equal up to rounding
    penalty: Callable[[nn.Module], Tensor] | None = None  # added to the loss in the script
    lr_at: Callable[[int], float] | None = None  # a schedule: factor of lr at step 0, 1, …

    def rank_losses(self, case: ModelCase, model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
        """One rank's loss of one micro-batch, as the model returns it (undivided, unscaled)."""
        batch = (
            case.concatenated(step, self.world_size, micro)
            if self.concatenated
            else case.batch(step, rank, self.world_size, micro)
        )
        loss = case.loss(model, batch)
        return loss if self.penalty is None else loss + self.penalty(model)

    def for_backward(self, loss: Tensor) -> Tensor:
        """What backward starts from."""
        if self.accumulation > 1:
            loss = loss / self.accumulation
        return loss if self.loss_scale == 1.0 else loss * self.loss_scale


def train_plain(case: ModelCase, steps: int = 3, world_size: int = 1, **options: Any) -> Run:
    """Trains `case` in plain PyTorch; options: fields of `Recipe`; half precision goes to `train_mixed`."""
    recipe = Recipe(steps=steps, world_size=world_size, **options)
    if recipe.dtype in (torch.bfloat16, torch.float16):
        return train_mixed(case, recipe)
    model = case.build(recipe.dtype)
    optimizer = make_optimizer(model.parameters(), recipe)
    accumulator = _Accumulator(case, model, recipe)
    run = Run(grads=[], norms=[])
    for step in range(recipe.steps):
        grads = accumulator.gradients(step)
        assert run.grads is not None
        assert run.norms is not None
        run.grads.append({name: None if g is None else g.clone() for name, g in grads.items()})
        for name, p in model.named_parameters():
            p.grad = None if (g := grads.get(name)) is None else g.to(p.dtype)
        run.norms.append(clip_(model.parameters(), recipe))
        if recipe.lr_at:
            optimizer.param_groups[0]["lr"] = recipe.lr * recipe.lr_at(step)
        optimizer.step()
        optimizer.zero_grad()
    run.losses = accumulator.losses
    run.weights = _copies(model.named_parameters())
    run.moments = {
        name: {k: v.clone() for k, v in optimizer.state[p].items() if k != "step" and isinstance(v, Tensor)}
        for name, p in model.named_parameters()
        if optimizer.state.get(p)
    }
    run.buffers = None if recipe.concatenated else accumulator.buffers
    return run


def train_mixed(case: ModelCase, recipe: Recipe) -> Run:
    """bf16 or fp16 module, fp32 masters from the weights as given, the written Adam on the masters."""
    import optim

    assert recipe.optimizer == "hybrid_adam"
    assert recipe.dtype is not None
    given = case.build(torch.float32)
    masters = {name: p.detach().clone().reshape(-1) for name, p in given.named_parameters()}
    model = case.build(torch.float32)
    params = dict(model.named_parameters())
    for name, p in params.items():  # buffers keep their dtype
        p.data = torch.empty_like(p, dtype=recipe.dtype).copy_(_to_half(masters[name], recipe.dtype).view_as(p))
    moments: dict[str, dict[str, Tensor]] = {}
    num_steps: dict[str, int] = {}
    accumulator = _Accumulator(case, model, recipe)
    run = Run(grads=[], norms=[])
    for step in range(recipe.steps):
        grads = accumulator.gradients(step)
        assert run.grads is not None
        assert run.norms is not None
        run.grads.append({name: _unscaled(g, recipe) for name, g in grads.items()})
        present = [(params[name], g) for name, g in grads.items() if g is not None]
        norm = _exact_norm(present, recipe) / recipe.loss_scale
        run.norms.append(torch.tensor(norm, dtype=torch.float32))
        clip = 1.0 if recipe.clip is None else optim.clip_coefficient(norm, recipe.clip)
        for name, p in params.items():
            grad = grads.get(name)
            if grad is None:
                continue
            state = moments.setdefault(name, {k: torch.zeros_like(masters[name]) for k in ("exp_avg", "exp_avg_sq")})
            num_steps[name] = num_steps.get(name, 0) + 1
            adam_update_(
                masters[name],
                grad.reshape(-1).float(),
                state["exp_avg"],
                state["exp_avg_sq"],
                step=num_steps[name],
                lr=recipe.lr * (recipe.lr_at(step) if recipe.lr_at else 1.0),
                betas=recipe.betas,
                eps=recipe.eps,
                weight_decay=recipe.weight_decay,
                adamw_mode=recipe.adamw_mode,
                bias_correction=recipe.bias_correction,
                maximize=recipe.maximize,
                inv_scale=1.0 / recipe.loss_scale,
                clip=clip,
            )
            p.data.copy_(_to_half(masters[name], recipe.dtype).view_as(p))
    run.losses = accumulator.losses
    run.weights = _copies(params.items())
    run.masters = {name: masters[name].view_as(p) for name, p in params.items() if p.requires_grad}
    run.moments = {name: {k: v.view_as(params[name]) for k, v in state.items()} for name, state in moments.items()}
    run.buffers = None if recipe.concatenated else accumulator.buffers
    return run


def make_optimizer(parameters: Any, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimizer over the plain model's or a sharded one's parameters, without frozen ones."""
    trainable = [p for p in parameters if p.requires_grad]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(trainable, recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay, foreach=False)
    adam = {"lr": recipe.lr, "betas": recipe.betas, "eps": recipe.eps, "weight_decay": recipe.weight_decay}
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(trainable, foreach=False, maximize=recipe.maximize, **adam)
    from optim import HybridAdam

    switches = {k: getattr(recipe, k) for k in ("adamw_mode", "bias_correction", "maximize")}
    return HybridAdam(trainable, **adam, **switches)


def clip_(parameters: Any, recipe: Recipe) -> Tensor:
    """The norm of all gradients, which are scaled down to `recipe.clip` if that is set."""
    with_grad = [p for p in parameters if p.grad is not None]
    largest = math.inf if recipe.clip is None else recipe.clip
    if recipe.optimizer == "hybrid_adam" and all(p.dtype == torch.float32 for p in with_grad):
        from optim import clip_grad_norm_  # the exact norm
    else:
        from torch.nn.utils import clip_grad_norm_
    if recipe.clip is None:  # only the norm is wanted: no gradient may be multiplied, not even by one
        stand_ins = [_with_grad(p, p.grad.clone()) for p in with_grad]
        return clip_grad_norm_(stand_ins, largest, norm_type=recipe.norm_type)
    return clip_grad_norm_(with_grad, largest, norm_type=recipe.norm_type)


def reduce_over_ranks(
    grads: Sequence[Tensor | None],
    reduce_dtype: torch.dtype | None = None,
    rest_dtype: torch.dtype | None = None,
    shard_group: int | None = None,
) -> Tensor | None:
    """Mean over ranks of what travels: the sum in rank order, at least in fp32, divided, and rounded once.

    shard_group: ranks that are added first, see `Recipe`.

    A rank without a gradient counts as zeros. One rank alone sends nothing.
    """
    first = next((g for g in grads if g is not None), None)
    if first is None:
        return None
    parts = [torch.zeros_like(first) if g is None else g for g in grads]
    if len(parts) == 1:
        return first.to(rest_dtype or first.dtype, copy=True)
    sent = [part.to(reduce_dtype or first.dtype) for part in parts]
    wide = torch.promote_types(sent[0].dtype, torch.float32)
    size = shard_group or len(sent)
    sums = []
    for start in range(0, len(sent), size):
        sums.append(sent[start].to(wide, copy=True))
        for part in sent[start + 1 : start + size]:
            sums[-1] += part.to(wide)
    total = sums[0]
    for other in sums[1:]:
        total += other
    total /= len(parts)
    return total.to(rest_dtype or first.dtype)


@dataclass
class _Accumulator:
    """Forward and backward of all ranks and micro-batches of a step on one model."""

    case: ModelCase
    model: nn.Module
    recipe: Recipe
    buffers: list[dict[str, Tensor]] = field(init=False)  # each rank has its own
    _losses: list[list[list[Tensor]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_ranks = 1 if self.recipe.concatenated else self.recipe.world_size
        self.buffers = [_copies(self.model.named_buffers()) for _ in range(self.num_ranks)]

    @property
    def losses(self) -> Tensor:
        return torch.stack([torch.stack([torch.stack(ranks) for ranks in step]) for step in self._losses])

    def gradients(self, step: int) -> Grads:
        """Reduced gradients by name; parameters that no rank gave one have None."""
        recipe = self.recipe
        total: Grads = {name: None for name, p in self.model.named_parameters() if p.requires_grad}
        losses: list[list[Tensor]] = [[] for _ in range(self.num_ranks)]
        sums: dict[str, list[Tensor]] = {}
        for micro in range(recipe.accumulation):
            by_rank = [self._backward(step, rank, micro, losses[rank]) for rank in range(self.num_ranks)]
            for name, so_far in total.items():
                parts = [grads[name] for grads in by_rank]
                if recipe.shard_group is not None and (micro or recipe.knows_several):
                    self._add_by_group(sums, name, so_far, parts)
                    continue
                grad = reduce_over_ranks(parts, recipe.reduce_dtype, recipe.accumulate_dtype, recipe.shard_group)
                if grad is None:
                    continue
                if recipe.accumulation > 1 and recipe.accumulate_dtype is None:
                    grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
                total[name] = grad if so_far is None else so_far + grad
        for name, of_groups in sums.items():
            total[name] = reduce_over_ranks(of_groups)
        self._losses.append(losses)
        return total

    def _add_by_group(
        self, sums: dict[str, list[Tensor]], name: str, so_far: Tensor | None, parts: Sequence[Tensor | None]
    ) -> None:
        """Add the mean of each group to its own sum, which begins with what all groups have."""
        recipe = self.recipe
        like = next((part for part in parts if part is not None), None)
        size = recipe.shard_group
        assert size is not None
        if like is None:
            return
        for group in range(len(parts) // size):
            its = [torch.zeros_like(like) if part is None else part for part in parts[group * size :][:size]]
            grad = reduce_over_ranks(its, recipe.reduce_dtype, recipe.accumulate_dtype)
            assert grad is not None
            if recipe.accumulation > 1 and recipe.accumulate_dtype is None:
                grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
            of_groups = sums.setdefault(name, [] if so_far is None else [so_far.clone() for _ in parts[::size]])
            if len(of_groups) <= group:
                of_groups.append(grad)
            else:
                of_groups[group] += grad

    def _backward(self, step: int, rank: int, micro: int, losses: list[Tensor]) -> Grads:
        recipe, model = self.recipe, self.model
        for name, buffer in model.named_buffers():
            buffer.copy_(self.buffers[rank][name])
        loss = recipe.rank_losses(self.case, model, step, rank, micro)
        recipe.for_backward(loss).backward()
        losses.append(loss.detach().clone())
        self.buffers[rank] = _copies(model.named_buffers())
        grads: Grads = {name: p.grad for name, p in model.named_parameters()}
        for p in model.parameters():
            p.grad = None
        return grads


def _to_half(master: Tensor, dtype: torch.dtype) -> Tensor:
    import optim

    return optim.to_bfloat16_half_up(master) if dtype == torch.bfloat16 else master.to(dtype)


def _unscaled(grad: Tensor | None, recipe: Recipe) -> Tensor | None:
    return grad if grad is None or recipe.loss_scale == 1.0 else grad.float() / recipe.loss_scale


def _exact_norm(pairs: Sequence[tuple[nn.Parameter, Tensor]], recipe: Recipe) -> float:
    """The global norm in fp64, of gradients in the dtype that they are held in, in the order of their parameters."""
    import optim

    if recipe.norm_type != 2.0:
        return max((float(g.abs().max()) for _, g in pairs if g.numel()), default=0.0)
    limbs = optim.zero_norm_limbs()
    for p, g in pairs:
        in_order = torch.empty_like(p, dtype=g.dtype).copy_(g)  # dense, with the strides of the parameter
        optim.accumulate_sum_of_squares_(limbs, in_order.as_strided((g.numel(),), (1,)))
    return optim.norm_from_limbs(limbs)


def _with_grad(like: nn.Parameter, grad: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty_like(like, dtype=grad.dtype), requires_grad=True)
    parameter.grad = grad
    return parameter


def _copies(named: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named}
