"""What the ranks of one watch tell one another, in the store of the process group.

Messages of a generation have keys of their own: after a failure that all ranks caught nobody reads those from before.
Any method raises RuntimeError if the rank that holds the store is gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch._C._distributed_c10d import PrefixStore

from gemini.ranks import exit_report


class Messages:
    """This rank's messages, and those that it reads."""

    def __init__(self, prefix: str, rank: int, world_size: int) -> None:
        """prefix: of all keys, equal on all ranks of the watch, and of no other watch."""
        self.generation = 0
        self._rank = rank
        self._world_size = world_size
        self._store = PrefixStore(prefix, exit_report.default_store())
        self._heard = -1  # the last generation whose failure this rank knows of
        self._met = ""  # key of this rank's last message at a meeting

    def begin_generation(self) -> None:
        """Use other keys from now on."""
        self.generation += 1

    def _key(self, name: str) -> str:
        return f"{self.generation}/{name}"

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    # -- failures

    def publish_failure(self, words: str) -> None:
        """Say that this rank failed, unless another has: the first failure stays, later ones are mostly its results."""
        # With "" as the expected value `compare_set` writes only if the key does not exist yet.
        self._store.compare_set(self._key("error"), "", f"{self._rank}\n{words}")
        self.note_heard()

    def failure(self) -> tuple[int, str] | None:
        """(rank, words) of the failure of this generation."""
        found = self._read(self._key("error"))
        if found is None:
            return None
        rank, words = found.split("\n", 1)
        return int(rank), words

    def note_heard(self) -> None:
        """Say that this rank knows of the failure."""
        if self._heard < self.generation:
            self._heard = self.generation
            self._store.set(self._key(f"heard/{self._rank}"), "")

    @property
    def knows_failure(self) -> bool:
        """Whether this rank knows of a failure of this generation."""
        return self._heard == self.generation

    def has_heard(self, rank: int) -> bool:
        """Whether `rank` knows of the failure of this generation."""
        return bool(self._store.check([self._key(f"heard/{rank}")]))

    def tear(self, words: str) -> None:
        """Say, for all generations to come, that this rank failed in the middle of an update."""
        self._store.compare_set("torn", "", f"rank {self._rank}: {words}")

    def torn(self) -> str | None:
        """What was said of an update that a rank did not finish."""
        return self._read("torn")

    # -- places

    def say_where(self, number: int, words: str) -> None:
        """Say at which collective this rank waits."""
        self._store.set(self._key(f"where/{self._rank}"), f"{number}\n{words}")

    def places(self) -> dict[int, tuple[str, str]]:
        """(number of collective, description) of each rank that has waited for long."""
        places = {rank: self._read(self._key(f"where/{rank}")) for rank in range(self._world_size)}
        return {rank: (place.split("\n")[0], place.split("\n")[1]) for rank, place in places.items() if place}

    def drop_place(self) -> None:
        """This rank waits no more: its place must not be compared with others' places in later collectives."""
        self._store.delete_key(self._key(f"where/{self._rank}"))

    # -- meetings

    def begin_meeting(self, number: int, words: str) -> Sequence[str]:
        """Say that this rank is here, at collective `number`. Returns the keys of all ranks' messages, by rank."""
        # With the number in the key, a rank that left the schedule at another collective does not complete this
        # meeting.
        keys = [self._key(f"met/{number}/{rank}") for rank in range(self._world_size)]
        self._store.set(keys[self._rank], words)
        return keys

    def all_met(self, keys: Sequence[str]) -> bool:
        """Whether all ranks have come."""
        return bool(self._store.check(list(keys)))

    def said(self, keys: Sequence[str]) -> list[str]:
        """What the ranks said, by rank. All have come."""
        return [self._store.get(key).decode() for key in keys]

    def end_meeting(self, keys: Sequence[str]) -> None:
        """All ranks have come, so each has left the meeting before this one and has read its messages."""
        if self._met:
            self._store.delete_key(self._met)
        self._met = keys[self._rank]

    def join(self) -> int:
        """Say that this rank is at the start of the generation. Returns the number of ranks that have come there."""
        return int(self._store.add(self._key("joined"), 1))

    def num_joined(self) -> int:
        """The number of ranks that have come there."""
        # Adding 0 reads the counter.
        return int(self._store.add(self._key("joined"), 0))
