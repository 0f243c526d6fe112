"""Random walks over what users do to a model in and between steps, beside a plain model to which the same is done.

Each operation is done to both. Where `docs/assumptions.md` says that the wrapped model differs, the operation brings
the plain one to the same state, or leaves the case out; a comment says so. On several ranks all have the same batches:
the mean of equal gradients has the bits of one of them, for world sizes that are powers of two.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gemini import ShardedModel, ShardedOptimizer
from tests.harness.devices import CPU, emulated
from tests.harness.seed import seed
from tests.zoo.drawn import Operations

WIDTH, VOCABULARY, BLOCKS = 16, 11, 3


class Block(nn.Module):
    """A layer with a parameter of its own, which may be checkpointed."""

    reentrant: bool | None = None  # None: not checkpointed

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def body(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x)))) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None or not torch.is_grad_enabled():
            return x + self.body(x)
        return x + checkpoint(self.body, x, use_reentrant=self.reentrant)


class Net(nn.Module):
    """Tied weights, a scalar, buffers, and parts that a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.extra, self.temperature = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(1.5))
        self.uses_extra, self.skipped = False, frozenset[int]()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                x = block(x)
        x = self.norm(x.flatten(0, 1)).view_as(x)
        if self.uses_extra:
            x = x + self.extra(x)
        return self.head(x) * self.temperature


def build() -> Net:
    """The same weights on every call."""
    with torch.random.fork_rng(devices=[]):
        seed(5)
        return Net()


def tokens(number: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(number))


def batch_for(model: Any, number: int) -> Tensor:
    """`tokens(number)` where the weights of a wrapped or a plain model are."""
    return tokens(number).to(net_of(model).temperature.device)


def loss_of(model: nn.Module, number: int) -> Tensor:
    batch = batch_for(model, number)
    return functional.cross_entropy(model(batch).flatten(0, 1), batch.roll(1, 0).flatten())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=False),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True, foreach=False),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-2, foreach=False),
}


class Walk:
    """Both models with their optimizers, and what has been done to them."""

    optimizers = OPTIMIZERS
    checkpoints: tuple[bool | None, ...] = None, False, True

    def __init__(self, chance: random.Random, world_size: int, device: torch.device = CPU) -> None:
        self.chance, self.world_size, self.device = chance, world_size, device
        self.options, self.name = self.draw_options(), chance.choice(list(self.optimizers))
        self.model = ShardedModel(build(), device=emulated(device), rank_timeout=60, **self.options)
        self.plain = self.build_plain()
        made = [self.optimizers[self.name](self._groups(model)) for model in (self.model, self.plain)]
        self.optimizer, self.its = self.finish(self.model, made[0]), self.finish(self.plain, made[1])
        self.has_extra = False  # the group of `extra` was added
        self.has_forgotten = False  # states of frozen parameters were given up
        self.saved: list[Any] | None = None
        self.hooks: list[Any] = []  # of a parameter
        self.module_hooks: list[Any] = []
        self.done: list[str] = []

    def build_plain(self) -> nn.Module:
        """The model that the wrapped one is held against."""
        return build().to(self.device)

    def draw_options(self) -> dict[str, Any]:
        """Arguments of `ShardedModel`."""
        options = {
            "tensor_placement_policy": self.chance.choice(["auto", "cpu", "cuda", "static"]),
            "stage": self.chance.choice([0, 1, 2, 3, 3]),
            "max_prefetch": self.chance.choice([0, 1, 4]),
        }
        size = self.chance.choice([None, 512, 1024, 2048, 2**14])
        return options if size is None else {**options, "chunk_size": size}

    def finish(self, model: Any, optimizer: torch.optim.Optimizer) -> Any:
        """What updates this model, made of an optimizer over its parameters."""
        return ShardedOptimizer(model, optimizer) if isinstance(model, ShardedModel) else optimizer

    def scale(self, optimizer: Any, loss: Tensor) -> Tensor:
        """The loss that this optimizer's model takes a backward of."""
        return loss

    @staticmethod
    def _groups(model: nn.Module) -> list[dict[str, Any]]:
        some = [parameter for name, parameter in model.named_parameters() if "extra" not in name]
        return [{"params": some[::2]}, {"params": some[1::2], "lr": 0.02}]

    def both(self, do: Callable[[Any, Any], Any]) -> list[Any]:
        """Do it to the wrapped model and its optimizer, then to the plain ones."""
        state = torch.get_rng_state()
        ours = do(self.model, self.optimizer)
        torch.set_rng_state(state)
        return [ours, do(self.plain, self.its)]

    def agree(self, do: Callable[[Any, Any], Tensor | None]) -> None:
        """Do it to both, and compare what comes back."""
        assert_same(*self.both(do), self.done[-1])

    def names(self, count: int = 1, trained: bool = False) -> list[str]:
        """Some parameters that are in a param group. trained: only if they are trained now."""
        found = [
            name
            for name, parameter in self.plain.named_parameters()
            if (self.has_extra or "extra" not in name) and (parameter.requires_grad or not trained)
        ]
        return self.chance.sample(found, min(count, len(found)))

    def number(self) -> int:
        """Of a batch. Even where ranks have others, it is odd on all of them or on none."""
        return self.chance.randrange(100)

    def walk(self, length: int) -> None:
        """Do as many random operations, with both models compared now and then."""
        always = self.chance.random() < 0.5  # comparing reads weights and gradients, which is an operation itself
        for _ in range(length):
            operation.draw(self, self.chance, self.done)
            if self.chance.random() < 0.2 or always:
                self.compare()
        self.compare()
        self.model.close()

    def compare(self) -> None:
        pairs = zip(self.model.named_parameters(), self.plain.named_parameters(), strict=True)
        for (name, ours), (its_name, its) in pairs:
            assert name == its_name
            assert ours.requires_grad == its.requires_grad, name
            assert_same(ours.detach().clone(), its.detach(), name)
            assert_same(ours.grad, its.grad, f"gradient of {name}")
        for (name, ours_too), (_, its_too) in zip(self.model.named_buffers(), self.plain.named_buffers(), strict=True):
            assert_same(ours_too, its_too, name)


def assert_same(ours: Tensor | None, its: Tensor | None, what: str) -> None:
    assert (ours is None) == (its is None), what
    assert ours is its is None or torch.equal(ours.detach().to(CPU, copy=True), its.detach().to(CPU)), what  # type: ignore[union-attr]


def of(model: nn.Module, name: str) -> nn.Parameter:
    return dict(model.named_parameters())[name]


def net_of(model: Any) -> Net:
    """Of a wrapped model, an engine, or a plain model."""
    return getattr(model, "module", model)  # plain nets have no part of this name


operation = Operations[Walk]()


def zero_both(walk: Walk) -> None:
    walk.both(lambda model, _: model.zero_grad())
