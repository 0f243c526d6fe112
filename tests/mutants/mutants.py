"""One-line faults for the core, each with the test that must notice it.

`old` must occur exactly once in `file`, so that a mutant which the code has outgrown is an error, not a pass.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """Replace `old` by `new` in `file`; `test` must then fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


ONE_RANK = "tests/test_parity_one_rank.py::test_a_model_at_its_smallest_budget_has_the_bits_of_the_plain_one"
TWO_RANKS = "tests/dist/test_parity.py::test_two_ranks_at_the_smallest_slots_equal_plain"
PAIRS = "tests/dist/test_parity.py::test_every_pair_of_options_equals_plain[2]"
HALF = "tests/test_half.py"
HALF_RANKS = "tests/dist/test_half.py"
BUILDING = "tests/dist/test_building.py::test_weights_are_rank_0s_whatever_the_seeds[2]"
MEMORY = "tests/dist/test_memory.py"

MUTANTS = [
    Mutant(
        "a released chunk keeps its views bound",
        "gemini/executor/fetcher.py",
        "        self.binding.write_back(chunk)\n        self.binding.unbind(chunk)\n",
        "        self.binding.write_back(chunk)\n",
        f"{ONE_RANK}[gpt2]",
    ),
    Mutant(
        "a stale payload survives the step",
        "gemini/executor/executor.py",
        "        if chunk.state is ChunkState.GATHERED:\n            self.fetcher.release(chunk, wipes=True)\n",
        "        if False:\n            self.fetcher.release(chunk, wipes=True)\n",
        f"{ONE_RANK}[chain]",
    ),
    Mutant(
        "nodes do not pin what they have unpacked",
        "gemini/executor/executor.py",
        "        self._nodes.pin(chunk)\n",
        "",
        "tests/test_executor.py::test_a_node_pins_what_it_has_unpacked_until_the_next_node_asks",
    ),
    Mutant(
        "pins of a node are never lifted",
        "gemini/executor/node_pins.py",
        "            for chunk in self._by_task.pop(inner).chunks:\n                chunk.pins -= 1",
        "            self._by_task.pop(inner)",
        f"{ONE_RANK}[gpt2]",
    ),
    Mutant(
        "handles ignore steps",
        "gemini/model/saved_tensors.py",
        "if handle.num_updates != chunk.num_updates:",
        "if False:",
        "tests/test_executor.py::test_backward_through_a_graph_from_before_a_step_raises",
    ),
    Mutant(
        "hooks are not pushed again inside operators",
        "gemini/model/hooks.py",
        "if torch.is_grad_enabled() and not self._saved_tensors.on_top():",
        "if False:",
        f"{ONE_RANK}[llama_checkpoint]",
    ),
    Mutant(
        "the root pushes no hooks",
        "gemini/model/hooks.py",
        "self._root_hooks.append(None if covered else self._saved_tensors.push())",
        "self._root_hooks.append(None)",
        f"{ONE_RANK}[norm_penalty]",
    ),
    Mutant(
        "a second gradient overwrites the first",
        "gemini/executor/gradients.py",
        "            view.add_(grad)\n",
        "            view.copy_(grad)\n",
        f"{ONE_RANK}[checkpoint_shared_reentrant]",
    ),
    Mutant(
        "pieces of a gradient are added to the sum of micro-batches one by one",
        "gemini/executor/gradients.py",
        "            if not gradient.in_pieces:",
        "            if True:",
        "tests/test_half.py",
    ),
    Mutant(
        "micro-batches are not added",
        "gemini/executor/exchange.py",
        "            target.add_(staging)",
        "            target.copy_(staging)",
        PAIRS,
    ),
    Mutant(
        "gradient slots are not zeroed",
        "gemini/executor/gradient_store.py",
        "                if not fired:\n                    view.zero_()",
        "                pass",
        f"{TWO_RANKS}[sometimes_unused]",
    ),
    Mutant(
        "a spilled gradient is lost",
        "gemini/executor/gradient_store.py",
        "            copy(gradient.payload.view(torch.uint8), gradient.spilled, self.device, self.host, self.traffic)",
        "            gradient.payload.zero_()",
        f"{ONE_RANK}[experts]",
    ),
    Mutant(
        "the sum over ranks is not divided",
        "gemini/executor/communicator.py",
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
        "tests/dist/test_sharding_collectives.py",
    ),
    Mutant(
        "ranks follow an agreement that they have left",
        "gemini/executor/communicator.py",
        "return None if agreed else tag",
        "return None",
        "tests/dist/test_rank_failures.py::"
        "test_ranks_that_take_different_ways_all_name_both_and_use_nothing[3-ways0]",
    ),
    Mutant(
        "an agreement overlooks the moment",
        "gemini/executor/agreement.py",
        "expected[position] == collective",
        "expected[position].chunk == collective.chunk",
        "tests/pure/test_agreement.py",
    ),
    Mutant(
        "an idle parameter moves",
        "gemini/optimizer/chunk_state.py",
        "active = [i for i in positions if has_gradient[i] and self.groups[i] is not None]",
        "active = [i for i in positions if self.groups[i] is not None]",
        f"{ONE_RANK}[sometimes_unused]",
    ),
    Mutant(
        "the clip factor is dropped",
        "gemini/optimizer/sharded_optimizer.py",
        "factors = factors._replace(clip=clip_coefficient(norm, max_norm))",
        "pass",
        PAIRS,
    ),
    Mutant(
        "the norm counts one rank only",
        "gemini/optimizer/summary.py",
        '    executor.communicator.all_reduce_sum_(both, "gradient summary")\n',
        "",
        f"{TWO_RANKS}[gpt2]",
    ),
    Mutant(
        "masters come from rounded weights",
        "gemini/model/move_in.py",
        "    given = torch.float32 if chunk.dtype in HALF_DTYPES else chunk.dtype\n",
        "    given = chunk.dtype\n",
        PAIRS,
    ),
    Mutant(
        "weights stay each rank's own",
        "gemini/model/move_in.py",
        '        communicator.broadcast_(payload, f"weights of chunk {chunk.index}")',
        "        pass",
        "tests/dist/test_rank_failures.py",
    ),
    Mutant(
        "what was fetched ahead survives a step",
        "gemini/executor/executor.py",
        "        self.moments.set(0, Phase.STEP)\n        self.fetcher.settle()\n",
        "        self.moments.set(0, Phase.STEP)\n",
        "tests/dist/test_slots.py::test_what_was_fetched_ahead_in_vain_changes_nothing",
    ),
    Mutant(
        "a rank without a gradient leaves its place in the order",
        "gemini/executor/gradients.py",
        "            for index in self.reduction.order[self._next_in_order :]:",
        "            for index in ():",
        PAIRS,
    ),
    Mutant(
        "a change in GatheredParameters stays on its rank",
        "gemini/model/link.py",
        '            self.communicator.broadcast_(flat, f"changes to {managed.name}", src=rank)',
        "            pass",
        "tests/dist/test_access.py",
    ),
    Mutant(
        "a change without a modifier is not undone",
        "gemini/model/gathered.py",
        "                        link.undo(before)",
        "                        pass",
        "tests/test_access.py",
    ),
    Mutant(
        "a master that was set does not reach its parameter",
        "gemini/optimizer/full_access.py",
        "        view.close(complete=True)",
        "        pass",
        "tests/test_access.py",
    ),
    Mutant(
        "a good step gives the chances back",
        "gemini/optimizer/loss_scale.py",
        "        self.num_skipped = 0\n        self.num_good += 1",
        "        self.num_skipped = self.num_bad = 0\n        self.num_good += 1",
        "tests/pure/test_loss_scale.py",
    ),
    Mutant(
        "gradients keep the loss scale",
        "gemini/optimizer/sharded_optimizer.py",
        "factors = GradientFactors(1.0 / self.loss_scale)",
        "factors = GradientFactors()",
        "tests/test_fp16.py",
    ),
    Mutant(
        "a leaf is left to the nodes of each rank",
        "gemini/executor/executor.py",
        "            if chunk in self._whole:",
        "            if False:",
        "tests/dist/test_leaves.py",
    ),
    Mutant(
        "a rank that uses nothing of a leaf goes around it",
        "gemini/model/leaf.py",
        "isinstance(t, Tensor) and t.requires_grad]",
        "False]",
        "tests/dist/test_leaves.py",
    ),
    Mutant(
        "a kept slot is updated under a view",
        "gemini/executor/fetcher.py",
        "                self._keep_another(chunk)",
        "                pass",
        "tests/dist/test_slots.py::test_a_view_that_outlives_a_step_keeps_the_old_weights",
    ),
    Mutant(
        "stage 2 does not gather what others updated",
        "gemini/optimizer/chunk_update.py",
        "            executor.fetcher.spread(chunk)",
        "            pass",
        PAIRS,
    ),
    Mutant(
        "edits stay in the payload",
        "gemini/executor/binding.py",
        "                    self.write_parameter(chunk.parameters[position], chunk.payload)",
        "                    pass",
        "tests/test_executor.py::test_edits_outside_a_step_reach_shard_and_master",
    ),
    Mutant(
        "gradients are never freed after backward",
        "gemini/executor/gradient_store.py",
        "            gradient.slot.chunk = None\n        if gradient.spilled",
        "            pass\n        if gradient.spilled",
        f"{MEMORY}::test_at_most_two_gradients_are_open_in_a_sequential_model",
    ),
    Mutant(
        "the budget is not enforced",
        "gemini/placement/policy.py",
        "    if budget_bytes is not None and needed > budget_bytes:",
        "    if False:",
        "tests/test_parity_one_rank.py::test_one_byte_less_than_the_smallest_budget_is_refused",
    ),
    Mutant(
        "what was frozen remembers its moments",
        "gemini/model/freezing.py",
        "                    self.owner.forget(each)",
        "                    pass",
        "tests/test_parts.py",
    ),
    Mutant(
        "what was frozen remembers its master",
        "gemini/model/freezing.py",
        "                    master_from_weights(each.chunk, each)",
        "                    pass",
        "tests/test_parts.py",
    ),
    Mutant(
        "frozen chunks keep their moments",
        "gemini/executor/rehoming.py",
        "                    owner.drop(chunk)",
        "                    pass",
        "tests/test_parts.py",
    ),
    Mutant(
        "weights stay behind when their home moves",
        "gemini/executor/rehoming.py",
        "        copy(chunk.homes[Kind.PARAM].flat, content, fetcher.tier(target), fetcher.tier(before.tier), "
        "fetcher.traffic)\n        chunk.settle",
        "        chunk.settle",
        "tests/test_parts.py",
    ),
    Mutant(
        "what was unfrozen without a group is passed over",
        "gemini/optimizer/untrained.py",
        "if states.group(each) is None]",
        "if False]",
        "tests/test_parts.py",
    ),
    Mutant(
        "ranks do not ask each other about what is unfrozen",
        "gemini/model/freezing.py",
        '            executor.communicator.agree(data, "change of what is trained", words, _ALIKE)',
        "            pass",
        "tests/dist/test_parts.py::test_ranks_that_do_not_do_alike_are_told",
    ),
    Mutant(
        "a build's edits stay each rank's own",
        "gemini/model/build_store.py",
        '            self._take_values(flat, f"values of {its.name}")\n',
        "",
        BUILDING,
    ),
    Mutant(
        "a build shows values that were not gathered",
        "gemini/model/build_store.py",
        "            if not (overwrites or positions <= chunk.valid):\n",
        "            if False:\n",
        BUILDING,
    ),
    Mutant(
        "shards of a built model outlive the move",
        "gemini/model/build_store.py",
        "            chunk.parameters.append(weakref.ref(its))\n",
        "            chunk.parameters.append(lambda its=its: its)\n",
        "tests/test_zero_init.py::test_building_holds_no_more_than_the_model_an_operator_and_a_chunk",
    ),
    Mutant(
        "operators are sharded at the end only",
        "gemini/model/zero_init.py",
        "        if module is not self._module:\n",
        "        if self._module is None:\n",
        "tests/dist/test_building.py::test_no_rank_holds_more_than_its_shards_an_operator_and_a_chunk[2-deep]",
    ),
    Mutant(
        "a late write to a view of a build is lost",
        "gemini/model/build_store.py",
        "        newer = set() if chunk.payload is chunk.home else chunk.newer()  # views of a home are never lost\n",
        "        newer: set[int] = set()\n",
        "tests/dist/test_building.py::test_a_write_through_a_view_that_comes_too_late_is_an_error",
    ),
    Mutant(
        "weights are not made anew where a gradient was",
        "gemini/executor/shared_homes.py",
        "                round_master_(part, master.flat)\n",
        "                pass\n",
        f"{HALF}::test_detours_between_backward_and_step",
    ),
    Mutant(
        "a gradient stays behind in a home that is taken back",
        "gemini/executor/shared_homes.py",
        "            copy(gradient.shard, shared, store.tier(gradient.resting.tier), tier, store.traffic)\n",
        "",
        f"{HALF}::test_detours_between_backward_and_step",
    ),
    Mutant(
        "a home is lent under a view",
        "gemini/executor/shared_homes.py",
        "        if not self._fetcher.settles(self._resident[chunk.index]):",
        "        if False:",
        f"{HALF}::test_detours_between_backward_and_step",
    ),
    Mutant(
        "a fetch reads a lent home",
        "gemini/executor/fetcher.py",
        "        if chunk.lent and chunk.state is ChunkState.RELEASED:",
        "        if False:",
        f"{HALF}::test_detours_between_backward_and_step",
    ),
    Mutant(
        "a kept slot is not left for its gradient",
        "gemini/executor/shared_homes.py",
        "            self._fetcher.release(chunk, wipes=True)",
        "            pass",
        f"{HALF_RANKS}::test_bytes_of_every_rank",
    ),
    Mutant(
        "gradients travel as they are",
        "gemini/executor/exchange.py",
        "        if chunk.travel_dtype is not chunk.dtype:",
        "        if False:",
        f"{HALF_RANKS}::test_ranks_equal_plain[2]",
    ),
    Mutant(
        "a module of another dtype returns it",
        "gemini/model/casting.py",
        "        return output if outside is None else _cast(output, outside, self._dtype)",
        "        return output",
        f"{HALF}::test_norms_and_attention_in_fp32_equal_a_model_that_casts",
    ),
    Mutant(
        "experts' gradients are expected as they came last time",
        "gemini/executor/gradients.py",
        "if self.communicator.world_size == 1 or not gradient.chunk.is_chosen:",
        "if True:",
        "tests/dist/test_parity.py::test_experts_that_only_some_ranks_use_are_added_up_in_rank_order",
    ),
    Mutant(
        "an edited weight keeps the remainder of its master",
        "gemini/executor/masters.py",
        "        master.masked_fill_(edited.to(master.device), 0)",
        "        pass",
        "tests/test_bad_input.py",
    ),
    Mutant(
        "an edit takes the whole parameter's remainders",
        "gemini/executor/snapshots.py",
        "        if not self.is_announced(managed):",
        "        if True:",
        "tests/test_bad_input.py",
    ),
    Mutant(
        "a view that was taken is not expected to be written to",
        "gemini/model/released.py",
        "link.before_write_through(views) if not was_written else False",
        "False",
        "tests/test_bad_input.py",
    ),
    Mutant(
        "weights from before edits outlive the step",
        "gemini/executor/executor.py",
        "        self.binding.snapshots.forget_all(self.chunks)\n",
        "",
        HALF,
    ),
    Mutant(
        "data assigned inside GatheredParameters is lost",
        "gemini/model/gathered.py",
        "                link.settle_data()",
        "                pass",
        HALF,
    ),
    Mutant(
        "loaded masters lose their remainders",
        "gemini/executor/masters.py",
        "        master[shard_start : shard_start + numel].copy_(remainder)",
        "        master[shard_start : shard_start + numel].zero_()",
        HALF,
    ),
    Mutant(
        "what a step passed over keeps the gradient in its half-precision copy",
        "gemini/optimizer/shard_view.py",
        "        if self._flat is not None or not complete:",
        "        if self._flat is not None:",
        HALF,
    ),
    Mutant(
        "autograd is not told what a kernel wrote",
        "optim/dispatch.py",
        "        cpu_adam.update(on_cpu, scalars)\n        _note_writes(on_cpu)",
        "        cpu_adam.update(on_cpu, scalars)",
        "tests/pure/test_optim_adam.py",
    ),
]
