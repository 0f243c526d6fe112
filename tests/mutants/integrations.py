"""Faults in gemini/integrations: what other libraries' loops do with sharded models."""

from tests.mutants.mutant import Mutant

ACCELERATE = "gemini/integrations/accelerate.py"
TRAINER = "gemini/integrations/transformers.py"
TRAINER_TESTS = "tests/features/test_transformers_trainer.py"
LIGHTNING = "gemini/integrations/lightning.py"
TESTS = "tests/features/test_accelerate.py"

PLANNED = "tests/features/test_micro_batches_of_libraries.py"

MUTANTS = [
    Mutant(
        "ranks copy what they load before all have read their files",
        "gemini/access/state_hooks.py",
        "            if errors is not self._errors:\n",
        "            if False:\n",
        "tests/features/test_transformers_checkpoints.py::test_a_rank_that_lacks_a_file_tells_every_rank",
    ),
    Mutant(
        "a rank that lacks the optimizer's file trains on without its state",
        TRAINER,
        "            if missing:\n                raise",
        "            if missing:\n                return\n                raise",
        "tests/features/test_transformers_checkpoints.py::test_a_rank_that_lacks_a_file_tells_every_rank",
    ),
    Mutant(
        "ranks load a checkpoint before all have read it",
        LIGHTNING,
        'with ending_together(self._models, "the checkpoint is read"):',
        "if True:",
        "tests/features/test_lightning_checkpoints.py::test_who_cannot_read_a_checkpoint_tells_every_rank",
    ),
    Mutant(
        "ranks that have read a state do not wait for one that cannot",
        "gemini/integrations/ranks.py",
        "models[0].chunk_manager.communicator.wait_for_all(done)",
        "pass",
        f"{TESTS}::test_who_cannot_read_a_state_tells_every_rank",
    ),
    Mutant(
        "a plan does not know the micro-batches of an accelerator",
        ACCELERATE,
        "replace(self.gemini.settings(), gradient_accumulation_steps=self.gradient_accumulation_steps)",
        "self.gemini.settings()",
        f"{PLANNED}::test_an_accelerator_tells_the_plan_its_micro_batches",
    ),
    Mutant(
        "a plan does not know the micro-batches of Lightning's Trainer",
        LIGHTNING,
        "trainer.accumulate_grad_batches if fits else None",
        "None",
        f"{PLANNED}::test_lightnings_trainer_tells_the_plan_its_micro_batches",
    ),
    Mutant(
        "a Trainer trains on ranks that its arguments do not know",
        "gemini/integrations/ranks.py",
        "if known != ranks:",
        "if False:",
        "tests/features/test_transformers_arguments.py::test_ranks_that_the_arguments_do_not_know_are_told_what_to_say",
    ),
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
    Mutant(
        "the Trainer's own autocast stands around weights of 16 bits",
        TRAINER,
        ', "mixed_precision": "no"}',
        "}",
        f"{TRAINER_TESTS}::test_a_trainer_trains_as_the_same_loop_by_hand",
    ),
    Mutant(
        "the Trainer moves the whole model to its device",
        TRAINER,
        "    def _move_model_to_device",
        "    def _move_no_model_to_device",
        "tests/features/test_transformers_arguments.py::test_the_private_names_that_are_used_are_these_and_there",
    ),
    Mutant(
        "the Trainer's backward knows no loss scale",
        "gemini/integrations/trainer_accelerator.py",
        "        self.its_optimizer.backward(loss)",
        "        loss.backward()",
        f"{TRAINER_TESTS}::test_a_trainer_trains_as_the_same_loop_by_hand",
    ),
    Mutant(
        "the Trainer's schedule moves with a step that was skipped",
        "gemini/integrations/trainer_accelerator.py",
        "return report is not None and report.skipped is not None",
        "return False",
        f"{TRAINER_TESTS}::test_a_skipped_step_leaves_the_schedule_where_it_is",
    ),
    Mutant(
        "ranks that generate do not wait for each other's sentences",
        TRAINER,
        "return model.settings.gathers(model.world_size)",
        "return False",
        f"{TRAINER_TESTS}::test_ranks_whose_sentences_end_early_go_on_with_the_others",
    ),
    Mutant(
        "a prompt's encoder runs on the rank alone that saves what it makes",
        TRAINER,
        "if is_peft and not self.args.should_save:",
        "if False:",
        "tests/features/test_transformers_checkpoints.py::test_prompts_are_saved_as_their_encoder_makes_them",
    ),
    Mutant(
        "the whole trunk is gathered to save its adapters",
        TRAINER,
        "is_peft = is_adapted(self.model)",
        "is_peft = False",
        "tests/features/test_transformers_checkpoints.py::test_adapters_are_saved_without_a_look_at_the_trunk",
    ),
    Mutant(
        "a rank that cannot write a checkpoint tells nobody",
        TRAINER,
        "        return ending_together([self.sharded_model], done)\n",
        "        return contextmanager(lambda: iter([None]))()\n",
        "tests/features/test_transformers_checkpoints.py::test_who_cannot_write_tells_every_rank",
    ),
    Mutant(
        "Lightning has micro-batches held whole until the window is full",
        LIGHTNING,
        "    def block_backward_sync(",
        "    def block_backward_syncs(",
        "tests/features/test_lightning.py::test_a_fit_trains_as_the_low_level_api_by_hand",
    ),
    Mutant(
        "a step that raises stays the module's forward",
        LIGHTNING,
        "        finally:\n            restore()",
        "        finally:\n            pass",
        "tests/features/test_lightning_refusals.py::test_a_step_that_fails_to_start_leaves_the_module_its_forward",
    ),
    Mutant(
        "a loss in fp16 is not scaled in Lightning",
        "gemini/integrations/lightning_precision.py",
        "tensor = optimizer.scale(tensor)",
        "pass",
        "tests/features/test_lightning.py::test_a_fit_trains_as_the_low_level_api_by_hand",
    ),
    Mutant(
        "a rank that cannot write an accelerator's state tells nobody",
        ACCELERATE,
        'with ending_together(models, "the state is saved"), ExitStack() as writing:',
        "with ExitStack() as writing:",
        f"{TESTS}::test_who_cannot_write_a_state_tells_every_rank",
    ),
    Mutant(
        "of several models the first alone tells that a state cannot be written",
        ACCELERATE,
        'with ending_together(models, "the state is saved"), ExitStack() as writing:',
        'with ending_together(models[:1], "the state is saved"), ExitStack() as writing:',
        f"{TESTS}::test_who_cannot_write_the_state_of_one_of_two_models_tells_those_that_wait_in_the_other",
    ),
    Mutant(
        "a rank that cannot write Lightning's checkpoint tells nobody",
        LIGHTNING,
        'with ending_together(self._models, "the checkpoint is saved"):',
        "if True:",
        "tests/features/test_lightning_checkpoints.py::test_who_cannot_write_a_checkpoint_tells_every_rank",
    ),
    Mutant(
        "Lightning makes other steps than the config's batch sizes",
        LIGHTNING,
        "if window not in (None, trainer.accumulate_grad_batches):",
        "if False:",
        "tests/features/test_lightning_refusals.py::"
        "test_batch_sizes_that_make_other_steps_than_the_trainers_are_refused",
    ),
]
