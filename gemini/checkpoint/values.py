"""What a checkpoint has beside tensors: plain values, states of schedules and data, random numbers."""

from __future__ import annotations

import base64
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gemini.errors import CheckpointError

# -- The random number generators of this process: Python's, NumPy's, torch's on the CPU and on the model's device.


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator that belongs to nobody. Plain values and small tensors. Local."""
    found = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if device.type != "cpu":
        found[device.type] = torch.get_device_module(device).get_rng_state(device)
    return found


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set the generators to what `random_state` returned, also of a process with another device. Local."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)


# -- Plain Python values as JSON, without pickle: what schedulers, samplers and scripts keep beside tensors.
#
# JSON has no tuples, bytes, tensors or keys that are no strings. Such a value is an object with the one key "$", whose
# value names the type, and "v". Decoding makes values of these types only: a file from elsewhere can run no code.


_TAG = "$"


def encode(value: Any, path: str) -> Any:
    """`value` as what `json` can write. Raises CheckpointError that names what has no form, and its place in `path`."""
    # The exact types count: a subclass, such as an enum that is an int, would come back as another type.
    kind = type(value)
    if value is None or kind in (bool, int, str, float):
        return value
    if kind is list:
        return [encode(each, f"{path}[{number}]") for number, each in enumerate(value)]
    if kind is dict and all(type(key) is str and key != _TAG for key in value):
        return {key: encode(each, f"{path}[{key!r}]") for key, each in value.items()}
    if kind in _PAIRS:
        pairs = [[encode(key, f"{path} key {key!r}"), encode(its, f"{path}[{key!r}]")] for key, its in value.items()]
        return {_TAG: _PAIRS[kind], "v": pairs}
    if kind in _SEQUENCES:
        # Sets have no order of their own: sorted, equal sets are equal files.
        items = sorted(value, key=repr) if kind in (set, frozenset) else value
        return {_TAG: _SEQUENCES[kind], "v": [encode(each, f"{path}[...]") for each in items]}
    if kind in (bytes, bytearray):
        return {_TAG: kind.__name__, "v": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        return _encode_tensor(value)
    if kind is np.ndarray and not value.dtype.hasobject:
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {_TAG: "numpy", "v": data, "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return {_TAG: "numpy scalar", "v": base64.b64encode(value.tobytes()).decode(), "dtype": value.dtype.str}
    if kind is torch.Size:
        return {_TAG: "torch.Size", "v": list(value)}
    if kind is torch.dtype:
        return {_TAG: "torch.dtype", "v": name_of(value)}
    if kind is torch.device:
        return {_TAG: "torch.device", "v": str(value)}
    raise CheckpointError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: nothing in it is pickled. "
        "Give plain values: numbers, text, bytes, tensors, NumPy arrays, and lists, tuples, sets and dicts of these"
    )


def decode(value: Any) -> Any:
    """The value that `encode` was given. Raises CheckpointError for an object that it has not written."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(each) for key, each in value.items()}
    kind = value[_TAG]
    try:
        return _decode_tagged(kind, value)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"a value of type {kind!r} in a checkpoint is not what this version writes") from error


def _decode_tagged(kind: str, value: Mapping[str, Any]) -> Any:
    content = value["v"]
    if kind in _PAIRS.values():
        made = next(each for each, name in _PAIRS.items() if name == kind)
        return made({decode(key): decode(its) for key, its in content})
    if kind in _SEQUENCES.values():
        make = next(each for each, name in _SEQUENCES.items() if name == kind)
        return make(decode(each) for each in content)
    if kind in ("bytes", "bytearray"):
        data = base64.b64decode(content)
        return data if kind == "bytes" else bytearray(data)
    if kind == "tensor":
        dtype = dtype_named(value["dtype"])
        flat = torch.frombuffer(bytearray(base64.b64decode(content)) or bytearray(1), dtype=torch.uint8)
        numel = torch.Size(value["shape"]).numel()
        return flat[: numel * dtype.itemsize].view(dtype).view(value["shape"]).clone()
    if kind in ("numpy", "numpy scalar"):
        array = np.frombuffer(base64.b64decode(content), dtype=np.dtype(value["dtype"]))
        return array.reshape(value["shape"]).copy() if kind == "numpy" else array[0]
    if kind == "torch.Size":
        return torch.Size(content)
    if kind == "torch.device":
        return torch.device(content)
    if kind == "torch.dtype":
        return dtype_named(content)
    raise KeyError(kind)


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in a checkpoint, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype with that name. Raises CheckpointError for another name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{name!r} in a checkpoint is no dtype of this version of torch")
    return found


def bytes_of(value: Tensor) -> bytes:
    """The elements of a tensor on any device, one behind the other, in their own dtype. Local."""
    flat = value.detach().to("cpu").contiguous().reshape(-1)
    # An empty tensor has no memory that could be viewed as bytes.
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _encode_tensor(value: Tensor) -> dict[str, Any]:
    data = base64.b64encode(bytes_of(value)).decode()
    return {_TAG: "tensor", "v": data, "dtype": name_of(value.dtype), "shape": list(value.shape)}


_PAIRS: dict[Any, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_SEQUENCES: dict[Any, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}


# -- Schedulers, samplers and loaders of a script: anything with `state_dict()`, alone, in a list or in a dict.


def states_of(part: Any, what: str) -> Any:
    """The states of `part`. Raises TypeError for an object without `state_dict()`."""
    if part is None:
        return None
    if isinstance(part, (list, tuple)):
        return [states_of(each, f"{what}[{number}]") for number, each in enumerate(part)]
    if isinstance(part, Mapping):
        return {str(name): states_of(each, f"{what}[{name!r}]") for name, each in part.items()}
    if not callable(getattr(part, "state_dict", None)):
        raise TypeError(f"{what} is a {type(part).__name__} without state_dict(): give what has one, or a list or dict")
    return part.state_dict()


def load_into(part: Any, state: Any, what: str) -> None:
    """Load what `states_of` returned. Raises what `load_state_dict` raises."""
    for each, its in pairs(part, state, what):
        each.load_state_dict(its)


def pairs(part: Any, state: Any, what: str) -> list[tuple[Any, Any]]:
    """Each object with its state. Raises CheckpointError if the checkpoint has other ones."""
    if part is None:
        return []
    if state is None:
        raise CheckpointError(f"the checkpoint has no state of {what}: leave it out, and it begins anew")
    if isinstance(part, (list, tuple)):
        if not isinstance(state, list) or len(state) != len(part):
            number = len(state) if isinstance(state, list) else "no list of them"
            raise CheckpointError(f"{what} has {len(part)} objects, the checkpoint has {number}")
        return [
            pair
            for number, (each, its) in enumerate(zip(part, state, strict=True))
            for pair in pairs(each, its, f"{what}[{number}]")
        ]
    if isinstance(part, Mapping):
        names = [str(name) for name in part]
        if not isinstance(state, Mapping) or sorted(names) != sorted(state):
            there = sorted(state) if isinstance(state, Mapping) else "no dict of them"
            raise CheckpointError(f"{what} has {sorted(names)}, the checkpoint has {there}")
        return [
            pair
            for (_, each), name in zip(part.items(), names, strict=True)
            for pair in pairs(each, state[name], f"{what}[{name!r}]")
        ]
    if not callable(getattr(part, "load_state_dict", None)):
        raise TypeError(f"{what} is a {type(part).__name__} without load_state_dict()")
    return [(part, state)]
