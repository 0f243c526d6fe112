"""The models that every feature is tried on: small, awkward on purpose, the same on every machine.

`MODELS[name]` is a `ModelCase`: `build()` seeds itself, `batch(step, rank, world_size)` gives each rank other
data with as many tokens (so that the mean over ranks is the mean over the whole batch), `loss(model, batch)`
works on the plain module and on a wrapped one. All are without dropout. Tags say what a case is about;
`chunk_numel` is a chunk size that cuts it into several chunks (at least 8 if tagged "big").
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness.seed import seed
from tests.zoo import hf_models as hf
from tests.zoo.awkward import chains, checkpoints, experts, outputs, owners, shapes, uses

Batch = dict[str, Any]
ALIGNMENT = 256  # elements on which every parameter starts


def token_batch(vocab: int = 256, rows: int = 2, length: int = 16) -> Callable[..., Batch]:
    def batch(step: int, rank: int = 0, world_size: int = 1, micro: int = 0) -> Batch:
        tokens = torch.randint(0, vocab, (rows, length), generator=_generator(step, rank, micro))
        return {"tokens": tokens, "step": step}

    return batch


def image_batch(rows: int = 2, edge: int = 16, classes: int = 10) -> Callable[..., Batch]:
    def batch(step: int, rank: int = 0, world_size: int = 1, micro: int = 0) -> Batch:
        generator = _generator(step, rank, micro)
        images = torch.randn(rows, 3, edge, edge, dtype=torch.float64, generator=generator)
        return {"images": images, "labels": torch.randint(0, classes, (rows,), generator=generator)}

    return batch


def _generator(step: int, rank: int, micro: int) -> torch.Generator:
    return torch.Generator().manual_seed(1 + step * 10_007 + rank * 101 + micro)


def model_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The model computes its own loss; floating inputs follow the dtype of the first parameter."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    is_float = {k: isinstance(v, Tensor) and v.is_floating_point() for k, v in batch.items()}
    return model(**{k: v.to(dtype) if is_float[k] else v for k, v in batch.items()})


def penalised_loss(model: nn.Module, batch: Batch) -> Tensor:
    """A penalty on weights in the script, after the forward has returned."""
    penalty = sum(p.norm() for name, p in model.named_parameters() if name.endswith("weight"))
    return model_loss(model, batch) + 1e-3 * penalty


def loss_of_outputs(model: nn.Module, batch: Batch) -> Tensor:
    """A loss function outside the model."""
    return model_loss(model, batch).square().mean()


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """One model, its data and its loss."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[..., Batch]
    loss: Callable[[nn.Module, Batch], Tensor] = model_loss
    tags: frozenset[str] = frozenset()
    chunk_numel: int = 4096
    no_grad_names: tuple[str, ...] = ()  # prefixes of trainable parameters without a gradient at step 0

    def build(self, dtype: torch.dtype | None = None) -> nn.Module:
        """The model, same weights on every call, the caller's random state untouched; the cast comes last."""
        with torch.random.fork_rng(devices=[]):
            seed(1234)
            model = self.make().train()
        return model if dtype is None or "own_dtypes" in self.tags else model.to(dtype)

    @property
    def whole_batch_is_the_mean(self) -> bool:
        """Whether one forward on the concatenated batch is the mean over its parts, in fp64 to 1e-9."""
        return not self.tags & {"not_a_mean", "fp32_inside", "own_dtypes", "no_fp64"}

    def concatenated(self, step: int, world_size: int, micro: int = 0) -> Batch:
        """All ranks' batches of a step as one."""
        parts = [self.batch(step, rank, world_size, micro) for rank in range(world_size)]
        first = parts[0].items()
        return {k: torch.cat([p[k] for p in parts]) if isinstance(v, Tensor) else v for k, v in first}

    def __str__(self) -> str:
        return self.name


MODELS: dict[str, ModelCase] = {}


def _add(name: str, make: Callable[[], nn.Module], tags: str = "", **options: Any) -> None:
    options.setdefault("batch", token_batch())
    MODELS[name] = ModelCase(name=name, make=make, tags=frozenset(tags.split()), **options)


def cases(*, tags: str = "", without: str = "", names: Sequence[str] = ()) -> list[ModelCase]:
    """Cases that have all `tags` and none of `without` (space separated); `names` selects by name."""
    wanted, unwanted = set(tags.split()), set(without.split())
    chosen = [MODELS[name] for name in names] if names else list(MODELS.values())
    return [c for c in chosen if wanted <= c.tags and not unwanted & c.tags]


def padded_numel(parameter: Tensor) -> int:
    return -(-parameter.numel() // ALIGNMENT) * ALIGNMENT


# Hugging Face (fp32_inside: RMSNorm computes in fp32 whatever the dtype, so fp64 is not exact)
_add("gpt2", hf.gpt2, "hf big tied", chunk_numel=16384)
_add("gpt2_eager", lambda: hf.gpt2("eager"), "hf big tied", chunk_numel=16384)
_add("gpt2_checkpoint", lambda: hf.gpt2(reentrant=False), "hf big tied checkpoint", chunk_numel=16384)
_add("gpt2_reentrant", lambda: hf.gpt2(reentrant=True), "hf big tied checkpoint reentrant", chunk_numel=16384)
_add("llama", hf.llama, "hf big fp32_inside", chunk_numel=8192)
_add("llama_checkpoint", lambda: hf.llama(reentrant=False), "hf big fp32_inside checkpoint", chunk_numel=8192)
_add(
    "llama_reentrant",
    lambda: hf.llama(reentrant=True),
    "hf big fp32_inside checkpoint reentrant",
    chunk_numel=8192,
)
_add("bert", hf.bert, "hf big tied", chunk_numel=8192)
_add("t5", hf.t5, "hf big fp32_inside tied", chunk_numel=8192)
_add("vit", hf.vit, "hf big float_input", chunk_numel=8192, batch=image_batch())
_add("mixtral", hf.mixtral, "hf big fp32_inside moe not_a_mean no_fp64", chunk_numel=8192)
_add("qwen3_moe", hf.qwen3_moe, "hf big fp32_inside moe", chunk_numel=4096)
_add("neox", hf.neox, "hf big", chunk_numel=8192)

# plain chains
_add("chain", chains.Chain, "big")
_add("chain_loss_outside", chains.ChainOutputs, "big", loss=loss_of_outputs)
_add("layer_norm", chains.NormedChain, "big")
_add("input_needs_grad", chains.InputNeedsGrad)
_add("convolutions", chains.Convolutions, "float_input", batch=image_batch())
_add("large_embedding", chains.LargeEmbedding, "big oversize", chunk_numel=2048, batch=token_batch(vocab=1024))

# in-place operations and outputs of every shape
_add("inplace_on_output", outputs.InplaceOnOutput)
_add("inplace_on_view", outputs.InplaceOnView)
_add("inplace_on_view_output", outputs.InplaceOnViewOutput)
_add("tuple_and_dict_output", outputs.TupleAndDictOutput)
_add("dataclass_output", outputs.DataclassOutput)
_add("none_output", outputs.NoneOutput)
_add("parameter_output", outputs.ParameterOutput)

# who uses which parameter, when, how often
_add("reused", uses.Reused, "big")
_add("tied", uses.Tied, "tied")
_add("borrowed", uses.Borrowed, "big borrowed")
_add("norm_penalty", uses.NormPenalty, "big borrowed")
_add("norm_penalty_outside", chains.Chain, "big borrowed", loss=penalised_loss)
_add("twice_in_one_operation", uses.TwiceInOneOperation)
_add("several_forwards", chains.Chain, "big", loss=lambda m, b: model_loss(m, b) + model_loss(m, _flipped(b)))
_add("unused", uses.Unused, "unused", no_grad_names=("idle.",))
_add("sometimes_unused", uses.SometimesUnused, "unused", no_grad_names=("odd.",))
_add("dead_branch", uses.DeadBranch, "unused", no_grad_names=("dead.",))
_add("frozen", uses.Frozen, "frozen")
_add("frozen_body", uses.FrozenBody, "frozen big")

# parents that own and read parameters
_add("nested", owners.Nested, "big")
_add("root_parameter", owners.RootParameter, "big")
_add("parameter_containers", owners.ParameterContainers)
_add("multihead_attention", owners.Attention)
_add("transformer_encoder", owners.Encoder, "big")
_add("lstm", owners.Recurrent)
_add("gru", lambda: owners.Recurrent(nn.GRU))

# shapes and dtypes
_add("zero_size", shapes.ZeroSize, no_grad_names=())
_add("scalar", shapes.Scalar)
_add("odd_shapes", shapes.OddShapes, chunk_numel=1024)
_add("mixed_dtypes", shapes.MixedDtypes, "own_dtypes")
_add("batch_norm", shapes.BatchNorm, "buffers not_a_mean")

# recomputation
for _reentrant in (False, True):
    _end, _tags = ("_reentrant", "checkpoint reentrant") if _reentrant else ("", "checkpoint")
    _add(f"checkpoint_operator{_end}", lambda r=_reentrant: checkpoints.CheckpointOperator(r), _tags)
    _add(f"checkpoint_block{_end}", lambda r=_reentrant: checkpoints.CheckpointBlock(r), _tags)
    _add(f"checkpoint_all{_end}", lambda r=_reentrant: checkpoints.CheckpointAll(r), _tags)
    _add(f"checkpoint_shared{_end}", lambda r=_reentrant: checkpoints.CheckpointShared(r), _tags)

# children chosen by data
_add("experts", experts.Experts, "big moe chosen_by_data unused")
_add("experts_same_on_all_ranks", experts.ScheduledExperts, "big moe unused")


def _flipped(batch: Batch) -> Batch:
    return batch | {"tokens": batch["tokens"].flip(-1)}
