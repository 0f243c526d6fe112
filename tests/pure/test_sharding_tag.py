"""A tag survives two signed integers; a mismatch says who expected what."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding import TAG_WORDS, Tag, TagMismatch

FIELD = st.integers(0, 2**32 - 1)


@given(st.builds(Tag, FIELD, FIELD, FIELD, FIELD))
def test_a_tag_survives_two_signed_64_bit_integers(tag: Tag) -> None:
    words = tag.pack()
    assert len(words) == TAG_WORDS
    assert all(-(2**63) <= word < 2**63 for word in words)
    assert Tag.unpack(words) == tag


@pytest.mark.parametrize("field", Tag._fields)
@pytest.mark.parametrize("value", [-1, 2**32])
def test_a_field_that_does_not_fit_is_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match="unsigned 32-bit"):
        Tag(1, 2, 3, 4)._replace(**{field: value}).pack()


def test_a_mismatch_names_every_rank_and_can_be_sent() -> None:
    mine, theirs = Tag(0xABCDEF01, 12, 3, 7), Tag(0xABCDEF01, 12, 5, 8)
    error = TagMismatch(0, mine, {0: mine, 1: theirs})
    text = str(error)
    assert "rank 0 expected chunk 3 at moment 7 (collective 12 of plan abcdef01)" in text
    assert "rank 1: chunk 5 at moment 8 (collective 12 of plan abcdef01)" in text
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.rank, copy.expected, copy.found, str(copy)) == (0, mine, {0: mine, 1: theirs}, text)
