"""What `gemini plan` finds out of a model on a cluster: numbers, before they are shown."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from torch import nn

from gemini.cli.cluster import Cluster
from gemini.cli.knobs import larger_batch, that_would_be_enough
from gemini.cli.question import Batch, Question
from gemini.errors import BudgetError
from gemini.memory.collector import uncollected
from gemini.model.estimate import num_parameters_of, packed_of
from gemini.model.first_batch import gradient_bytes
from gemini.model.workload import blocks_of, workload_of
from gemini.placement.budget import ACTIVATION_FRACTION
from gemini.placement.cost import ModelledStep, modelled_step
from gemini.placement.demand import OPTIM_STATES
from gemini.placement.dtypes import Dtype
from gemini.placement.explain import budgets_in_words
from gemini.placement.moves import Moves, moves_of
from gemini.placement.plan import Plan
from gemini.placement.policies import FRACTIONS
from gemini.placement.predict import Predicted, expected_schedule, predict
from gemini.settings import Settings, dtype_of


@dataclass(frozen=True)
class Answer:
    """Bytes and seconds of each rank, or why there are none.

    Args:
        cluster: where.
        batch: of each rank.
        num_parameters: of the whole model; tied ones count once.
        dtype: of most of the weights, and so of products.
        activations: bytes at most of all that a step takes besides model data, without checkpointing and with it. None:
            not known.
        plan: None: it does not fit.
        refusal: why, if there is no plan.
        predicted: of a step, with the batch's checkpointing. None: no plan.
        setting: the `model_data_memory` with which `ShardedModel` makes this plan, beside `device_memory`. None: no
            plan, or no bound on the device.
        knobs: what would make it fit, or what more and less memory would change, in words.
        moves: of a step.
        step: modelled. None: no plan, or no rates.
        notes: what is not known, in words.
    """

    cluster: Cluster
    batch: Batch
    num_parameters: int
    dtype: Dtype
    activations: tuple[int | None, ...]  # two
    plan: Plan | None
    refusal: BudgetError | None
    predicted: Predicted | None
    setting: int | None
    knobs: tuple[str, ...]
    moves: Moves | None
    step: ModelledStep | None
    notes: tuple[str, ...]

    @property
    def activations_at_hand(self) -> int | None:
        """Bytes of activations with the batch's own choice of checkpointing. None: they are not known."""
        return self.activations[self.batch.is_checkpointed]


def answer(
    module: nn.Module, settings: Settings, cluster: Cluster, batch: Batch, optim_states: int = OPTIM_STATES
) -> Answer:
    """Plan for `module` and model its step. Local; nothing is allocated.

    optim_states: states per element that the optimizer keeps.
    Raises ValueError for settings that the module contradicts.
    """
    dtype = _dtype_of(module, settings)
    work = workload_of(module, dtype.itemsize, batch.experts_per_token)
    # None: weights keep their own dtypes, which may differ within a model, and so do their gradients.
    itemsize = None if settings.dtype is None else dtype.itemsize
    # Packings of large models are many objects that all stay alive: the cycle collector would visit them repeatedly.
    with uncollected():
        packed = packed_of(module, settings, cluster.ranks.count)
        gradients = gradient_bytes(module, itemsize)
        question = Question(module, settings, cluster, batch, dtype, work, gradients, packed, optim_states)
        return _Answering(question).answer()


class _Answering:
    def __init__(self, question: Question) -> None:
        self._question = question
        self._notes = list(question.workload.notes)

    def answer(self) -> Answer:
        """The plan with what it costs, or why there is none; and what would change it."""
        question, refusal, predicted, moves, step, setting = self._question, None, None, None, None, None
        plan: Plan | None = None
        try:
            plan = question.plan()
        except BudgetError as error:
            refusal = error
            knobs = [*that_would_be_enough(question, error)]
        else:
            knobs = [*budgets_in_words(plan.demand, plan.placement, plan.budget, plan.settings.policy)]
            knobs += larger_batch(question, plan)
            # Checkpointed blocks are computed again in the backward, and fetched for it.
            names = [*blocks_of(question.module)] if question.batch.is_checkpointed else []
            predicted = predict(plan, schedule=expected_schedule(plan, names))
            moves = moves_of(plan, predicted)
            step = self._step(moves)
            setting = self._setting(plan)
            self._notes.append(
                "Bytes that move are predicted for operators that run in the order in which the model has them."
            )
        if question.cluster.host_bytes is None:
            self._notes.append("No --host-memory was given: the host is taken to have room for all that rests there.")
        if question.activations is None:
            self._notes.append(
                "Activations are not known: their formulas do not cover this model. As ShardedModel does before the "
                f"first step, {ACTIVATION_FRACTION:.0%} of the device are left to them."
            )
        # Both figures of activations are shown, so that the reader sees what checkpointing saves before it is chosen.
        return Answer(
            cluster=question.cluster,
            batch=question.batch,
            num_parameters=num_parameters_of(question.module),
            dtype=question.dtype,
            activations=tuple(
                replace(question, batch=replace(question.batch, is_checkpointed=each)).activations
                for each in (False, True)
            ),
            plan=plan,
            refusal=refusal,
            predicted=predicted,
            setting=setting,
            knobs=tuple(knobs),
            moves=moves,
            step=step,
            notes=tuple(self._notes),
        )

    def _setting(self, plan: Plan) -> int | None:
        """The `model_data_memory` with which `ShardedModel` makes `plan`; what it does without it is a note."""
        device = self._question.cluster.device_bytes
        # Without a bound on the device, as on an emulated one, there is no budget to name.
        if device is None or plan.budget_bytes is None:
            return None
        # `ShardedModel` plans before it sees a batch, so it does not know these activations. It makes the same plan at
        # once if it is given the bytes that they leave to model data.
        given = "".join(f", {name}={value}" for name, value in chosen_of(plan.settings).items())
        self._notes.append(
            f"ShardedModel makes this plan with device_memory={device}, model_data_memory={plan.budget_bytes}{given}."
        )
        refused = self._question.refusal_at_first()
        if refused is not None:
            self._notes.append(
                f"With device_memory={device} alone ShardedModel leaves {ACTIVATION_FRACTION:.0%} to activations until "
                f"a step has run, and refuses to train: {refused}."
            )
        return plan.budget_bytes

    def _step(self, moves: Moves) -> ModelledStep | None:
        question, notes = self._question, self._notes
        rates, batch, work = question.cluster.rates, question.batch, question.workload
        if rates is None:
            notes.append("No step time is modelled: nobody gave rates of this machine (--rates).")
            return None
        # FLOPs of one rank in a whole step. Activation checkpointing runs only the blocks' forwards again.
        forward = batch.micro_batches * work.forward_flops(batch.tokens, batch.length)
        again = batch.micro_batches * work.computed_again_flops(batch.tokens, batch.length)
        try:
            step = modelled_step(
                moves,
                forward,
                again if batch.is_checkpointed else 0.0,
                question.dtype.name,
                rates,
                question.cluster.ranks,
            )
        except ValueError as error:
            # The rates have none for the dtype of the products, such as float64: the plan is an answer all the same.
            notes.append(f"No step time is modelled: {error}.")
            return None
        if step.unknown:
            notes.append(
                f"Not in the modelled time, because no rate between ranks is known: {', '.join(step.unknown)}."
            )
        # Published rates, and rates that were measured without a process group, have no time of a launch.
        if rates.collective_s == 0 and question.cluster.ranks.count > 1:
            notes.append("Launches of collectives are not in the modelled time: these rates have none.")
        return step


def chosen_of(settings: Settings) -> dict[str, float]:
    """What has a say in the plan besides memory, and is not the default."""
    values = {name: getattr(settings, name) for name in (*FRACTIONS, "gradient_accumulation_steps", "chunk_size")}
    return {name: value for name, value in values.items() if value is not None}


def _dtype_of(module: nn.Module, settings: Settings) -> Dtype:
    """The dtype that most of the model's elements have once it is wrapped."""
    # A model may mix dtypes, such as norms in fp32 within bf16. Matrices have most of the elements, so the commonest
    # dtype is that of the products.
    counts: Counter[Dtype] = Counter()
    for parameter in module.parameters():
        counts[dtype_of(parameter.dtype)] += parameter.numel()
    own = counts.most_common(1)[0][0] if counts else Dtype("float32", 4)
    given = settings.dtype
    return own if given is None or isinstance(given, dict) else dtype_of(given)  # type: ignore[arg-type]
