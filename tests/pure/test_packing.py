"""Packing and chunk-size search: numbers in, numbers out."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.placement.packing import PackedChunk, Packer, PackingInput, candidates, pack, report
from sharding import ALIGNMENT, ParameterSpec, resolve_strategy

NUMELS = st.integers(0, 5000)
OPERATORS = st.lists(st.lists(st.tuples(NUMELS, st.sampled_from(["a", "b"])), max_size=4), min_size=1, max_size=8)


def inputs_of(operators: list[list[tuple[int, str]]]) -> list[list[PackingInput]]:
    return [
        [
            PackingInput(ParameterSpec(f"{i}.{j}", numel, (numel,)), key, 4 if key == "a" else 2)
            for j, (numel, key) in enumerate(operator)
        ]
        for i, operator in enumerate(operators)
    ]


@settings(max_examples=150, deadline=None)
@given(OPERATORS, st.sampled_from(["tensor", "bucket", "chunk"]), st.integers(1, 5), st.sampled_from([1, 4096, 20_000]))
def test_every_parameter_has_exactly_one_place(operators, strategy, world_size, chunk_bytes):  # type: ignore[no-untyped-def]
    inputs = inputs_of(operators)
    chunks = pack(inputs, resolve_strategy(strategy), chunk_bytes, world_size)
    items = {item.spec.name: item for operator in inputs for item in operator}
    placed = [name for chunk in chunks for name in chunk.names]
    assert sorted(placed) == sorted(items)
    for chunk in chunks:
        assert chunk.layout.numel % (world_size * ALIGNMENT) == 0
        assert chunk.oversize == (chunk.payload_bytes > chunk_bytes), "only what is too large has a chunk of its own"
        end = 0
        for name, offset in sorted(zip(chunk.names, chunk.offsets, strict=True), key=lambda place: place[1]):
            assert items[name].key == chunk.key
            assert offset % ALIGNMENT == 0
            assert offset >= end, "parameters do not overlap"
            end = offset + items[name].spec.numel
        assert end <= chunk.layout.numel


def pack_one_key(sizes: list[list[int]], chunk_bytes: int, strategy: str = "chunk") -> list[PackedChunk]:
    return pack(
        inputs_of([[(n, "a") for n in operator] for operator in sizes]), resolve_strategy(strategy), chunk_bytes, 1
    )


def test_no_border_cuts_an_operator_that_fits_into_a_chunk() -> None:
    chunks = pack_one_key([[512, 256], [512, 256], [512, 256]], 4 * 1024)
    assert [chunk.names for chunk in chunks] == [("0.0", "0.1"), ("1.0", "1.1"), ("2.0", "2.1")]


def test_an_oversize_tensor_leaves_the_chunk_around_it_open() -> None:
    chunks = pack_one_key([[256], [9999], [256]], 4 * 1024)
    assert [(chunk.names, chunk.oversize) for chunk in chunks] == [(("0.0", "2.0"), False), (("1.0",), True)]


def test_the_report_counts_padding_gathered_bytes_and_collectives() -> None:
    chunks = pack_one_key([[1000], [1000]], 4 * 1024)
    counted = report(chunks, 4 * 1024, 8000)
    assert counted.padding_bytes == 2 * 4 * 24
    assert counted.gathered_bytes == 4 * 4 * 1024
    assert counted.num_collectives == 6
    assert counted.total_bytes == counted.padding_bytes + counted.gathered_bytes + counted.collective_bytes


def test_the_search_begins_with_the_cheapest_and_ends_with_what_only_a_tight_budget_asks_for() -> None:
    operators = inputs_of([[(n, "a") for n in (262_144, 512)] for _ in range(24)])
    found = list(candidates(Packer(operators, resolve_strategy("chunk"), 2), 2))
    costs = [each.total_bytes for each, _ in found]
    assert costs[0] == min(costs)
    assert found[0][0].num_chunks < 24 * 2
    sizes = [each.chunk_bytes for each, _ in found]
    assert len(set(sizes)) == len(sizes) > 5
    shapes = [[(cut.place, len(cut.units), cut.oversize) for cut in cuts] for _, cuts in found]
    assert all(shapes.count(shape) == 1 for shape in shapes), "one size stands for all that make the same chunks"
    assert any(len(cuts) == 24 and not any(cut.oversize for cut in cuts) for _, cuts in found), "an operator each"
    assert min(sizes) == 1024
    for each, cuts in found:
        assert sum(len(unit) for cut in cuts for unit in cut.units) == 48, "every packing is of the whole model"
        assert each.num_chunks == len(cuts)


def test_tiny_operators_share_chunks_as_large_as_what_their_padding_makes_of_them() -> None:
    """1,000 Linear(8, 8) have 288 KB of numbers, which take 2 MB: chunks of a search up to 288 KB would be eight."""
    packer = Packer(inputs_of([[(64, "a"), (8, "a")]] * 1000), resolve_strategy("bucket"), 2)
    found = [counted for counted, _ in candidates(packer, 2)]
    assert found[0].num_chunks == 2
    assert max(counted.chunk_bytes for counted in found) == 2**21
    assert min(counted.num_chunks for counted in found) == 1


@settings(max_examples=100, deadline=None)
@given(OPERATORS, st.sampled_from(["tensor", "bucket", "chunk"]), st.integers(1, 3), st.integers(1, 60_000))
def test_there_is_no_other_way_to_cut_a_model(operators, strategy, world_size, chunk_bytes):  # type: ignore[no-untyped-def]
    packer = Packer(inputs_of(operators), resolve_strategy(strategy), world_size)
    every = list(packer.every_cut())
    sizes = [size for size, _ in every]
    assert sizes == sorted(set(sizes))
    _, expected = max((one for one in every if one[0] <= chunk_bytes), key=lambda one: one[0])
    assert packer.cut(chunk_bytes) == expected
