"""What `gemini plan` says where a question is refused: what does not fit, by the names of its own options."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from gemini.cli import question
from gemini.placement import needs
from tests.features.test_plan_command import MODELS, SIZE, SMALL, asked, config, refused, run

__all__ = ["config"]  # a fixture
BLOCKS = "tests.features.test_plan_advice:blocks"
DEEP = "tests.features.test_plan_advice:deep"
FUSED = "tests.features.test_plan_refusals:Fused"
UNKNOWN = "tests.features.test_plan_advice:Convolutions"


class FusedExperts(nn.Module):
    """Eight experts in one parameter, as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(8, 64, 64))
        self.bias = nn.Parameter(torch.empty(64))


class Fused(nn.Sequential):
    def __init__(self) -> None:
        super().__init__()
        for number in range(2):
            self.add_module(f"gate{number}", nn.Linear(64, 8))
            self.add_module(f"experts{number}", FusedExperts())


@pytest.mark.parametrize("more", [(), ("--optim-states", "0"), ("--policy", "static")], ids=" ".join)
def test_a_refusal_names_options_and_no_share_that_does_not_apply(more: tuple[str, ...]) -> None:
    """Activations are known, so that nothing of the device is left to them by default."""
    found, said = refused(BLOCKS, "--ranks", "2", "--device-memory", "60KB", *more)
    message = found["refused"]["message"]
    assert "until a step has shown" not in message and "device_memory until" not in message
    assert f"--policy {'static' if 'static' in more else 'auto'} needs" in message
    assert "Allow more with --device-memory" in message and "device_memory" not in message
    assert not re.search(r"\w=", message), "a setting of Python's"
    assert found["in_the_way"] in said, "for people, in words of theirs"


def test_a_refusal_says_the_share_that_applies_where_activations_are_not_known() -> None:
    found, _ = refused(UNKNOWN, "--ranks", "1", "--device-memory", "10KB")
    message, enough = found["refused"]["message"], found["refused"]["enough_bytes"]
    assert "Model data gets 94% of --device-memory at most until" in message
    assert f"{enough} bytes of it are enough" in message
    assert asked(UNKNOWN, "--ranks", "1", "--device-memory", f"{enough}B")["fits"]


def test_a_training_that_shardedmodel_refuses_is_said_in_pythons_names() -> None:
    options = (DEEP, "--ranks", "1", "--policy", "cuda", "--device-memory")
    (enough,) = SIZE.findall(" ".join(refused(*options, "10KB")[0]["would_change"]))
    found = asked(*options, enough)
    (note,) = [note for note in found["notes"] if "refuses to train" in note]
    assert "94% of device_memory= at most until" in note and "--" not in note


@pytest.mark.parametrize(
    ("ranks", "nodes", "per_node"), [(1, 1, 1), (7, 1, 7), (9, 3, 3), (11, 11, 1), (12, 2, 6), (16, 2, 8)]
)
def test_a_cluster_of_any_size_is_answered_where_only_memory_is_described(
    ranks: int, nodes: int, per_node: int
) -> None:
    cluster = asked(SMALL, "--ranks", str(ranks), "--device-memory", "1MB")["cluster"]
    assert (cluster["ranks"], cluster["nodes"], cluster["ranks_per_node"]) == (ranks, nodes, per_node)


def test_ranks_that_do_not_fill_the_nodes_of_a_named_machine_are_told_the_way_out() -> None:
    options = (SMALL, "--machine", "dgx-h100", "--ranks", "9")
    code, shown = run(*options)
    assert code == 2
    assert "give a multiple of it, or another --ranks-per-node" in " ".join(re.sub(r"[│╭╮╰╯─]", " ", shown).split())
    assert asked(*options, "--ranks-per-node", "3")["cluster"]["nodes"] == 3


def test_more_ranks_that_are_advised_fill_the_nodes_of_a_named_machine() -> None:
    """Of 3 ranks twice as many share a node, and four times as many would leave places empty on the second."""
    options = (BLOCKS, "--machine", "dgx-h100", "--policy", "cuda", "--device-memory", "220KB", "--ranks")
    knobs = " ".join(refused(*options, "3")[0]["would_change"])
    found = re.search(r"--ranks (\d+)", knobs)
    assert found is not None and found[1] == "24", knobs
    refused(*options, "6")
    assert asked(*options, "24")["fits"]


def test_fewer_ranks_are_advised_where_the_optimizer_keeps_no_states() -> None:
    """Twice as many ranks would not be enough for Adam."""
    memory = ("--device-memory", "110KB", "--host-memory", "148KB", "--sequence-length", "1", "--rates", "none")
    options = (BLOCKS, *memory, "--optim-states", "0", "--ranks")
    knobs = " ".join(refused(*options, "1")[0]["would_change"])
    found = re.search(r"--ranks (\d+)", knobs)
    assert found is not None and found[1] == "2", knobs
    assert asked(*options, "2")["fits"]


@pytest.mark.parametrize(("model", "options", "num_packed"), [(BLOCKS, ("--policy", "cuda"), 2), (FUSED, (), 1)])
def test_all_tries_of_a_question_share_their_packings(
    monkeypatch: pytest.MonkeyPatch, model: str, options: tuple[str, ...], num_packed: int
) -> None:
    """Other ranks have others."""
    packings, plan_training, made, plans = needs.packings, question.plan_training, [], []
    monkeypatch.setattr(needs, "packings", lambda *given: made.append(given) or packings(*given))
    monkeypatch.setattr(question, "plan_training", lambda *given: plans.append(given) or plan_training(*given))
    refused(model, "--ranks", "2", "--device-memory", "270KB", "--host-memory", "1MB", *options)
    assert len(plans) > num_packed
    assert len(made) == num_packed


def test_what_can_be_said_of_a_name_is_said_before_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured() -> None:
        raise AssertionError("rates were measured")

    monkeypatch.setattr("gemini.cli.question.rates_of", measured)
    for name in ("nonsense", str(MODELS), str(MODELS / "missing.json")):
        code, shown = run(name)
        assert code == 2 and ("is no folder" in shown or "does not exist" in shown), shown


def test_the_operator_that_does_not_fit_is_named() -> None:
    found, _ = refused(FUSED, "--ranks", "2", "--device-memory", "270KB")
    (said,) = [knob for knob in found["would_change"] if "alone needs more than the budget" in knob]
    assert said.startswith("experts0 alone"), "the gates would fit"
    assert "gate_up_proj, has 131.1 KB" in said
    assert "slots and gradient slot each hold it whole" in said
    assert "experts in modules of their own" in said
    assert not any("--ranks" in knob for knob in found["would_change"]), "they share no slot"


def test_no_operator_is_blamed_where_others_do_not_fit_either(config: Path) -> None:
    for memory in ("1800KB", "2200KB"):
        found, _ = refused(str(config), "--ranks", "2", "--device-memory", memory, "--activation-checkpointing")
        assert not any("alone needs" in knob for knob in found["would_change"])


@pytest.mark.parametrize(("memory", "length"), [("1650KB", None), ("1800KB", 20)])
def test_less_than_a_quarter_of_a_sequence_is_not_advised(config: Path, memory: str, length: int | None) -> None:
    options = (str(config), "--ranks", "2", "--device-memory", memory, "--activation-checkpointing")
    knobs = " ".join(refused(*options)[0]["would_change"])
    found = re.search(r"--sequence-length (\d+): ", knobs)
    assert (None if found is None else int(found[1])) == length, knobs
    assert asked(*options, "--sequence-length", str(length or 14))["fits"], "of 64 tokens a quarter is 16"


def test_gradients_that_pass_through_the_host_are_counted() -> None:
    """Two weights of an operator that are each larger than a chunk: a rank has a gradient slot for one of them."""
    options = ("tests.features.test_host_room:four_experts", "--ranks", "2", "--rates", "none")
    least = refused(*options, "--device-memory", "10KB")[0]["would_change"]
    (device,) = SIZE.findall(" ".join(least))
    tight = ("--device-memory", device, "--host-memory")
    found = asked(*options, *tight, "1MB")
    at_rest, needed = sum(found["host"].values()), found["host_peak"]
    assert needed > at_rest
    assert asked(*options, *tight, f"{needed}B")["host_peak"] == needed
    code, shown = run(*options, *tight, f"{needed}B")
    assert code == 0 and "gradients passing through" in shown
    message = refused(*options, *tight, f"{needed - 1}B")[0]["refused"]["message"]
    assert f"needs {needed} bytes" in message and f"{needed - at_rest} of them for gradients that find no" in message
