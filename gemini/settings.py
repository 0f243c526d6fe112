"""Settings: what a user may choose about a sharded model, as one frozen value that every front end maps onto.

`ShardedModel(module, stage=2)`, `estimate_memory(module, stage=2)` and the planner make `Settings(stage=2)` of their
arguments, so that an option has one name, one default, one check and one error message. Settings know no module and no
rank: what follows from them for a model is the plan's (gemini/placement/plan.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, TypedDict, Unpack, runtime_checkable

import torch
from torch import nn

from gemini.placement.demand import ChunkDtypes, Dtype, parse_bytes
from gemini.placement.policies import FRACTIONS, MARGIN, DiskPolicy, check_fraction, resolve_policy
from gemini.placement.policy import PlacementPolicy
from optim import HALF_DTYPES
from optim.adam import refuse_unknown_arguments
from sharding import ShardStrategy, WireFormat, resolve_strategy

# Names of dtypes in configs. The first ones are also those of the command line.
SHORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DTYPES_BY_NAME = {
    **SHORT_DTYPES,
    "float32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfp16": torch.bfloat16,  # DeepSpeed's spelling in `communication_data_type`
    "bfloat16": torch.bfloat16,
    "fp64": torch.float64,
    "float64": torch.float64,
    "double": torch.float64,
}
CASTABLE_DTYPES = (torch.float32, *HALF_DTYPES)
_DTYPES = (*CASTABLE_DTYPES, torch.float64)
BUDGETS = ("device_memory", "model_data_memory", "host_memory")
QUANTIZED = ("quantized_weights", "quantized_frozen_weights", "quantized_gradients")
_WIRES = {bits: WireFormat(bits) for bits in (8, 4)}
# What counts something: the least, and what it must be.
COUNTS = {
    **dict.fromkeys(
        ("param_persistence_threshold", "model_persistence_threshold", "max_live_parameters"),
        (0, "a number of elements, of at least 0"),
    ),
    "max_prefetch": (0, "a number of payloads, of at least 0"),
    "shard_group_size": (1, "a number of ranks, of at least 1, or None"),
    "secondary_group_size": (2, "a number of ranks, of at least 2, or None"),
}
_OF_THIS_RANK = ("device", "rank_timeout")  # ranks need not have the same

Strategy = ShardStrategy | type[ShardStrategy] | str | None


@runtime_checkable
class Emulation(Protocol):
    """An emulated device whose memory is bounded and shared: `gemini.EmulatedDevice`."""

    def hold(self, ledger: Any) -> None:
        """What this ledger counts lies on the device from now on."""


Device = int | str | torch.device | Emulation | None
DtypeLike = torch.dtype | str
Weights = torch.dtype | Mapping[type[nn.Module] | str, torch.dtype | None] | None


class Options(TypedDict, total=False):
    """The fields of `Settings` as keyword arguments, so that type checkers know them.

    Without `shard_strategy`: `ShardedModel` takes it as a positional argument too.
    """

    stage: int
    tensor_placement_policy: str | PlacementPolicy
    shard_param_frac: float | None
    offload_optim_frac: float | None
    offload_param_frac: float | None
    gpu_margin_mem_ratio: float | None
    param_persistence_threshold: int
    model_persistence_threshold: int | None
    max_live_parameters: int | None
    shard_group_size: int | None
    secondary_group_size: int | None
    optimizer_shard: str
    ignored_parameters: Collection[str]
    max_prefetch: int | None
    deferred_update: bool | None
    update_in_backward: bool
    gradient_accumulation_steps: int | None
    reuse_fp16_shard: bool
    dtype: DtypeLike | Mapping[type[nn.Module] | str, DtypeLike | None] | None
    reduce_dtype: DtypeLike | None
    accumulate_dtype: DtypeLike | None
    quantized_weights: int | None
    quantized_frozen_weights: int | None
    quantized_gradients: int | None
    chunk_size: int | None
    device: Device
    device_memory: int | str | None
    model_data_memory: int | str | None
    host_memory: int | str | None
    disk_path: str | Path | None
    disk_memory: int | str | None
    disk_optim_frac: float | None
    disk_checksums: bool
    rank_timeout: float
    ignore_unused_parameters: bool


class Budgets(TypedDict, total=False):
    """Those of `Options` that are bytes of memory."""

    device_memory: int | str | None
    model_data_memory: int | str | None
    host_memory: int | str | None


@dataclass(frozen=True, kw_only=True)
class SettingFields:
    """The fields of `Settings`, which a config has too: types and defaults. `Settings` says what they mean."""

    shard_strategy: Strategy = None
    stage: int = 3
    tensor_placement_policy: str | PlacementPolicy = "auto"
    shard_param_frac: float | None = None
    offload_optim_frac: float | None = None
    offload_param_frac: float | None = None
    gpu_margin_mem_ratio: float | None = None
    param_persistence_threshold: int = 0
    model_persistence_threshold: int | None = None
    max_live_parameters: int | None = None
    shard_group_size: int | None = None
    secondary_group_size: int | None = None
    optimizer_shard: str = "group"
    ignored_parameters: Collection[str] = ()
    max_prefetch: int | None = None
    deferred_update: bool | None = None
    update_in_backward: bool = False
    gradient_accumulation_steps: int | None = None
    reuse_fp16_shard: bool = False
    dtype: Weights = None
    reduce_dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype | None = None
    quantized_weights: int | None = None
    quantized_frozen_weights: int | None = None
    quantized_gradients: int | None = None
    chunk_size: int | None = None
    device: Device = None
    device_memory: int | str | None = None
    model_data_memory: int | str | None = None
    host_memory: int | str | None = None
    disk_path: str | Path | None = None
    disk_memory: int | str | None = None
    disk_optim_frac: float | None = None
    disk_checksums: bool = False
    rank_timeout: float = 600.0
    ignore_unused_parameters: bool = True


@dataclass(frozen=True, kw_only=True)
class Settings(SettingFields):
    """Everything that `ShardedModel` may be told besides the module and its process group.

    Sizes in memory are bytes: an int, or a string such as "8GiB" (2**30) or "8GB" (10**9), which becomes an int.

    The first sentence of each argument stands in docs/config.md, with the one that begins with "None:".

    Args:
        shard_strategy: what is cut into one shard per rank: a "tensor", a "bucket" (an operator's tensors), a "chunk",
            or what an instance or a class of `ShardStrategy` says. None: "chunk".
        stage: what is divided over ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
        tensor_placement_policy: where states rest: "auto" (the device, as far as it goes), "cpu", "cuda", "static",
            "disk", or an object with `name` and `place(demand, budget_bytes)`.
        shard_param_frac: with "static", see `StaticPolicy`: of the parameters, given up between uses, at stage 3 on
            several ranks. None: 1.0.
        offload_optim_frac: with "static": of optimizer state, masters and gradients, on the host, where the update
            runs. None: 0.0.
        offload_param_frac: with "static": of the parameters, on the host. None: 0.0.
        gpu_margin_mem_ratio: with "auto": of what parameters, gradients and slots leave of the device's budget, the
            fraction that masters and optimizer state may take. None: all of it, before more slots than are needed.
        param_persistence_threshold: parameters of fewer elements stay whole on the device of every rank, whatever the
            policy, in chunks of their own. Their optimizer state is placed and sharded like that of others.
        model_persistence_threshold: elements that such parameters have in all, at most; in order of first use, one that
            would pass it is skipped. None: no bound.
        max_live_parameters: elements that slots hold on the device, at most: what is gathered, or fetched from the
            host, at any instant, paddings included. What is at home on the device does not count. None: no bound.
        shard_group_size: consecutive ranks that share one copy of what `stage` shards; the other groups of so many
            ranks hold replicas of it. A `device_mesh` says the same, with ranks in any order. None: all are one group.
        secondary_group_size: consecutive ranks, such as those of a node, that keep a second copy of the weights among
            them at stage 3. The first gather after an update is from all ranks that share the shards, and what arrives
            is kept beside each rank's own shard, on its tier; every further one, in the backward and of later
            micro-batches, is from these ranks alone. Weights that do not change are gathered from all ranks once. A
            rank holds 1/size of the weights more. At other stages, and for weights that persist or are written to in
            forwards (`max_norm`), it has no effect. Results do not change. None: there is no second copy.
        optimizer_shard: "all": masters and optimizer state are divided over all ranks of all groups; "group": within
            each. With "all", at stage 3 with `shard_group_size` (or a `device_mesh` of two dimensions), a group holds
            weights and gradients once. A step then has one exchange of gradients between groups, however many backwards
            it has, and one gather of its new weights. A rank holds its part of the weights once more, beside those of
            its group. Other stages, `update_in_backward`, `secondary_group_size`, `reuse_fp16_shard` and quantised
            exchanges cannot go with it. Without groups it has no effect.
        ignored_parameters: names of parameters (shell patterns, as "head.*") that are left alone: in no chunk, on the
            device and in the dtype in which they are, with each rank's own values and gradients, neither reduced nor
            clipped. An optimizer of their own trains them.
        max_prefetch: payloads that may be on their way to the device at once before they are asked for: gathered from
            other ranks, or copied from the host. Each goes into a slot that is free, or whose content is used later, so
            a plan has no memory for it. 0: every operator waits for its own. None: 1 where ranks gather or the device
            is an accelerator, on which copies run beside kernels; else 0. Results do not change.
        deferred_update: whether updates on the host run beside the next forward: `step()` of `HybridAdam` returns when
            gradients are summed up and clipped. A thread then updates one chunk after the other, and each is waited for
            where it is used next. At stages 1 and 2 of several ranks, where a step gathers weights, it has no effect.
            None: True if the device is an accelerator. Results do not change.
        update_in_backward: True: the backward updates a chunk as soon as its gradient is whole, whose memory is free
            again then: gradients have no homes, 2 bytes a 16-bit parameter less. With `deferred_update` the thread has
            the rest of the backward, too. A step has one backward, no clipping and no loss scale, and a gradient that
            is not finite skips no step. Between backward and step, weights and states are new already and gradients are
            gone: whatever reads or writes them there raises `UpdatedInBackwardError`; hooks see gradients. At stages 1
            and 2 of several ranks it has no effect. Results do not change.
        gradient_accumulation_steps: backwards of one optimizer step. With more than 1 the plan has room for the fp32
            sums of 16-bit gradients, 4 bytes a parameter, beside the gradients. 1: they take it beside the plan, from
            the second backward of a step on, and on the host where the device is full. None: as 1, until steps have
            shown how many they have; another plan follows then. Under `host_memory` or with a disk, None also keeps
            room on the host for a second backward of a step, or training is refused; 1 says that there is none. With
            replicas, more than 1 leaves the exchange with them to the step for all backwards; without it the first one
            exchanges at once. Otherwise results do not change.
        reuse_fp16_shard: whether the reduced gradient is stored in the memory of the 16-bit parameter, which the step
            makes again from its fp32 master. The bits are the same, and fp16 weights take 2 bytes per parameter less.
            bf16 weights have split masters without it, which take no more (but for stage 1 on several ranks). A chunk
            whose parameters are used between backward and step (several micro-batches, `state_dict()`), or seen in
            views, gets gradient memory of its own from then on, on the host where the device is full. The plan has it
            where it knows of several micro-batches. At stages 1 and 2 a chunk of several units has it anyway.
        dtype: dtype of the weights in chunks, or one by module; bf16 and fp16 ones keep fp32 masters. None: the
            module's own. "bf16" names torch.bfloat16. By module: {torch.nn.LayerNorm: torch.float32, "head.*": None,
            "*": torch.bfloat16}, with classes and names (shell patterns) as keys. The innermost module that a key
            chooses decides for all that it contains, the first such key for it, "*" for the rest. A module that a key
            but "*" chose gets floating-point inputs in its dtype; what it returns in that has the first one's dtype
            again (without one: that of "*"). Buffers keep their dtypes.
        reduce_dtype: dtype in which gradients travel between ranks: each rank's is cast before the exchange. None: its
            own. Whatever travels, the mean over ranks is made in fp32 and rounded once.
        accumulate_dtype: dtype in which reduced gradients rest and micro-batches are added up, from the first on. None:
            the gradient's own, and fp32 from the second micro-batch on for 16-bit ones. fp64 weights keep to fp64.
        quantized_weights: 8 or 4: the bits of an element in which weights travel at stage 3 when ranks gather them, in
            blocks of 256 elements with an fp32 scale each. Approximate: an element is wrong by at most absmax / (2 *
            (2**(bits - 1) - 1)) of its block, and by the rounding to its dtype. All ranks compute with the same values;
            homes, masters, state dicts and checkpoints keep the exact ones. At other stages, and for weights that
            persist or are in fp64, it has no effect. None: they travel as they are.
        quantized_frozen_weights: likewise, for weights that are frozen when the model is wrapped, such as those beside
            adapters. None: as `quantized_weights`.
        quantized_gradients: 8 or 4: likewise, of gradients when they are reduced, at every stage. None: they travel as
            they are. Each rank's are wrong by at most that bound, of which the mean is taken in fp32. With replicas the
            sums of groups travel so too, and then the mean; at stage 0 the mean does. fp64 ones travel as they are.
        chunk_size: elements of a chunk. None: the cheapest size that the budgets allow.
        device: "emulated", "cuda:0", an int, a torch.device or an `EmulatedDevice`. None: the current accelerator, else
            emulated.
        device_memory: bytes that this process may hold on the device at most, activations included. None: what is free.
        model_data_memory: bytes of `device_memory` that chunks may take. None: what activations leave of it.
        host_memory: bytes that chunks may take on the host. None: what is free.
        disk_path: a folder on a local disk for masters and optimizer state that find no room on the host, or for all of
            them with policy "disk". Each rank has a file there that nobody else sees and that ends with the process;
            ranks may have folders of other names. Results do not change. None: nothing rests on a disk.
        disk_memory: bytes that chunks may take in `disk_path`. None: what is free.
        disk_optim_frac: of the masters and optimizer state that would rest on the host, the fraction that rests on the
            disk at least, from the last chunk on. None: none, but with the policy "disk" all.
        disk_checksums: whether an update or a fetch ends with an error where it reads other bytes from the disk than
            were written, or read there before: a crc32 of each request, on the cores.
        rank_timeout: seconds after which a rank that does not answer counts as lost.
        ignore_unused_parameters: False: `optimizer.step()` raises if a trainable parameter got no gradient on any rank
            since the last step, and names all that did not.

    Raises TypeError or ValueError, which name the field, what was found and what is valid.

        >>> settings = Settings(stage=2, device_memory="8GiB")
        >>> settings.device_memory
        8589934592
    """

    def __post_init__(self) -> None:
        resolve_strategy(self.shard_strategy)
        self._check_policy()
        self._check_ignored()
        self._check_numbers()
        self._check_dtypes()
        check_device("device", self.device)
        # The class is frozen, so the checks write past it: they leave one form of each value, such as bytes for "8GiB".
        for name in (*BUDGETS, "disk_memory"):
            object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        self._check_disk()
        part, whole = self.budget_bytes("model_data_memory"), self.budget_bytes("device_memory")
        if part is not None and whole is not None and part > whole:
            raise ValueError(f"model_data_memory={part} is more than device_memory={whole}")

    @staticmethod
    def of(
        owner: str, *others: str, settings: Settings | None, shard_strategy: Strategy = None, **options: Unpack[Options]
    ) -> Settings:
        """`settings`, or the defaults, with `options` in place of the fields of these names.

        owner, others: the function that was given the options, and its other arguments, for the error of an unknown
        option. Local. Raises TypeError or ValueError.
        """
        valid = [each.name for each in fields(Settings)]
        refuse_unknown_arguments(owner, [name for name in options if name not in valid], [*valid, *others])
        if settings is not None and not isinstance(settings, Settings):
            raise TypeError(f"settings must be a Settings or None, found {type(settings).__name__}")
        given: dict[str, Any] = {**options}  # of wider types: a dtype may be a name, which a field never is
        settings = replace(settings or Settings(), **given)
        return settings if shard_strategy is None else replace(settings, shard_strategy=shard_strategy)

    @property
    def policy(self) -> PlacementPolicy:
        """What decides where states rest: `tensor_placement_policy` with the fractions that belong to it."""
        return resolve_policy(self.tensor_placement_policy, **self._of_policy())

    def with_policy(self, policy: str | PlacementPolicy) -> Settings:
        """These settings with another policy, and without the fractions of theirs.

        Local. Raises ValueError for an unknown name.
        """
        none: dict[str, Any] = dict.fromkeys((*FRACTIONS, MARGIN))
        return replace(self, tensor_placement_policy=policy, **none)

    def budget_bytes(self, name: str) -> int | None:
        """One of the budgets, in bytes. Local; raises nothing."""
        return parse_bytes(getattr(self, name), name)

    def over(self, world_size: int) -> Settings:
        """These settings on so many ranks, where groups that are all ranks, or one rank each, are plain cases. Local.

        Raises ValueError if groups of `shard_group_size` do not fill them, or those of `secondary_group_size` a group.
        """
        return self._in_groups(world_size)._with_secondary(world_size)

    def _in_groups(self, world_size: int) -> Settings:
        size = self.shard_group_size
        if size is None:
            return self
        if world_size % size:
            raise ValueError(
                f"shard_group_size={size} does not divide {world_size} ranks into groups: give a divisor of "
                f"{world_size}, or start a multiple of {size} ranks"
            )
        # Groups of one rank divide no weights and no gradients: with optimizer states over all ranks that is stage 1.
        if size == 1 and world_size > 1 and self.optimizer_shard == "all":
            return replace(self, stage=1, shard_group_size=None, optimizer_shard="group")
        # Groups of one rank shard nothing: that is what stage 0 does, with all ranks as replicas.
        if size == 1 and world_size > 1:
            return replace(self, stage=0, shard_group_size=None)
        return replace(self, shard_group_size=None, optimizer_shard="group") if size == world_size else self

    def _with_secondary(self, world_size: int) -> Settings:
        size, num_shards = self.secondary_group_size, self.num_shards(world_size)
        if size is None:
            return self
        if num_shards % size:
            raise ValueError(
                f"secondary_group_size={size} does not divide the {num_shards} ranks that share the shards: give a "
                f"divisor of {num_shards}, such as the number of ranks of a node"
            )
        # All ranks that share the shards have the only copy among them.
        return replace(self, secondary_group_size=None) if size == num_shards or self.stage < 3 else self

    def num_shards(self, world_size: int) -> int:
        """Ranks that share everything, of `world_size` in all. Local; raises nothing after `over`."""
        return world_size if self.optimizer_shard == "all" else self.shard_group_size or world_size

    @property
    def num_in_group(self) -> int | None:
        """Ranks that share weights and gradients while all ranks share optimizer states. None: they share all alike."""
        return self.shard_group_size if self.optimizer_shard == "all" else None

    def gathers(self, world_size: int) -> bool:
        """Parameters are gathered from other ranks. Local; raises nothing."""
        return self.stage == 3 and world_size > 1

    def chunk_dtypes(self, weight: Dtype) -> ChunkDtypes:
        """The dtypes of a chunk of such weights. Only fp32, fp16 and bf16 gradients travel and rest in other ones.

        Local; raises nothing.
        """
        if weight not in map(dtype_of, CASTABLE_DTYPES):
            return ChunkDtypes(weight, weight, weight, weight, widens=False)
        return ChunkDtypes(
            weight,
            travel=dtype_of(self.reduce_dtype) if self.reduce_dtype else weight,
            rest=dtype_of(self.accumulate_dtype) if self.accumulate_dtype else weight,
            sums=dtype_of(self.reduce_dtype or torch.float32),
            widens=self.accumulate_dtype is None and weight.is_half,
        )

    def weight_wire(self, weight: Dtype, trainable: bool) -> WireFormat | None:
        """The format in which such weights are gathered. None: as they are. Local; raises nothing."""
        frozen = self.quantized_weights if self.quantized_frozen_weights is None else self.quantized_frozen_weights
        return self._wire(self.quantized_weights if trainable else frozen, weight)

    def gradient_wire(self, weight: Dtype) -> WireFormat | None:
        """The format in which gradients of such weights are reduced. None: as they are. Local; raises nothing."""
        return self._wire(self.quantized_gradients, weight)

    def _wire(self, bits: int | None, weight: Dtype) -> WireFormat | None:
        return None if bits is None or weight not in map(dtype_of, CASTABLE_DTYPES) else _WIRES[bits]

    def prefetch_depth(self, world_size: int) -> int:
        """`max_prefetch`, or its default on `world_size` ranks with this device. Local; raises nothing."""
        if self.max_prefetch is not None:
            return self.max_prefetch
        # Without streams a copy that starts earlier takes the time of the operator before, and none is saved.
        return int(self.gathers(world_size) or self.has_streams)

    @property
    def defers_update(self) -> bool:
        """`deferred_update`, or its default with this device. Raises nothing."""
        # On the emulated device forward and update would share the processor's cores, and none is idle.
        return self.has_streams if self.deferred_update is None else self.deferred_update

    @property
    def has_streams(self) -> bool:
        """Whether kernels and copies run beside the host: the device is an accelerator. Raises nothing."""
        if self.device is None:
            return torch.accelerator.is_available()
        return not isinstance(self.device, Emulation) and str(self.device) not in ("emulated", "cpu")

    @property
    def disk_fraction(self) -> float:
        """`disk_optim_frac`, or its default with this policy. Raises nothing."""
        return float(isinstance(self.policy, DiskPolicy)) if self.disk_optim_frac is None else self.disk_optim_frac

    def frees_gradients(self, world_size: int) -> bool:
        """Whether backwards use gradients up, so that a plan has no homes for them. Local; raises nothing."""
        # Updates of weights that ranks update in parts end with a collective, which needs a point that all ranks share.
        return self.update_in_backward and (world_size == 1 or self.stage in (0, 3))

    def shared(self) -> tuple[str, ...]:
        """`name=value` of each field that all ranks must have in common; these decide the order of collectives.

        Raises nothing.
        """
        values: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        # These two are compared by name: the repr of an object has its address, which differs between ranks.
        values["shard_strategy"] = type(resolve_strategy(self.shard_strategy)).__name__
        values["tensor_placement_policy"] = self.policy.name
        # Ranks of several nodes may have folders of other names, each node its own scratch.
        values["disk_path"] = None if self.disk_path is None else "a folder"
        return tuple(f"{name}={value}" for name, value in values.items() if name not in _OF_THIS_RANK)

    def _of_policy(self) -> dict[str, float]:
        given = {name: getattr(self, name) for name in (*FRACTIONS, MARGIN)}
        return {name: value for name, value in given.items() if value is not None}

    def _check_policy(self) -> None:
        policy = resolve_policy(self.tensor_placement_policy)
        for name, value in self._of_policy().items():
            object.__setattr__(self, name, check_fraction(name, value))
            wanted = "auto" if name == MARGIN else "static"
            # The policy would not read it: the user would believe in a fraction that has no effect.
            if self.tensor_placement_policy != wanted:
                raise ValueError(
                    f"{name}={value} belongs to tensor_placement_policy={wanted!r}, found {policy.name!r}: leave one "
                    "of the two out"
                )

    def _check_disk(self) -> None:
        if self.disk_path is not None and not isinstance(self.disk_path, (str, Path)):
            raise TypeError(f"disk_path must be a folder, found {self.disk_path!r}")
        if self.disk_optim_frac is not None:
            object.__setattr__(self, "disk_optim_frac", check_fraction("disk_optim_frac", self.disk_optim_frac))
        given = {
            f"disk_memory={self.disk_memory}": self.disk_memory is not None,
            f"disk_optim_frac={self.disk_optim_frac}": bool(self.disk_optim_frac),
            "tensor_placement_policy='disk'": isinstance(self.policy, DiskPolicy),
        }
        for name, needs_disk in given.items():
            if needs_disk and self.disk_path is None:
                raise ValueError(f"{name} needs disk_path=, a folder on a local disk")

    def _check_ignored(self) -> None:
        names = self.ignored_parameters
        if isinstance(names, str) or not isinstance(names, Collection) or not all(isinstance(n, str) for n in names):
            raise TypeError(f"ignored_parameters must be a list of names of parameters, found {names!r}")
        object.__setattr__(self, "ignored_parameters", tuple(sorted(names)))  # a set has another order on every rank

    def _check_numbers(self) -> None:
        if not _is_int(self.stage) or self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage must be 0, 1, 2 or 3, found {self.stage!r}")
        steps = self.gradient_accumulation_steps
        if steps is not None and (not _is_int(steps) or steps < 1):
            raise ValueError(f"gradient_accumulation_steps must be a number of at least 1, or None, found {steps!r}")
        if self.update_in_backward and (steps or 1) > 1:
            raise ValueError(
                f"update_in_backward=True uses the gradients of each backward at once, and "
                f"gradient_accumulation_steps={steps} adds up several: leave one of the two out"
            )
        self._check_optimizer_shard()
        for name in QUANTIZED:
            bits = getattr(self, name)
            if bits is not None and (not _is_int(bits) or bits not in _WIRES):
                raise (ValueError if _is_int(bits) else TypeError)(
                    f"{name} must be 8 or 4, the bits of an element that travels, or None, found {bits!r}"
                )
        if self.reuse_fp16_shard and (self.quantized_weights or self.quantized_frozen_weights):
            raise ValueError(
                "reuse_fp16_shard=True makes weights again from their masters where they are, and quantized_weights= "
                "shows others than these: leave one of the two out"
            )
        size = self.chunk_size
        if size is not None and not _is_int(size):
            raise TypeError(f"chunk_size must be an int (elements) or None, found {type(size).__name__}")
        if size is not None and size < 1:
            raise ValueError(f"chunk_size must be at least 1 element, found {size}")
        for name, (least, meaning) in COUNTS.items():
            count = getattr(self, name)
            # For the others None means no bound or no group; this one has 0 for none.
            is_left_out = count is None and name != "param_persistence_threshold"
            if not is_left_out and (not _is_int(count) or count < least):
                raise (ValueError if _is_int(count) else TypeError)(f"{name} must be {meaning}, found {count!r}")
        timeout = self.rank_timeout
        if not (_is_int(timeout) or isinstance(timeout, float)) or not 0 < timeout < math.inf:
            raise ValueError(f"rank_timeout must be a number of seconds above 0, found {timeout!r}")
        flags = "reuse_fp16_shard", "ignore_unused_parameters", "update_in_backward", "disk_checksums"
        for name in (*flags, "deferred_update"):
            value, or_none = getattr(self, name), name == "deferred_update"
            if not isinstance(value, bool) and not (or_none and value is None):
                raise TypeError(f"{name} must be True or False{', or None' * or_none}, found {value!r}")

    def _check_optimizer_shard(self) -> None:
        if self.optimizer_shard not in ("group", "all"):
            raise ValueError(f"optimizer_shard must be 'group' or 'all', found {self.optimizer_shard!r}")
        if self.optimizer_shard == "group":
            return
        if self.stage != 3:
            raise ValueError(
                f"optimizer_shard='all' divides optimizer states over all ranks beside weights in groups, found "
                f"stage={self.stage}: give stage=3, or leave shard_group_size= out, where stages 1 and 2 do that"
            )
        others = {
            "update_in_backward": self.update_in_backward,
            "secondary_group_size": self.secondary_group_size is not None,
            "reuse_fp16_shard": self.reuse_fp16_shard,
            **{name: getattr(self, name) is not None for name in QUANTIZED},
        }
        for name, is_given in others.items():
            if is_given:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} cannot go with optimizer_shard='all': leave one of the two out"
                )

    def _check_dtypes(self) -> None:
        if isinstance(self.dtype, Mapping):
            for key in self.dtype:
                if not isinstance(key, str) and not (isinstance(key, type) and issubclass(key, nn.Module)):
                    raise TypeError(f"dtype={{...}} has module classes and names of modules as keys, found {key!r}")
            # A copy: a later change of the user's mapping changes nothing.
            weights = {key: checked_dtype(f"dtype of {key!r}", value) for key, value in self.dtype.items()}
            object.__setattr__(self, "dtype", weights)
        else:
            object.__setattr__(self, "dtype", checked_dtype("dtype", self.dtype))
        for name in ("reduce_dtype", "accumulate_dtype"):
            object.__setattr__(self, name, checked_dtype(name, getattr(self, name), CASTABLE_DTYPES))
        if self.reuse_fp16_shard and self.accumulate_dtype is torch.float32:
            raise ValueError(
                "reuse_fp16_shard=True keeps 16-bit gradients where 16-bit parameters were; with "
                "accumulate_dtype=torch.float32 they do not fit there: leave one of the two out"
            )


def _is_int(value: object) -> bool:
    # `True` is an int to Python, and would count as 1.
    return isinstance(value, int) and not isinstance(value, bool)


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raises ValueError unless this is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, found {value!r}")


def dtype_of(dtype: torch.dtype) -> Dtype:
    """A dtype of torch as planning sees it."""
    return Dtype(str(dtype).removeprefix("torch."), dtype.itemsize)


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """The inverse of `dtype_of`."""
    found: torch.dtype = getattr(torch, dtype.name)
    return found


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype that "bf16", "bfloat16" or "torch.bfloat16" names; None for other words."""
    return _DTYPES_BY_NAME.get(name.removeprefix("torch.").lower())


def checked_dtype(name: str, dtype: DtypeLike | None, valid: tuple[torch.dtype, ...] = _DTYPES) -> torch.dtype | None:
    """The dtype itself, or the one that a string names. Raises ValueError unless weights can be of this dtype."""
    found = dtype_named(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and found not in valid:
        raise ValueError(f"{name} must be None or one of {', '.join(map(str, valid))}, found {dtype!r}")
    return found


def check_device(name: str, device: Device) -> None:
    """Raises TypeError unless a device can be given so; whether the machine has it is found when it is used."""
    if isinstance(device, bool) or not (device is None or isinstance(device, (int, str, torch.device, Emulation))):
        raise TypeError(f'{name} must be "emulated", an int, a string or a torch.device, found {device!r}')


def check_module(name: str, module: Any) -> None:
    """Raises TypeError unless this is a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{name} must be a torch module, found {type(module).__name__}")
