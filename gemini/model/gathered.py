"""`GatheredParameters`: a context in which parameters are whole and plain, between steps, to be read or changed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType

import torch
from torch import Tensor, nn

from gemini.access.parameter_link import ParameterLink, any_link_of
from gemini.building.zero_init import shard_pending
from gemini.errors import GeminiError, UnsupportedError


class GatheredParameters:
    """Context manager inside which the given parameters are ordinary, whole parameters on every rank.

    Entering and leaving are collective: every rank of the model's process group does both, between steps.

    Args:
        params: a parameter, several, or a module, from a `ShardedModel` or a `ZeroInitContext`. Parameters of plain
            modules are left alone.
        modifier_rank: the rank in the model's process group whose changes count. When the context ends, its values
            reach all ranks and the fp32 masters, so the next step starts from them. None: nothing may be changed.
        fwd_module: accepted and not used. DeepSpeed needs it where a module uses another module's parameters; here
            such parameters fetch themselves.
        enabled: False makes the context do nothing.

    Raises TypeError or ValueError for arguments of another kind. Entering raises SlotError if the parameters do not
    fit into the model's slots together. Leaving raises UnsupportedError if a parameter was changed without a
    `modifier_rank`. This change, and any change inside a context that an exception leaves, is undone.

    Example:
        >>> with GatheredParameters(model.module[0], modifier_rank=0), torch.no_grad():
        ...     model.module[0].weight[3] = 0
    """

    def __init__(
        self,
        params: nn.Parameter | nn.Module | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        # A tensor can be iterated, too, so it is looked for before a list.
        given: list[Tensor] = [params] if isinstance(params, Tensor) else []
        if not given:
            given.extend(params.parameters() if isinstance(params, nn.Module) else params)
        for each in given:
            if not isinstance(each, Tensor):
                raise TypeError(f"params must be parameters or a module, found {type(each).__name__}")
        if fwd_module is not None and not isinstance(fwd_module, nn.Module):
            raise TypeError(f"fwd_module must be a torch module, found {type(fwd_module).__name__}")
        # Parameters under construction may still be whole: put them onto shards, or they would have no link yet.
        if enabled:
            shard_pending(given)
        links = (any_link_of(each) for each in given) if enabled else ()
        # A tied parameter that is given twice counts once.
        self._links = list(dict.fromkeys(link for link in links if link is not None))
        self._modifier = modifier_rank
        for link in self._links:
            self._check_rank(link.owner.communicator.world_size)
        self._stack = ExitStack()
        self._before: list[Tensor] = []  # on the CPU, one for each link
        self._masters: list[Tensor | None] = []  # likewise, of this rank's part

    def _check_rank(self, world_size: int) -> None:
        rank = self._modifier
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size):
            raise ValueError(f"modifier_rank must be None or one of the {world_size} ranks, found {rank!r}")

    def __enter__(self) -> None:
        # A model that is built and one that is wrapped gather by different means: each gathers its own parameters.
        by_owner: dict[object, list[ParameterLink]] = {}
        for link in self._links:
            by_owner.setdefault(link.owner, []).append(link)
        # The inner stack undoes the gathers if a later one, or a copy, fails.
        with ExitStack() as stack:
            for links in by_owner.values():
                stack.enter_context(links[0].gathered(links))
            with torch.no_grad():
                # The copies are on the CPU: no plan has device memory for whole parameters a second time.
                parameters = [link.managed.parameter for link in self._links]
                self._before = [parameter.detach().to("cpu", copy=True) for parameter in parameters]
                self._masters = [link.part_of_master() for link in self._links]
            self._stack = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack, torch.no_grad():
            # This comes before the comparison: a write to `.data` has left the payload as it was.
            refused = self._adopt_data()
            is_kept = error is None and refused is None
            # Without a rank whose changes count, ranks may have changed different values: undo all of them.
            pairs = zip(self._links, self._before, self._masters, strict=True)
            changed = [each for each in pairs if _differs(*each[:2])]
            if not is_kept or self._modifier is None:
                for link, before, master in changed:
                    link.undo(before, master)
            else:
                # Broadcast all parameters: only the modifying rank knows which of them it has changed.
                for link in self._links:
                    link.broadcast_from(self._modifier)
            self._before, self._masters = [], []
            if error is None and refused is not None:
                # Other ranks may wait for this one's values.
                owner = self._links[0].owner
                try:
                    with owner.communicator.publishing():
                        raise refused
                finally:
                    refused = None  # a cycle of exception and frame would keep views of slots alive
            if error is None and self._modifier is None and changed:
                names = ", ".join(repr(link.managed.name) for link, *_ in changed)
                raise UnsupportedError(
                    f"GatheredParameters(...) without modifier_rank= was left with changes to {names}, which are "
                    "undone. Name the rank whose changes count, such as modifier_rank=0"
                )

    def _adopt_data(self) -> GeminiError | None:
        """Copy values into the payload where a write to `.data` replaced the parameter's memory. Returns a refusal."""
        refused = None
        for link in self._links:
            try:
                link.adopt_data()
            except GeminiError as found:
                # Without its frames, which hold views of slots.
                refused = refused or found.with_traceback(None)
        return refused


def _differs(link: ParameterLink, before: Tensor) -> bool:
    now = link.whole().to("cpu")
    return not torch.equal(_bits(now), _bits(before))


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes. Comparing values would miss a change of -0.0, and find one in every NaN."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
