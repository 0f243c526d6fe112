"""Parameters into chunks: their order, the chunks' size, and the facts of a packed chunk."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from operator import attrgetter
from typing import Protocol

from gemini.placement.demand import ChunkDtypes, Demand, ModelSpec, Placement, Tier, WeightSpec
from gemini.placement.policy import moved_and_updated
from gemini.settings import Settings
from sharding import (
    ALIGNMENT,
    ParameterSpec,
    ShardLayout,
    ShardStrategy,
    Unit,
    check_units,
    lay_out_unit,
    resolve_strategy,
    round_up,
)

# -- Packing: which chunk contains each parameter, and at which offset. Numbers only.
#
# Operators come in the order in which the module tree lists them. Their parameters are grouped by key (dtype,
# trainable: only equal keys share a chunk), turned into units by the shard strategy, and units are laid one after
# the other into chunks of at most `chunk_bytes`. The units of one operator go to one chunk if they fit into one,
# so that no border cuts an operator; a unit larger than a chunk gets a chunk of its own, of the second slot size.


@dataclass(frozen=True)
class PackingInput:
    """One parameter and what packing needs to know of it."""

    spec: ParameterSpec
    key: Hashable  # only parameters of equal key share a chunk
    itemsize: int


@dataclass(frozen=True)
class PackedChunk:
    """One chunk: its parameters by name with their element offsets, and how it is divided over the ranks."""

    key: Hashable
    itemsize: int
    names: tuple[str, ...]
    offsets: tuple[int, ...]  # elements, each a multiple of 256
    layout: ShardLayout
    oversize: bool  # larger than a regular chunk: it needs a slot of the second size

    @property
    def payload_bytes(self) -> int:
        return self.layout.numel * self.itemsize


@dataclass(slots=True)
class Cut:
    """A chunk before its parameters have offsets: the units that go into it. `seal` makes a `PackedChunk` of it."""

    key: Hashable
    itemsize: int
    place: int  # of its first operator
    oversize: bool
    units: list[list[ParameterSpec]]
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class _SizedUnit:
    """A unit, with the size of a chunk that contains nothing else."""

    specs: list[ParameterSpec]
    place: int  # of the operator
    numel: int  # from its start to where the next unit of a chunk may start
    payload_bytes: int


class _Line:
    """Units of one key, laid one after the other into a payload that takes all of them."""

    def __init__(self, rows: Sequence[Sequence[_SizedUnit]]) -> None:
        """rows: the units of one operator each."""
        self.rows = rows
        self.units = [unit for row in rows for unit in row]
        self.specs = [unit.specs for unit in self.units]
        self.starts = [0, *accumulate(unit.numel for unit in self.units)]  # of the units, and the end
        self.firsts = [0, *accumulate(map(len, rows))]  # the number of each row's first unit, and of all units
        self.unit_bytes = sorted({unit.payload_bytes for unit in self.units})
        its = pairwise(self.firsts)
        # Sizes of the operators for which a chunk that began before them may be closed.
        self.row_numels = sorted({self.starts[end] - self.starts[first] for first, end in its if 0 < first < end - 1})

    def up_to(self, chunk_bytes: int) -> _Line:
        """The line without the units that are larger than a chunk."""
        return _Line([[unit for unit in row if unit.payload_bytes <= chunk_bytes] for row in self.rows])


class Packer:
    """Cuts one model into chunks of any size. Units and their sizes, which do not depend on it, are computed once."""

    def __init__(
        self,
        operators: Sequence[Sequence[PackingInput]],
        strategy: ShardStrategy,
        world_size: int,
        num_replicas: int = 1,
    ) -> None:
        """operators: in the order of the module tree. Raises ValueError if the strategy loses or repeats one.

        world_size, num_replicas: as of `ShardLayout`.
        """
        self._spans_chunk = strategy.spans_chunk
        # A strategy that spans the chunk merges its units, and only the merged one is padded for the ranks.
        self._unit_alignment = ALIGNMENT if strategy.spans_chunk else world_size * ALIGNMENT
        self._ranks = world_size, num_replicas
        # Every rank's slice of a payload ends on a multiple of ALIGNMENT elements, see [Note: Alignment] in
        # sharding/layout.py.
        self._quantum = world_size * ALIGNMENT
        self._groups: list[tuple[Hashable, int, _Line]] = []
        self.operator_bytes = [sum(item.spec.numel * item.itemsize for item in operator) for operator in operators]
        # A dict keeps the order of first use. The order of a set of keys, which contain texts, differs between
        # processes, and with it the chunks would.
        for key, itemsize in {item.key: item.itemsize for operator in operators for item in operator}.items():
            of_key = [[item.spec for item in operator if item.key == key] for operator in operators]
            places = [place for place, specs in enumerate(of_key) if specs]
            units = _units_by_operator([of_key[place] for place in places], strategy)
            rows = [
                [self._sized(unit, place, itemsize) for unit in its] for place, its in zip(places, units, strict=True)
            ]
            self._groups.append((key, itemsize, _Line(rows)))

    def cut(self, chunk_bytes: int) -> list[Cut]:
        """Chunks of at most `chunk_bytes`, in order of first use. Each parameter is in exactly one."""
        return self._cut(chunk_bytes)[0]

    def every_cut(self) -> Iterator[tuple[int, list[Cut]]]:
        """Every distinct way to cut the model, each with the least chunk size that makes it, in ascending order."""
        size: int | None = 1
        while size is not None:
            cuts, then = self._cut(size)
            yield size, cuts
            size = then

    def num_units(self) -> int:
        """The number of units in all chunks together, whatever the chunk size."""
        return sum(len(line.units) for _, _, line in self._groups)

    def seal(self, cuts: Sequence[Cut]) -> tuple[PackedChunk, ...]:
        """The same chunks with the offset of every parameter."""
        return tuple(_seal(cut, self._spans_chunk, *self._ranks) for cut in cuts)

    def exact_bytes(self) -> set[int]:
        """The bytes of each payload that holds exactly one operator or one unit."""
        sizes: set[int] = set()
        for _, itemsize, line in self._groups:
            sizes.update(line.unit_bytes)
            numels = {line.starts[end] - line.starts[first] for first, end in pairwise(line.firsts)}
            sizes.update(itemsize * round_up(numel, self._quantum) for numel in numels)
        return sizes

    def _cut(self, chunk_bytes: int) -> tuple[list[Cut], int | None]:
        """The chunks, and the least size that makes others. None: no larger one does."""
        cuts: list[Cut] = []
        refused: list[int] = []
        for key, itemsize, line in self._groups:
            if line.unit_bytes[-1] > chunk_bytes:
                # The smallest unit that is larger than a chunk: from its size on it joins the regular chunks.
                refused.append(line.unit_bytes[bisect_right(line.unit_bytes, chunk_bytes)])
                cuts += [
                    Cut(key, itemsize, unit.place, True, [unit.specs], unit.payload_bytes)
                    for unit in line.units
                    if unit.payload_bytes > chunk_bytes
                ]
                line = line.up_to(chunk_bytes)
            found, bytes_refused = self._fill(key, itemsize, line, chunk_bytes)
            cuts += found
            refused += bytes_refused
        # The sort is stable: within an operator the order is that of keys, with oversize chunks first.
        return sorted(cuts, key=attrgetter("place")), min(refused, default=None)

    def _fill(self, key: Hashable, itemsize: int, line: _Line, chunk_bytes: int) -> tuple[list[Cut], set[int]]:
        """Chunks of a line without units that are larger, and payloads of larger chunks that might have been made.

        A chunk ends before the first unit that does not fit; before the first one of that unit's operator, if a chunk
        of its own holds all units of the operator, and this one has units of others.
        """
        done: list[Cut] = []
        starts, firsts, quantum = line.starts, line.firsts, self._quantum
        # A payload is padded to a multiple of the quantum: with a capacity in between it could exceed `chunk_bytes`.
        num_units, capacity = len(line.units), chunk_bytes // itemsize // quantum * quantum
        # From this size on one more operator fits into a chunk, so that the chunk before it may end at its border.
        refused = set(line.row_numels[bisect_right(line.row_numels, capacity) :][:1])
        first = 0
        # Each turn makes one chunk. The line has no unit that is larger than a chunk, so at least one fits and the loop
        # ends.
        while first < num_units:
            end = bisect_right(starts, starts[first] + capacity, first) - 1
            if end < num_units:
                # The first unit that does not fit has the number `end`. The units of its operator are those in [before,
                # after).
                row, too_many = bisect_right(firsts, end), end + 1
                before, after = firsts[row - 1], firsts[row]
                if first < before < after - 1 and starts[after] - starts[before] <= capacity:
                    # A larger chunk ends here too, until it holds the whole operator.
                    end, too_many = before, after
                # With room for so many elements the chunk would have had one unit, or one operator, more.
                refused.add(starts[too_many] - starts[first])
            payload_bytes = itemsize * round_up(starts[end] - starts[first], quantum)
            done.append(Cut(key, itemsize, line.units[first].place, False, line.specs[first:end], payload_bytes))
            first = end
        return done, {itemsize * round_up(numel, quantum) for numel in refused}

    def _sized(self, unit: list[ParameterSpec], place: int, itemsize: int) -> _SizedUnit:
        end = 0
        # Each parameter starts on an aligned offset, as `lay_out_unit` places it.
        for spec in unit:
            end = round_up(end, ALIGNMENT) + spec.numel
        payload_bytes = itemsize * round_up(end, self._quantum)
        return _SizedUnit(unit, place, round_up(end, self._unit_alignment), payload_bytes)


def pack(
    operators: Sequence[Sequence[PackingInput]], strategy: ShardStrategy, chunk_bytes: int, world_size: int
) -> tuple[PackedChunk, ...]:
    """Chunks of at most `chunk_bytes`, in order of first use. Each parameter of `operators` is in exactly one."""
    packer = Packer(operators, strategy, world_size)
    return packer.seal(packer.cut(chunk_bytes))


def _units_by_operator(
    operators: list[list[ParameterSpec]], strategy: ShardStrategy
) -> list[list[list[ParameterSpec]]]:
    """The strategy's units by operator. A unit belongs to the operator of its first parameter."""
    units = strategy.units(operators)
    # A user's strategy may lose or repeat a weight, which would then have no place in a chunk, or two.
    check_units(strategy, operators, units)
    owner = {spec.name: index for index, operator in enumerate(operators) for spec in operator}
    groups: list[list[list[ParameterSpec]]] = [[] for _ in operators]
    for unit in units:
        groups[owner[unit[0].name]].append(unit)
    return groups


def _seal(cut: Cut, spans_chunk: bool, world_size: int, num_replicas: int) -> PackedChunk:
    # A strategy that spans the chunk divides all of it in one piece, as a single unit.
    units = [[spec for unit in cut.units for spec in unit]] if spans_chunk else cut.units
    names: list[str] = []
    offsets: list[int] = []
    laid_out: list[Unit] = []
    start = 0
    for unit in units:
        # The unit is padded, so that all ranks have equal parts of it, as the all-gather in place needs.
        inside, numel = lay_out_unit([spec.numel for spec in unit], world_size)
        names += [spec.name for spec in unit]
        offsets += [start + offset for offset in inside]
        laid_out.append(Unit(start, numel))
        start += numel
    layout = ShardLayout(tuple(laid_out), world_size, num_replicas)
    return PackedChunk(cut.key, cut.itemsize, tuple(names), tuple(offsets), layout, cut.oversize)


# -- Chunk-size search: the chunk size that wastes least, with every cost counted in bytes.
#
# Three costs pull against each other: padding (units rounded up, chunk ends left empty by whole operators, large
# slots that hold small chunks), the bytes gathered at the busiest moment (slots), and the number of collectives, each
# charged with the bytes that the link could have carried in the time a launch takes.
#
# If everything fits the device, the cheapest size is the best. If not, bytes travel in every step, and how many depends
# on the size: large chunks use a small budget badly. Only a placement can tell, so the search merely orders the sizes.
# `plan_model` places them one after the other, up to `CHUNKS_PLACED` chunks in all, and takes the size whose step costs
# least (`step_cost`) among those that use the budget.


BYTES_PER_COLLECTIVE = 512 * 2**10
"""The bytes that the link could carry in the time that a collective's launch takes.

Two gloo ranks on one machine: about 1 MiB (`python -m benchmarks.collective_cost`). NCCL over PCIe, taken at 20 to
40 us and 12 GB/s, not measured: 240 to 480 KiB. Half a MiB is between the two.
"""

CHUNKS_PLACED = 2_000
"""Chunks that are placed while searching the size for a budget; after that the best size so far is taken. They take
some hundredths of a second."""

_COLLECTIVES_PER_CHUNK = 3  # gathered for forward and backward, reduced once
_GRANULARITY_BYTES = 2**10 * 64
_LEAST_BYTES = 2**10  # a shard of one rank ends on a multiple of 256 elements
_NUM_EXACT_SIZES = 24
_UNITS_CUT = 50_000
"""Units that are cut while trying every remaining size, before the search gives up: some tenths of a second."""
_NUM_SLOTS = 4  # two payloads and two gradients: the floor of a sequential model


@dataclass(frozen=True)
class SearchReport:
    """One candidate size and its costs, in bytes."""

    chunk_bytes: int
    num_chunks: int
    padding_bytes: int
    gathered_bytes: int
    num_collectives: int  # launches per chunk's units and step

    @property
    def collective_bytes(self) -> int:
        """The launches of a step, converted to bytes."""
        return self.num_collectives * BYTES_PER_COLLECTIVE

    @property
    def total_bytes(self) -> int:
        """The sum of all costs, by which candidates are ordered."""
        return self.padding_bytes + self.gathered_bytes + self.collective_bytes


class Sized(Protocol):
    """What the cost functions need to know of a chunk."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of the whole chunk, padding included."""

    @property
    def oversize(self) -> bool:
        """The chunk is larger than the chunk size and uses slots of the second size."""


def report(chunks: Sequence[Sized], chunk_bytes: int, model_bytes: int) -> SearchReport:
    """The costs of packing into `chunks`."""
    regular = max((chunk.payload_bytes for chunk in chunks if not chunk.oversize), default=0)
    # The largest chunk of a size decides how large all slots of that size are.
    oversize = max((chunk.payload_bytes for chunk in chunks if chunk.oversize), default=0)
    padding = sum(chunk.payload_bytes for chunk in chunks) - model_bytes
    # A slot of the second size stays partly empty whenever it holds a chunk smaller than the largest. Without this term
    # the search prefers sizes so small that every weight matrix is larger than a chunk.
    padding += sum(oversize - chunk.payload_bytes for chunk in chunks if chunk.oversize)
    return SearchReport(
        chunk_bytes, len(chunks), padding, _NUM_SLOTS * regular + 2 * oversize, _COLLECTIVES_PER_CHUNK * len(chunks)
    )


def step_cost(demand: Demand, placement: Placement, world_size: int) -> int:
    """Bytes over the link in a step under a budget; updates on the host and launches count as bytes of equal time."""
    # The copies of a chunk are counted like its collectives: two fetches and one gradient.
    copies = sum(
        count * _COLLECTIVES_PER_CHUNK for _, homes, count in placement.alike(demand) if Tier.HOST in homes.values()
    )
    collectives = _COLLECTIVES_PER_CHUNK * len(demand.chunks) if world_size > 1 else 0
    return moved_and_updated(demand, placement) + demand.costs.copy * copies + BYTES_PER_COLLECTIVE * collectives


def candidates(packer: Packer, world_size: int) -> Iterator[tuple[SearchReport, list[Cut]]]:
    """Candidate chunk sizes with the chunks that they make, in three groups.

    First the usual sizes by cost: powers of two and multiples of the largest operators' sizes. Then sizes that only a
    tight budget calls for: smaller than a launch is worth, or exactly one operator or one unit, so that a slot has no
    room to spare. Last all other sizes from the smallest on, because the ideal slot may hold a sum of several units;
    of a model with thousands of weights only the first of these. Sizes that make the same chunks are one candidate.
    """
    seen: set[bytes] = set()  # membership only
    # The usual sizes. 4096 elements a rank leave room for the padding of an operator's units.
    # The powers of two go from 64 KiB to 512 MiB.
    usual = {_GRANULARITY_BYTES * 2**power for power in range(14)}
    for size in sorted(set(packer.operator_bytes), reverse=True)[:8]:
        usual.update(_round_up(size * times + 4096 * world_size, _GRANULARITY_BYTES) for times in (1, 2, 4))
    # No size above the whole model makes other chunks. Count the padding of every unit: in a model of tiny operators
    # padding is most of the bytes.
    in_all = sum(cut.payload_bytes for cut in packer.cut(max(usual)))
    ceiling = max(_GRANULARITY_BYTES, _round_up(in_all, _GRANULARITY_BYTES))
    yield from _by_cost(packer, {size for size in usual if size <= ceiling}, seen)
    # Sizes for tight budgets.
    tight = {_LEAST_BYTES * 2**power for power in range(6)}
    tight.update(sorted(packer.exact_bytes(), reverse=True)[:_NUM_EXACT_SIZES])
    # The usual sizes were tried above: leaving them out saves the cuts that `seen` would discard.
    yield from _by_cost(packer, tight - usual, seen)
    # Every other size, as many as the bound on cut units allows.
    for size, cuts in islice(packer.every_cut(), _UNITS_CUT // max(1, packer.num_units())):
        yield from _unseen(packer, size, cuts, seen)


def _by_cost(packer: Packer, sizes: Collection[int], seen: set[bytes]) -> list[tuple[SearchReport, list[Cut]]]:
    found = [one for size in sorted(sizes) for one in _unseen(packer, size, packer.cut(size), seen)]
    return sorted(found, key=lambda one: (one[0].total_bytes, one[0].chunk_bytes))


def _unseen(packer: Packer, size: int, cuts: list[Cut], seen: set[bytes]) -> Iterator[tuple[SearchReport, list[Cut]]]:
    """The candidate, unless an earlier size has made the same chunks."""
    # Only the fingerprint is kept: the cuts of thousands of sizes would take too much memory.
    shape = array("q", [number for cut in cuts for number in (cut.place, len(cut.units), cut.oversize)]).tobytes()
    if shape not in seen:
        seen.add(shape)
        yield report(cuts, size, sum(packer.operator_bytes)), cuts


def _round_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple


# -- What is fixed about a model's chunks: which weights each one holds, how it is divided, and in which dtypes.


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
    fetch_layout: ShardLayout  # `layout`, with the format in which weights travel when they are fetched
    grad_layout: ShardLayout  # likewise, of gradients that are reduced
    secondary_layout: ShardLayout | None  # of the second copy in a node; None: there is none
    dtypes: ChunkDtypes
    may_lend_home: bool  # the parameter home may hold the reduced gradient between backward and step
    splits_master: bool  # bf16: the fp32 master is the parameter home and the int16 remainders beside it
    is_fine: bool  # so many small parameters that the Python calls for each of them decide the speed
    is_chosen: bool  # each rank's data decides which of the weights that rank uses
    persists: bool  # of weights that stay whole on the device of every rank
    in_groups: bool  # gradients are shared in groups of ranks, and optimizer states by all

    @property
    def num_groups(self) -> int:
        """Groups of ranks that share gradients."""
        return self.layout.world_size // self.grad_layout.world_size

    @property
    def rest_numel(self) -> int:
        """Elements of the reduced gradient at rest, while backwards add to it."""
        return (self.grad_layout if self.in_groups else self.optim_layout).shard_numel

    @property
    def may_await_replicas(self) -> bool:
        """Whether the means of groups may add up before replicas exchange them."""
        return has_later_replicas(self.grad_layout, self.optim_layout)

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
    num_shards = settings.num_shards(world_size)
    packer = Packer(inputs, resolve_strategy(settings.shard_strategy), num_shards, world_size // num_shards)
    if settings.chunk_size is None:
        for found, cuts in candidates(packer, num_shards):
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
        weight_wire = settings.weight_wire(dtypes.weight, by_name[packed.names[0]].trainable)
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
            # Weights that every rank holds whole are not fetched, and what an update has changed travels as it is.
            fetch_layout=layout.traveling(weight_wire if home_layout.world_size > 1 else None),
            secondary_layout=_secondary(layout, home_layout, settings, is_edited),
            grad_layout=layout.traveling(settings.gradient_wire(dtypes.weight)).within_group(settings.num_in_group),
            in_groups=settings.num_in_group is not None,
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


def _secondary(
    layout: ShardLayout, home_layout: ShardLayout, settings: Settings, is_edited: bool
) -> ShardLayout | None:
    # What a forward writes to weights differs between ranks: each rank's counts for its shard, which the second copy
    # would not show.
    num_ranks = settings.num_in_group or settings.secondary_group_size
    if num_ranks is None or home_layout.world_size == 1 or is_edited:
        return None
    return layout.within(num_ranks)


def has_later_replicas(grad_layout: ShardLayout, optim_layout: ShardLayout) -> bool:
    """Whether the means of groups may add up before replicas exchange them.

    Ranks that keep whole means exchange their parts before they gather them. What travels quantised is exchanged as the
    sum that it was before.
    """
    return grad_layout.num_replicas > 1 and optim_layout.world_size > 1 and grad_layout.wire is None


def whole_layout(layout: ShardLayout) -> ShardLayout:
    """The layout of a rank that holds the whole payload."""
    return ShardLayout((Unit(0, layout.numel),) if layout.numel else (), 1)
