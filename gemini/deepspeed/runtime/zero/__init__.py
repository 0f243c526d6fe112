"""`deepspeed.zero`, which is `deepspeed.runtime.zero`: building a model on shards, and access to its parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gemini.access.link import register_external_parameter, unregister_external_parameter
from gemini.building.zero_init import ZeroInitContext
from gemini.deepspeed.comm import init_distributed
from gemini.deepspeed.parameters import mark
from gemini.elsewhere import refusing
from gemini.engine.config import Config, load_config
from gemini.engine.initialize import Source, agreed_config
from gemini.errors import ConfigError
from gemini.launch import ranks_of
from gemini.log import warn_at_script
from gemini.model.plain import GatheredParameters
from gemini.model.tiled import TiledLinear
from gemini.placement.policies import offloads_params

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "register_external_parameter",
    "unregister_external_parameter",
]

_WITHOUT_EFFECT = {
    "mem_efficient_linear": "autograd keeps no copies of gathered weights here",
    "pin_memory": "host memory is pinned where there is an accelerator",
    "zero_param_parallel_group": "parameters have one group of ranks",
    "sequence_data_parallel_group": "give data_parallel_group the group that shards",
    "param_swapper": "the config's nvme_path is enough",
    "tensor_overrides": "tensors that are made inside stay where the code makes them",
    **dict.fromkeys(
        ("zero_quantized_weights", "zero_quantized_nontrainable_weights"),
        "weights travel as they are while a model is built; the config's key says how they do in training",
    ),
}
_DEFAULTS: dict[str, bool] = {"mem_efficient_linear": True, "pin_memory": False}
_DEFAULTS |= {"zero_quantized_weights": False, "zero_quantized_nontrainable_weights": False}


class Init(ZeroInitContext):
    """`ZeroInitContext` with the arguments of `deepspeed.zero.Init`.

    Args:
        module: one that exists: it is sharded at once, and nothing is entered. None: for use in a `with` statement.
        data_parallel_group: the ranks. None: all of torch.distributed, which is made first if a launcher has started
            this script and there is none: DeepSpeed's scripts build their model before anything else.
        remote_device: "cpu" keeps shards in host memory, "nvme" on the disk that the config's nvme_path names. None: as
            the config's offload_param says, else where there is room.
        config_dict_or_path: a config, for dtype and offload. config: an older name of it.
        enabled: False makes the context do nothing.
        dtype: what weights are cast to when the context ends. None: as the config says; without one they are not cast.
        mpu: an object whose `get_data_parallel_group()` gives the ranks.
        zero_quantized_weights, zero_quantized_nontrainable_weights: have no effect, which is said: while a model is
            built its weights travel as they are. The config's keys say how they travel in training.
        without_effect: `mem_efficient_linear`, `pin_memory` and others, which are said to have no effect.

    Collective if it is enabled. Raises ConfigError for what does not exist here and, on every rank, for a config that
    one cannot read; DivergenceError if the ranks' configs differ; and what `ZeroInitContext` raises.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Source = None,
        config: Source = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        *,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        **without_effect: Any,
    ) -> None:
        given = {"mem_efficient_linear": mem_efficient_linear, "pin_memory": pin_memory}
        given["zero_quantized_weights"] = zero_quantized_weights
        given["zero_quantized_nontrainable_weights"] = zero_quantized_nontrainable_weights
        for name, value in {**given, **without_effect}.items():
            if name not in _WITHOUT_EFFECT:
                raise TypeError(f"zero.Init() has no argument {name!r}")
            # Scripts that pass DeepSpeed's default lose nothing by it, and are not warned.
            if value != _DEFAULTS.get(name):
                warn_at_script(f"zero.Init({name}=...) has no effect: {_WITHOUT_EFFECT[name]}")
        if remote_device not in (None, "cpu", "none", "nvme"):
            raise ConfigError(f"zero.Init(remote_device={remote_device!r}) must be 'cpu', 'nvme' or 'none'")
        if data_parallel_group is None and mpu is not None:
            data_parallel_group = mpu.get_data_parallel_group()
        if data_parallel_group is None and enabled:
            init_distributed()
        folder: str | Path | None = None
        if config_dict_or_path is not None or config is not None:
            source = config if config_dict_or_path is None else config_dict_or_path
            # A context that does nothing is not collective, so ranks do not compare their configs for it.
            zero_config = (
                _config_of(source, data_parallel_group) if enabled else load_config(source, prefers="deepspeed")
            )
            # Dtypes by module are for `ShardedModel`: a context casts all weights to one.
            dtype = zero_config.dtype if dtype is None and isinstance(zero_config.dtype, torch.dtype) else dtype
            folder = zero_config.disk_path
            if remote_device is None and offloads_params(zero_config.tensor_placement_policy):
                remote_device = "cpu" if folder is None else "nvme"
        if remote_device == "nvme" and folder is None:
            raise ConfigError("zero.Init(remote_device='nvme') needs a config whose offload_param has nvme_path")
        where: dict[str, Any] = {"home": {"cpu": "host", "nvme": "disk"}.get(remote_device or "", "auto")}
        where |= {"disk_path": folder} if remote_device == "nvme" else {}
        super().__init__(dtype=dtype, process_group=data_parallel_group, enabled=enabled, **where)
        if module is not None:
            # A context is entered once. This one is another, so that `self` can still be entered by a `with` statement.
            with ZeroInitContext(dtype=dtype, process_group=data_parallel_group, enabled=enabled, **where) as context:
                if enabled:
                    context.convert(module)
            mark(module.parameters())

    def __exit__(self, *failure: Any) -> None:
        """Leave the context; parameters on shards have a `ds_id` from then on."""
        super().__exit__(*failure)
        if self._store is not None:
            mark(link.managed.parameter for link in self._store.chunks.links())

    def get_dp_process_group(self) -> dist.ProcessGroup | None:
        """The ranks over which parameters are divided; None: this process alone. Local. Raises nothing."""
        return ranks_of(self._group)

    def get_partition_rank(self) -> int:
        """This process's rank among them. Local. Raises nothing. A subclass chooses no other: nothing asks it."""
        group = self.get_dp_process_group()
        return 0 if group is None else dist.get_rank(group)


def _config_of(source: Source, group: dist.ProcessGroup | None) -> Config:
    """Agree on the config: a rank that could not read its own would leave the others in the first collective."""
    return agreed_config(source, ranks_of(group), prefers="deepspeed")


__getattr__ = refusing(__name__)
