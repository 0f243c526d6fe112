"""The seed of a test's random numbers."""

import torch


def seed(number: int) -> None:
    """`torch.manual_seed`, without what that does for CUDA where there is none.

    torch keeps the seed for the moment when CUDA is used first, with the stack of the call, which takes 3 ms. A run of
    all tests calls it some ten thousand times.
    """
    if torch.cuda.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)
