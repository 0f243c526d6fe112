"""`gemini plan` says nothing that a training contradicts: its plan can be wrapped, and its advice can be taken."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import transformers
from torch import nn

from gemini import EmulatedDevice, HybridAdam, Settings, ShardedModel, ShardedOptimizer
from gemini.cli import question
from gemini.errors import BudgetError
from gemini.placement.demand import Tier, parse_bytes
from tests.features.test_first_batch import Composite
from tests.features.test_plan_command import SIZE, SMALL, asked, refused, run
from tests.zoo.mlp import Mlp

BLOCKS = "tests.features.test_plan_advice:blocks"
DEEP = "tests.features.test_plan_advice:deep"


def blocks() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))


def deep() -> nn.Module:
    """Activations take next to nothing beside its model data."""
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(40)))


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))


class TwoTexts(nn.Linear):
    """With the config of such a model, as Musicgen."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.config = Composite()


def llama() -> nn.Module:
    """Most of its bytes are an embedding."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 8000}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64)
    return transformers.LlamaForCausalLM(config)


def trained(module: nn.Module, **options: Any) -> ShardedModel:
    """Wrapped, with an optimizer that has made its state."""
    model = ShardedModel(module, device=EmulatedDevice(options["device_memory"]), **options)
    ShardedOptimizer(model, HybridAdam(model.parameters()))
    return model


@pytest.mark.parametrize("device_memory", ["16KB", "20KB", "60KB"])
def test_a_model_can_be_wrapped_with_the_plan_that_is_shown(device_memory: str) -> None:
    options = (SMALL, "--ranks", "1", "--device-memory", device_memory, "--host-memory", "1MB", "--batch", "4")
    found = asked(*options)
    setting = found["wrap_with"]
    # The machine that is asked for has accelerators, for which a plan counts other costs.
    with mock.patch.object(Settings, "has_streams", True):
        model = trained(Mlp(), **setting)
    assert not model.plan.infers
    assert sum(found["device"].values()) == model.plan.device_bytes
    assert sum(found["host"].values()) == model.plan.host_bytes
    assert found["chunk_bytes"] == model.plan.packing.chunk_bytes
    shown = " ".join(run(*options)[1].split())
    said = re.search(r'device_memory="(\w+)", model_data_memory="?(\d[\d.]*KB|\d+)', shown)
    assert said is not None and said[1] == device_memory
    assert parse_bytes(said[2] if "KB" in said[2] else int(said[2]), "") == setting["model_data_memory"]


def test_what_all_memory_together_is_too_small_for_is_searched_for_without_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search for a plan within host memory would try every chunk size in vain, for seconds with a large model."""
    bounds, plans = [], question.plan_training

    def noting(packed: Any, settings: Settings, *rest: Any) -> Any:
        bounds.append(settings.host_memory)
        return plans(packed, settings, *rest)

    monkeypatch.setattr(question, "plan_training", noting)
    options = (DEEP, "--device-memory", "300KB", "--host-memory")
    needed = refused(*options, "1MB")[0]["refused"]["needed_bytes"]
    assert bounds[0] is None
    bounds.clear()
    assert asked(*options, f"{needed}B")["fits"] and bounds[0] == needed


def test_a_training_that_the_device_memory_alone_would_have_refused_is_said() -> None:
    options = (DEEP, "--ranks", "1", "--policy", "cuda", "--host-memory", "1MB", "--device-memory")
    knobs = " ".join(refused(*options, "10KB")[0]["would_change"])
    enough = parse_bytes(SIZE.search(knobs)[1], "")  # type: ignore[index]
    found = asked(*options, f"{enough}B")
    (note,) = [note for note in found["notes"] if "refuses to train" in note]
    alone = {"device_memory": enough, "host_memory": "1MB", "tensor_placement_policy": "cuda"}
    with pytest.raises(BudgetError) as error:
        trained(deep(), **alone)
    assert f"needs {error.value.needed_bytes} bytes of model data" in note
    trained(deep(), **found["wrap_with"], tensor_placement_policy="cuda")
    assert not any("refuses to train" in note for note in asked(*options, f"{2 * enough}B")["notes"])


def test_a_tier_without_memory_is_not_the_machines() -> None:
    assert asked(SMALL, "--machine", "dgx-h100", "--host-memory", "0B")["cluster"]["host_memory"] == 0
    found, _ = refused(SMALL, "--machine", "dgx-h100", "--device-memory", "0B")
    assert found["cluster"]["device_memory"] == 0 and found["refused"]["tier"] == "device"


def test_a_host_without_a_bound_is_said() -> None:
    options = (SMALL, "--ranks", "1", "--device-memory", "60KB")
    assert any("--host-memory" in note for note in asked(*options)["notes"])
    assert not any("--host-memory" in note for note in asked(*options, "--host-memory", "1MB")["notes"])


def test_memory_of_both_tiers_is_advised_where_both_are_short() -> None:
    options = (BLOCKS, "--ranks", "1", "--host-memory", "100KB", "--device-memory")
    knobs = " ".join(refused(*options, "50KB")[0]["would_change"])
    both = re.search(r"--device-memory ([\d.]+KB) --host-memory ([\d.]+KB)", knobs)
    assert both is not None, knobs
    refused(*options, both[1])
    assert asked(*options, both[1], "--host-memory", both[2])["fits"]


def test_a_larger_batch_that_is_said_to_have_a_plan_has_one_on_a_host_that_is_short() -> None:
    options = (BLOCKS, "--ranks", "1", "--host-memory", "100KB", "--device-memory", "700KB")
    found = asked(*options)
    largest = [re.search(r"--batch (\d+): has a plan", each) for each in found["would_change"]]
    (sequences,) = [int(each[1]) for each in largest if each]
    assert sequences > 1
    assert asked(*options, "--batch", str(sequences))["fits"]


def test_where_the_policy_is_what_does_not_fit_another_one_and_more_ranks_are_advised() -> None:
    options = (BLOCKS, "--device-memory", "400KB", "--host-memory", "1MB")
    found, _ = refused(*options, "--ranks", "1", "--policy", "cuda")
    knobs = found["would_change"]
    assert knobs[0].startswith("--policy auto: ")
    assert asked(*options, "--ranks", "1", "--policy", "auto")["fits"]
    (ranks,) = [each[1] for knob in knobs if (each := re.search(r"--ranks (\d+)", knob))]
    assert asked(*options, "--ranks", ranks, "--policy", "cuda")["fits"]
    assert not any("--policy" in knob for knob in refused(*options[:1], "--device-memory", "9KB")[0]["would_change"])


def test_activations_that_no_formula_covers_are_not_known() -> None:
    options = ("tests.features.test_plan_advice:Convolutions", "--ranks", "1", "--device-memory", "100KB")
    found = asked(*options)
    assert found["activations_at_most"] == {"whole": None, "checkpointed": None}
    assert found["model_data_budget"] == 70_000, "as ShardedModel leaves before the first step"
    assert found["device_peak"] is None
    shown = run(*options)[1]
    assert "Activations: not known." in shown and "besides activations" in shown
    refusal, _ = refused(*options[:-1], "10KB")
    enough = SIZE.search(" ".join(refusal["would_change"]))[1]  # type: ignore[index]
    assert asked(*options[:-1], enough)["fits"]


def test_a_model_with_two_texts_is_planned_without_a_sequence_length() -> None:
    assert asked("tests.features.test_plan_advice:TwoTexts", "--rates", "none")["fits"]


def test_the_bound_of_activations_has_the_gradient_that_autograd_holds() -> None:
    found = asked("tests.features.test_plan_advice:llama", "--sequence-length", "8", "--rates", "none")
    device = EmulatedDevice()
    model = ShardedModel(llama(), device=device)
    ShardedOptimizer(model, HybridAdam(model.parameters()))
    ids = torch.arange(8).view(1, 8)
    with device.holding_activations():
        model(input_ids=ids, labels=ids).loss.backward()
    measured = model.chunk_manager.trace.peak[1]
    assert measured > 8000 * 32 * 4, "a gradient of the embedding"
    assert measured <= found["activations_at_most"]["whole"]


# -- A disk: the plan with one, and the advice to take one.


@pytest.mark.parametrize(("host_memory", "is_enough"), [("300KB", True), ("110KB", False)])
def test_small_moments_are_advised_where_the_host_is_short_and_what_is_advised_is_enough(
    host_memory: str, is_enough: bool
) -> None:
    """Before more host memory, where they are enough; beside less of it than exact moments take, where not."""
    options = (BLOCKS, "--ranks", "1", "--device-memory", "260KB", "--host-memory")
    advised = refused(*options, host_memory)[0]["would_change"]
    (exact,) = (each for each in advised if each.startswith("--host-memory"))
    (small,) = (each for each in advised if each.startswith("--optimizer 8bit"))
    assert (advised.index(small) < advised.index(exact)) == is_enough
    room, most = (re.search(r"--host-memory ([\d.]+KB)", each) for each in (small, exact))
    assert most is not None and (room is None) == is_enough
    host = host_memory if room is None else room[1]
    found = asked(*options, host, "--optimizer", "8bit")
    assert sum(found["host"].values()) <= (parse_bytes(host, "") or 0) < (parse_bytes(most[1], "") or 0)
    # Who keeps no moments, or has chosen small ones, is told of none.
    assert not any("8bit" in each for each in refused(*options, "20KB", "--optimizer", "sgd")[0]["would_change"])


def test_a_disk_is_advised_where_the_host_is_short_and_what_is_advised_is_enough(tmp_path: Path) -> None:
    options = (BLOCKS, "--ranks", "1", "--device-memory", "260KB", "--host-memory", "300KB")
    said = run(*options)[1]
    advised = re.search(r"--disk-memory ([\d.]+[KM]B)\n .* rest on a local disk of each rank", said)
    assert advised is not None, said
    found = asked(*options, "--disk-memory", advised[1])
    on_disk = sum(found["disk"].values())
    assert on_disk <= parse_bytes(advised[1], "") <= 1.001 * on_disk and sum(found["host"].values()) <= 300_000
    assert found["moves"]["from_disk_bytes"] == found["moves"]["to_disk_bytes"] == on_disk
    assert found["wrap_with"].pop("disk_path") == "FOLDER"
    with mock.patch.object(Settings, "has_streams", True):
        model = trained(blocks(), **found["wrap_with"], disk_path=tmp_path)
    for tier in Tier:
        assert found[tier.value] == model.plan.placement.bytes_by_kind(model.plan.demand, tier)
    # A disk that is too small is refused as such.
    code, shown = run(*options, "--disk-memory", "1KB")
    assert code == 1 and "on the disk of each rank are what is in the way" in shown


def test_a_folder_here_is_measured_and_its_free_bytes_are_the_bound(tmp_path: Path) -> None:
    options = BLOCKS, "--ranks", "1", "--device-memory", "260KB", "--host-memory", "300KB", "--rates", "measured"
    found = asked(*options, "--disk-path", str(tmp_path), "--policy", "disk")
    free = psutil.disk_usage(str(tmp_path)).free
    assert abs(found["cluster"]["disk_memory"] - free) < free / 2
    rates, seconds = found["cluster"]["rates"], found["modelled"]["seconds_by_part"]
    for part, way, moved in (("disk to host", "read", "from_disk_bytes"), ("host to disk", "write", "to_disk_bytes")):
        assert seconds[part] == found["moves"][moved] / rates[f"disk_{way}_bytes_per_s"] > 0
    assert not list(tmp_path.iterdir())
    code, shown = run(*options, "--disk-path", str(tmp_path / "nowhere"))
    assert code == 2 and "takes no file" in shown


def test_the_table_has_a_column_for_a_disk_and_says_what_is_not_known() -> None:
    options = BLOCKS, "--ranks", "1", "--device-memory", "260KB", "--host-memory", "300KB", "--rates", "dgx-h100"
    code, shown = run(*options, "--disk-memory", "1GB")
    assert code == 0 and re.search(r"device +host +disk", shown)
    assert re.search(r"moments +[\d.]+ +[\d.]+ +[\d.]+", shown)
    assert "because these rates do not have theirs: disk to host, host to disk" in shown
    assert not re.search(r"device +host +disk", run(BLOCKS, "--ranks", "1", "--device-memory", "1MB")[1])


def test_gradients_that_the_backward_uses_up_take_nothing() -> None:
    options = BLOCKS, "--ranks", "1", "--dtype", "bf16", "--device-memory", "10MB"
    without, found = asked(*options), asked(*options, "--update-in-backward")
    assert without["device"]["grad"] and not found["device"]["grad"] + found["host"]["grad"]
    assert found["wrap_with"]["update_in_backward"] is True
