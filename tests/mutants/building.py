"""Faults in gemini/building: models under construction."""

from tests.mutants.mutant import BUILDING, Mutant

MUTANTS = [
    Mutant(
        "gradients reach weights that were built on shards and that nobody wrapped",
        "gemini/building/link.py",
        "hook_last(managed.parameter, partial(",
        "hook_last(nn.Parameter(), partial(",
        "tests/features/test_zero_init_use.py::test_gradients_before_wrapping_are_an_error[unfrozen]",
    ),
    Mutant(
        "data that lies in another order in memory is brought into the old one while a model is built",
        "gemini/building/link.py",
        "return super().fits(value) and have_one_order(dense_stride(value), managed.stride, value.shape)",
        "return super().fits(value)",
        "tests/features/test_zero_init_use.py::test_data_that_lies_in_another_order_is_followed[1rank-True]",
    ),
    Mutant(
        "a build's edits stay each rank's own",
        "gemini/building/binding.py",
        '            self.communicator.broadcast_(payload.flat[managed.in_payload], f"values of {managed.name}")\n',
        "",
        "tests/features/test_building_walks.py",
    ),
    Mutant(
        "a build shows values that were not gathered",
        "gemini/building/store.py",
        "        if not (overwrites or binding.valid[chunk].issuperset(each.position for each in members)):\n",
        "        if False:\n",
        BUILDING,
    ),
    Mutant(
        "shards of a built model outlive the move",
        "gemini/building/binding.py",
        "        chunk.drop_parameters(gone)\n",
        "",
        "tests/features/test_zero_init_memory.py::test_building_holds_no_more_than_the_model_an_operator_and_a_chunk",
    ),
    Mutant(
        "a cast at the end of a build keeps all old shards until it is done",
        "gemini/building/built_chunks.py",
        "            while waiting:\n                self._round(waiting.pop(), dtype)\n",
        "            for chunk in waiting[::-1]:\n                self._round(chunk, dtype)\n",
        "tests/features/test_zero_init_memory.py::test_a_cast_at_the_end_of_the_context_holds_one_operator_twice",
    ),
    Mutant(
        "a cast of weights that stay whole forgets their order in memory",
        "gemini/building/zero_init.py",
        "rounded = torch.empty_like(moved, dtype=self._dtype)",
        "rounded = torch.empty(moved.shape, dtype=self._dtype, device=moved.device)",
        "tests/features/test_zero_init.py::test_a_cast_keeps_the_order_of_elements_in_memory",
    ),
    Mutant(
        "operators are sharded at the end only",
        "gemini/building/zero_init.py",
        "        if module is not self._module:\n",
        "        if self._module is None:\n",
        "tests/features/test_zero_init_memory.py::test_no_rank_holds_more_than_its_shards_an_operator_and_a_chunk[2ranks-deep]",
    ),
    Mutant(
        "a late write to a view of a build is lost",
        "gemini/building/binding.py",
        "self.renumber_edits(chunk, None if is_home else [",
        "self.renumber_edits(chunk, None if True else [",
        "tests/features/test_zero_init_use.py::test_a_write_through_a_view_that_comes_too_late_is_an_error",
    ),
]
