"""Faults of gemini/cli."""

from tests.mutants.mutant import Mutant

_REFUSALS = "tests/features/test_plan_refusals.py"

MUTANTS = [
    Mutant(
        "a refusal of gemini plan speaks of a share of the device that does not apply",
        "refusal_of",
        "free is None or free.are_activations_unknown",
        "True",
        f"{_REFUSALS}::test_a_refusal_names_options_and_no_share_that_does_not_apply",
    ),
    Mutant(
        "every try of gemini plan makes packings of its own",
        "Question.plan",
        "plan = plan_training(self.packed, self._settings_with(there), free, self.optim_states, is_try)",
        "made = packed_of(self.module, self.settings, self.cluster.ranks.count)\n"
        "plan = plan_training(made, self._settings_with(there), free, self.optim_states, is_try)",
        f"{_REFUSALS}::test_all_tries_of_a_question_share_their_packings",
    ),
    Mutant(
        "gemini plan counts Adam's states, whatever it is asked",
        "Question.plan",
        "plan_training(self.packed, self._settings_with(there), free, self.optim_states, is_try)",
        "plan_training(self.packed, self._settings_with(there), free)",
        "tests/features/test_plan_command.py::test_the_plan_is_that_of_an_optimizer_with_so_many_states",
    ),
    Mutant(
        "other ranks are planned with the packings of these",
        "Question.with_ranks",
        "packed = packed_of(self.module, settings, count)",
        "packed = self.packed",
        f"{_REFUSALS}::test_more_ranks_that_are_advised_fill_the_nodes_of_a_named_machine",
    ),
    Mutant(
        "ranks are on nodes of 8 where only memory is described",
        "described",
        "_filled_by(count)",
        "_PER_NODE",
        f"{_REFUSALS}::test_a_cluster_of_any_size_is_answered_where_only_memory_is_described",
    ),
    Mutant(
        "gemini plan advises ranks that do not fill nodes",
        "_more_ranks",
        "if not cluster.ranks.fill_nodes(count):\n    continue",
        "",
        f"{_REFUSALS}::test_more_ranks_that_are_advised_fill_the_nodes_of_a_named_machine",
    ),
    Mutant(
        "more ranks are advised than are enough for an optimizer without states",
        "Question.least_bytes_at_rest",
        "self.optim_states",
        "2",
        f"{_REFUSALS}::test_fewer_ranks_are_advised_where_the_optimizer_keeps_no_states",
    ),
    Mutant(
        "any part of a sequence is advised",
        "_with_fewer_tokens",
        "tokens is None or tokens * (_LEAST_PART if may_shorten else 1) < length",
        "tokens is None or tokens <= 0",
        f"{_REFUSALS}::test_less_than_a_quarter_of_a_sequence_is_not_advised",
    ),
    Mutant(
        "an operator is blamed where others do not fit either",
        "_smaller_operator",
        "len(shapes) != 1 or not budget",
        "not budget",
        f"{_REFUSALS}::test_no_operator_is_blamed_where_others_do_not_fit_either",
    ),
    Mutant(
        "the operator that does not fit is not named",
        "remedies_of",
        "found += _smaller_operator(too_large, question.packed.spec, budget)",
        "pass",
        f"{_REFUSALS}::test_the_operator_that_does_not_fit_is_named",
    ),
    Mutant(
        "refusals of gemini plan name settings of Python's",
        "as_json",
        "with_options(str(refusal))",
        "str(refusal)",
        f"{_REFUSALS}::test_a_refusal_names_options_and_no_share_that_does_not_apply",
    ),
    Mutant(
        "a machine is measured for a name that nothing has",
        "plan",
        "check_name(model)",
        "",
        f"{_REFUSALS}::test_what_can_be_said_of_a_name_is_said_before_the_machine_is_measured",
    ),
    Mutant(
        "a packing is made for every iteration",
        "Packed.with_states",
        "place = 0",
        "self._unmade, self._made = packings(self.spec, self._settings, self.world_size), []\nplace = 0",
        "tests/pure/test_packed.py::test_a_packing_is_made_once_and_only_when_it_is_asked_for",
    ),
]
