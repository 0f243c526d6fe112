"""`deepspeed.runtime.zero.config`: the section `zero_optimization` as an object, checked by the config's own table."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, ClassVar

from gemini.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from gemini.elsewhere import missing, refusing
from gemini.engine.config import load_config
from gemini.engine.config.deepspeed_keys import OFFLOAD, ZERO

__all__ = [
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "ZeroStageEnum",
]


class ZeroStageEnum(IntEnum):
    """The stages, by what is divided over the ranks."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class _Section:
    """A section of a DeepSpeed config. A key that was not given is None, or its default below: gemini decides.

    Raises ConfigError, as `initialize` does, for keys and values that it would refuse.
    """

    path: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, **keys: Any) -> None:
        keys = {key: value.model_dump() if isinstance(value, _Section) else value for key, value in keys.items()}
        section, _, part = self.path.partition(".")
        # Offloading is refused at stage 0, which is the default.
        load_config(
            {section: {"stage": ZeroStageEnum.weights.value, part: keys} if part else keys}, dialect="deepspeed"
        )
        self._given = keys
        names: dict[str, str] = {}
        for key in (*ZERO, *OFFLOAD):
            section, _, name = key.path.rpartition(".")
            if section == self.path:
                names |= dict.fromkeys((name, *key.spellings), name)
            elif section.rpartition(".")[0] == self.path:
                names[section.rpartition(".")[2]] = section.rpartition(".")[2]
        self._values: dict[str, Any] = {**dict.fromkeys(names.values()), **self.defaults}
        for given, value in keys.items():
            made = _SECTIONS.get(given)
            self._values[names[given]] = value if made is None or value is None else made(**value)

    def model_dump(self) -> dict[str, Any]:
        """The keys that were given, for a config: `{"zero_optimization": section.model_dump()}`. Local."""
        return dict(self._given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise missing(type(self).__name__, name, "docs/config.md lists its keys")
        return self._values[name]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self._given.items())})"


class DeepSpeedZeroOffloadParamConfig(_Section):
    """`zero_optimization.offload_param`."""

    path = "zero_optimization.offload_param"
    defaults: ClassVar[Mapping[str, Any]] = {"device": OffloadDeviceEnum.none}


class DeepSpeedZeroOffloadOptimizerConfig(_Section):
    """`zero_optimization.offload_optimizer`."""

    path = "zero_optimization.offload_optimizer"
    defaults: ClassVar[Mapping[str, Any]] = {"device": OffloadDeviceEnum.none}


class DeepSpeedZeroConfig(_Section):
    """`zero_optimization`."""

    path = "zero_optimization"
    defaults: ClassVar[Mapping[str, Any]] = {"stage": ZeroStageEnum.disabled}


_SECTIONS: dict[str, type[_Section]] = {
    "offload_param": DeepSpeedZeroOffloadParamConfig,
    "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
}

__getattr__ = refusing(__name__)
