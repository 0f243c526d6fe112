"""One thread in the test process, as in the ranks: some kernels (layer norm's backward) sum in an order that the
number of threads decides, and references are compared bit by bit."""

import torch

torch.set_num_threads(1)
