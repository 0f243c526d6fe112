"""Faults in optim: the arithmetic of Adam and of the norm, and which kernel runs."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "the host reads where the first element is that is not finite",
        "first_nonfinite",
        "indices.take(bad_elements.to(torch.uint8).argmax())",
        "indices[bad_elements.to(torch.uint8).argmax()]",
        "tests/pure/test_optim_norm.py::test_the_host_reads_nothing_off_the_cpu",
    ),
    Mutant(
        "autograd is not told what a kernel wrote",
        "update_pieces",
        "cpu_adam.update(group, scalars)\n_note_writes(group)",
        "cpu_adam.update(group, scalars)",
        "tests/pure/test_optim_adam.py",
    ),
    Mutant(
        "the norm of a plain model has its tiles in the order of indices",
        "_global_norm",
        "in_memory_order(gradient, parameter)",
        "gradient.contiguous().view(-1)",
        "tests/pure/test_optim_clip.py::test_tiles_are_cut_in_the_order_of_the_parameters_memory",
    ),
    Mutant(
        "pieces on several GPUs are one launch",
        "update_pieces",
        "piece.weight.device",
        "torch.device(piece.weight.device.type)",
        "tests/pure/test_optim_dispatch.py",
    ),
]
