"""Faults in gemini/ranks and sharding: agreeing, failing together, exchanging shards."""

from tests.mutants.mutant import GOLDEN, TWO_RANKS, Mutant

MUTANTS = [
    Mutant(
        "nobody looks whether a rank's process is still there",
        "gemini/ranks/watchdog.py",
        "            is_gone = processes.is_gone(store, global_rank)\n",
        "            is_gone = False\n",
        "tests/dist/test_rank_failures.py::test_a_killed_rank_is_lost_where_no_connection_tells_of_it",
    ),
    Mutant(
        "what ends a process of multiprocessing is not told",
        "gemini/ranks/exit_report.py",
        "    if error is not None:\n        _tell(error)\n    atexit",
        "    atexit",
        "tests/dist/test_ranks_of_multiprocessing.py",
    ),
    Mutant(
        "the sum over ranks is not divided",
        "gemini/ranks/communicator.py",
        "out, tag, mean=True,",
        "out, tag, mean=False,",
        f"{TWO_RANKS}[chain]",
    ),
    Mutant(
        "ranks add in reverse order",
        "sharding/collectives.py",
        "sum_rows(rows, out, self.world_size if mean",
        "sum_rows(rows.flip(0), out, self.world_size if mean",
        "tests/dist/test_parity.py::test_three_and_four_ranks_equal_plain[3]",
    ),
    Mutant(
        "tags are not compared",
        "sharding/tag_buffers.py",
        "if words != list(self.tag.pack()) * (len(words) // TAG_WORDS):",
        "if False:",
        "tests/features/test_sharding_tags.py::test_a_tag_beside_an_exchange_is_compared_when_it_has_come",
    ),
    Mutant(
        "ranks follow a schedule that they have left",
        "gemini/ranks/communicator.py",
        "return None if agreed else tag",
        "return None",
        "tests/dist/test_divergence.py::test_ranks_that_take_different_ways_all_name_both_and_use_nothing[3-ways0]",
    ),
    Mutant(
        "groups of dropped models are kept",
        "gemini/ranks/own_group.py",
        "part.is_left = part.is_left or all(",
        "part.is_left = part.is_left and all(",
        "tests/dist/test_dropped_models.py::test_models_made_and_dropped_in_turn_leave_at_most_one_process_group",
    ),
    Mutant(
        "a process ends while threads of collectives hold tensors",
        "gemini/ranks/gloo_threads.py",
        "    while num_quiet_looks < 2 and",
        "    while num_quiet_looks < 0 and",
        "tests/test_process_end.py::test_a_script_ends_when_the_threads_of_collectives_have_let_go",
    ),
    Mutant(
        "a collective in flight holds the hooks of its model",
        "gemini/ranks/communicator.py",
        "            with unhooked():\n",
        "            if True:\n",
        "tests/dist/test_dropped_models.py::test_models_made_and_dropped_in_turn_leave_at_most_one_process_group",
    ),
    Mutant(
        "a replay overlooks the position",
        "gemini/ranks/replay.py",
        "expected[position] == collective",
        "expected[position].chunk == collective.chunk",
        "tests/pure/test_replay.py",
    ),
    Mutant(
        "the mean over ranks is made by a number",
        "sharding/rank_order_sum.py",
        "            total.div_(number)",
        "            total.div_(divisor)",
        "tests/test_fallbacks.py",
    ),
    Mutant(
        "a backend that only orders streams is not waited for",
        "gemini/ranks/watchdog.py",
        "    while not work.is_completed():",
        "    while False:",
        "tests/dist/test_stream_ordered.py",
    ),
    Mutant(
        "ranks compare tags that they have agreed on",
        "gemini/ranks/communicator.py",
        "        return None if agreed else tag",
        "        return tag",
        f"{GOLDEN}[2]",
    ),
    Mutant(
        "two ranks may use one GPU",
        "gemini/ranks/own_devices.py",
        "        if uuid in first:",
        "        if False:",
        "tests/pure/test_own_devices.py",
    ),
]
