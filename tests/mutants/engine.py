"""Faults in gemini/engine: what a config becomes, and what is said of one that is wrong."""

from tests.mutants.mutant import Mutant

CONFIG = "gemini/engine/config"

MUTANTS = [
    Mutant(
        "a sampler inside a sampler of batches repeats its first epoch",
        "tell_epoch",
        '[loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]',
        '[loader, getattr(loader, "sampler", None), batches]',
        "tests/features/test_engine_edges.py::test_whatever_orders_the_data_is_told_the_epoch",
    ),
    Mutant(
        "an evaluation inside a training takes its hooks away",
        "Trainer.evaluate",
        "self._hooks = others",
        "pass",
        "tests/features/test_engine_edges.py::test_an_evaluation_inside_a_training_leaves_it_its_hooks",
    ),
    Mutant(
        "an evaluation ends with all modules in one mode",
        "Trainer._evaluating",
        "if module.training != was_training:\n    module.train(was_training)",
        "self.engine.train(modes[0][1])",
        "tests/features/test_engine_edges.py::test_an_evaluation_leaves_every_module_the_mode_that_it_had",
    ),
    Mutant(
        "an epoch's loss has losses of a training that failed",
        "Loss.before_train",
        "self._of_epoch.clear()",
        "",
        "tests/features/test_engine_edges.py::test_metrics_after_a_training_that_failed_have_none_of_its_losses",
    ),
    Mutant(
        "a window stays full after a step that was skipped once too often",
        "Engine.step",
        "try:\n"
        "    optimizer.step()\n"
        "finally:\n"
        "    if optimizer.last_step is not before:\n"
        "        self._end_window(optimizer, rate)",
        "try:\n"
        "    optimizer.step()\n"
        "except ArithmeticError:\n"
        "    raise\n"
        "else:\n"
        "    if optimizer.last_step is not before:\n"
        "        self._end_window(optimizer, rate)",
        "tests/features/test_engine_edges.py"
        "::test_after_too_many_skipped_steps_a_window_begins_with_its_first_micro_batch",
    ),
    Mutant(
        "inputs are cast to a dtype that the config alone has",
        "Engine.__init__",
        "model.settings",
        "self.config",
        "tests/features/test_engine_edges.py::test_inputs_are_cast_to_the_dtype_of_a_model_that_was_wrapped_before",
    ),
    Mutant(
        "DeepSpeed's call reads what could be ours as ours",
        "dialect_of",
        "prefers in TABLES",
        "False",
        "tests/features/test_engine_edges.py::test_deepspeeds_call_reads_its_own_keys_where_they_are_ours_too",
    ),
    Mutant(
        "a signal during an evaluation begins an epoch",
        "Trainer.fit",
        "if is_last or self._stops():\n    break",
        "if is_last:\n    break",
        "tests/features/test_engine_edges.py::test_a_signal_during_an_evaluation_begins_no_epoch",
    ),
    Mutant(
        "a training begins with the gradients of one that failed",
        "Trainer.fit",
        "self._discard_window()",
        "",
        "tests/features/test_engine_edges.py::test_a_training_after_one_that_failed_has_none_of_its_gradients",
    ),
    Mutant(
        "a schedule of the script's moves in an open window",
        "MovedByScript.step",
        "self._has_gradients and not self._has_update",
        "False",
        "tests/features/test_engine_moving.py::test_a_script_moves_its_schedule",
    ),
    Mutant(
        "the engine moves a schedule of the script's, too",
        "initialize",
        "assemble(Engine, agreed, model, *given, moves_given=False, device_mesh=device_mesh)",
        "assemble(Engine, agreed, model, *given, moves_given=True, device_mesh=device_mesh)",
        "tests/features/test_engine_moving.py::test_a_script_moves_its_schedule",
    ),
    Mutant(
        "batch sizes that do not fit together pass",
        "batch_sizes",
        "train % given if is_open else train != given",
        "train % given",
        "tests/pure/test_config_bad.py::test_batch_sizes_are_compared_once_the_number_of_ranks_is_known",
    ),
    Mutant(
        "a DeepSpeed config without a stage is sharded",
        "finish",
        'fields.setdefault("stage", 0)',
        'fields.setdefault("stage", 3)',
        "tests/pure/test_config_deepspeed.py::test_the_oldest_forms_are_read",
    ),
    Mutant(
        "an optimizer that is to rest on the host rests on the device",
        "OptimizerOnHostPolicy.place",
        "self.ratio",
        "0.0",
        "tests/pure/test_config_deepspeed.py::test_an_optimizer_on_the_host_leaves_parameters_on_the_device",
    ),
    Mutant(
        "a key that is auto and that somebody knows keeps its default",
        "Table.translate",
        'self._is_undecided(value) and ".".join(path) in auto',
        "False",
        "tests/pure/test_config_deepspeed.py::test_auto_is_resolved_by_who_knows_or_by_a_default_that_is_said",
    ),
    Mutant(
        "a placement policy of Colossal-AI's that is auto counts as undecided",
        "Table._is_undecided",
        "self.placeholder",
        '"auto"',
        "tests/pure/test_config_colossal.py::test_what_a_config_becomes",
    ),
    Mutant(
        "a Colossal-AI model does not cast its inputs",
        "finish",
        'found.fields.setdefault("cast_inputs", True)',
        "pass",
        "tests/features/test_references.py::"
        "test_a_python_config_of_colossalais_page_trains_as_the_same_settings_by_hand",
    ),
    Mutant(
        "ranks that have not met train a whole model each",
        "ranks_of",
        'started == 1 or not is_rank or os.environ.get(NO_LAUNCH, "") not in ("", "0")',
        'True or not is_rank or os.environ.get(NO_LAUNCH, "") not in ("", "0")',
        "tests/dist/test_torchrun.py::test_the_first_example_shares_its_model_over_the_ranks_of_torchrun",
    ),
    Mutant(
        "ranks that another launcher than torchrun has started each train alone",
        "was_launched",
        '"RANK" in os.environ and "WORLD_SIZE" in os.environ',
        "dist.is_torchelastic_launched()",
        "tests/features/test_zero_names.py::test_the_context_joins_the_ranks_that_a_launcher_started",
    ),
    Mutant(
        "zero.Init builds on one rank although torchrun has started several",
        "Init.__init__",
        "data_parallel_group is None and enabled",
        "False",
        "tests/features/test_zero_names.py::test_the_context_joins_the_ranks_that_a_launcher_started",
    ),
    Mutant(
        "a Python config runs although that is forbidden",
        "_read_python",
        'os.environ.get(NO_EXEC) == "1"',
        "False",
        "tests/pure/test_config_bad.py::test_python_configs_do_not_run_where_that_is_forbidden",
    ),
    Mutant(
        "a config of any size is read",
        "_text_of",
        "num_bytes > MAX_BYTES",
        "False",
        "tests/pure/test_config_bad.py::test_what_is_no_config_file_is_said_before_it_is_read",
    ),
    Mutant(
        "names are compared by spelling alone",
        "nearest",
        "best is not None and in_common(best)[0] >= _MEANT",
        "False",
        "tests/pure/test_config.py::test_an_unknown_key_is_answered_with_the_one_that_means_the_same",
    ),
    Mutant(
        "ranks with other optimizers have the same canonical text",
        "Config.canonical",
        "self.model_dump(exclude=set(SETTINGS))",
        'self.model_dump(exclude={*SETTINGS, "optimizer"})',
        "tests/pure/test_config.py::test_ranks_can_compare_what_they_must_have_in_common",
    ),
    Mutant(
        "every micro-batch waits for its loss",
        "Loss.after_micro_batch",
        "self._of_step.append(loss)",
        "self._of_step.append(torch.tensor(float(loss)))",
        "tests/features/test_engine_trainer.py::test_hooks_wait_for_the_device_when_a_metric_is_read",
    ),
    Mutant(
        "a step after loss.backward() does nothing without a word",
        "Engine.step",
        "self._window.refuse_foreign_gradients(self.batch_sizes.accumulation)",
        "",
        "tests/features/test_engine_misuse.py"
        "::test_a_step_after_loss_backward_is_refused_and_training_goes_on[1rank-1]",
    ),
    Mutant(
        "what another engine's backward brought is no micro-batch",
        "Engine.backward",
        "engine._count(whole, divisor, is_own=False)",
        "pass",
        "tests/features/test_chained_engines.py::test_two_engines_in_a_chain_train_as_two_plain_modules[1rank-1-free]",
    ),
    Mutant(
        "the last step uses a window that a failure has ended",
        "Engine.step",
        "is_due = self._is_full() or last",
        "is_due = last or self._is_full()",
        "tests/features/test_engine_misuse.py"
        "::test_after_a_failure_that_drops_the_window_the_last_step_has_nothing_to_step",
    ),
    Mutant(
        "a window ends where the config says, and not where the script does",
        "DeepSpeedEngine.set_gradient_accumulation_boundary",
        "self._boundary = is_boundary",
        "self._boundary = None",
        "tests/features/test_deepspeed_engine.py"
        "::test_a_script_may_say_which_micro_batch_is_the_last_of_a_window[1rank-all by hand]",
    ),
    Mutant(
        "a config that one rank cannot read is an error of zero.Init on that rank alone",
        "Init.__init__",
        '_config_of(source, data_parallel_group) if enabled else load_config(source, prefers="deepspeed")',
        "_config_of(source, data_parallel_group) if False else load_config(source)",
        "tests/features/test_engine_agreement.py::"
        "test_a_bad_config_of_one_rank_is_told_to_all_before_the_model_is_touched[2ranks-1-zero_init-differs]",
    ),
    Mutant(
        "a step that is made once more has other random numbers and statistics",
        "BatchWindow._begin_again",
        "self._start.restore()",
        "pass",
        "tests/features/test_shortage_in_trainer.py"
        "::test_a_step_without_memory_is_made_once_more_with_the_same_bits[1rank-1]",
    ),
    Mutant(
        "a step is not made once more whose model data found no memory",
        "_is_shortage",
        "error.is_shortage and error.tier == Tier.DEVICE",
        "False",
        "tests/features/test_shortage_in_trainer.py::test_slots_without_memory_repeat_the_window_on_all_ranks",
    ),
    Mutant(
        "a rank does not know that another rank's model data found no memory",
        "_is_shortage",
        "error.message.startswith(_OF_RANKS)",
        "error.message.startswith(_OF_RANKS[0])",
        "tests/features/test_shortage_in_trainer.py::test_slots_without_memory_repeat_the_window_on_all_ranks",
    ),
    Mutant(
        "a signal ends a training in the middle of a window",
        "Together.batches",
        "stops and not (fills_windows and self._engine.is_window_open())",
        "stops",
        "tests/features/test_engine_trainer.py"
        "::test_a_signal_in_the_middle_of_a_window_ends_training_after_its_step[1rank]",
    ),
    Mutant(
        "an engine does not divide the loss by its micro-batches",
        "Engine.backward",
        "loss = loss / divisor",
        "pass",
        "tests/features/test_engine_reference.py::"
        "test_accumulation_clipping_and_rates_are_those_of_plain_pytorch_at_every_step"
        "[1rank-colossal-CosineAnnealingLR]",
    ),
    Mutant(
        "a step is logged before the schedule moves",
        "Engine._end_window",
        "assert report is not None",
        "assert report is not None\nif self._log.is_on:\n    self._log.after_step(self.global_steps, rate, report)",
        "tests/features/test_engine_log.py::test_a_step_whose_log_finds_the_disk_full_is_over_on_all_ranks",
    ),
    Mutant(
        "the losses of a step whose schedule raises count in the next one's mean",
        "Engine._end_window",
        "try:\n"
        "    if report.skipped is not None:\n"
        "        self.skipped_steps += 1\n"
        "    elif self._moving is not None:\n"
        "        self._moving.after_update()\n"
        "finally:\n"
        "    if self._log.is_on:\n"
        "        self._log.after_step(self.global_steps, rate, report)",
        "try:\n"
        "    if report.skipped is not None:\n"
        "        self.skipped_steps += 1\n"
        "    elif self._moving is not None:\n"
        "        self._moving.after_update()\n"
        "except OverflowError:\n"
        "    raise\n"
        "else:\n"
        "    if self._log.is_on:\n"
        "        self._log.after_step(self.global_steps, rate, report)",
        "tests/features/test_engine_log.py::test_a_step_whose_schedule_raises_is_logged_with_its_own_losses",
    ),
    Mutant(
        "warnings of a step name a line of the library",
        "warn_at_script",
        "warnings.warn(message, category, stacklevel=level)",
        "warnings.warn(message, category, stacklevel=5)",
        "tests/features/test_engine_log.py::test_warnings_of_a_step_name_the_line_of_the_script",
    ),
]
