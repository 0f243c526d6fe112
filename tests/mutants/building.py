"""Faults in gemini/building: models under construction."""

from tests.mutants.mutant import BUILDING, Mutant

MUTANTS = [
    Mutant(
        "gradients reach weights that were built on shards and that nobody wrapped",
        "BuiltLink.__init__",
        "managed.parameter",
        "nn.Parameter()",
        "tests/features/test_zero_init_use.py::test_gradients_before_wrapping_are_an_error[unfrozen]",
    ),
    Mutant(
        "data that lies in another order in memory is brought into the old one while a model is built",
        "BuiltLink.fits",
        "super().fits(value) and have_one_order(dense_stride(value), managed.stride, value.shape)",
        "super().fits(value)",
        "tests/features/test_zero_init_use.py::test_data_that_lies_in_another_order_is_followed[1rank-True]",
    ),
    Mutant(
        "a build's edits stay each rank's own",
        "BuildBinding.write_parameter",
        'self.communicator.broadcast_(payload.flat[managed.in_payload], f"values of {managed.name}")',
        "",
        "tests/features/test_building_walks.py",
    ),
    Mutant(
        "a build shows values that were not gathered",
        "BuildStore._fetch",
        "if not (overwrites or binding.valid[chunk].issuperset(each.position for each in members)):",
        "if False:",
        BUILDING,
    ),
    Mutant(
        "shards of a built model outlive the move",
        "BuildBinding.part_with",
        "chunk.drop_parameters(gone)",
        "",
        "tests/features/test_zero_init_memory.py::test_building_holds_no_more_than_the_model_an_operator_and_a_chunk",
    ),
    Mutant(
        "a cast at the end of a build keeps all old shards until it is done",
        "BuiltChunks.cast",
        "while waiting:\n    self._round(waiting.pop(), dtype)",
        "for chunk in waiting[::-1]:\n    self._round(chunk, dtype)",
        "tests/features/test_zero_init_memory.py::test_a_cast_at_the_end_of_the_context_holds_one_operator_twice",
    ),
    Mutant(
        "a cast of weights that stay whole forgets their order in memory",
        "ZeroInitContext._move_whole",
        "torch.empty_like(moved, dtype=self._dtype)",
        "torch.empty(moved.shape, dtype=self._dtype, device=moved.device)",
        "tests/features/test_zero_init.py::test_a_cast_keeps_the_order_of_elements_in_memory",
    ),
    Mutant(
        "operators are sharded at the end only",
        "ZeroInitContext._on_parameter",
        "if module is not self._module:\n    self._shard_pending(module)",
        "if self._module is None:\n    self._shard_pending(module)",
        "tests/features/test_zero_init_memory.py::test_no_rank_holds_more_than_its_shards_an_operator_and_a_chunk[2ranks-deep]",
    ),
    Mutant(
        "a late write to a view of a build is lost",
        "BuildBinding.open",
        "None if is_home else [each.position for each in chunk.parameters]",
        "None if True else [each.position for each in chunk.parameters]",
        "tests/features/test_zero_init_use.py::test_a_write_through_a_view_that_comes_too_late_is_an_error",
    ),
]
