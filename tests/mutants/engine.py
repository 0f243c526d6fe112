"""Faults in gemini/engine: what a config becomes, and what is said of one that is wrong."""

from tests.mutants.mutant import Mutant

CONFIG = "gemini/engine/config"

MUTANTS = [
    Mutant(
        "a sampler inside a sampler of batches repeats its first epoch",
        "gemini/engine/loaders.py",
        'batches, getattr(batches, "sampler", None)]',
        "batches]",
        "tests/features/test_engine_edges.py::test_whatever_orders_the_data_is_told_the_epoch",
    ),
    Mutant(
        "an evaluation inside a training takes its hooks away",
        "gemini/engine/trainer/trainer.py",
        "            self._hooks = others  #",
        "            pass  #",
        "tests/features/test_engine_edges.py::test_an_evaluation_inside_a_training_leaves_it_its_hooks",
    ),
    Mutant(
        "an evaluation ends with all modules in one mode",
        "gemini/engine/trainer/trainer.py",
        "                if module.training != was_training:\n                    module.train(was_training)\n",
        "                self.engine.train(modes[0][1])\n",
        "tests/features/test_engine_edges.py::test_an_evaluation_leaves_every_module_the_mode_that_it_had",
    ),
    Mutant(
        "an epoch's loss has losses of a training that failed",
        "gemini/engine/trainer/metrics.py",
        "        self._of_epoch.clear()\n",
        "",
        "tests/features/test_engine_edges.py::test_metrics_after_a_training_that_failed_have_none_of_its_losses",
    ),
    Mutant(
        "a window stays full after a step that was skipped once too often",
        "gemini/engine/engine.py",
        "        finally:\n            # One",
        "        except ArithmeticError:\n            raise\n        else:\n            # One",
        "tests/features/test_engine_edges.py"
        "::test_after_too_many_skipped_steps_a_window_begins_with_its_first_micro_batch",
    ),
    Mutant(
        "inputs are cast to a dtype that the config alone has",
        "gemini/engine/engine.py",
        "        weights = model.settings.dtype  #",
        "        weights = self.config.dtype  #",
        "tests/features/test_engine_edges.py::test_inputs_are_cast_to_the_dtype_of_a_model_that_was_wrapped_before",
    ),
    Mutant(
        "DeepSpeed's call reads what could be ours as ours",
        "gemini/engine/config/load.py",
        "    if prefers in TABLES and all(",
        "    if False and all(",
        "tests/features/test_engine_edges.py::test_deepspeeds_call_reads_its_own_keys_where_they_are_ours_too",
    ),
    Mutant(
        "a signal during an evaluation begins an epoch",
        "gemini/engine/trainer/trainer.py",
        "                if is_last or self._stops():\n                    break\n",
        "                if is_last:\n                    break\n",
        "tests/features/test_engine_edges.py::test_a_signal_during_an_evaluation_begins_no_epoch",
    ),
    Mutant(
        "a training begins with the gradients of one that failed",
        "gemini/engine/trainer/trainer.py",
        "            self._discard_window()\n",
        "",
        "tests/features/test_engine_edges.py::test_a_training_after_one_that_failed_has_none_of_its_gradients",
    ),
    Mutant(
        "a schedule of the script's moves in an open window",
        "gemini/engine/moving.py",
        "if self._has_gradients and not self._has_update:",
        "if False:",
        "tests/features/test_engine_moving.py::test_a_script_moves_its_schedule",
    ),
    Mutant(
        "the engine moves a schedule of the script's, too",
        "gemini/engine/initialize.py",
        "process_group, moves_given=False)",
        "process_group, moves_given=True)",
        "tests/features/test_engine_moving.py::test_a_script_moves_its_schedule",
    ),
    Mutant(
        "batch sizes that do not fit together pass",
        f"{CONFIG}/batch.py",
        "    if train % given if is_open else train != given:",
        "    if train % given:",
        "tests/pure/test_config_bad.py::test_batch_sizes_are_compared_once_the_number_of_ranks_is_known",
    ),
    Mutant(
        "a DeepSpeed config without a stage is sharded",
        f"{CONFIG}/deepspeed_keys.py",
        'fields.setdefault("stage", 0)',
        'fields.setdefault("stage", 3)',
        "tests/pure/test_config_deepspeed.py::test_the_oldest_forms_are_read",
    ),
    Mutant(
        "an optimizer that is to rest on the host rests on the device",
        f"{CONFIG}/offload.py",
        "StaticPolicy(offload_optim_frac=self.ratio",
        "StaticPolicy(offload_optim_frac=0.0",
        "tests/pure/test_config_deepspeed.py::test_an_optimizer_on_the_host_leaves_parameters_on_the_device",
    ),
    Mutant(
        "a key that is auto and that somebody knows keeps its default",
        f"{CONFIG}/key.py",
        'if self._is_undecided(value) and ".".join(path) in auto:',
        "if False:",
        "tests/pure/test_config_deepspeed.py::test_auto_is_resolved_by_who_knows_or_by_a_default_that_is_said",
    ),
    Mutant(
        "a placement policy of Colossal-AI's that is auto counts as undecided",
        f"{CONFIG}/key.py",
        "and value == self.placeholder",
        'and value == "auto"',
        "tests/pure/test_config_colossal.py::test_what_a_config_becomes",
    ),
    Mutant(
        "a Colossal-AI model does not cast its inputs",
        f"{CONFIG}/colossal_keys.py",
        'found.fields.setdefault("cast_inputs", True)',
        "pass",
        "tests/features/test_references.py::"
        "test_a_python_config_of_colossalais_page_trains_as_the_same_settings_by_hand",
    ),
    Mutant(
        "ranks that have not met train a whole model each",
        "gemini/launch.py",
        "if started == 1 or not is_rank",
        "if True or not is_rank",
        "tests/dist/test_torchrun.py::test_the_first_example_shares_its_model_over_the_ranks_of_torchrun",
    ),
    Mutant(
        "ranks that another launcher than torchrun has started each train alone",
        "gemini/launch.py",
        'return "RANK" in os.environ and "WORLD_SIZE" in os.environ',
        "return dist.is_torchelastic_launched()",
        "tests/features/test_zero_names.py::test_the_context_joins_the_ranks_that_a_launcher_started",
    ),
    Mutant(
        "zero.Init builds on one rank although torchrun has started several",
        "gemini/deepspeed/runtime/zero/__init__.py",
        "if data_parallel_group is None and enabled:",
        "if False:",
        "tests/features/test_zero_names.py::test_the_context_joins_the_ranks_that_a_launcher_started",
    ),
    Mutant(
        "a Python config runs although that is forbidden",
        f"{CONFIG}/read.py",
        'if os.environ.get(NO_EXEC) == "1":',
        "if False:",
        "tests/pure/test_config_bad.py::test_python_configs_do_not_run_where_that_is_forbidden",
    ),
    Mutant(
        "a config of any size is read",
        f"{CONFIG}/read.py",
        "    if num_bytes > MAX_BYTES:",
        "    if False:",
        "tests/pure/test_config_bad.py::test_what_is_no_config_file_is_said_before_it_is_read",
    ),
    Mutant(
        "names are compared by spelling alone",
        f"{CONFIG}/nearest.py",
        "    if best is not None and in_common(best)[0] >= _MEANT:",
        "    if False:",
        "tests/pure/test_config.py::test_an_unknown_key_is_answered_with_the_one_that_means_the_same",
    ),
    Mutant(
        "ranks with other optimizers have the same canonical text",
        f"{CONFIG}/config.py",
        "exclude=set(SETTINGS))",
        'exclude={*SETTINGS, "optimizer"})',
        "tests/pure/test_config.py::test_ranks_can_compare_what_they_must_have_in_common",
    ),
    Mutant(
        "every micro-batch waits for its loss",
        "gemini/engine/trainer/metrics.py",
        "        self._of_step.append(loss)\n",
        "        self._of_step.append(torch.tensor(float(loss)))\n",
        "tests/features/test_engine_trainer.py::test_hooks_wait_for_the_device_when_a_metric_is_read",
    ),
    Mutant(
        "a step after loss.backward() does nothing without a word",
        "gemini/engine/engine.py",
        "        self._window.refuse_foreign_gradients(self.batch_sizes.accumulation)\n",
        "",
        "tests/features/test_engine_misuse.py"
        "::test_a_step_after_loss_backward_is_refused_and_training_goes_on[1rank-1]",
    ),
    Mutant(
        "what another engine's backward brought is no micro-batch",
        "gemini/engine/engine.py",
        "                engine._count(whole, divisor)\n",
        "                pass\n",
        "tests/features/test_chained_engines.py::test_two_engines_in_a_chain_train_as_two_plain_modules[1rank-1-free]",
    ),
    Mutant(
        "the last step uses a window that a failure has ended",
        "gemini/engine/engine.py",
        "        is_due = self._is_full() or last\n",
        "        is_due = last or self._is_full()\n",
        "tests/features/test_engine_misuse.py"
        "::test_after_a_failure_that_drops_the_window_the_last_step_has_nothing_to_step",
    ),
    Mutant(
        "a window ends where the config says, and not where the script does",
        "gemini/deepspeed/engine.py",
        "        self._boundary = is_boundary\n",
        "        self._boundary = None\n",
        "tests/features/test_deepspeed_engine.py"
        "::test_a_script_may_say_which_micro_batch_is_the_last_of_a_window[1rank-all by hand]",
    ),
    Mutant(
        "a config that one rank cannot read is an error of zero.Init on that rank alone",
        "gemini/deepspeed/runtime/zero/__init__.py",
        'if enabled else load_config(source, prefers="deepspeed")',
        "if False else load_config(source)",
        "tests/features/test_engine_agreement.py::"
        "test_a_bad_config_of_one_rank_is_told_to_all_before_the_model_is_touched[2ranks-1-zero_init-differs]",
    ),
    Mutant(
        "a step that is made once more has other random numbers and statistics",
        "gemini/engine/trainer/window.py",
        "        self._start.restore()\n",
        "        pass\n",
        "tests/features/test_shortage_in_trainer.py"
        "::test_a_step_without_memory_is_made_once_more_with_the_same_bits[1rank-1]",
    ),
    Mutant(
        "a step is not made once more whose model data found no memory",
        "gemini/engine/trainer/window.py",
        "        return error.is_shortage and error.tier == Tier.DEVICE",
        "        return False",
        "tests/features/test_shortage_in_trainer.py::test_slots_without_memory_repeat_the_window_on_all_ranks",
    ),
    Mutant(
        "a rank does not know that another rank's model data found no memory",
        "gemini/engine/trainer/window.py",
        "        return error.message.startswith(_OF_RANKS)",
        "        return error.message.startswith(_OF_RANKS[0])",
        "tests/features/test_shortage_in_trainer.py::test_slots_without_memory_repeat_the_window_on_all_ranks",
    ),
    Mutant(
        "a signal ends a training in the middle of a window",
        "gemini/engine/trainer/together.py",
        "(stops and not (fills_windows and self._engine.is_window_open()))",
        "stops",
        "tests/features/test_engine_trainer.py"
        "::test_a_signal_in_the_middle_of_a_window_ends_training_after_its_step[1rank]",
    ),
    Mutant(
        "an engine does not divide the loss by its micro-batches",
        "gemini/engine/engine.py",
        "            loss = loss / divisor\n",
        "            pass\n",
        "tests/features/test_engine_reference.py::"
        "test_accumulation_clipping_and_rates_are_those_of_plain_pytorch_at_every_step"
        "[1rank-colossal-CosineAnnealingLR]",
    ),
    Mutant(
        "a step is logged before the schedule moves",
        "gemini/engine/engine.py",
        "        self.global_steps += 1\n        report = optimizer.last_step\n        assert report is not None\n",
        "        self.global_steps += 1\n        report = optimizer.last_step\n        assert report is not None\n"
        "        if self._log.is_on:\n            self._log.after_step(self.global_steps, rate, report)\n",
        "tests/features/test_engine_log.py::test_a_step_whose_log_finds_the_disk_full_is_over_on_all_ranks",
    ),
    Mutant(
        "the losses of a step whose schedule raises count in the next one's mean",
        "gemini/engine/engine.py",
        "            finally:\n                # The log comes last",
        "            except OverflowError:\n                raise\n            else:\n"
        "                # The log comes last",
        "tests/features/test_engine_log.py::test_a_step_whose_schedule_raises_is_logged_with_its_own_losses",
    ),
    Mutant(
        "warnings of a step name a line of the library",
        "gemini/script.py",
        "stacklevel=level)",
        "stacklevel=5)",
        "tests/features/test_engine_log.py::test_warnings_of_a_step_name_the_line_of_the_script",
    ),
]
