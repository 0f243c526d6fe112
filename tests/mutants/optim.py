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
    Mutant(
        "a block of 8-bit moments loses the sign of its scale",
        "quantize_",
        "torch.where((x == magnitude).any(dim=1, keepdim=True), magnitude, -magnitude)",
        "magnitude",
        "tests/pure/test_small_moments.py::test_a_block_without_gradient_decays_by_beta_and_its_bytes_stay",
    ),
    Mutant(
        "embeddings have moments of 8 bits",
        "format_of_tensor",
        "wanted == EIGHT_BIT and is_embedding and bits is None",
        "False",
        "tests/features/test_small_states.py",
    ),
    Mutant(
        "random numbers are drawn by the place in the shard",
        "StateLayout.stored",
        "part.place + before",
        "first",
        "tests/features/test_small_states.py::test_stochastic_rounding_draws_the_same_numbers_anywhere",
    ),
    Mutant(
        "a moment that is not finite has the scale of its block",
        "_store_moments",
        "~(part.exp_avg.isfinite() & part.exp_avg_sq.isfinite())",
        "torch.zeros_like(part.exp_avg, dtype=torch.bool)",
        "tests/pure/test_small_moments.py::test_a_gradient_that_is_not_finite_costs_its_own_element_and_no_other_of_its_block",
    ),
]
