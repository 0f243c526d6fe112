"""Faults in optim: the arithmetic of Adam and of the norm, and which kernel runs."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "the host reads where the first element is that is not finite",
        "optim/norm.py",
        "indices.take(bad_elements.to(torch.uint8).argmax())",
        "indices[bad_elements.to(torch.uint8).argmax()]",
        "tests/pure/test_optim_norm.py::test_the_host_reads_nothing_off_the_cpu",
    ),
    Mutant(
        "autograd is not told what a kernel wrote",
        "optim/dispatch.py",
        "            cpu_adam.update(group, scalars)\n            _note_writes(group)\n",
        "            cpu_adam.update(group, scalars)\n",
        "tests/pure/test_optim_adam.py",
    ),
    Mutant(
        "the norm of a plain model has its tiles in the order of indices",
        "optim/clip.py",
        "in_memory_order(gradient, parameter)",
        "gradient.contiguous().view(-1)",
        "tests/pure/test_optim_clip.py::test_tiles_are_cut_in_the_order_of_the_parameters_memory",
    ),
    Mutant(
        "pieces on several GPUs are one launch",
        "optim/dispatch.py",
        "by_device.setdefault(piece.weight.device, [])",
        "by_device.setdefault(torch.device(piece.weight.device.type), [])",
        "tests/pure/test_optim_dispatch.py",
    ),
]
