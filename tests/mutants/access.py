"""Faults in gemini/access and gemini/observe.py: weights outside their operators, what autograd keeps; events."""

from tests.mutants.mutant import Mutant

INFERENCE = "tests/features/test_plan_for_inference.py"

MUTANTS = [
    Mutant(
        "a write through .data in a forward goes unnoticed",
        "Binding.show_data",
        "self.before_write(managed)\nself.mark_edited(managed)",
        "pass",
        "tests/features/test_data_writes.py::"
        "test_a_write_before_the_use_gives_what_plain_pytorch_computes[1rank-numpy-before-fp32]",
    ),
    Mutant(
        "another .data in a forward leaves the payload",
        "_set",
        "_plain_link(parameter) is None",
        "True",
        "tests/features/test_data_writes.py::"
        "test_a_frozen_average_that_the_forward_moves_is_that_of_plain_pytorch[1rank-data =-fp32]",
    ),
    Mutant(
        "the compiler traces what autograd calls for a tensor that it saves",
        "_Pack.__call__",
        "@never_traced(A_HOOK)\ndef __call__(self, tensor: Tensor) -> Any:",
        "def __call__(self, tensor: Tensor) -> Any:",
        "tests/features/test_compile_beside.py::test_a_block_that_the_compiler_gave_up_trains_under_autocast",
    ),
    Mutant(
        "a gradient that is given to what was detached is the parameter's",
        "assign_grad",
        "set_own_grad(tensor, value) if link is None else link.set_gradient(value)",
        "link.set_gradient(value) if (link := any_link_of(tensor)) else set_own_grad(tensor, value)",
        "tests/features/test_gradients.py::test_what_was_detached_has_a_gradient_of_its_own",
    ),
    Mutant(
        "a backward for some parameters holds them all",
        "_SPECIAL",
        "{**ANSWERS, torch.autograd.grad: gradients, torch.autograd.backward: backward, _T.data.__get__: "
        "get_data, _T.data.__set__: set_data, _T.copy_: _copy, _T.detach: _detach, torch.detach: _detach, "
        "torch.empty_like: _empty_like}",
        "{**ANSWERS, torch.autograd.grad: gradients, _T.data.__get__: get_data, _T.data.__set__: set_data, "
        "_T.copy_: _copy, _T.detach: _detach, torch.detach: _detach, torch.empty_like: _empty_like}",
        "tests/features/test_autograd_functions.py::"
        "test_a_backward_for_some_parameters_gives_these_their_gradients_wherever_they_are",
    ),
    Mutant(
        "values on meta end a state dict that is half loaded",
        "load_whole_state_dict",
        "if value.is_meta:",
        "if False:",
        "tests/features/test_access_edges.py::test_values_on_meta_load_nothing",
    ),
    Mutant(
        "a part of a master that is set follows no unfreeze",
        "_begin",
        'what.startswith("safe_set")',
        'what.startswith("safe_set_full")',
        "tests/features/test_access_edges.py::test_a_part_of_a_master_is_set_as_exactly_as_a_whole_one_after_an_unfreeze",
    ),
    Mutant(
        "a gradient that is set trains a frozen parameter",
        "_trained_gradients",
        "if not link.managed.is_trained:",
        "if False:",
        "tests/features/test_access_edges.py::test_a_frozen_parameter_is_given_no_gradient",
    ),
    Mutant(
        "what one rank reads inside a gathered block parts the ranks",
        "ParameterLink.broadcast_from",
        "communicator.position.set(managed.operator, Phase.TOUCH)",
        "",
        "tests/features/test_access_edges.py::test_what_one_rank_reads_inside_a_gathered_block_parts_no_ranks",
    ),
    Mutant(
        "what was undone stays in home and master",
        "ParameterLink.undo",
        "if master is not None:",
        "if False:",
        "tests/features/test_access_edges.py::test_an_edit_that_was_undone_leaves_nothing_where_it_was_brought_home_meanwhile",
    ),
    Mutant(
        "a flag that was raised is forgotten where the first graph is built",
        "Trainability._follow_use",
        "self.flags_raised.difference_update([number for number, flag in enumerate(self._flags) if flag])",
        "self.flags_raised.clear()",
        "tests/features/test_frozen_parts.py::"
        "test_what_is_unfrozen_may_be_used_outside_of_a_forward_before_anything_was_trained",
    ),
    Mutant(
        "a plan for more micro-batches that finds no memory ends the training",
        "LivePlan._follow_micro_batches",
        'if self._manager.try_plan(plan, f"steps of {number} micro-batches", *_ADDED_UP) is not None:\n'
        "    return False",
        'self._manager.change_plan(plan, f"steps of {number} micro-batches", *_ADDED_UP)',
        "tests/features/test_evaded_shortages.py::"
        "test_a_plan_for_more_micro_batches_that_finds_no_memory_ends_no_training",
    ),
    Mutant(
        "a plan does not learn how many micro-batches a step has",
        "LivePlan._follow_micro_batches",
        "if not steps.have_changed or not self._replanning.is_possible:\n    return False",
        "if True:\n    return False",
        "tests/features/test_planned_micro_batches.py::test_a_plan_learns_how_many_micro_batches_steps_have",
    ),
    Mutant(
        "a plan follows what only the last step had",
        "MicroBatches.have_changed",
        "self._last != self._followed and self._num_alike >= self._needed and self._last > 0",
        "self._last != self._followed and self._last > 0",
        "tests/features/test_planned_micro_batches.py::test_a_number_that_was_told_is_not_learnt",
    ),
    Mutant(
        "every rank follows its own number of micro-batches",
        "summarize",
        "-(-num_backwards // communicator.world_size)",
        "step.grads.num_backwards",
        "tests/features/test_planned_micro_batches.py::test_ranks_that_add_up_other_numbers_plan_alike",
    ),
    Mutant(
        "a model that only infers keeps the room of what only training needs",
        "Purpose.is_followed",
        "return infers or not self._may_infer",
        "return True",
        f"{INFERENCE}::test_auto_has_all_weights_on_the_device_to_infer_and_then_trains_like_a_model_that_never_inferred",
    ),
    Mutant(
        "a rank without memory for another plan stays with it alone",
        "ChunkManager.try_plan",
        "self.agree_on_room(_refusal_of(lambda: self._carry_out(plan, migrate)))",
        "_refusal_of(lambda: self._carry_out(plan, migrate))",
        f"{INFERENCE}::test_a_model_that_finds_no_memory_for_inference_infers_with_the_plan_that_it_has[2ranks]",
    ),
    Mutant(
        "a node holds its weight's slot while its activation is recomputed",
        "SavedTensors.unpack",
        "activation.unpack_early()",
        "pass",
        "tests/features/test_any_budget.py::test_a_model_trains_at_its_least_budget_with_the_bits_of_the_plain_one",
    ),
    Mutant(
        "replicas keep the gradients that their ranks wrote",
        "FlatAccess.set_of_each_rank",
        "if chunk.layout.world_size > 1 and chunk.optim_layout.world_size == 1:",
        "if False:",
        "tests/features/test_gradient_writes.py::test_ranks_that_write_different_values_keep_one_model",
    ),
    Mutant(
        "gradients are shown with their loss scale",
        "GradientAccess._shown",
        "if inv_scale != 1.0:",
        "if False:",
        "tests/features/test_gradients.py::test_fp16_gradients_are_seen_and_set_without_the_loss_scale",
    ),
    Mutant(
        "weights that were set do not reach a payload that is there",
        "FullPrecisionAccess.set_whole",
        "ready(chunk.region())[managed.in_payload].copy_(shown)",
        "pass",
        "tests/features/test_access.py",
    ),
    Mutant(
        "a move that failed counts as made",
        "OpenMove.__exit__",
        "self.blocks == 0 and error is None",
        "self.blocks == 0",
        "tests/features/test_observe.py::test_a_move_that_fails_is_not_noted",
    ),
    Mutant(
        "handles ignore steps",
        "SavedTensors.unpack",
        "handle.num_updates != chunk.num_updates",
        "False",
        "tests/test_manager.py::test_backward_through_a_graph_from_before_a_step_raises",
    ),
    Mutant(
        "autograd is given tensors with their graph",
        "_Pack.__call__",
        "tensor.detach()",
        "tensor",
        "tests/features/test_dropped_graphs.py::test_a_graph_that_is_dropped_without_a_complete_backward_keeps_nothing",
    ),
    Mutant(
        "a saved tensor may be modified",
        "SavedTensors.unpack",
        "packed.tensor._version != packed.version",
        "False",
        "tests/features/test_dropped_graphs.py::test_a_tensor_that_was_modified_after_it_was_saved_is_autograds_error",
    ),
    Mutant(
        "checkpointing does not count the weights that we have handles of",
        "_Pack.__call__",
        "if self._checkpoints:",
        "if False:",
        "tests/features/test_checkpoint.py::test_a_checkpointed_model_has_the_bits_of_the_plain_one",
        index=0,
    ),
    Mutant(
        "a checkpoint keeps a view of a slot",
        "_Pack._show",
        "kept.data = kept.clone()",
        "pass",
        "tests/features/test_checkpoint.py::test_a_checkpointed_model_has_the_bits_of_the_plain_one",
    ),
    Mutant(
        "autograd.grad fetches every parameter that it is asked for",
        "_SPECIAL",
        "{**ANSWERS, torch.autograd.grad: gradients, torch.autograd.backward: backward, _T.data.__get__: "
        "get_data, _T.data.__set__: set_data, _T.copy_: _copy, _T.detach: _detach, torch.detach: _detach, "
        "torch.empty_like: _empty_like}",
        "{**ANSWERS, torch.autograd.backward: backward, _T.data.__get__: get_data, _T.data.__set__: set_data, "
        "_T.copy_: _copy, _T.detach: _detach, torch.detach: _detach, torch.empty_like: _empty_like}",
        "tests/features/test_autograd_functions.py::test_gradients_of_all_parameters_are_the_plain_ones_and_leave_grad_alone",
    ),
    Mutant(
        "hooks that are registered after wrapping run after the model's own",
        "GradientHooks.__setitem__",
        "if self._own_id is not None and self._own_id in self:",
        "if False:",
        "tests/features/test_user_hooks.py",
    ),
    Mutant(
        "a write to a view of a gradient is lost",
        "_call",
        "return _view(source, tensor, whole, held)",
        "return tensor",
        "tests/features/test_gradient_writes.py::test_writes_reach_the_step",
    ),
    Mutant(
        "a write to a list of gradients goes unnoticed",
        "Writes.__torch_dispatch__",
        "for target in pytree.tree_leaves(given):",
        "for target in (given,):",
        "tests/features/test_gradient_writes.py::test_torchs_clipping_holds_one_gradient_at_a_time",
    ),
    Mutant(
        "a change in GatheredParameters stays on its rank",
        "ParameterLink.broadcast_from",
        "communicator.broadcast_(payload.flat[managed.in_payload], what, rank)",
        "pass",
        "tests/features/test_access.py",
    ),
    Mutant(
        "moments that are given up are remembered",
        "Trainability.discard_state",
        "optimizer.states.discard(each)",
        "pass",
        "tests/features/test_frozen_state.py",
    ),
    Mutant(
        "a master that is given up is remembered",
        "Trainability.discard_state",
        "master_from_weights(each.chunk, each)",
        "pass",
        "tests/features/test_frozen_state.py",
    ),
    Mutant(
        "frozen chunks lose their moments",
        "Replanning._left_by_training",
        "kept.add(Kind.OPTIM)",
        "pass",
        "tests/features/test_frozen_parts.py",
    ),
    Mutant(
        "frozen chunks lose their masters",
        "Replanning._left_by_training",
        "kept.add(Kind.MASTER)",
        "pass",
        "tests/features/test_frozen_parts.py",
    ),
    Mutant(
        "ranks do not ask each other about what is unfrozen",
        "ChunkManager._agree_on",
        'self.communicator.agree(f"{plan.hash:010d} {shown}".encode(), change, words, remedy)',
        "pass",
        "tests/features/test_frozen_parts.py::test_ranks_that_do_not_do_alike_are_told",
    ),
    Mutant(
        "everything is planned again for each parameter that is unfrozen and written to",
        "Link._touch",
        "raised and not detached and any(link.managed.index in raised for link in links)",
        "raised and any(link.managed.index in raised for link in links)",
        "tests/features/test_unfreezing.py",
    ),
    Mutant(
        "a view that was taken is not expected to be written to",
        "_use",
        "link.before_write_through(views) if not was_written else False",
        "False",
        "tests/test_edits.py::test_an_edit_reaches_forward_state_dict_and_master_and_survives_the_step[bf16-view.fill_]",
    ),
    Mutant(
        "a state dict of the wrapped module holds lazy tensors",
        "StateHooks._after_state_dict",
        "state[name] = self._whole(name, value, state)",
        "pass",
        "tests/features/test_state_dicts.py::test_a_saved_state_dict_of_the_module_holds_tensors_that_load_anywhere",
    ),
    Mutant(
        "a parametrization takes its parameter out of the chunk",
        "ReleasedParameter.set_",
        "return set_source(self, *args, **kwargs)",
        "return super().set_(*args, **kwargs)",
        "tests/features/test_parametrizations.py::test_a_parametrization_put_on_after_wrapping_trains_as_in_plain_pytorch"
        "[after it-own with inverse-smallest]",
    ),
    Mutant(
        "an edit that is not at home yet is lost to what is set",
        "FullPrecisionAccess.set_whole",
        "binding.write_back_one(managed)",
        "pass",
        "tests/features/test_half_edits.py::test_weights_that_are_edited_and_put_back_are_the_same_at_every_budget",
    ),
]
