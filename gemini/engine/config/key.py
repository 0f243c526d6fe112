"""What a key of a config becomes: a setting of ours, nothing, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
)
from torch import nn

from gemini.engine.config.read import KeyPath, Problem, nearest, problems_of, unknown_key
from gemini.placement.policies import FRACTIONS
from gemini.settings import COUNTS, QUANTIZED, Settings
from gemini.settings import dtype_named as dtype_of_name

# -- The arguments of `ShardedModel` as fields of a config: names for dtypes and classes, and the checks of `Settings`.


def dtype_named(value: Any) -> Any:
    """A dtype by its name; what is not a string is left alone. Raises ValueError for an unknown name."""
    if not isinstance(value, str):
        return value
    found = dtype_of_name(value)
    if found is None:
        raise ValueError(f"{value!r} is no dtype; write one of fp32, fp16, bf16, fp64")
    return found


def module_named(key: Any) -> Any:
    """A key of `dtype={...}`: a class of torch.nn by its full name, else a name of modules.

    Raises ValueError for a name that torch.nn does not have.
    """
    if not isinstance(key, str) or not key.startswith("torch.nn."):
        return key
    name = key.removeprefix("torch.nn.")
    if not isinstance(getattr(nn, name, None), type):
        raise ValueError(f"{key} is no class; the nearest is torch.nn.{nearest(name, dir(nn))}")
    return getattr(nn, name)


_WHOLE = ("chunk_size", *COUNTS, *QUANTIZED)


def setting(value: Any, info: ValidationInfo) -> Any:
    """The value of one field, as `Settings` takes it. Raises ValueError with the words of `Settings`."""
    name = info.field_name or ""
    if name == "dtype" and isinstance(value, Mapping):
        value = {module_named(key): dtype_named(dtype) for key, dtype in value.items()}
    elif name.endswith("dtype"):
        value = dtype_named(value)
    elif name in _WHOLE and isinstance(value, float) and value.is_integer():
        # Every format reads 1e6 as a float.
        value = int(value)
    # Each field is checked by itself here, and a fraction alone would contradict the default policy "auto", or a disk's
    # size lack the disk. `Config` checks all fields together afterwards.
    others: dict[str, Any] = {"tensor_placement_policy": "static"} if name in FRACTIONS else {}
    try:
        return getattr(Settings(**{"disk_path": ".", **others, name: value}), name)
    # pydantic collects a validator's ValueError with those of other fields. A TypeError would end its checks.
    except TypeError as error:
        raise ValueError(str(error)) from error


# -- Keys of another library's config, and how they become fields of ours.
#
# A table of `Key` says of each key what it takes and what becomes of it here: it is a field (`MappedTo`), it has no
# effect and something else happens instead (`NoEffect`), or gemini has nothing that would do as it says and refuses it
# (`Refused`). The same table is read by `translate` and printed in docs/config.md.


def _whole(value: Any) -> Any:
    """Turn a number such as 5e8, which every format reads as a float, into the whole number that is meant."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
Whole = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Section = dict[str, Any]


def same(value: Any) -> Any:
    return value


def none_if_zero(number: float) -> float | None:
    """0 is another library's word for "none", of a norm or of steps."""
    return number or None


@dataclass(frozen=True)
class MappedTo:
    """The key is a field of `Config`.

    Args:
        to: the field's dotted path; "*" stands for the last part of the key.
        by: from the key's value to the field's. None: the field keeps its default.
        note: what is different here, for the documentation.
        refused: values for which there is nothing here, and why.
    """

    to: str
    by: Callable[[Any], Any] = same
    note: str = ""
    refused: Mapping[Any, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NoEffect:
    """The key changes nothing. `instead` says what happens here."""

    instead: str


# What several libraries have keys for.
CHUNKS = NoEffect("collectives carry one chunk; its size is searched under the budgets, or fixed by `chunk_size`")
PINNED = NoEffect("host memory is page-locked wherever there is a CUDA device")
OTHER_PARALLELISM = "parameters are divided over data-parallel ranks only"


@dataclass(frozen=True)
class Refused:
    """The key asks for what gemini does not do. `unless` are the values that do not ask for it."""

    because: str
    unless: tuple[Any, ...] | Callable[[Any], bool] = (False,)

    def is_harmless(self, value: Any) -> bool:
        return value in self.unless if isinstance(self.unless, tuple) else self.unless(value)


Effect = MappedTo | NoEffect | Refused


@dataclass(frozen=True)
class Key:
    """One row of a table.

    Args:
        path: the key as a dotted path. "*" as its last part: all keys there that have no row of their own.
        values: what it takes, as an annotation that pydantic checks.
        effect: what becomes of it.
        spellings: other names of the last part of the path.
        auto: what happens where the value is "auto" and nobody has given one. "": it is an error.
    """

    path: str
    values: Any
    effect: Effect
    spellings: tuple[str, ...] = ()
    auto: str = ""

    @property
    def paths(self) -> Iterator[str]:
        parent, dot, last = self.path.rpartition(".")
        yield from (f"{parent}{dot}{name}" for name in (last, *self.spellings))


@dataclass
class Translation:
    """What a table made of a config."""

    fields: dict[str, Any] = field(default_factory=dict)  # nested, as `Config` takes them
    origins: dict[KeyPath, KeyPath] = field(default_factory=dict)  # from a field to the key that it came from
    ignored: list[tuple[str, str]] = field(default_factory=list)  # key, what happens instead
    problems: list[Problem] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)  # the values of valid keys, by dotted path

    def put(self, target: KeyPath, value: Any, origin: KeyPath) -> None:
        """Give a field of `Config` its value; a mapping is merged with what is there."""
        self.origins[target] = origin
        place = self.fields
        for part in target[:-1]:
            place = place.setdefault(part, {})
        # Several keys may give parts of one section: a static `fp16.loss_scale` replaces three fields of `loss_scale`,
        # and `fp16.hysteresis` stays beside them.
        if isinstance(value, Mapping) and isinstance(place.get(target[-1]), dict):
            value = {**place[target[-1]], **value}
        place[target[-1]] = value


class Table:
    """The keys of one library.

    Args:
        keys: the rows. Where two keys are one field, the later row counts.
        section: the key that no other library has.
        finish: adds what follows from several keys together, and from those that are missing.
        placeholder: the value that stands for one which somebody else decides. None: no value does, and "auto" is a
            value like any other.
    """

    def __init__(
        self,
        keys: Sequence[Key],
        section: str,
        finish: Callable[[Mapping[str, Any], Translation], None],
        placeholder: str | None = None,
    ):
        self.keys = tuple(keys)
        self.section = section
        self.finish = finish
        self.placeholder = placeholder
        self.by_path = {path: key for key in keys for path in key.paths}
        # A section is what stands before a dot of a path.
        self.sections = sorted({path[:end] for path in self.by_path for end, char in enumerate(path) if char == "."})

    def key_of(self, path: KeyPath) -> Key | None:
        """The row of a key, or that of its section's "*"."""
        # A key of its own comes first: `optimizer.params.max_grad_norm` is refused, though `optimizer.params.*` takes
        # all names.
        return self.by_path.get(".".join(path)) or self.by_path.get(".".join((*path[:-1], "*")))

    def leaves(self, data: Mapping[Any, Any], above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
        """The keys of a config, with sections opened as far as the table knows them."""
        for name, value in data.items():
            path = (*above, str(name))
            # A section that is no mapping is a leaf: `zero_optimization: true` is a key of its own, and
            # `offload_param: "cpu"` an error.
            if ".".join(path) in self.sections and isinstance(value, Mapping):
                yield from self.leaves(value, path)
            else:
                yield path, value

    def translate(self, data: Mapping[str, Any], auto: Mapping[str, Any]) -> Translation:
        """`data` as fields of `Config`. `auto`: values for keys that say "auto", by dotted path."""
        # The keys are sorted by row first. A row then sees all spellings of its key, and rows are applied in the
        # table's order: where two keys are one field, the order of the file must not decide.
        result, given = Translation(), dict[str, list[tuple[KeyPath, Any]]]()
        for path, value in self.leaves(data):
            key = self.key_of(path)
            if self._is_undecided(value) and ".".join(path) in auto:
                value = auto[".".join(path)]
            if value is None:  # null, or nothing where the value would have been decided
                continue
            if key is None and ".".join(path) in self.sections:
                result.problems.append(Problem(path, f"must be a mapping of keys to values, found {value!r}"))
            elif key is None:
                result.problems.append(unknown_key(path, [*self.by_path, *self.sections]))
            else:
                given.setdefault(key.path, []).append((path, value))
        for key in self.keys:
            found = given.get(key.path, [])
            for path, value in found:
                # Where any string is a value, the word for "undecided" is one, too: a folder may be called "auto".
                if self._is_undecided(value) and key.values is not str:
                    _leave_undecided(key, path, result)
                else:
                    _apply(key, path, value, result)
            # Below "*" each name is another key.
            if len(found) > 1 and not key.path.endswith("*"):
                spelled = " and ".join(path[-1] for path, _ in found)
                result.problems.append(Problem(found[1][0], f": {spelled} are one key; leave one out"))
        # A refused value is in no field: `finish` would take it for one that was left out, and refuse what follows.
        if not result.problems:
            self.finish(data, result)
        # The rows came in the table's order. A reader compares the keys with the file.
        places = {".".join(path): place for place, (path, _) in enumerate(self.leaves(data))}
        result.ignored.sort(key=lambda noted: places[noted[0]])
        return result

    def _is_undecided(self, value: Any) -> bool:
        return isinstance(value, str) and value == self.placeholder


def _leave_undecided(key: Key, path: KeyPath, result: Translation) -> None:
    if key.auto:
        result.ignored.append((".".join(path), f'"auto": {key.auto}'))
    else:
        result.problems.append(Problem(path, 'is "auto", which nothing decides here: write the value'))


def _apply(key: Key, path: KeyPath, value: Any, result: Translation) -> None:
    name = ".".join(path)
    try:
        # Without `strict` pydantic would convert: "yes" to True, "2" to 2.
        value = TypeAdapter(key.values, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError as error:
        # pydantic may report several errors of one value. One sentence for each key is enough.
        result.problems.extend(problems_of(error, (), path)[:1])
        return
    effect = key.effect
    # `finish` asks for values that are in no field, such as `bf16.enabled: false` or the ratio of an offload.
    result.given[name] = value
    if isinstance(effect, NoEffect):
        result.ignored.append((name, effect.instead))
    elif isinstance(effect, Refused):
        if not effect.is_harmless(value):
            result.problems.append(Problem(path, f"={value!r} is refused: {effect.because}"))
    # Other values, such as lists, may have no hash and cannot be looked up.
    elif isinstance(value, (str, int)) and value in effect.refused:
        result.problems.append(Problem(path, f"={value!r} is refused: {effect.refused[value]}"))
    else:
        try:
            mapped = effect.by(value)
        except ValueError as error:  # in a section, whose values have no types of their own
            result.problems.append(Problem(path, f": {error}"))
            return
        target = tuple(path[-1] if part == "*" else part for part in effect.to.split("."))
        if mapped is not None:
            result.put(target, mapped, path)
