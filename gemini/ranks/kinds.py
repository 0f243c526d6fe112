"""Kinds of collectives: what each is for. A tag carries the kind as a number, and errors name it.

The upper bits of a tag's chunk hold the kind, so that collectives of two kinds at one place have different tags.
"""

from __future__ import annotations

from sharding import Tag

KINDS = (
    *("all-gather", "reduce-scatter"),  # of a chunk
    *("gradient summary", "largest gradient", "end of backward", "points of reduction", "unsynced gradients"),
    *("agreement on complete gradients", "agreement on the pass", "names of states"),
    *("change of what is trained", "change of what is compiled"),
    *("new param group", "discard_state()", "the optimizer's settings", "dropped models", "change of optimizer states"),
    *("choice of optimizer", "loaded optimizer state"),
)
"""Kinds with a number of their own. All others share the next one: ranks compare what they say of it otherwise."""
KIND_SHIFT = 24
_OF_CHUNKS = KINDS[:2]


def in_words(what: str, chunk: int) -> str:
    """A collective of this kind, for an error: with its chunk, if it has one."""
    return f"{what} of chunk {chunk}" if what in _OF_CHUNKS else what


def tag_in_words(tag: Tag) -> str:
    """The collective that has this tag, for an error."""
    kind, chunk = divmod(tag.chunk, 1 << KIND_SHIFT)
    return in_words(KINDS[kind] if kind < len(KINDS) else "collective", chunk)
