"""What most of these models share: an embedding, a head, and a loss that moves every logit."""

from torch import Tensor, nn

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
