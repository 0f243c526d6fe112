"""The `ranks` fixture: `ranks(world_size).run(case, *args)` on gloo processes that live for the session."""

from collections.abc import Iterator

import pytest

from tests.dist.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    codes = pool.stop()
    assert all(code == 0 for of_size in codes.values() for code in of_size), f"exit codes by world size: {codes}"
