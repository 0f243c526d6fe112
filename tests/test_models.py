"""The registry keeps its promises: same weights, other data per rank, a finite loss, gradients where said."""

import pytest
import torch

from tests.zoo.models import MODELS, ModelCase, cases, padded_numel


@pytest.mark.parametrize("case", MODELS.values(), ids=str)
def test_each_model_builds_the_same_weights_and_learns_from_its_batch(case: ModelCase) -> None:
    model, again = case.build(), case.build()
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name

    loss = case.loss(model, case.batch(0))
    assert loss.isfinite()
    assert loss.dim() == 0
    loss.backward()
    for name, p in model.named_parameters():
        idle = not p.requires_grad or name.startswith(case.no_grad_names)
        if case.no_grad_names or "moe" not in case.tags:
            assert (p.grad is None) == idle, name
        if p.grad is not None:
            assert p.grad.isfinite().all(), name
    assert any(p.grad is not None and p.grad.count_nonzero() for p in model.parameters())

    numel = sum(padded_numel(p) for p in model.parameters())
    assert "big" not in case.tags or numel >= 8 * case.chunk_numel


@pytest.mark.parametrize("case", MODELS.values(), ids=str)
def test_ranks_steps_and_micro_batches_have_other_data_of_the_same_size(case: ModelCase) -> None:
    batches = [case.batch(0, 0, 2), case.batch(0, 1, 2), case.batch(1, 0, 2), case.batch(0, 0, 2, 1)]
    key = next(k for k, v in batches[0].items() if isinstance(v, torch.Tensor))
    shapes = {b[key].shape for b in batches}
    assert len(shapes) == 1
    assert all(not torch.equal(a[key], b[key]) for i, a in enumerate(batches) for b in batches[:i])
    assert torch.equal(case.batch(0, 1, 2)[key], batches[1][key])


CASTS = [(case, torch.bfloat16) for case in cases(without="own_dtypes")]
CASTS += [(case, torch.float64) for case in cases(without="own_dtypes no_fp64")]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("case", "dtype"), CASTS, ids=str)
def test_each_model_runs_in_any_dtype(case: ModelCase, dtype: torch.dtype) -> None:
    model = case.build(dtype)
    case.loss(model, case.batch(0)).backward()
    for name, p in model.named_parameters():
        assert p.dtype == dtype, name
        assert p.grad is None or (p.grad.dtype == dtype and p.grad.isfinite().all()), name
