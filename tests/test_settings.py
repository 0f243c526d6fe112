"""One value for all options: what a user gives as arguments, and what a front end gives as `Settings`."""

import dataclasses
import pickle
import typing
from typing import Any

import pytest
import torch

from gemini import Settings, ShardedModel, estimate_memory
from gemini.settings import Options
from tests.zoo.mlp import CHUNK_NUMEL, build

GIVEN: dict[str, Any] = {
    "shard_strategy": "tensor",
    "stage": 2,
    "tensor_placement_policy": "cpu",
    "dtype": {torch.nn.Linear: torch.bfloat16, "*": None},
    "chunk_size": CHUNK_NUMEL,
    "device": "emulated",
    "model_data_memory": "1MiB",
    "host_memory": "1GiB",
    "rank_timeout": 60,
}


def test_options_and_settings_make_the_same_model() -> None:
    by_options = ShardedModel(build(), **GIVEN)
    by_settings = ShardedModel(build(), settings=Settings(**GIVEN))
    assert by_options.settings == by_settings.settings == Settings(**GIVEN)
    assert by_options.plan == by_settings.plan
    assert by_settings.settings.model_data_memory == 2**20, "sizes are numbers from then on"


def test_an_option_goes_before_the_same_field_of_the_settings() -> None:
    base = Settings(**GIVEN)
    model = ShardedModel(build(), "bucket", settings=base, stage=3)
    assert model.settings == dataclasses.replace(base, stage=3, shard_strategy="bucket")
    estimate = estimate_memory(build(), settings=base, chunk_size=2 * CHUNK_NUMEL)
    assert estimate == estimate_memory(build(), **GIVEN | {"chunk_size": 2 * CHUNK_NUMEL})


def test_settings_are_a_value() -> None:
    mapping = {"*": torch.bfloat16}
    settings = Settings(dtype=mapping, host_memory="1GB")
    mapping["*"] = torch.float16
    assert settings.dtype == {"*": torch.bfloat16}, "the user's mapping may change afterwards"
    assert pickle.loads(pickle.dumps(settings)) == settings != Settings(dtype=mapping, host_memory="1GB")
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.stage = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        Settings("tensor")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"stage": 4}, ValueError, "stage must be 0, 1, 2 or 3, found 4"),
        ({"shard_strategy": "rows"}, ValueError, "shard_strategy='rows'"),
        ({"tensor_placement_policy": "gpu"}, ValueError, "tensor_placement_policy='gpu'"),
        ({"reduce_dtype": torch.int8}, ValueError, "reduce_dtype must be None or one of"),
        ({"dtype": {3: None}}, TypeError, "dtype={...} has module classes and names of modules as keys, found 3"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1 element, found 0"),
        ({"device": 1.5}, TypeError, "device must be"),
        ({"model_data_memory": 2000, "device_memory": "1KB"}, ValueError, "model_data_memory=2000 is more than"),
        ({"host_memory": "2 gigs"}, ValueError, "host_memory='2 gigs' is not a size"),
        ({"rank_timeout": 0}, ValueError, "rank_timeout must be a number of seconds above 0"),
        ({"max_prefetch": -1}, ValueError, "max_prefetch must be a number of payloads, of at least 0, found -1"),
        ({"max_prefetch": True}, TypeError, "max_prefetch must be a number of payloads, of at least 0, found True"),
        ({"max_prefetch": 1.5}, TypeError, "max_prefetch must be a number of payloads, of at least 0, found 1.5"),
        ({"ignore_unused_parameters": 1}, TypeError, "ignore_unused_parameters must be True or False, found 1"),
        ({"reuse_fp16_shard": True, "accumulate_dtype": torch.float32}, ValueError, "leave one of the two out"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named_whoever_is_told(options: dict[str, Any], kind: type, message: str) -> None:
    for told in (Settings, lambda **options: estimate_memory(build(), **options)):
        with pytest.raises(kind) as error:
            told(**options)
        assert message in str(error.value)


def test_an_unknown_option_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(TypeError, match=r"estimate_memory\(\) has no argument 'chunksize'; .* is 'chunk_size'"):
        estimate_memory(build(), chunksize=512)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"ShardedModel\(\) has no argument 'proces_group'; .* is 'process_group'"):
        ShardedModel(build(), proces_group=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="settings must be a Settings or None, found dict"):
        ShardedModel(build(), settings=GIVEN)  # type: ignore[arg-type]


def test_type_checkers_know_every_option() -> None:
    fields = typing.get_type_hints(Settings)
    options = {"shard_strategy": fields["shard_strategy"], **typing.get_type_hints(Options)}
    assert options.keys() == fields.keys()
    # A dtype may be a name in an argument, and is none in a field.
    wider = {name for name, kind in fields.items() if options[name] != kind}
    assert wider == {"dtype", "reduce_dtype", "accumulate_dtype"}
    assert all(str in typing.get_args(options[name]) for name in wider)
