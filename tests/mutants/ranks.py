"""Faults in gemini/ranks and sharding: agreeing, failing together, exchanging shards."""

from tests.mutants.mutant import GOLDEN, TWO_RANKS, Mutant

MUTANTS = [
    Mutant(
        "nobody looks whether a rank's process is still there",
        "Watchdog._ended",
        "is_gone = process_is_gone(store, global_rank)",
        "is_gone = False",
        "tests/dist/test_rank_failures.py::test_a_killed_rank_is_lost_where_no_connection_tells_of_it",
    ),
    Mutant(
        "what ends a process of multiprocessing is not told",
        "_at_end_of_child",
        "if error is not None:\n    _tell(error)",
        "",
        "tests/dist/test_ranks_of_multiprocessing.py",
    ),
    Mutant(
        "the sum over ranks is not divided",
        "Communicator.start_reduce_scatter",
        "among.start_reduce_scatter(payload, layout, out, tag, mean=True, scratch=scratch)",
        "among.start_reduce_scatter(payload, layout, out, tag, mean=False, scratch=scratch)",
        f"{TWO_RANKS}[chain]",
    ),
    Mutant(
        "ranks add in reverse order",
        "Collectives.start_reduce_scatter",
        "sum_rows(rows, out, self.world_size if mean else 1, scratch)",
        "sum_rows(rows.flip(0), out, self.world_size if mean else 1, scratch)",
        "tests/dist/test_parity.py::test_three_and_four_ranks_equal_plain[3]",
    ),
    Mutant(
        "tags are not compared",
        "Announced.verify",
        "words != list(self.tag.pack()) * (len(words) // TAG_WORDS)",
        "False",
        "tests/features/test_sharding_tags.py::test_a_tag_beside_an_exchange_is_compared_when_it_has_come",
    ),
    Mutant(
        "ranks follow a schedule that they have left",
        "Communicator._next",
        "None if agreed else tag",
        "None",
        "tests/dist/test_divergence.py::test_ranks_that_take_different_ways_all_name_both_and_use_nothing[3-ways0]",
    ),
    Mutant(
        "groups of dropped models are kept",
        "end_dropped",
        "part.is_left or all(part.name in by_rank.get(rank, ()) for rank in part.ranks)",
        "part.is_left and all(part.name in by_rank.get(rank, ()) for rank in part.ranks)",
        "tests/dist/test_dropped_models.py::test_models_made_and_dropped_in_turn_leave_at_most_one_process_group",
    ),
    Mutant(
        "a process ends while threads of collectives hold tensors",
        "wait_until_gloo_is_idle",
        "num_quiet_looks < 2",
        "num_quiet_looks < 0",
        "tests/test_process_end.py::test_a_script_ends_when_the_threads_of_collectives_have_let_go",
    ),
    Mutant(
        "a collective in flight holds the hooks of its model",
        "Communicator._agreeing",
        "with unhooked():\n    yield",
        "if True:\n    yield",
        "tests/dist/test_dropped_models.py::test_models_made_and_dropped_in_turn_leave_at_most_one_process_group",
    ),
    Mutant(
        "a replay overlooks the position",
        "ScheduleReplay.matches",
        "expected[position : position + 1] == [collective]",
        "[each.chunk for each in expected[position : position + 1]] == [collective.chunk]",
        "tests/pure/test_replay.py",
    ),
    Mutant(
        "the mean over ranks is made by a number",
        "sum_rows",
        "total.div_(number)",
        "total.div_(divisor)",
        "tests/test_fallbacks.py",
    ),
    Mutant(
        "a backend that only orders streams is not waited for",
        "_completes",
        "not work.is_completed()",
        "False",
        "tests/dist/test_stream_ordered.py",
    ),
    Mutant(
        "ranks compare tags that they have agreed on",
        "Communicator._next",
        "None if agreed else tag",
        "tag",
        f"{GOLDEN}[2]",
    ),
    Mutant(
        "two ranks may use one GPU",
        "refuse_equal",
        "if uuid in first:",
        "if False:",
        "tests/pure/test_own_devices.py",
    ),
]
