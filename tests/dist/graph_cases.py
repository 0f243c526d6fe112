"""Graphs that every rank drops without a complete backward."""

from tests.dropped_graphs import TwoHeads, assert_dropped_graphs_keep_nothing
from tests.mlp import wrap


def dropped(rank: int, world_size: int, kinds: tuple[str, ...], place: str) -> None:
    """The model has a leaf of which ranks may use different parts; its outputs are tied to its inputs."""
    model = wrap(place, TwoHeads)
    for kind in kinds:
        model.train()
        assert_dropped_graphs_keep_nothing(model, kind, 8)
    model.close()
