"""The arguments of `ShardedModel` as fields of a config: names for dtypes and classes, and the checks of `Settings`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import PlainValidator, ValidationInfo
from torch import nn

from gemini.engine.config.nearest import nearest
from gemini.placement.policies import FRACTIONS
from gemini.settings import COUNTS, Settings

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfp16": torch.bfloat16,  # DeepSpeed's spelling in `communication_data_type`
    "bfloat16": torch.bfloat16,
    "fp64": torch.float64,
    "float64": torch.float64,
    "double": torch.float64,
}


def dtype_named(value: Any) -> Any:
    """A dtype by its name; what is not a string is left alone. Raises ValueError for an unknown name."""
    if not isinstance(value, str):
        return value
    name = value.removeprefix("torch.").lower()
    if name not in DTYPES:
        raise ValueError(f"{value!r} is no dtype; write one of fp32, fp16, bf16, fp64")
    return DTYPES[name]


def module_named(key: Any) -> Any:
    """A key of `dtype={...}`: a class of torch.nn by its full name, else a name of modules.

    Raises ValueError for a name that torch.nn does not have.
    """
    if not isinstance(key, str) or not key.startswith("torch.nn."):
        return key
    name = key.removeprefix("torch.nn.")
    if not isinstance(getattr(nn, name, None), type):
        raise ValueError(f"{key} is no class; the nearest is torch.nn.{nearest(name, dir(nn))}")
    return getattr(nn, name)


def _checked(value: Any, info: ValidationInfo) -> Any:
    """The value of one field, as `Settings` takes it. Raises ValueError with the words of `Settings`."""
    name = info.field_name or ""
    if name == "dtype" and isinstance(value, Mapping):
        value = {module_named(key): dtype_named(dtype) for key, dtype in value.items()}
    elif name.endswith("dtype"):
        value = dtype_named(value)
    elif name in ("chunk_size", *COUNTS) and isinstance(value, float) and value.is_integer():
        # Every format reads 1e6 as a float.
        value = int(value)
    # Each field is checked by itself here, and a fraction alone would contradict the default policy "auto". `Config`
    # checks all fields together afterwards.
    others = {"tensor_placement_policy": "static"} if name in FRACTIONS else {}
    try:
        return getattr(Settings(**{**others, name: value}), name)
    # pydantic collects a validator's ValueError with those of other fields. A TypeError would end its checks.
    except TypeError as error:
        raise ValueError(str(error)) from error


Setting = PlainValidator(_checked)
