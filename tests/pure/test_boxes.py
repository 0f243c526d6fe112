"""Intervals of tensors as boxes, and files of boxes, against indexing whole tensors."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemini import CheckpointError
from gemini.checkpoint.tensor_files import (
    Box,
    OpenFiles,
    Order,
    Part,
    TensorFile,
    boxes_of,
    parts_in,
    tensors_in,
    whole,
)

SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@st.composite
def intervals(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    start = draw(st.integers(0, whole(shape).numel))
    return shape, start, draw(st.integers(start, whole(shape).numel))


def indices(box: Box) -> tuple[slice, ...]:
    return box.inside(Box((0,) * len(box.sizes), box.sizes))


@given(intervals())
def test_boxes_are_the_interval_in_order(interval: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, end = interval
    numbers = torch.arange(whole(shape).numel).view(shape)
    found = list(boxes_of(shape, start, end))
    assert [int(n) for box in found for n in numbers[indices(box)].reshape(-1)] == list(range(start, end))
    assert len(found) <= max(1, 2 * len(shape) - 1) and all(box.numel for box in found)


@given(intervals(), st.data())
def test_memory_in_another_order_is_boxes_of_the_dimensions(
    interval: tuple[tuple[int, ...], int, int], data: st.DataObject
) -> None:
    shape, start, end = interval
    dims = data.draw(st.permutations(range(len(shape))))
    # A dense tensor whose memory holds 0, 1, 2, ...: its dimensions follow each other as `dims` says.
    memory = torch.arange(whole(shape).numel).view([shape[dim] for dim in dims])
    tensor = memory.permute(sorted(range(len(dims)), key=dims.__getitem__)) if dims else memory
    order = Order.of(tensor.stride(), tensor.shape)
    found = [
        int(number)
        for box, sizes in order.boxes(shape, start, end)
        for number in tensor[indices(box)].permute(order.dims).reshape(sizes).reshape(-1)
    ]
    assert found == list(range(start, end))


@given(SHAPES, st.data())
def test_overlaps_are_the_common_elements(shape: tuple[int, ...], data: st.DataObject) -> None:
    def draw() -> Box:
        offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        sizes = tuple(data.draw(st.integers(1, size - at)) for at, size in zip(offsets, shape, strict=True))
        return Box(offsets, sizes)

    one, other = draw(), draw()
    numbers = torch.arange(whole(shape).numel).view(shape)
    both = set(numbers[indices(one)].reshape(-1).tolist()) & set(numbers[indices(other)].reshape(-1).tolist())
    common = one.overlap(other)
    assert (set() if common is None else set(numbers[indices(common)].reshape(-1).tolist())) == both
    if common is not None:
        assert torch.equal(numbers[indices(one)][common.inside(one)], numbers[indices(common)])


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("shape", [(), (7,), (4, 1, 3), (2, 3, 2, 2)])
def test_parts_that_some_ranks_wrote_are_read_in_other_parts(
    tmp_path: Path, shape: tuple[int, ...], num_ranks: int
) -> None:
    value = torch.randn(shape).to(torch.bfloat16)
    numel = value.numel()
    cuts = [numel * rank // num_ranks for rank in range(num_ranks + 1)]
    paths = []
    for rank in range(num_ranks):
        for number, box in enumerate(boxes_of(shape, cuts[rank], cuts[rank + 1])):
            paths.append(tmp_path / f"{rank}-{number}.safetensors")
            file = TensorFile(paths[-1], [Part("it", box, value.dtype), Part("id", Box((rank,), (1,)), torch.int64)])
            file.write("it", value[indices(box)].reshape(-1))
            file.write("id", torch.tensor([rank]))
            file.finish()
    stored = tensors_in(paths)["it"]
    assert (stored.shape, stored.dtype, stored.missing()) == (shape, value.dtype, 0)
    with OpenFiles() as files:
        assert torch.equal(stored.whole(files), value)
        for start in range(numel):
            for end in range(start + 1, numel + 1, 2):
                for box in boxes_of(shape, start, end):
                    assert torch.equal(stored.read(box, files), value[indices(box)])
                    into = torch.zeros(box.sizes, dtype=torch.float32)
                    stored.read(box, files, into)
                    assert torch.equal(into, value[indices(box)].float())
    if num_ranks > 1 and numel > 1:
        assert tensors_in(paths[:-1])["it"].missing() > 0 or tensors_in(paths[:-1])["it"].shape != shape


@pytest.mark.parametrize("data", [b"", b"\x05", b"\xff" * 40, (2).to_bytes(8, "little") + b"[]", b"PK\x03\x04" * 9])
def test_foreign_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="foreign"):
        parts_in(path)
