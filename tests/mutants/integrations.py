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
        "StateHooks._before_load",
        "if errors is not self._errors:",
        "if False:",
        "tests/features/test_transformers_checkpoints.py::test_a_rank_that_lacks_a_file_tells_every_rank",
    ),
    Mutant(
        "a rank that lacks the optimizer's file trains on without its state",
        "ShardedTraining._load_optimizer_and_scheduler",
        "raise FileNotFoundError(\n"
        "    f\"this rank does not find {' and '.join(missing)}, and another rank does: resume from a folder \"\n"
        '    "that every rank can read, or save with save_on_each_node=True"\n'
        ")",
        "return",
        "tests/features/test_transformers_checkpoints.py::test_a_rank_that_lacks_a_file_tells_every_rank",
    ),
    Mutant(
        "ranks load a checkpoint before all have read it",
        "GeminiStrategy.load_checkpoint",
        'with ending_together(self._models, "the checkpoint is read"):',
        "if True:",
        "tests/features/test_lightning_checkpoints.py::test_who_cannot_read_a_checkpoint_tells_every_rank",
    ),
    Mutant(
        "ranks that have read a state do not wait for one that cannot",
        "ending_together",
        "models[0].chunk_manager.communicator.wait_for_all(done)",
        "pass",
        f"{TESTS}::test_who_cannot_read_a_state_tells_every_rank",
    ),
    Mutant(
        "a plan does not know the micro-batches of an accelerator",
        "Accelerator._sharded",
        "replace(self.gemini.settings(), gradient_accumulation_steps=self.gradient_accumulation_steps)",
        "self.gemini.settings()",
        f"{PLANNED}::test_an_accelerator_tells_the_plan_its_micro_batches",
    ),
    Mutant(
        "a plan does not know the micro-batches of Lightning's Trainer",
        "GeminiStrategy.setup",
        "trainer.accumulate_grad_batches if fits else None",
        "None",
        f"{PLANNED}::test_lightnings_trainer_tells_the_plan_its_micro_batches",
    ),
    Mutant(
        "a Trainer trains on ranks that its arguments do not know",
        "refuse_unknown_ranks",
        "known != ranks",
        "False",
        "tests/features/test_transformers_arguments.py::test_ranks_that_the_arguments_do_not_know_are_told_what_to_say",
    ),
    Mutant(
        "micro-batches of an accelerator are held whole until the window is full",
        "Accelerator._take_accumulation",
        "self.gradient_state.plugin_kwargs.update(num_steps=window, sync_each_batch=True)",
        "self.gradient_state.plugin_kwargs.update(num_steps=window)",
        "tests/features/test_accelerate_refusals.py::test_a_users_accumulation_plugin_does_not_hold_whole_gradients",
    ),
    Mutant(
        "a schedule stays where another optimizer's step was skipped",
        "Accelerator.prepare_scheduler",
        "any(scheduler.optimizer.param_groups[0] is group for group in optimizer.param_groups)",
        "False",
        f"{TESTS}::test_a_schedule_follows_its_own_optimizer",
    ),
    Mutant(
        "an optimizer that is prepared before its model finds none",
        "Accelerator.prepare",
        "self.prepare_model(each)",
        "pass",
        f"{TESTS}::test_two_models_with_two_optimizers_have_the_bits_of_plain_accelerate",
    ),
    Mutant(
        "what goes into a model of 16-bit weights is not cast",
        "_with_casts",
        '{"": dtype, "*": torch.float32}',
        "dtype",
        f"{TESTS}::test_a_script_trains_as_the_low_level_api_by_hand",
    ),
    Mutant(
        "the Trainer's own autocast stands around weights of 16 bits",
        "ShardedTraining._build_accelerator_args",
        '{**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}',
        "{**super()._build_accelerator_args(**kwargs)}",
        f"{TRAINER_TESTS}::test_a_trainer_trains_as_the_same_loop_by_hand",
    ),
    Mutant(
        "the Trainer moves the whole model to its device",
        "ShardedTraining._move_model_to_device",
        "def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:",
        "def _move_no_model_to_device(self, model: nn.Module, device: torch.device) -> None:",
        "tests/features/test_transformers_arguments.py::test_the_private_names_that_are_used_are_these_and_there",
    ),
    Mutant(
        "the Trainer's backward knows no loss scale",
        "TrainerAccelerator.backward",
        "self.its_optimizer.backward(loss)",
        "loss.backward()",
        f"{TRAINER_TESTS}::test_a_trainer_trains_as_the_same_loop_by_hand",
    ),
    Mutant(
        "the Trainer's schedule moves with a step that was skipped",
        "TrainerAccelerator.optimizer_step_was_skipped",
        "self.sharded_optimizer is not None and was_skipped(self.sharded_optimizer)",
        "False",
        f"{TRAINER_TESTS}::test_a_skipped_step_leaves_the_schedule_where_it_is",
    ),
    Mutant(
        "ranks that generate do not wait for each other's sentences",
        "Seq2SeqTrainer._gathers",
        "model.settings.gathers(model.world_size)",
        "False",
        f"{TRAINER_TESTS}::test_ranks_whose_sentences_end_early_go_on_with_the_others",
    ),
    Mutant(
        "a prompt's encoder runs on the rank alone that saves what it makes",
        "ShardedTraining._save",
        "is_peft and not self.args.should_save",
        "False",
        "tests/features/test_transformers_checkpoints.py::test_prompts_are_saved_as_their_encoder_makes_them",
    ),
    Mutant(
        "the whole trunk is gathered to save its adapters",
        "ShardedTraining._save",
        "is_adapted(self.model)",
        "False",
        "tests/features/test_transformers_checkpoints.py::test_adapters_are_saved_without_a_look_at_the_trunk",
    ),
    Mutant(
        "a rank that cannot write a checkpoint tells nobody",
        "ShardedTraining._together",
        "return ending_together([self.sharded_model], done)",
        "return contextmanager(lambda: iter([None]))()",
        "tests/features/test_transformers_checkpoints.py::test_who_cannot_write_tells_every_rank",
    ),
    Mutant(
        "Lightning has micro-batches held whole until the window is full",
        "GeminiStrategy.block_backward_sync",
        "@contextmanager\ndef block_backward_sync(self) -> Iterator[None]:",
        "@contextmanager\ndef block_backward_syncs(self) -> Iterator[None]:",
        "tests/features/test_lightning.py::test_a_fit_trains_as_the_low_level_api_by_hand",
    ),
    Mutant(
        "a step that raises stays the module's forward",
        "GeminiStrategy._in_forward",
        "restore()",
        "pass",
        "tests/features/test_lightning_refusals.py::test_a_step_that_fails_to_start_leaves_the_module_its_forward",
        index=1,
    ),
    Mutant(
        "a loss in fp16 is not scaled in Lightning",
        "GeminiPrecision.pre_backward",
        "tensor = optimizer.scale(tensor)",
        "pass",
        "tests/features/test_lightning.py::test_a_fit_trains_as_the_low_level_api_by_hand",
    ),
    Mutant(
        "a rank that cannot write an accelerator's state tells nobody",
        "Accelerator.save_state",
        'with ending_together(models, "the state is saved"), ExitStack() as writing:',
        "with ExitStack() as writing:",
        f"{TESTS}::test_who_cannot_write_a_state_tells_every_rank",
    ),
    Mutant(
        "of several models the first alone tells that a state cannot be written",
        "Accelerator.save_state",
        'ending_together(models, "the state is saved")',
        'ending_together(models[:1], "the state is saved")',
        f"{TESTS}::test_who_cannot_write_the_state_of_one_of_two_models_tells_those_that_wait_in_the_other",
    ),
    Mutant(
        "a rank that cannot write Lightning's checkpoint tells nobody",
        "GeminiStrategy.save_checkpoint",
        'with ending_together(self._models, "the checkpoint is saved"):',
        "if True:",
        "tests/features/test_lightning_checkpoints.py::test_who_cannot_write_a_checkpoint_tells_every_rank",
    ),
    Mutant(
        "Lightning makes other steps than the config's batch sizes",
        "GeminiStrategy.setup",
        "window not in (None, trainer.accumulate_grad_batches)",
        "False",
        "tests/features/test_lightning_refusals.py::"
        "test_batch_sizes_that_make_other_steps_than_the_trainers_are_refused",
    ),
]
