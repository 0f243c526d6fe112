"""Questions about a tensor that need none of its data: a stand-in of its shape and dtype answers them."""

from __future__ import annotations

from typing import Any

import torch

_T: Any = torch.Tensor


def _getters(*names: str) -> set[Any]:
    return {getattr(_T, name).__get__ for name in names if hasattr(_T, name)}


METADATA: set[Any] = _getters(
    *("shape", "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "ndim", "layout", "_version", "itemsize"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn", "is_nested", "is_xpu"),
    *("is_mps", "is_xla", "is_ipu", "is_hpu", "is_maia", "is_mtia", "is_vulkan", "names", "output_nr", "retains_grad"),
    *("nbytes", "_backward_hooks", "_post_accumulate_grad_hooks", "name", "_base"),
) | {
    getattr(_T, name)
    for name in (
        *("size", "dim", "numel", "nelement", "__hash__", "is_floating_point", "is_complex", "element_size", "__len__"),
        *("register_hook", "register_post_accumulate_grad_hook", "is_inference", "ndimension", "get_device"),
        *("is_signed", "is_conj", "is_neg", "_is_view", "has_names", "is_same_size", "retain_grad"),
    )
    if hasattr(_T, name)
}
METADATA |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_signed, torch.is_same_size}
