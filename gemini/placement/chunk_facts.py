"""What is fixed about a model's chunks: which weights each one holds, how it is divided, and in which dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gemini.placement.chunk_size import SearchReport, candidates
from gemini.placement.dtypes import ChunkDtypes
from gemini.placement.packing import PackedChunk, Packer, PackingInput
from gemini.placement.specs import ModelSpec, WeightSpec
from gemini.settings import Settings
from sharding import ParameterSpec, ShardLayout, Unit, resolve_strategy

FINE_COUNT = 32
"""A chunk needs at least this many parameters before the batched code path pays off."""
FINE_NUMEL = 4096
"""Above this mean parameter size, copying data costs more than the Python calls."""


@dataclass(frozen=True, kw_only=True)
class ChunkFacts(PackedChunk):
    """One chunk, equal on all ranks."""

    index: int
    home_layout: ShardLayout  # of the parameter home: `layout`, or one rank's where every rank holds it whole
    optim_layout: ShardLayout  # likewise, of the reduced gradient, master and optimizer state
    dtypes: ChunkDtypes
    may_lend_home: bool  # the parameter home may hold the reduced gradient between backward and step
    splits_master: bool  # bf16: the fp32 master is the parameter home and the int16 remainders beside it
    is_fine: bool  # so many small parameters that the Python calls for each of them decide the speed
    is_chosen: bool  # each rank's data decides which of the weights that rank uses
    persists: bool  # of weights that stay whole on the device of every rank

    @property
    def master_itemsize(self) -> int:
        """Bytes of an element's master beside the 16-bit weight: fp32, or the int16 remainder of a split one."""
        return 2 if self.splits_master else 4


@dataclass(frozen=True)
class Packing:
    """How a model is cut into chunks, and the costs that the search for the chunk size found."""

    chunks: tuple[ChunkFacts, ...]
    chunk_bytes: int
    searched: SearchReport | None  # None for a size that the user gave


def packings(spec: ModelSpec, settings: Settings, world_size: int) -> Iterator[Packing]:
    """The packing with the chunk size in `settings`, or the packings of all candidate sizes, cheapest first.

    Raises ValueError if the shard strategy loses or repeats a weight.
    """
    persistent = _persistent(spec, settings)
    inputs = [[_packing_input(weight, weight.name in persistent) for weight in row] for row in spec.first_uses()]
    packer = Packer(inputs, resolve_strategy(settings.shard_strategy), world_size)
    if settings.chunk_size is None:
        for found, cuts in candidates(packer, world_size):
            yield Packing(_facts_of(packer.seal(cuts), spec, settings, persistent), found.chunk_bytes, found)
        return
    # The user gives `chunk_size` in elements. Convert it with the element size of most parameters.
    itemsizes = [item.itemsize for row in inputs for item in row]
    # Of sizes that are equally frequent all ranks must take the same: hence the sort.
    chunk_bytes = settings.chunk_size * max(sorted(set(itemsizes)), key=itemsizes.count, default=1)
    facts = _facts_of(packer.seal(packer.cut(chunk_bytes)), spec, settings, persistent)
    yield Packing(facts, chunk_bytes, None)


def _persistent(spec: ModelSpec, settings: Settings) -> frozenset[str]:
    """The names of weights that stay whole on the device, see `Settings.param_persistence_threshold`."""
    if not settings.param_persistence_threshold:  # the steady state: no weight is smaller
        return frozenset()
    found, numel = [], 0
    threshold = settings.model_persistence_threshold
    for weight in (weight for row in spec.first_uses() for weight in row):
        is_small = weight.numel < settings.param_persistence_threshold
        # A weight that would pass the bound is skipped. A smaller one behind it may still be within it.
        if is_small and (threshold is None or numel + weight.numel <= threshold):
            found.append(weight.name)
            numel += weight.numel
    return frozenset(found)


def _packing_input(weight: WeightSpec, persists: bool) -> PackingInput:
    spec = ParameterSpec(weight.name, weight.numel, weight.shape)
    # Memory of a gradient and optimizer state is given to whole chunks, so trained and frozen weights are packed apart.
    return PackingInput(spec, (weight.dtype.name, weight.trainable, persists), weight.dtype.itemsize)


def _facts_of(
    packed_chunks: tuple[PackedChunk, ...], spec: ModelSpec, settings: Settings, persistent: frozenset[str]
) -> tuple[ChunkFacts, ...]:
    by_name = {weight.name: weight for weight in spec.weights}
    chosen = {spec.weights[place].name for o in spec.operators if o.is_chosen for place in o.weights}
    edited = {spec.weights[place].name for o in spec.operators if o.edits_weights for place in o.weights}
    # One object for each dtype: `needs._key_of` tells equal dtypes by their identity.
    facts, dtypes_of = [], {dtype: settings.chunk_dtypes(dtype) for dtype in {each.dtype for each in spec.weights}}
    for index, packed in enumerate(packed_chunks):
        layout = packed.layout
        dtypes = dtypes_of[by_name[packed.names[0]].dtype]
        # Persistence and dtype are part of the packing key, so the first weight speaks for all of the chunk.
        persists = packed.names[0] in persistent
        home_layout = layout if settings.stage == 3 and not persists else whole_layout(layout)
        optim_layout = layout if settings.stage >= 1 else home_layout
        # Reuse needs the updated elements to be contiguous in the parameter home. At stages 1 and 2 with several units
        # per chunk they are not.
        is_contiguous = home_layout.world_size == optim_layout.world_size or len(layout.units) == 1
        # The gradient takes the bytes of the parameters, and a step can recreate these only where they have an fp32
        # master.
        fits = dtypes.weight.is_half and dtypes.rest == dtypes.weight
        # Weights that persist stay where they are by contract, so their home is not lent.
        may_lend_home = settings.reuse_fp16_shard and fits and is_contiguous and not persists
        # A split master does not see what a forward writes to the weight itself.
        is_edited = not edited.isdisjoint(packed.names)
        numel = sum(by_name[name].numel for name in packed.names)
        chunk_facts = ChunkFacts(
            **vars(packed),
            index=index,
            home_layout=home_layout,
            optim_layout=optim_layout,
            dtypes=dtypes,
            may_lend_home=may_lend_home,
            # In a lent home the gradient would overwrite the upper half of a split master, which is the parameter.
            splits_master=dtypes.weight.name == "bfloat16" and not may_lend_home and not is_edited,
            is_fine=len(packed.names) >= FINE_COUNT and numel <= FINE_NUMEL * len(packed.names),
            is_chosen=not chosen.isdisjoint(packed.names),
            persists=persists,
        )
        facts.append(chunk_facts)
    return tuple(facts)


def whole_layout(layout: ShardLayout) -> ShardLayout:
    """The layout of a rank that holds the whole payload."""
    return ShardLayout((Unit(0, layout.numel),) if layout.numel else (), 1)
