"""Refusals of a plan, in words: which one is told where no chunk size fits, and what would help besides a budget."""

from __future__ import annotations

from gemini.errors import BudgetError
from gemini.placement.specs import ModelSpec


def advised(error: BudgetError, spec: ModelSpec) -> BudgetError:
    """The refusal, with what a compiled module has to do with it."""
    compiled = [operator for operator in spec.operators if operator.is_compiled]
    if not compiled or error.tier != "device":
        return error
    largest = max(compiled, key=lambda operator: sum(spec.weights[place].numel for place in operator.weights))
    return error.reworded(
        f"{error}. {largest.name or 'The model'} is compiled, so that all of its chunks are needed at once: compile "
        "smaller modules inside it, such as its blocks, one by one"
    )


def least_of(refused: list[BudgetError], is_searched: bool) -> BudgetError:
    """The refusal that asks for least, over all chunk sizes; the host's least where some sizes fit the device."""
    known = [(error.needed_bytes, error) for error in refused if error.needed_bytes is not None]
    live = [(error.needed_numel, error) for error in refused if error.needed_numel is not None]
    if live:  # sizes that keep to the budgets
        return _smaller_chunks(min(live, key=lambda one: one[0])[1], len(refused), is_searched)
    if not known:  # a policy of the user's, with words of its own
        return refused[0]
    on_host = [(needed, error) for needed, error in known if error.tier == "host"]
    _, error = min(on_host or known, key=lambda one: one[0])
    return error if on_host else _smaller_chunks(error, len(refused), is_searched)


def _smaller_chunks(error: BudgetError, num_tried: int, is_searched: bool) -> BudgetError:
    """The refusal, with what the chunk size has to do with it."""
    tried = f". {num_tried} chunk sizes were tried: none needs less"
    advice = tried if is_searched else ", or make chunk_size= smaller"
    return error.reworded(f"{error}{advice}")
