"""`TiledLinear`: a linear layer as a grid of smaller ones, of which only one need be on the device at a time.

The largest parameter bounds every budget from below, because an operator needs its weight whole. A layer that is cut
into tiles needs one tile: each is an operator of its own, whose chunks are fetched, reduced and updated by themselves.
DeepSpeed calls this memory-centric tiling (https://arxiv.org/abs/2104.07857, section 5.1.3).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gemini.model.plain import GatheredParameters


class TiledLinear(nn.Module):
    """A linear layer made of `out_splits` x `in_splits` smaller ones, its tiles, for weights that are too large whole.

    Each tile is an operator of its own in a `ShardedModel`, so the least budget falls to that of one tile. The outputs
    are those of one `nn.Linear`: with `in_splits=1` each output element is the same sum, otherwise it is added up from
    one partial sum for each input tile, and rounds in the dtype of the activations between them. The input's gradient
    is a sum over the `out_splits` tiles likewise. Tiles that are sharded or offloaded have the bits of plain ones.

    Arguments and names of the parameters (`linears.ROW.COLUMN.weight`) are those of DeepSpeed's class. Building it is
    local, or collective inside a `ZeroInitContext` and with an `init_linear` that is sharded.

    Args:
        in_features: the size of the input's last dimension.
        out_features: the size of the output's last dimension.
        bias: whether there is a bias: it is in the last tile of each row.
        in_splits: into how many parts the input is cut. Parts differ by one element at most, larger ones first.
        out_splits: into how many parts the output is cut, likewise.
        input_is_already_split: True takes a sequence of `in_splits` tensors as the input, in place of one tensor.
        combine_out_splits: False returns the list of `out_splits` outputs, in place of their concatenation.
        linear_cls: makes a tile: `linear_cls(in_features, out_features, bias=..., **kwargs)`, a module with `weight`
            and `bias` as `nn.Linear` has them. Tiles of `nn.Linear` itself start within the bound of the whole layer,
            which follows from all of `in_features`.
        init_linear: a layer whose values the tiles start with, as by `copy_params_from`.
        kwargs: further arguments of `linear_cls`, such as `device` and `dtype`.

    Raises ValueError for sizes or splits out of range, and what `copy_params_from` raises.

    Example:
        >>> layer = TiledLinear(1000, 4000, in_splits=3, out_splits=8, init_linear=torch.nn.Linear(1000, 4000))
        >>> layer(torch.ones(2, 1000)).shape
        torch.Size([2, 4000])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.in_splits = in_splits
        self.out_splits = out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = _bounds("in", in_features, in_splits)  # part i is [in_parts[i], in_parts[i + 1])
        self.out_parts = _bounds("out", out_features, out_splits)
        self.linears = nn.ModuleList()
        for out_width in _widths(self.out_parts):
            row = nn.ModuleList()
            for in_width in _widths(self.in_parts):
                # One bias for each sum of partial products.
                has_bias = bias and len(row) == in_splits - 1
                tile = linear_cls(in_width, out_width, bias=has_bias, **kwargs)
                if linear_cls is nn.Linear:
                    _scale_start(tile, in_width, in_features)
                row.append(tile)
            self.linears.append(row)
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """The layer's output; collective in a `ShardedModel`, as the call of any of its modules.

        Args:
            input_: of shape (..., in_features), or with `input_is_already_split` a sequence of its parts.

        Returns a tensor of shape (..., out_features), or with `combine_out_splits=False` a list of its parts. Raises
        ValueError for an input of another size or number of parts.
        """
        inputs = self._inputs_of(input_)
        outputs = [_sum_of(tile(part) for tile, part in zip(row, inputs, strict=True)) for row in self._rows()]
        if not self.combine_out_splits:
            return outputs
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def copy_params_from(self, other: nn.Module) -> None:
        """Copy weight and bias of a whole layer into the tiles. Rank 0's values reach all ranks, and the fp32 masters.

        Collective where this layer or `other` is in a `ShardedModel` or a `ZeroInitContext`, and then called between
        steps; otherwise local. One tile at a time is gathered, and `other` whole.

        Args:
            other: an `nn.Linear`, or a module with `weight` and `bias` of these shapes.

        Raises ValueError, before anything has changed, if `other` has another shape, or a bias where this layer has
        none, or none where it has one; and what `GatheredParameters` raises.

        Example:
            >>> TiledLinear(8, 8, out_splits=2).copy_params_from(torch.nn.Linear(8, 8))
        """
        weight, bias = self._checked(other)
        with GatheredParameters([weight] if bias is None else [weight, bias]), torch.no_grad():
            for row, (top, bottom) in zip(self._rows(), itertools.pairwise(self.out_parts), strict=True):
                for tile, (left, right) in zip(row, itertools.pairwise(self.in_parts), strict=True):
                    its_weight, its_bias = _weight_and_bias(tile)
                    with GatheredParameters(tile, modifier_rank=0):
                        its_weight.copy_(weight[top:bottom, left:right])
                        if bias is not None and its_bias is not None:
                            its_bias.copy_(bias[top:bottom])

    def extra_repr(self) -> str:
        """What `print(module)` shows of the grid. Local. Raises nothing."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"in_splits={self.in_splits}, out_splits={self.out_splits}"
        )

    def _rows(self) -> Iterator[nn.ModuleList]:
        """The tiles of each part of the output, in order."""
        for row in self.linears:
            assert isinstance(row, nn.ModuleList)
            yield row

    def _inputs_of(self, given: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        """The input's parts, checked: of a wrong one torch would say only that a tile cannot be multiplied."""
        widths = _widths(self.in_parts)
        if isinstance(given, Tensor) and (not self.input_is_already_split or self.in_splits == 1):
            if given.shape[-1] != self.in_features:
                raise ValueError(
                    f"TiledLinear: the input's last dimension is {given.shape[-1]}, not {self.in_features}"
                )
            parts: Sequence[Tensor] = given.split(widths, dim=-1)
            return parts
        if isinstance(given, Tensor) or [each.shape[-1] for each in given] != widths:
            found = tuple(given.shape) if isinstance(given, Tensor) else [tuple(each.shape) for each in given]
            raise ValueError(
                f"TiledLinear(in_splits={self.in_splits}, input_is_already_split={self.input_is_already_split}) takes "
                f"{'tensors of last dimensions ' + str(widths) if self.input_is_already_split else 'one tensor'}, "
                f"found {found}"
            )
        return given

    def _checked(self, other: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
        weight, bias = _weight_and_bias(other)
        shape = (self.out_features, self.in_features)
        if weight is None or tuple(weight.shape) != shape:
            found = "none" if weight is None else tuple(weight.shape)
            raise ValueError(f"TiledLinear.copy_params_from() needs a weight of shape {shape}, found {found}")
        if (bias is not None) is not self.use_bias or (bias is not None and tuple(bias.shape) != shape[:1]):
            needed = f"of shape {shape[:1]}" if self.use_bias else "of none"
            found = "none" if bias is None else f"one of shape {tuple(bias.shape)}"
            raise ValueError(
                f"TiledLinear(bias={self.use_bias}).copy_params_from() needs a bias {needed}, found {found}"
            )
        return weight, bias


def _weight_and_bias(layer: nn.Module) -> tuple[Any, Any]:
    return getattr(layer, "weight", None), getattr(layer, "bias", None)


def _bounds(which: str, num_features: int, num_splits: int) -> list[int]:
    """Where the parts begin and end: those that are larger by one come first, as DeepSpeed cuts them."""
    if not 1 <= num_splits <= num_features:
        raise ValueError(
            f"TiledLinear: {which}_splits={num_splits} must be at least 1 and at most {which}_features={num_features}"
        )
    width, num_larger = divmod(num_features, num_splits)
    return [part * width + min(part, num_larger) for part in range(num_splits + 1)]


def _widths(bounds: Sequence[int]) -> list[int]:
    return [end - start for start, end in itertools.pairwise(bounds)]


def _sum_of(partials: Iterator[Tensor]) -> Tensor:
    # Not in place: a tile may return a view, or a tensor that its autograd node has saved. A generator, so that two
    # partial sums are alive at a time, not all of them.
    total = next(partials)
    for partial in partials:
        total = total + partial
    return total


def _scale_start(tile: nn.Module, in_width: int, in_features: int) -> None:
    """Make the start of a tile of `nn.Linear` as large as that of the whole layer.

    `nn.Linear` draws from (-1/sqrt(n), 1/sqrt(n)) for n inputs. With the tile's own n the sum over k input tiles would
    be sqrt(k) times as large as the layer's output, and a model that is trained from scratch would be another one.
    """
    if in_width != in_features:
        with torch.no_grad():
            for parameter in tile.parameters():
                parameter.mul_((in_width / in_features) ** 0.5)
