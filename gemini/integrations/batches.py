"""What a config says of batches and logs, where a script or its library decides about them."""

from __future__ import annotations

from gemini.engine.config import Config

_DEFAULT = Config()
_DECIDED_ELSEWHERE = {
    "train_batch_size": "the data loader and the micro-batches of a step decide",
    "train_micro_batch_size_per_gpu": "the data loader decides",
    "drop_last": "the data loader decides",
    "steps_per_print": "the script logs",
    "monitors": "the script logs",
}


def window_of(config: Config, world_size: int) -> int | None:
    """Micro-batches of an optimizer step, if the config says so, or both batch sizes; None if it does not. Local."""
    sizes = (config.train_batch_size, config.train_micro_batch_size_per_gpu)
    # One batch size alone leaves the other to the data loader, and so says nothing of the number of micro-batches.
    if config.gradient_accumulation_steps is None and None in sizes:
        return None
    return config.batch_sizes(world_size).accumulation


def without_effect(config: Config) -> list[str]:
    """A line for each key that changes nothing, with what happens instead. Local."""
    # A key that is left at its default asks for nothing, so it needs no line.
    here = {
        name: instead
        for name, instead in _DECIDED_ELSEWHERE.items()
        if getattr(config, name) != getattr(_DEFAULT, name)
    }
    return [f"without effect: {key}: {instead}" for key, instead in [*config.ignored, *here.items()]]
