"""`gemini.initialize`: an Engine out of a config, and the table that it prints."""

from __future__ import annotations

import inspect
import io
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from gemini.engine.config import Config, load_config
from gemini.engine.config.config import SETTINGS
from gemini.engine.config.load import Dialect
from gemini.engine.config.load import Source as Source
from gemini.engine.config.muon import check_modules
from gemini.engine.engine import Engine
from gemini.engine.schedules import make_schedule, moves_by_metric
from gemini.errors import ConfigError, DivergenceError, UnsupportedError
from gemini.launch import launched_config
from gemini.log import get_dist_logger, warn_at_script
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.sharded_optimizer import ShardedOptimizer
from gemini.placement.demand import Kind, Tier, format_bytes
from gemini.ranks.mesh import ranks_in
from gemini.settings import Settings, check_module
from optim.adam import ON_DISK
from sharding import Collectives

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# -- Loaders for an engine: of one rank's part of a dataset, and of whole windows only.


def loader_of(
    dataset: Dataset[Any],
    config: Config,
    rank: int,
    world_size: int,
    collate_fn: Callable[..., Any] | None = None,
    *,
    batch_size: int | None = None,
    sampler: Sampler[Any] | None = None,
    **options: Any,
) -> DataLoader[Any]:
    """A loader of micro-batches from this rank's part of a dataset. `sampler.set_epoch` shuffles it again. Local.

    Args:
        dataset, rank, world_size, collate_fn: as their names say.
        config: for the size of a micro-batch, and whether one that is not full is left out.
        batch_size: in place of the config's.
        sampler: which samples this rank gets. None: its part of a shuffled dataset.
        options: of the DataLoader.

    Raises ConfigError if the config has no batch size.
    """
    size = config.batch_sizes(world_size).micro if batch_size is None else batch_size
    if size is None:
        raise ConfigError("a loader needs a batch size: give train_batch_size or train_micro_batch_size_per_gpu")
    # An iterable dataset cannot be indexed by a sampler, so it has to divide itself over the ranks.
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, size, collate_fn=collate_fn, drop_last=config.drop_last, **options)
    # Without `drop_last` the sampler gives some samples twice, so that all ranks have equally many: a rank that has no
    # batch left would not come to the others' collectives.
    if sampler is None:
        sampler = DistributedSampler(dataset, world_size, rank, drop_last=config.drop_last)
    return DataLoader(dataset, size, sampler=sampler, collate_fn=collate_fn, drop_last=config.drop_last, **options)


class WholeWindows:
    """A loader without the micro-batches at its end that do not fill a window, as in Colossal-AI.

    Other attributes are those of the wrapped loader.
    """

    def __init__(self, loader: Any, window: int) -> None:
        self._loader = loader
        self._window = window

    def __len__(self) -> int:
        num_batches = len(self._loader)
        return num_batches - num_batches % self._window

    def __iter__(self) -> Iterator[Any]:
        num_batches = len(self._loader)
        if 0 < num_batches < self._window:
            # A loop by hand would end without a word, and nothing would have been trained.
            warn_at_script(
                f"the loader has {num_batches} micro-batches, fewer than the {self._window} of a step, and yields "
                "none: make gradient_accumulation_steps= smaller or give it more data",
            )
        # The iterator ends at the last whole window, so no batch behind it is drawn.
        return islice(iter(self._loader), len(self))

    def __getattr__(self, name: str) -> Any:
        # `copy` and pickle look attributes up before `_loader` is set. Forwarding them would recurse for ever.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)


def whole_windows(loader: Any, window: int) -> Any:
    """The loader in whole windows. The loader itself if a window is one batch, or if it has no length."""
    # Without a length nobody knows which window is the last one until the data end.
    return WholeWindows(loader, window) if window > 1 and length_of(loader) is not None else loader


def tell_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of everything that may order a loader's data: itself, its samplers, its dataset. Local.

    A sampler of samples may also be inside the sampler of batches that a DataLoader was given, and an iterable dataset
    shuffles by itself. What is not told repeats the order of its first epoch.
    """
    batches = getattr(loader, "batch_sampler", None)
    found = [loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]
    # By identity: a DataLoader shows the sampler that it was given at two places.
    for each in {id(each): each for each in [*found, getattr(loader, "dataset", None)]}.values():
        set_epoch = getattr(each, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)


def length_of(loader: Any) -> int | None:
    """The number of batches. None: it is not known, as with a DataLoader over an iterable dataset without a length."""
    try:
        return len(loader)
    except TypeError:
        return None


# -- Assembles an `Engine` from the user's objects and a config. Both front ends share it.


OptimizerLike = Optimizer | Sequence[Optimizer] | Callable[..., Optimizer | Sequence[Optimizer]] | None
_GIVEN = "initialize() was given another one, which is used"
SchedulerLike = Any  # a schedule, or a callable that makes one from an optimizer


def assemble(
    engine_class: type[Engine],
    config: Config,
    model: nn.Module,
    optimizer: OptimizerLike,
    parameters: Iterable[Any] | None = None,
    criterion: Callable[..., Any] | None = None,
    lr_scheduler: SchedulerLike = None,
    process_group: dist.ProcessGroup | None = None,
    moves_given: bool = True,
    device_mesh: DeviceMesh | None = None,
) -> Engine:
    """Make the engine. Arguments that cannot be combined are refused before the model is wrapped. Collective.

    moves_given: whether the engine moves a schedule that is given as an object, rather than the script.
    Raises TypeError for an argument of another kind, ConfigError and UnsupportedError for what cannot be combined, and
    what `ShardedModel` and `ShardedOptimizer` raise.
    """
    # Wrapping changes the user's module for good: what can be refused is refused before it.
    check_module("model", model)
    _check_kinds(optimizer, criterion, lr_scheduler)
    # The engine moves what the config names and what a callable makes, in both call forms: the script has no object
    # whose `step` it could call.
    moves = moves_given or not _is_schedule(lr_scheduler)
    # A callable has not made its schedule yet. What it makes is looked at in `scheduler_of`.
    if moves:
        _refuse_plateau(lr_scheduler)
    _warn_of_untrained(criterion, model)
    parameters = None if parameters is None else _checked_parameters(parameters)
    # Objects that were given replace those that the config names. An optimizer class takes the config's `params`.
    if optimizer is not None and not inspect.isclass(optimizer):
        config = config.without("optimizer", _GIVEN)
    if lr_scheduler is not None:
        config = config.without("scheduler", _GIVEN)
    # This is an error rather than one more key without effect: the user wants a training, and would get an evaluation.
    if optimizer is None and config.optimizer is None and (lr_scheduler is not None or config.scheduler is not None):
        raise ConfigError(
            "a scheduler needs an optimizer: give initialize(optimizer=...), or 'optimizer' in the config"
        )
    if isinstance(model, ShardedModel):
        # A model is wrapped once. The config's other fields, such as clipping, still count.
        config = _as_wrapped(config, model)
    else:
        sizes = config.batch_sizes(_num_ranks(process_group, device_mesh))
        # The plan needs the number of micro-batches, also if the config only gives batch sizes.
        settings = replace(config.settings(), gradient_accumulation_steps=sizes.accumulation)
        settings = replace(settings, **_disk_of(optimizer, config))
        model = ShardedModel(model, process_group=process_group, device_mesh=device_mesh, settings=settings)
    # The optimizer comes after the model, since a callable gets the wrapped model's parameters. One that was made
    # before has the same parameter objects.
    plain = optimizer_of(model, optimizer, config, parameters)
    if plain is None:
        return engine_class(model, None, criterion, None, config=config)
    sharded = (
        plain if isinstance(plain, ShardedOptimizer) else ShardedOptimizer(model, plain, **config.optimizer_options())
    )
    schedule = scheduler_of(lr_scheduler, config, sharded, plain)
    return engine_class(model, sharded, criterion, schedule, config=config, moves_schedule=moves)


def _disk_of(optimizer: OptimizerLike, config: Config) -> dict[str, Any]:
    """What a `HybridAdam` that asks for a disk in Colossal-AI's way says of it, as settings of the model."""
    named = {} if config.optimizer is None else config.optimizer.params
    fraction, folder = (getattr(optimizer, name, named.get(name)) for name in ON_DISK)
    return {"disk_path": folder, "disk_optim_frac": fraction} if fraction else {}


def _num_ranks(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> int:
    # There is no communicator yet that could be asked.
    if device_mesh is not None:
        return ranks_in(None, device_mesh).world_size
    if process_group is not None:
        return process_group.size()
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _check_kinds(optimizer: Any, criterion: Any, lr_scheduler: Any) -> None:
    """Raises TypeError for objects of a wrong kind, which would fail later, in the middle of a training."""
    if isinstance(optimizer, str):
        raise TypeError(
            f"optimizer={optimizer!r} is a name, which belongs into the config: "
            f"{{'optimizer': {{'type': {optimizer!r}, 'params': {{...}}}}}}"
        )
    if not (optimizer is None or _are_optimizers(optimizer) or callable(optimizer)):
        raise TypeError(
            "optimizer must be an optimizer, a list of those of the model's parts, or a callable that makes one, found "
            f"{optimizer!r}"
        )
    if not (criterion is None or callable(criterion)):
        raise TypeError(f"criterion must be a function of outputs and labels, found {criterion!r}")
    # A schedule need not be a class of torch's: any object with a `step` may be one.
    if not (lr_scheduler is None or callable(lr_scheduler) or hasattr(lr_scheduler, "step")):
        raise TypeError(f"lr_scheduler must be a schedule, or a callable that makes one, found {lr_scheduler!r}")


def _warn_of_untrained(criterion: Any, model: nn.Module) -> None:
    """Warn of a criterion's own parameters, which are in no chunk and in no optimizer of the engine's."""
    if not isinstance(criterion, nn.Module):
        return
    known = {*model.parameters()}
    names = [name for name, each in criterion.named_parameters() if each.requires_grad and each not in known]
    if names:
        warn_at_script(
            f"criterion has parameters of its own, {', '.join(names)}, which the engine does not train: put it into "
            "the model, whose forward then returns the loss, or freeze them with requires_grad_(False)"
        )


def _is_schedule(given: Any) -> bool:
    """Whether `given` is a schedule, rather than None or a callable that makes one."""
    # A class has a `step`, too, and is called with the optimizer to make a schedule.
    return given is not None and not inspect.isclass(given) and hasattr(given, "step")


def _refuse_plateau(schedule: Any) -> None:
    """Raises UnsupportedError for a schedule whose `step` takes a metric, which the engine does not have."""
    if moves_by_metric(schedule):
        raise UnsupportedError(
            "lr_scheduler=ReduceLROnPlateau moves by a metric, which the engine does not know: make it after "
            "initialize(), as ReduceLROnPlateau(engine.optimizer), and call its step(metric) yourself"
        )


def _checked_parameters(parameters: Iterable[Any]) -> list[Any]:
    """The parameters as a list. Raises TypeError for a tensor, which would be iterated, and ValueError for none."""
    if isinstance(parameters, Tensor):
        raise TypeError(
            "model_parameters must be a list of parameters or param groups, found a tensor: put it in a list"
        )
    # An iterator such as `model.parameters()` can be read once, and its elements are needed after the model is wrapped.
    found = list(parameters)
    if not found:
        raise ValueError(
            "model_parameters is empty: an iterator gives its parameters once. Leave it out to train all of the model"
        )
    return found


def _as_wrapped(config: Config, model: ShardedModel) -> Config:
    """The config, with notes on its fields that have no effect because the model is wrapped with other values."""
    wanted, plain = config.settings(), Settings()
    ignored = [
        (name, f"the model was wrapped before, with {getattr(model.settings, name)!r}")
        for name in SETTINGS
        # The engine counts micro-batches by the config in any case. The model only plans memory by this field.
        if name != "gradient_accumulation_steps"
        # A value that is the default need not have been given, so it contradicts nothing.
        and getattr(wanted, name) not in (getattr(plain, name), getattr(model.settings, name))
    ]
    return config.with_notes([*config.ignored, *ignored], config.constants)


def optimizer_of(
    model: ShardedModel, given: OptimizerLike, config: Config, parameters: Iterable[Any] | None = None
) -> Optimizer | Sequence[Optimizer] | None:
    """The optimizer, or several, that was given, or made by what was given or by the config. Local.

    Raises TypeError if a callable that was given makes something else.
    """
    if given is not None and not callable(given):
        return given
    chosen_parameters = list(model.parameters() if parameters is None else parameters)
    if given is None:
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        if config.optimizer is None:
            return None
        named = config.optimizer.make(chosen_parameters, names)
        if config.optimizer.is_muon:
            check_modules(named if isinstance(named, list) else [named], model)
        return named
    # A lambda or a partial has its own arguments, and would raise on those of the config.
    arguments = config.optimizer.params if config.optimizer is not None and inspect.isclass(given) else {}
    made = given(chosen_parameters, **arguments)
    if not _are_optimizers(made):
        raise TypeError(f"optimizer={given!r} must make a torch optimizer of parameters, it made {type(made).__name__}")
    return made


def _are_optimizers(given: Any) -> bool:
    """Whether `given` is an optimizer, or a list of several."""
    several = given if isinstance(given, (list, tuple)) and given else [given]
    return all(isinstance(each, Optimizer) for each in several)


def scheduler_of(
    given: SchedulerLike, config: Config, optimizer: ShardedOptimizer, plain: Optimizer | Sequence[Optimizer]
) -> Any:
    """The schedule, which acts on the sharded optimizer's param groups. Local.

    Those are the plain optimizer's own, so a schedule that was made of that goes on. Raises UnsupportedError for a
    schedule of another optimizer.
    """
    if given is None:
        return None if config.scheduler is None else make_schedule(config.scheduler, optimizer)
    if isinstance(given, LRScheduler):
        # Its rates would go into param groups that no step reads, and the rate would silently stay.
        ours = [optimizer, *(plain if isinstance(plain, Sequence) else [plain])]
        if not any(given.optimizer is each for each in ours):
            raise UnsupportedError("lr_scheduler belongs to another optimizer than the one that was given")
        # torch's schedule watches the `step` of the optimizer that it was made of, and the engine may call another one.
        # Without this flag it would warn, at its first move, that it moves before the optimizer.
        given.optimizer._opt_called = True  # type: ignore[attr-defined]
        return given
    if not _is_schedule(given):
        given = given(optimizer)
        _refuse_plateau(given)
    return given


# -- The table of an engine's decisions, shown at its start: settings, bytes on each tier, and keys without effect.


_FILE_WIDTH = 120  # columns, if the output is not a terminal
_KINDS = {
    Kind.PARAM: "weights",
    Kind.GRAD: "gradients",
    Kind.MASTER: "fp32 masters",
    Kind.OPTIM: "optimizer state",
    "slots": "slots for weights",
    "gradient slots": "slots for gradients",
    "scratch": "buffers",
}
_OF_TRAINING = Kind.GRAD, Kind.OPTIM, "gradient slots", "scratch"


def say(engine: Engine) -> None:
    """Log the table on rank 0 at level INFO, with colours if stderr is a terminal. Local."""
    _log("the engine decided", lambda width, shows: in_words(engine, width, shows))


def say_model(model: ShardedModel, lines: Iterable[str] = ()) -> None:
    """Log what is decided of a model that another library trains, as `say` does. Local.

    lines: what to say behind the table.
    """
    table = _table([*_of_model(model), *_of_chunks(model)], _bytes(model, trains=True), "why: model.plan.explain()")
    _log("gemini decided", lambda width, shows: "\n".join([_printed(table, width, shows), *lines]))


def _log(title: str, text: Callable[[int, bool], str]) -> None:
    # The logger writes to stderr, wherever stdout goes.
    shows = sys.stderr.isatty()
    width = shutil.get_terminal_size().columns if shows else _FILE_WIDTH
    get_dist_logger().info(f"{title}\n{text(width, shows)}", ranks=[0])


def in_words(engine: Engine, width: int, is_terminal: bool = False) -> str:
    """The table as text, `width` columns wide: decisions, the bytes of a rank, then keys without effect. Local."""
    # A plan counts what training with Adam takes until an optimizer comes, and an engine without one trains nothing.
    amounts = _bytes(engine.model, trains=engine.optimizer is not None)
    table = _table(_decisions(engine), amounts, "why: engine.model.plan.explain()", engine.config.ignored)
    return _printed(table, width, is_terminal)


def _printed(table: Table, width: int, is_terminal: bool) -> str:
    # The console writes into a string, which rich colours only if it is forced to.
    console = Console(file=io.StringIO(), width=width, force_terminal=is_terminal)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    # rich fills each line up to the width. A log file needs no blanks at the ends of its lines.
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def _table(
    decisions: Iterable[tuple[str, str]], amounts: Table, caption: str, ignored: Iterable[tuple[str, str]] = ()
) -> Table:
    table = Table(box=box.HORIZONTALS, show_header=False, caption=caption)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, words in decisions:
        table.add_row(name, Text(words))
    table.add_section()
    table.add_row("on each rank", amounts)
    if ignored:
        table.add_section()
        # rich reads a str as markup: what stands in brackets would be taken for a style, and not be shown.
        table.add_row("without effect", Text("\n".join(f"{key}: {instead}" for key, instead in ignored)))
    return table


def _of_model(model: ShardedModel) -> Iterator[tuple[str, str]]:
    # Chunks are asked, not the config: without `dtype` weights keep the module's own dtypes.
    dtypes = dict.fromkeys(str(chunk.dtype).removeprefix("torch.") for chunk in model.chunk_manager.chunks)
    yield "stage", f"{model.settings.stage}, {model.world_size} rank{'s' * (model.world_size > 1)}"
    yield "weights", ", ".join(dtypes)


def _of_chunks(model: ShardedModel) -> Iterator[tuple[str, str]]:
    plan = model.plan
    yield "placement", plan.policy
    how = "as given" if plan.packing.searched is None else "searched"
    yield "chunks", f"{len(plan.packing.chunks)} of up to {format_bytes(plan.packing.chunk_bytes)}, {how}"


def _decisions(engine: Engine) -> Iterator[tuple[str, str]]:
    config, sizes = engine.config, engine.batch_sizes
    yield from _of_model(engine.model)
    yield "optimizer", _optimizer(engine)
    yield "schedule", _schedule(engine)
    yield "gradient clipping", "none" if config.clip_grad_norm is None else f"to a norm of {config.clip_grad_norm:g}"
    yield "loss scale", _loss_scale(engine)
    micro = "batches as the loader has them" if sizes.micro is None else f"{sizes.micro} samples a forward"
    window = f"{sizes.accumulation} forward{'s' * (sizes.accumulation > 1)} a step"
    yield "batch", f"{micro}, {window}" + (f", {sizes.train} samples a step over all ranks" if sizes.train else "")
    yield from _of_chunks(engine.model)


def _optimizer(engine: Engine) -> str:
    if engine.optimizer is None:
        return "none: this engine evaluates"
    # A schedule keeps the optimizer's own rate in `initial_lr`; `lr` has its first rate already, which is 0 in a
    # warmup.
    rates = dict.fromkeys(f"{group.get('initial_lr', group['lr']):g}" for group in engine.optimizer.param_groups)
    name = "as given" if engine.config.optimizer is None else engine.config.optimizer.type
    return f"{name}, learning rate {', '.join(rates)}"


def _loss_scale(engine: Engine) -> str:
    configured = engine.config.loss_scale
    if engine.loss_scale == 1.0:
        return "none"
    return f"{engine.loss_scale:g}, static" if configured.is_static else f"dynamic, {engine.loss_scale:g} at first"


def _schedule(engine: Engine) -> str:
    named = engine.config.scheduler
    if engine.lr_scheduler is None:
        return "none: the learning rate stays"
    if not engine.moves_schedule:
        return "as given: lr_scheduler.step() moves it"
    return type(engine.lr_scheduler).__name__ if named is None else named.type


def _bytes(model: ShardedModel, trains: bool) -> Table:
    """The bytes of one rank. Rows: states, slots and buffers. Columns: tiers."""
    plan = model.plan
    tiers = [tier for tier in Tier if tier is not Tier.DISK or plan.placement.disk_bytes(plan.demand)]
    found = {tier: plan.placement.bytes_by_kind(plan.demand, tier) for tier in tiers}
    if not trains:
        for of_tier in found.values():
            of_tier |= dict.fromkeys(_OF_TRAINING, 0)
    table = Table.grid(padding=(0, 2))
    table.add_column()
    for _ in tiers:
        table.add_column(justify="right")
    table.add_row("", *(str(tier) for tier in tiers))
    for kind, words in _KINDS.items():
        # A kind without bytes gets no row: weights of fp32 have no masters, and one rank may need no slots.
        numbers = [of_tier.get(kind, 0) for of_tier in found.values()]
        if any(numbers):
            table.add_row(words, *(format_bytes(number) if number else "" for number in numbers))
    table.add_row("in all", *(format_bytes(sum(of_tier.values())) for of_tier in found.values()))
    budgets = (plan.budget.device, plan.budget.host, plan.budget.disk)[: len(tiers)]
    table.add_row("budget", *("none" if budget is None else format_bytes(budget) for budget in budgets))
    return table


# -- Agreement on the config: equal on all ranks, or an error on all of them, before anything is allocated.


_GOOD, _BAD = b"\0", b"\1"


def agreed_config(
    source: Source,
    group: dist.ProcessGroup | None,
    *,
    dialect: Dialect | None = None,
    prefers: Dialect = "gemini",
    auto: Mapping[str, Any] | None = None,
) -> Config:
    """The config that `load_config` makes of these arguments, if all ranks of the group have the same one. Collective.

    Raises ConfigError on every rank if one of them cannot read its config, and DivergenceError if they differ.
    """
    return agreed(lambda size: load_config(source, dialect=dialect, prefers=prefers, auto=auto, world_size=size), group)


def agreed(make: Callable[[int], Config], group: dist.ProcessGroup | None) -> Config:
    """The config that `make` makes from the number of ranks, if all ranks have the same one. Collective.

    Raises the errors of `agreed_config`, and what `make` raises; the other ranks then raise ConfigError.
    """
    # A model's communicator comes later: its settings, such as `rank_timeout`, are in the config that is read here.
    collectives = Collectives(group)
    config, error = None, None
    try:
        # `canonical` is inside because it takes the `repr` of objects of the user's, which may raise.
        config = make(collectives.world_size)
        # Ranks of several nodes may have folders of other names, each node its own scratch.
        place = None if config.disk_path is None else "a folder"
        words = _GOOD + config.model_copy(update={"disk_path": place}).canonical().encode()
    except Exception as found:
        # Any exception must reach the other ranks, which would wait for this one otherwise.
        error = found
        said = str(found) if isinstance(found, ConfigError) else f"{type(found).__name__}: {found}"
        # A file's name in a message may have lone surrogates, which UTF-8 cannot encode.
        words = _BAD + said.encode(errors="backslashreplace")
    # Every rank comes here, with its config or with the reason why it has none.
    everyone = collectives.all_gather_bytes(words)
    if error is not None:
        raise error
    # Ranks go through the same list in the same order, so all that have a config of their own raise the same error.
    for rank, its in enumerate(everyone):
        if its.startswith(_BAD):
            raise ConfigError(f"rank {rank}: {its[1:].decode()}")
        if its != everyone[0]:
            raise DivergenceError(
                f"the config differs between rank 0 and rank {rank}: {_difference(everyone[0], its)}. Give all one"
            )
    assert config is not None
    return config


def _difference(one: bytes, other: bytes) -> str:
    """The first field that differs, with both values."""
    one_config, other_config = (json.loads(words[1:]) for words in (one, other))
    name = next(name for name in one_config if one_config[name] != other_config.get(name))
    # The model's settings are one list of `name=value`; of those only the two that differ are shown.
    if not isinstance(one_config[name], list):
        return f"{name} is {one_config[name]!r} against {other_config.get(name)!r}"
    pair = next((a, b) for a, b in zip(one_config[name], other_config[name], strict=True) if a != b)
    return " against ".join(pair)


# -- `initialize`: makes an `Engine` from a model, an optimizer and a config, in Colossal-AI's call form.


def initialize(
    model: nn.Module,
    optimizer: OptimizerLike = None,
    criterion: Callable[..., Any] | None = None,
    train_dataloader: Any = None,
    test_dataloader: Any = None,
    lr_scheduler: SchedulerLike = None,
    *,
    config: Source = None,
    process_group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    verbose: bool = True,
) -> tuple[Engine, Any, Any, Any]:
    """An `Engine` that trains the model sharded, as the config says. Collective: every rank calls it alike.

    The call form of `colossalai.initialize`. For DeepSpeed's see `gemini.deepspeed.engine`.

    Args:
        model: any module, also one from a `ZeroInitContext`, or a `ShardedModel`, which stays as it is.
        optimizer: an optimizer of the model's parameters, a list of several of its parts, or a class or callable that
            makes one or several from them. None: the optimizer of the config.
        criterion: a function of outputs and labels.
        train_dataloader: returned without the batches at its end that do not fill a window of accumulation.
        test_dataloader: returned as it is.
        lr_scheduler: a schedule of that optimizer, which the script (or a `Trainer`) moves after a step or an epoch, as
            in Colossal-AI. Or a callable that makes one, which the engine moves after every optimizer step, as it moves
            one that the config names.
        config: a mapping, the path of a JSON, YAML, TOML or Python file, or a `Config`. None: the config that was given
            to `launch_from_torch(config=...)`, else all defaults.
        process_group: the ranks. None: all that were started, which join here if they have not met (`ShardedModel`).
        device_mesh: instead, the ranks as a torch `DeviceMesh`, of which two dimensions are (replicate, shard), or have
            names that say what they divide, as of `ShardedModel`.
        verbose: whether rank 0 logs what was decided.

    Returns the engine, the two loaders and the schedule, whose `step()` waits for a full window of accumulation and
    ignores skipped steps. Raises ConfigError for an invalid config, DivergenceError if the ranks' configs differ, and
    what `ShardedModel` and `ShardedOptimizer` raise.

    Example:
        >>> config = {"stage": 2, "optimizer": {"type": "HybridAdam", "params": {"lr": 1e-3}}}
        >>> engine, *_ = initialize(torch.nn.Linear(8, 1), config=config, verbose=False)
    """
    # The config is compared over the ranks that `ShardedModel` finds for `process_group=None`.
    group = ranks_in(process_group, device_mesh).group
    # Ranks compare configs before anything else: one that cannot read its file would leave the others in the wrapping.
    agreed = agreed_config(launched_config() if config is None else config, group)
    given = optimizer, None, criterion, lr_scheduler, process_group
    engine = assemble(Engine, agreed, model, *given, moves_given=False, device_mesh=device_mesh)
    if verbose:
        say(engine)
    window = engine.batch_sizes.accumulation
    # As in Colossal-AI. Otherwise a window that is open at the end of an epoch would go on with batches of the next
    # one.
    train = None if train_dataloader is None else whole_windows(train_dataloader, window)
    return engine, train, test_dataloader, engine.lr_scheduler
