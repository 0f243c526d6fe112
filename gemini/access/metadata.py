"""Functions of a tensor that need none of its data: a placeholder of its shape and dtype answers them."""

from __future__ import annotations

from typing import Any

import torch

_T: Any = torch.Tensor


def _getters(*names: str) -> set[Any]:
    # `__torch_function__` is given this method when an attribute is read.
    return {getattr(_T, name).__get__ for name in names if hasattr(_T, name)}


METADATA: set[Any] = _getters(
    *("device", "is_cpu", "is_cuda", "is_hpu", "is_ipu", "is_maia", "is_meta", "is_mps", "is_mtia", "is_vulkan"),
    *("is_xla", "is_xpu"),
    *("shape", "dtype", "requires_grad", "is_leaf", "grad_fn", "ndim", "layout", "_version", "itemsize", "nbytes"),
    *("is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn", "is_nested", "names", "output_nr", "retains_grad"),
    *("_backward_hooks", "_post_accumulate_grad_hooks", "name", "_base"),
) | {
    getattr(_T, name)
    for name in (
        *("size", "dim", "numel", "nelement", "__hash__", "is_floating_point", "is_complex", "element_size", "__len__"),
        *("register_hook", "register_post_accumulate_grad_hook", "is_inference", "ndimension", "retain_grad"),
        *("is_signed", "is_conj", "is_neg", "_is_view", "has_names", "get_device"),
    )
    # Names differ between versions of torch.
    if hasattr(_T, name)
}
METADATA |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_signed}
