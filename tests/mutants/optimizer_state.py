"""Faults in gemini/optimizer: states and param groups, how they are saved, loaded and shown."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "scalars of a parameter without dimensions are loaded as its state",
        "_is_flat",
        'return name in names.flat if names.known is not None else name != "step"',
        'return name != "step"',
        "tests/features/test_state_dict_forms.py::test_the_state_of_a_parameter_without_dimensions_is_loaded_as_it_was_saved",
    ),
    Mutant(
        "an fp32 model drops the masters of a 16-bit one",
        "_load_master",
        "if has_master or chunk.dtype not in HALF_DTYPES:",
        "if has_master:",
        "tests/features/test_state_dict_forms.py::test_an_fp32_model_goes_on_from_the_masters_of_a_16_bit_one",
    ),
    Mutant(
        "a momentum buffer that is None is so for ever",
        "load_entry",
        "if value is None:\n    continue",
        "",
        "tests/features/test_state_dict_forms.py::test_a_momentum_buffer_that_is_none_is_made_by_the_next_step",
    ),
    Mutant(
        "a state of torch's Adam goes on as AdamW",
        "_hyperparameters_for",
        'found.setdefault("adamw_mode", found.get("decoupled_weight_decay", group["adamw_mode"]))',
        "",
        "tests/features/test_state_dict_forms.py::test_a_state_of_torchs_adam_goes_on_as_adam_and_of_adamw_as_adamw",
    ),
    Mutant(
        "state that a state dict has of frozen parameters is passed over",
        "_wanted",
        "kinds.add(Kind.OPTIM)",
        "pass",
        "tests/features/test_frozen_state.py",
    ),
    Mutant(
        "an optimizer that found no room keeps what it took",
        "ChunkStates.drop_all",
        "self.drop(state.chunk)",
        "pass",
        "tests/test_no_memory.py",
    ),
    Mutant(
        "ranks may make other param groups",
        "agreed_groups",
        "[owner, *settings, *words]",
        "[owner]",
        "tests/features/test_param_groups.py::test_ranks_that_group_or_order_parameters_otherwise_make_no_optimizer",
    ),
    Mutant(
        "ranks may ask for other fractions on the disk with their optimizers",
        "agreed_groups",
        "[owner, *settings, *words]",
        "[owner, *words]",
        "tests/features/test_disk.py::test_a_folder_of_an_optimizer_that_takes_no_file_leaves_the_model_without_a_disk",
    ),
    Mutant(
        "ranks may load other optimizer state",
        "load_optimizer_state",
        "state_in_words(saved).encode()",
        'b""',
        "tests/features/test_state_dict_forms.py::test_ranks_that_load_other_optimizer_state_are_told",
    ),
    Mutant(
        "ranks compare four digits of a learning rate",
        "in_words",
        "if isinstance(value, Tensor):",
        "if value is ...:",
        "tests/features/test_param_groups.py::test_settings_that_differ_by_rank_are_refused_before_the_step",
    ),
    Mutant(
        "a learning rate that was loaded is the state dict's own",
        "load_optimizer_state",
        "group.update(deepcopy(its))",
        "group.update(its)",
        "tests/features/test_state_dict_forms.py::test_a_learning_rate_that_was_loaded_is_the_optimizers_own",
    ),
    Mutant(
        "hooks on loading an optimizer's state do not run",
        "ShardedOptimizer.load_state_dict",
        "@loads_with_hooks\ndef load_state_dict(self, state_dict: dict[str, Any]) -> None:",
        "def load_state_dict(self, state_dict: dict[str, Any]) -> None:",
        "tests/features/test_state_dict_forms.py::test_hooks_on_an_optimizers_state_dicts_run_as_in_plain_pytorch",
    ),
    Mutant(
        "the state of a frozen parameter shows None",
        "_ParameterState.__getitem__",
        "kept_optimizer_state(managed.parameter, name)",
        "kept_optimizer_state(managed.parameter, name) if managed.parameter.requires_grad else None",
        "tests/features/test_state_dicts.py::test_an_optimizers_state_is_a_view_by_parameter",
    ),
    Mutant(
        "loaded masters leave fp16 weights as they are",
        "_load_master",
        "if has_master or chunk.dtype not in HALF_DTYPES:",
        "if chunk.splits_master or chunk.dtype not in HALF_DTYPES:",
        "tests/features/test_half_edits.py::test_masters_of_an_optimizers_state_dict_bring_their_weights",
    ),
    Mutant(
        "a parameter of another model shows the state at its place",
        "managed_of",
        "link is not None and link.step is step",
        "link is not None",
        "tests/features/test_state_dicts.py::"
        "test_an_optimizers_state_has_no_parameter_of_another_model_and_none_without_state",
    ),
    Mutant(
        "a rank that cannot make its optimizer tells nobody",
        "making_optimizer",
        "with step.publishing():\n    yield",
        "yield",
        "tests/features/test_param_groups.py::test_a_rank_that_cannot_make_its_optimizer_tells_the_others_why",
    ),
]
