"""Plain values as JSON: they come back as they were, with their types, or are refused with their place."""

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemini import CheckpointError
from gemini.checkpoint.values import decode, encode

KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.lists(inner).map(deque),
        st.dictionaries(KEYS, inner),
        st.dictionaries(st.sampled_from(["$", "v", "a"]), inner),
        st.dictionaries(KEYS, inner).map(OrderedDict),
        st.sets(KEYS),
        st.frozensets(KEYS),
    ),
    max_leaves=12,
)


def there_and_back(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, "it"))))


def assert_alike(found: Any, value: Any) -> None:
    assert type(found) is type(value)
    if isinstance(value, dict):
        assert len(found) == len(value)
        for (key, its), (known, wanted) in zip(found.items(), value.items(), strict=True):
            assert_alike(key, known)
            assert_alike(its, wanted)
    elif isinstance(value, (list, tuple, deque)):
        assert len(found) == len(value)
        for its, wanted in zip(found, value, strict=True):
            assert_alike(its, wanted)
    else:
        assert found == value


@given(VALUES)
def test_values_come_back_with_their_types(value: Any) -> None:
    assert_alike(there_and_back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.empty(0, 3, dtype=torch.int16),
        torch.tensor([True, False]),
        torch.randn(5, requires_grad=True),
        torch.tensor([1 + 2j]),
    ],
    ids=["float", "transposed", "no dimension", "empty", "bool", "leaf", "complex"],
)
def test_tensors_come_back(value: torch.Tensor) -> None:
    found = there_and_back(value)
    assert found.dtype is value.dtype and torch.equal(found, value) and not found.requires_grad
    found.add_(found)  # it is the loader's own, to write to


def test_other_values_come_back() -> None:
    array = np.arange(6, dtype=">i2").reshape(2, 3)
    found = there_and_back({"array": array, "scalar": np.float32(0.1), "size": torch.Size([2, 3])})
    assert np.array_equal(found["array"], array) and found["array"].dtype == array.dtype
    assert type(found["scalar"]) is np.float32 and found["scalar"] == np.float32(0.1)
    assert type(found["size"]) is torch.Size and found["size"] == (2, 3)
    assert there_and_back(torch.bfloat16) is torch.bfloat16
    assert there_and_back(torch.device("cuda:1")) == torch.device("cuda:1")
    assert there_and_back(Counter({2: 3})) == Counter({2: 3}) and type(there_and_back(Counter())) is Counter
    assert math.isnan(there_and_back(float("nan"))) and there_and_back([-math.inf]) == [-math.inf]
    assert math.copysign(1.0, there_and_back(-0.0)) == -1.0


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, object()]}, r"it\['a'\]\[1\] is a builtins.object"),
        ({"a": {"b": lambda: 0}}, r"it\['a'\]\['b'\] is a builtins.function"),
        ([Color.RED], r"it\[0\] is a .*Color"),
        ({(1, 2): defaultdict(int)}, r"it\[\(1, 2\)\] is a collections.defaultdict"),
        ({Color.RED: 1}, r"it key <Color.RED: 1> is a .*Color"),
        (np.array([object()]), "it is a numpy.ndarray"),
    ],
    ids=["object", "function", "enum", "subclass", "key", "objects of NumPy"],
)
def test_a_refusal_names_the_place(value: Any, place: str) -> None:
    with pytest.raises(CheckpointError, match=place):
        encode(value, "it")


@pytest.mark.parametrize(
    "written",
    [
        {"$": "pickle", "v": "gASVAA=="},
        {"$": "tuple"},
        {"$": "tuple", "v": 3},
        {"$": "dict", "v": [[1, 2, 3]]},
        {"$": "tensor", "v": "AAAA", "dtype": "float32", "shape": [4]},
        {"$": "tensor", "v": "", "dtype": "load", "shape": []},
        {"$": "numpy", "v": "AAAA", "dtype": "O", "shape": [1]},
        {"$": "numpy scalar", "v": "", "dtype": "<f4"},
        {"$": "torch.device", "v": "nowhere"},
        {"$": ["tuple"], "v": []},
        {"$": "set", "v": [[1]]},
    ],
    ids=str,
)
def test_what_was_not_written_by_us_is_refused(written: Any) -> None:
    with pytest.raises(CheckpointError, match="in a checkpoint"):
        decode(written)
