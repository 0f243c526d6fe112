"""Plain torch models, each awkward in one way: how parameters are used, owned, shared, shaped or recomputed.

All read `tokens` (rows × length), or `images` and `labels`, and return their loss; H is the hidden width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

H = 32
VOCAB = 256


def mean_logsumexp(logits: Tensor) -> Tensor:
    """A loss that moves every logit and is a mean over tokens."""
    return logits.logsumexp(-1).mean() + 0.1 * logits.square().mean()


def linears(count: int, width: int = H) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, width) for _ in range(count))


class Embedded(nn.Module):
    """An embedding and a head around `body`, which subclasses write."""

    def __init__(self, vocab: int = VOCAB) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, H)
        self.head = nn.Linear(H, 64)

    def body(self, h: Tensor, step: int) -> Tensor:
        raise NotImplementedError

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        return mean_logsumexp(self.head(self.body(self.embed(tokens), step)))


# ---- plain chains --------------------------------------------------------------------------------


class Chain(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(28)

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return h


class ChainOutputs(Chain):
    """Returns logits: the loss is computed outside."""

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        return self.head(self.body(self.embed(tokens), step))


class NormedChain(Embedded):
    """Weights and 1-D weights whose values backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(24)
        self.norms = nn.ModuleList(nn.LayerNorm(H) for _ in range(24))

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h = h + torch.tanh(layer(norm(h)))
        return h


class InputNeedsGrad(nn.Module):
    """The root's input requires a gradient, and nothing is embedded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, H))

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        x = F.one_hot(tokens % H, H).to(self.scale.dtype).requires_grad_()
        h = x * self.scale
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return mean_logsumexp(h)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.second = nn.Conv2d(16, 16, 3, stride=2, bias=False)
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        h = F.gelu(self.norm(self.first(images)))
        h = F.gelu(self.second(h)).mean((-1, -2))
        return F.cross_entropy(self.head(h), labels)


class LargeEmbedding(Embedded):
    """An embedding larger than a chunk, and a head tied to nothing of the same size."""

    def __init__(self) -> None:
        super().__init__(vocab=1024)
        self.layers = linears(6)
        self.head = nn.Linear(H, 1024, bias=False)

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h


# ---- in-place operations and outputs of every shape ----------------------------------------------


class InplaceOnOutput(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = F.relu_(layer(h).add_(0.1))
        return h


class InplaceOnView(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = layer(h)
            view = h.unsqueeze(0).squeeze(0)
            view += 1.0
            h = torch.tanh(view)
        return h


class MatmulView(nn.Module):
    """An operator whose output is a view; autograd saves its weight itself (`x @ w` takes no view of it)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(H, H) / H**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).view(-1, H)


class InplaceOnViewOutput(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.first = MatmulView()
        self.second = MatmulView()

    def body(self, h: Tensor, step: int) -> Tensor:
        h = self.first(h)
        h += 1.0
        return self.second(torch.tanh(h))


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(H, H) / H**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x @ self.weight, {"scaled": [x * self.weight.sum()], "nothing": None}


class TupleAndDictOutput(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwoOutputs() for _ in range(3))

    def body(self, h: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            product, more = block(h)
            h = torch.tanh(product + 0.1 * more["scaled"][0])
        return h


@dataclass
class Hidden:
    value: Tensor
    gate: Tensor | None = None


class GatedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(H, H)
        self.gate = nn.Linear(H, H)

    def forward(self, hidden: Hidden) -> Hidden:
        return Hidden(value=torch.tanh(self.value(hidden.value)), gate=torch.sigmoid(self.gate(hidden.value)))


class DataclassOutput(Embedded):
    """Operators behind blocks that take and return a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GatedBlock() for _ in range(3))

    def body(self, h: Tensor, step: int) -> Tensor:
        hidden = Hidden(h)
        for block in self.blocks:
            hidden = block(hidden)
            hidden = Hidden(hidden.value * hidden.gate)
        return hidden.value


class AppendTo(nn.Module):
    """Returns None: what it computes goes into the list it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(H, H) / H**0.5)

    def forward(self, x: Tensor, into: list[Tensor]) -> None:
        into.append(torch.tanh(x @ self.weight))


class NoneOutput(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AppendTo() for _ in range(3))

    def body(self, h: Tensor, step: int) -> Tensor:
        outputs = [h]
        for block in self.blocks:
            block(outputs[-1], outputs)
        return outputs[-1] + outputs[1]


class GiveParameter(nn.Module):
    """Returns its parameter itself, or a view of it."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.weight = nn.Parameter(torch.randn(H, H) / H**0.5)

    def forward(self) -> Tensor:
        return self.weight.t() if self.transposed else self.weight


class ParameterOutput(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.givers = nn.ModuleList(GiveParameter(transposed) for transposed in (False, True, False))

    def body(self, h: Tensor, step: int) -> Tensor:
        for giver in self.givers:
            h = torch.tanh(F.linear(h, giver()))
        return h


# ---- who uses which parameter, when, how often ---------------------------------------------------


class Reused(Embedded):
    """Operators that run several times in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(20)

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in [*self.layers, *self.layers]:
            h = h + torch.tanh(layer(torch.tanh(layer(h))))
        return h


class Tied(Embedded):
    """The head is the embedding, and two layers share one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)
        self.layers[2].bias = self.layers[0].bias
        self.head = nn.Linear(H, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h


class Borrowed(nn.Module):
    """The root, which owns no parameter, multiplies by children's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, H)
        self.layers = linears(24)

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        h = self.embed(tokens)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        h = h @ self.layers[0].weight + F.linear(h, self.layers[-1].weight[:H])
        return mean_logsumexp(F.linear(h, self.embed.weight))


class NormPenalty(Borrowed):
    """A penalty on released weights, inside the root's forward."""

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        penalty = sum(layer.weight.norm() + (layer.bias * layer.bias).sum() for layer in self.layers)
        return super().forward(tokens, step) + 0.01 * penalty


class TwiceInOneOperation(Embedded):
    """One parameter on both sides of one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = MatmulView()
        self.second = MatmulView()

    def body(self, h: Tensor, step: int) -> Tensor:
        w, u = self.first.weight, self.second.weight
        h = torch.tanh(h @ (w @ w))
        h = torch.tanh(torch.einsum("...i,ij,jk->...k", h, u, u))
        return h * (w * w).sum() / H


class Unused(Embedded):
    """`idle` is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(3)
        self.idle = nn.Linear(H, H)

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h


class SometimesUnused(Embedded):
    """`odd` runs at odd steps only, `even` at even ones, on all ranks alike."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Linear(H, H)
        self.odd = nn.Linear(H, H)

    def body(self, h: Tensor, step: int) -> Tensor:
        return torch.tanh(self.odd(h) if step % 2 else self.even(h))


class DeadBranch(Embedded):
    """`dead` runs in forward, but its output goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(3)
        self.dead = nn.Linear(H, H)

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = torch.tanh(layer(h))
            self.dead(h)
        return h


class Frozen(Embedded):
    """A frozen operator between trainable ones, and a frozen bias beside a trainable weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)
        self.layers[1].requires_grad_(False)
        self.layers[2].bias.requires_grad_(False)

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h


class FrozenBody(Chain):
    """Only the head learns, with low-rank adapters on the last layers: most of the model is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.head.requires_grad_(True)
        self.down = nn.Linear(H, 4, bias=False)
        self.up = nn.Linear(4, H, bias=False)

    def body(self, h: Tensor, step: int) -> Tensor:
        return super().body(h + self.up(self.down(h)), step)


# ---- parents that own and read parameters --------------------------------------------------------


class ScaledBlock(nn.Module):
    """Owns `scale` and `shift`, used before, between and after its children, which have children too."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, H))
        self.layer = nn.Linear(H, H)
        self.inner = ScaledBlock(depth - 1) if depth else nn.Linear(H, H)
        self.shift = nn.Parameter(torch.linspace(-0.1, 0.1, H))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x * self.scale))
        h = self.inner(h + self.shift) * self.scale
        return torch.tanh(h) + self.shift


class Nested(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ScaledBlock(depth=3) for _ in range(5))

    def body(self, h: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h


class RootParameter(Chain):
    """The root's own parameter is used around every child."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.9, 1.1, H))

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = torch.tanh(layer(h)) * self.scale + h
        return h


class ParameterContainers(Embedded):
    """`ParameterList` and `ParameterDict`: containers own the parameters, but never run."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(H, H) / H**0.5 for _ in range(4))
        self.vectors = nn.ParameterDict({"scale": torch.ones(H), "shift": torch.zeros(H)})

    def body(self, h: Tensor, step: int) -> Tensor:
        for matrix in self.matrices:
            h = torch.tanh(h @ matrix) * self.vectors["scale"] + self.vectors["shift"]
        return h


class Attention(Embedded):
    """`nn.MultiheadAttention` reads its child's weight without calling the child."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(H, 4, batch_first=True) for _ in range(2))

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = h + layer(h, h, h, need_weights=False)[0]
        return h


class Encoder(Embedded):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(H, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)

    def body(self, h: Tensor, step: int) -> Tensor:
        return self.encoder(h)


class Recurrent(Embedded):
    """Recurrent modules hand a list of their weights to one function."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.recurrent = kind(H, H // 2, num_layers=2, bidirectional=True, batch_first=True)

    def body(self, h: Tensor, step: int) -> Tensor:
        return self.recurrent(h)[0]


# ---- shapes and dtypes ---------------------------------------------------------------------------


class ZeroSize(Embedded):
    """Parameters of no elements, one of them used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(H, H)
        self.empty = nn.Parameter(torch.empty(0, H))
        self.also_empty = nn.Parameter(torch.empty(3, 0, 2))

    def body(self, h: Tensor, step: int) -> Tensor:
        h = torch.tanh(self.layer(h))
        return h + self.empty.sum() + self.also_empty.sum()


class Scalar(Embedded):
    """0-dimensional parameters: a temperature on the root, a gate on an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.layers = linears(3)
        self.layers[1].gate = nn.Parameter(torch.tensor(1.3))

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h * self.temperature * self.layers[1].gate


class OddShapes(nn.Module):
    """No dimension is a multiple of anything; one weight is not contiguous when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(251, 31)
        self.first = nn.Linear(31, 17)
        self.second = nn.Linear(17, 53, bias=False)
        self.cube = nn.Parameter(torch.randn(3, 5, 7) / 5)
        self.third = nn.Linear(53, 29)
        self.turned = nn.Parameter(torch.randn(13, 29).t())

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        h = self.third(torch.tanh(self.second(torch.tanh(self.first(self.embed(tokens % 251))))))
        return mean_logsumexp(torch.tanh(h) @ self.turned) * self.cube.tanh().square().sum()


class MixedDtypes(nn.Module):
    """fp32, bf16 and fp64 parameters side by side; activations are cast on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, H)
        self.low = nn.Linear(H, H, dtype=torch.bfloat16)
        self.middle = nn.Linear(H, H)
        self.high = nn.Linear(H, H, dtype=torch.float64)
        self.low_again = nn.Linear(H, H, dtype=torch.bfloat16)

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        h = self.embed(tokens)
        for layer in (self.low, self.middle, self.high, self.low_again):
            h = torch.tanh(layer(h.to(layer.weight.dtype)))
        return mean_logsumexp(h.float())


class BatchNorm(Embedded):
    """Buffers, floating and integer, that change in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(3)
        self.norms = nn.ModuleList(nn.BatchNorm1d(H) for _ in range(3))

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h = torch.tanh(norm(layer(h).transpose(1, 2)).transpose(1, 2))
        return h


# ---- recomputation -------------------------------------------------------------------------------


class Checkpointed(Embedded):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = linears(4)

    def again(self, function: Any, *inputs: Tensor) -> Tensor:
        return checkpoint(function, *inputs, use_reentrant=self.reentrant)


class CheckpointOperator(Checkpointed):
    """Each operator in a region of its own."""

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = self.again(lambda x, layer=layer: torch.tanh(layer(x)), h)
        return h


class CheckpointBlock(Checkpointed):
    """Several operators in one region, between operators outside it."""

    def body(self, h: Tensor, step: int) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return self.layers[2](torch.tanh(self.layers[1](x)))

        return torch.tanh(self.layers[3](self.again(block, self.layers[0](h))))


class CheckpointAll(Checkpointed):
    """The whole model after the embedding, loss included, in one region."""

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        def rest(h: Tensor) -> Tensor:
            for layer in self.layers:
                h = torch.tanh(layer(h))
            return mean_logsumexp(self.head(h))

        return self.again(rest, self.embed(tokens))


class CheckpointShared(Checkpointed):
    """One block in four regions: under reentrant checkpointing its parameters get gradients four times."""

    def body(self, h: Tensor, step: int) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return self.layers[1](F.gelu(self.layers[0](x)))

        for _ in range(4):
            h = h + self.again(block, h)
        return self.layers[3](torch.tanh(self.layers[2](h)))


# ---- children chosen by data ---------------------------------------------------------------------


class ExpertLayer(nn.Module):
    """Top-1 routing over experts that are modules: each rank's batch wakes others of them."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(H, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(H, 2 * H), nn.GELU(), nn.Linear(2 * H, H)) for _ in range(num_experts)
        )

    def forward(self, h: Tensor) -> Tensor:
        weights, chosen = self.router(h).softmax(-1).max(-1)
        out = torch.zeros_like(h)
        for expert in chosen.unique().tolist():
            rows = (chosen == expert).nonzero()[:, 0]
            out = out.index_add(0, rows, self.experts[expert](h[rows]) * weights[rows, None])
        return h + out


class Experts(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ExpertLayer(16) for _ in range(2))

    def body(self, h: Tensor, step: int) -> Tensor:
        h = h[:, :3].reshape(-1, H)  # few tokens: some experts stay idle
        for layer in self.layers:
            h = layer(h)
        return h


class ScheduledExperts(Embedded):
    """The step, not the data, chooses the experts, so all ranks run the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(H, 2 * H), nn.GELU(), nn.Linear(2 * H, H)) for _ in range(8)
        )

    def chosen(self, step: int) -> Iterator[nn.Module]:
        yield from (self.experts[(step + offset) % len(self.experts)] for offset in (0, 3, 4))

    def body(self, h: Tensor, step: int) -> Tensor:
        for expert in self.chosen(step):
            h = h + expert(h)
        return h
