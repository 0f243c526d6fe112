"""A sharded model as other code sees it: names, state dicts and attributes are those of the module that it wraps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from gemini.errors import UnsupportedError
from gemini.executor.executor import Executor
from gemini.model.weights import load_part, load_whole_state_dict, whole_state_dict


class PlainView(nn.Module):
    """What a `ShardedModel` answers on behalf of the module that it wraps."""

    module: nn.Module
    executor: Executor

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(  # type: ignore[override]
        self,
        *,
        rank0_only: bool = False,
        destination: OrderedDict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> OrderedDict[str, Any]:
        """Whole CPU copies under the plain module's names; empty on other ranks with `rank0_only`. Collective.

        destination: what a plain module around this one collects its own state dict in.
        """
        if keep_vars:
            raise UnsupportedError("state_dict(keep_vars=True) of a ShardedModel: its whole tensors are copies")
        with self.executor.publishing():
            state = whole_state_dict(self.module, self.executor, rank0_only, prefix)
        if destination is None:
            return state
        destination.update(state)
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:  # type: ignore[override]
        """Set weights, masters and buffers from whole tensors; checks all keys and shapes first. Collective."""
        with self.executor.publishing():
            return load_whole_state_dict(self.module, self.executor, state_dict, strict)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """torch calls it for the parts of a plain module that loads its state dict."""
        with self.executor.publishing():
            load_part(self.module, self.executor, state_dict, prefix, *rest[-3:])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return getattr(module, name)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UnsupportedError(
            "copy.deepcopy(ShardedModel) is not possible: its memory is shared with an executor. Build the module anew "
            "and load model.state_dict() into it"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError("a ShardedModel cannot be pickled: save model.state_dict() instead")

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        raise UnsupportedError(
            ".to(), .cuda(), .half() and the like are not possible on a ShardedModel: give device= and dtype= to it"
        )
