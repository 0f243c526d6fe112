"""Axolotl, LLaMA-Factory and ms-swift train sharded: by stand-ins of the places at which they take a Trainer's class.

The stand-ins have the names, the signatures and the tables of those libraries, whose Trainers are transformers'.
"""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers

from gemini import UnsupportedError
from gemini.integrations import ms_swift
from gemini.integrations.llama_factory import main
from gemini.integrations.transformers import ShardedTraining
from tests.zoo.hf_trainers import SHARDED, Texts, arguments, gpt2, logged, trainer

CONFIG = {"device": "emulated", "model_data_memory": "300KiB", "chunk_size": 4096}
assert CONFIG == SHARDED, "the losses that are expected are those of the same chunks"


class AxolotlTrainer(transformers.Trainer):
    """Axolotl's has what it adds by name, and passes the rest on."""

    def __init__(self, *_args: Any, bench_data_collator: Any = None, **kwargs: Any) -> None:
        super().__init__(*_args, **kwargs)
        self.bench_data_collator = bench_data_collator


class AxolotlDPOTrainer(AxolotlTrainer):
    pass


class CustomSeq2SeqTrainer(transformers.Seq2SeqTrainer):
    """LLaMA-Factory's wants arguments of its own."""

    def __init__(self, finetuning_args: Any, processor: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.finetuning_args = finetuning_args


class SwiftTrainer(transformers.Seq2SeqTrainer):
    def __init__(self, model: Any = None, args: Any = None, data_collator: Any = None, **kwargs: Any) -> None:
        super().__init__(model, args, data_collator, **kwargs)


def module(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(content)
    return made


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class BasePlugin:
        pass

    class TrainerFactory:
        TRAINER_MAPPING = {"causal_lm": "swift.trainers.Seq2SeqTrainer", "ppo": "swift.trainers.PPOTrainer"}

    workflow = module("llamafactory.train.sft.workflow", CustomSeq2SeqTrainer=CustomSeq2SeqTrainer)

    def run_exp(args: dict[str, Any]) -> Any:
        assert "gemini" not in args, "LLaMA-Factory refuses keys that it does not know"
        training = transformers.Seq2SeqTrainingArguments(**arguments_of(args["output_dir"], "seq2seq"))
        more = {"finetuning_args": "its", "processor": None}
        return trained(workflow.CustomSeq2SeqTrainer(model=gpt2(), args=training, train_dataset=Texts(), **more))

    made = [
        module("axolotl"),
        module("axolotl.core"),
        module("axolotl.integrations"),
        module("axolotl.integrations.base", BasePlugin=BasePlugin),
        module("axolotl.core.trainers", AxolotlTrainer=AxolotlTrainer, AxolotlDPOTrainer=AxolotlDPOTrainer),
        module("llamafactory"),
        module("llamafactory.train"),
        module("llamafactory.train.sft"),
        workflow,
        module("llamafactory.train.tuner", run_exp=run_exp),
        module("swift"),
        module("swift.trainers", Seq2SeqTrainer=SwiftTrainer),
        module("swift.trainers.trainer_factory", TrainerFactory=TrainerFactory),
    ]
    for each in made:
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.setattr(ms_swift, "_theirs", {})
    yield
    sys.modules.pop("gemini.integrations.axolotl", None)


def arguments_of(folder: Any, kind: str = "plain") -> dict[str, Any]:
    made = arguments(
        folder, transformers.Seq2SeqTrainingArguments if kind == "seq2seq" else transformers.TrainingArguments
    )
    names = ("use_cpu", "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "max_grad_norm")
    names += ("learning_rate", "weight_decay", "warmup_steps", "logging_steps", "save_strategy", "report_to")
    return {"output_dir": str(folder), "disable_tqdm": True, **{name: getattr(made, name) for name in names}}


def trained(its: Any) -> Any:
    its.train()
    assert isinstance(its, ShardedTraining) and its.sharded_model.plan.budget_bytes == 300 * 2**10
    return its


def expected(folder: Path) -> list[float]:
    ours = trainer(folder)
    ours.train()
    return logged(ours)


def test_axolotl_trains_sharded_by_a_plugin_and_a_key_of_its_file(libraries: None, tmp_path: Path) -> None:
    plugins = importlib.import_module("gemini.integrations.axolotl")
    plugin = plugins.GeminiPlugin()
    module_name, _, name = plugin.get_input_args().rpartition(".")
    keys = getattr(importlib.import_module(module_name), name)(gemini=CONFIG)
    kind = plugin.get_trainer_cls({"gemini": keys.gemini, "rl": None})
    assert issubclass(kind, AxolotlTrainer)
    args = transformers.TrainingArguments(**arguments_of(tmp_path))
    ours = trained(kind(model=gpt2(), args=args, train_dataset=Texts(), bench_data_collator="its"))
    assert ours.bench_data_collator == "its" and logged(ours) == expected(tmp_path)
    assert issubclass(plugin.get_trainer_cls({"rl": "dpo"}), AxolotlDPOTrainer)
    with pytest.raises(UnsupportedError, match="rl: grpo of Axolotl has no sharded Trainer here: there are dpo, "):
        plugin.get_trainer_cls({"rl": "grpo"})


def test_llama_factory_trains_sharded_by_a_key_of_its_file(libraries: None, tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    file.write_text(json.dumps({"stage": "sft", "output_dir": str(tmp_path), "gemini": CONFIG}))
    ours = main([str(file)])
    assert ours.finetuning_args == "its" and logged(ours) == expected(tmp_path)
    workflow = importlib.import_module("llamafactory.train.sft.workflow")
    assert workflow.CustomSeq2SeqTrainer is CustomSeq2SeqTrainer, "the name is theirs again"
    file.write_text(json.dumps({"stage": "ppo"}))
    with pytest.raises(
        UnsupportedError, match="stage: ppo has no sharded Trainer here: there are pt, sft, rm, dpo, kto"
    ):
        main([str(file)])


def test_ms_swift_trains_sharded_once_a_plugin_has_registered(libraries: None, tmp_path: Path) -> None:
    assert ms_swift.register({"stage": 2}) == ms_swift.register(CONFIG) == ["causal_lm"]
    table = importlib.import_module("swift.trainers.trainer_factory").TrainerFactory.TRAINER_MAPPING
    assert table["ppo"] == "swift.trainers.PPOTrainer"
    module_name, _, name = table["causal_lm"].rpartition(".")
    kind = getattr(importlib.import_module(module_name), name)
    args = transformers.Seq2SeqTrainingArguments(**arguments_of(tmp_path, "seq2seq"))
    assert logged(trained(kind(gpt2(), args, train_dataset=Texts()))) == expected(tmp_path)
    with pytest.raises(AttributeError, match=r"call register\(\) first"):
        _ = ms_swift.PPOTrainer


@pytest.mark.parametrize("library", ["lightning", "transformers", "accelerate", "trl", "axolotl"])
def test_a_front_end_without_its_library_says_how_to_install_it(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == library:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    name = f"gemini.integrations.{library}"
    for each in [each for each in sys.modules if each == name or each.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, each)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(
        ModuleNotFoundError, match=f"needs {library}, .* not installed: pip install {library}$"
    ) as found:
        importlib.import_module(name)
    assert found.value.name == library
