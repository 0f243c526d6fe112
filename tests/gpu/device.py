"""The device that the tests of this folder run on. GEMINI_TEST_DEVICE chooses it; without a GPU it is the CPU."""

import os

import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts: before the first product
DEVICE = torch.device(os.environ.get("GEMINI_TEST_DEVICE", "cuda:0" if torch.cuda.is_available() else "cpu"))
if DEVICE.type == "cuda" and DEVICE.index is None:
    DEVICE = torch.device("cuda", 0)  # as tensors on it say
