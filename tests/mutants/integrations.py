"""Faults in gemini/integrations: what other libraries' loops do with sharded models."""

from tests.mutants.mutant import Mutant

ACCELERATE = "gemini/integrations/accelerate.py"
TESTS = "tests/features/test_accelerate.py"

MUTANTS = [
    Mutant(
        "micro-batches of an accelerator are held whole until the window is full",
        ACCELERATE,
        ", sync_each_batch=True",
        "",
        "tests/features/test_accelerate_refusals.py::test_a_users_accumulation_plugin_does_not_hold_whole_gradients",
    ),
    Mutant(
        "a schedule stays where another optimizer's step was skipped",
        ACCELERATE,
        "scheduler.optimizer.param_groups[0] is optimizer.param_groups[0]",
        "False",
        f"{TESTS}::test_a_schedule_follows_its_own_optimizer",
    ),
    Mutant(
        "an optimizer that is prepared before its model finds none",
        ACCELERATE,
        "                self.prepare_model(each)  # before",
        "                pass  # before",
        f"{TESTS}::test_two_models_with_two_optimizers_have_the_bits_of_plain_accelerate",
    ),
    Mutant(
        "what goes into a model of 16-bit weights is not cast",
        "gemini/integrations/precision.py",
        '{"": dtype, "*": torch.float32}',
        "dtype",
        f"{TESTS}::test_a_script_trains_as_the_low_level_api_by_hand",
    ),
]
