"""Loaders for an engine: of one rank's part of a dataset, and of whole windows only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from gemini.engine.config import Config
from gemini.errors import ConfigError
from gemini.script import warn_at_script


def loader_of(
    dataset: Dataset[Any],
    config: Config,
    rank: int,
    world_size: int,
    collate_fn: Callable[..., Any] | None = None,
    *,
    batch_size: int | None = None,
    sampler: Sampler[Any] | None = None,
    **options: Any,
) -> DataLoader[Any]:
    """A loader of micro-batches from this rank's part of a dataset. `sampler.set_epoch` shuffles it again. Local.

    Args:
        dataset, rank, world_size, collate_fn: as their names say.
        config: for the size of a micro-batch, and whether one that is not full is left out.
        batch_size: in place of the config's.
        sampler: which samples this rank gets. None: its part of a shuffled dataset.
        options: of the DataLoader.

    Raises ConfigError if the config has no batch size.
    """
    size = config.batch_sizes(world_size).micro if batch_size is None else batch_size
    if size is None:
        raise ConfigError("a loader needs a batch size: give train_batch_size or train_micro_batch_size_per_gpu")
    # An iterable dataset cannot be indexed by a sampler, so it has to divide itself over the ranks.
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, size, collate_fn=collate_fn, drop_last=config.drop_last, **options)
    # Without `drop_last` the sampler gives some samples twice, so that all ranks have equally many: a rank that has no
    # batch left would not come to the others' collectives.
    if sampler is None:
        sampler = DistributedSampler(dataset, world_size, rank, drop_last=config.drop_last)
    return DataLoader(dataset, size, sampler=sampler, collate_fn=collate_fn, drop_last=config.drop_last, **options)


class WholeWindows:
    """A loader without the micro-batches at its end that do not fill a window, as in Colossal-AI.

    Other attributes are those of the wrapped loader.
    """

    def __init__(self, loader: Any, window: int) -> None:
        self._loader = loader
        self._window = window

    def __len__(self) -> int:
        num_batches = len(self._loader)
        return num_batches - num_batches % self._window

    def __iter__(self) -> Iterator[Any]:
        num_batches = len(self._loader)
        if 0 < num_batches < self._window:
            # A loop by hand would end without a word, and nothing would have been trained.
            warn_at_script(
                f"the loader has {num_batches} micro-batches, fewer than the {self._window} of a step, and yields "
                "none: make gradient_accumulation_steps= smaller or give it more data",
            )
        # The iterator ends at the last whole window, so no batch behind it is drawn.
        return islice(iter(self._loader), len(self))

    def __getattr__(self, name: str) -> Any:
        # `copy` and pickle look attributes up before `_loader` is set. Forwarding them would recurse for ever.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)


def whole_windows(loader: Any, window: int) -> Any:
    """The loader in whole windows. The loader itself if a window is one batch, or if it has no length."""
    # Without a length nobody knows which window is the last one until the data end.
    return WholeWindows(loader, window) if window > 1 and length_of(loader) is not None else loader


def tell_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of everything that may order a loader's data: itself, its samplers, its dataset. Local.

    A sampler of samples may also be inside the sampler of batches that a DataLoader was given, and an iterable dataset
    shuffles by itself. What is not told repeats the order of its first epoch.
    """
    batches = getattr(loader, "batch_sampler", None)
    found = [loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]
    # By identity: a DataLoader shows the sampler that it was given at two places.
    for each in {id(each): each for each in [*found, getattr(loader, "dataset", None)]}.values():
        set_epoch = getattr(each, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)


def length_of(loader: Any) -> int | None:
    """The number of batches. None: it is not known, as with a DataLoader over an iterable dataset without a length."""
    try:
        return len(loader)
    except TypeError:
        return None
