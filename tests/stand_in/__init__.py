"""A stand-in for an accelerator: a device of torch, in host memory, for machines without a GPU. See docs/testing.md.

The emulated device is the CPU, so a tensor on the wrong device goes unnoticed there, and `gemini/memory/memory.py`
is never used. This is a device of its own (torch's PrivateUse1), on which the CPU's kernels run. As on a GPU, tensors
of the host and of the device do not mix, new memory holds no zeros, copies with `non_blocking=True` are late, and the
host waits where it reads. What happened is counted.
"""
