"""Models that `gemini plan` knows without transformers are those of transformers, and ids of the Hub are models."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from gemini import Settings, specs_of
from gemini.cli.app import app
from gemini.cli.families import known
from gemini.model.workload import blocks_of, gradient_bytes, workload_of

ROOT = Path(__file__).resolve().parents[2]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("said", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_named_by_its_config_has_the_dtype_that_the_config_says(kind: str, said: str, tmp_path: Path) -> None:
    """As `from_pretrained` loads it: in 16 bits. Masters have the other 16 bits of fp32."""
    config = transformers.AutoConfig.for_model(kind, **(SIZES if kind == "llama" else {"n_layer": 1, "vocab_size": 9}))
    architecture = "LlamaForCausalLM" if kind == "llama" else "GPT2LMHeadModel"
    written = config.to_dict() | {"architectures": [architecture], "model_type": kind, said: "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({name: value for name, value in written.items() if value != {}}))
    done = CliRunner().invoke(app, ["estimate", str(tmp_path), "--ranks", "1", "--json"])
    assert done.exit_code == 0, done.output
    of_a_rank = json.loads(done.stdout)["3"]["device"]
    assert of_a_rank["master"] == of_a_rank["param"] > 0


@pytest.mark.parametrize(
    "of",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 32},
        {"model_type": "mistral", "head_dim": 24, "attention_bias": True},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "head_dim": 32},
        {"model_type": "qwen3", "head_dim": 32, "attention_bias": True, "tie_word_embeddings": True},
    ],
    ids=lambda of: " ".join(map(str, of.values())),
)
def test_a_known_family_has_the_weights_and_operators_of_transformers(of: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(**SIZES | of)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    # As it was written by hand, and as `save_pretrained` writes it.
    for written in (SIZES | of, config.to_dict() | {"architectures": [type(theirs).__name__]}):
        ours = known(written)
        assert ours is not None
        assert specs_of(ours, Settings(), 2) == specs_of(theirs, Settings(), 2)
        assert workload_of(ours, 2) == workload_of(theirs, 2)
        assert list(blocks_of(ours)) == list(blocks_of(theirs))
        assert gradient_bytes(ours) == gradient_bytes(theirs)


@pytest.mark.parametrize(
    "of",
    [
        {"model_type": "deepseek_v3"},
        {"model_type": "llama", "quantization_config": {"bits": 4}},
        {"model_type": "llama", "hidden_act": "gelu_new"},
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        {"model_type": "llama", "num_key_value_heads": None},
        {"model_type": "qwen3"},
    ],
    ids=lambda of: " ".join(map(str, of.values())),
)
def test_what_may_have_other_weights_is_left_to_transformers(of: dict[str, Any]) -> None:
    assert known(SIZES | of) is None


# -- Ids of the Hub.


def estimated(name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gemini.cli.app", "estimate", name, "--json"]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=120, env={**os.environ, **environment}
    )


def test_a_model_in_the_cache_of_the_hub_is_read_offline(tmp_path: Path) -> None:
    folder = tmp_path / "models--someone--small-llama"
    for revision, layers in (("old", 1), ("new", 3)):
        file = folder / "snapshots" / revision / "config.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({**SIZES, "model_type": "llama", "num_hidden_layers": layers}))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("new")
    done = estimated("someone/small-llama", HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    three = known({**SIZES, "model_type": "llama"})
    assert three is not None
    assert json.loads(done.stdout)["3"]["parameters"] == sum(each.numel() for each in three.parameters())
    done = estimated("someone/else", HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert "'someone/else' is not in the cache" in done.stderr and "HF_HUB_OFFLINE" in done.stderr


def test_a_model_of_the_hub_is_refused_at_once_where_no_network_is(tmp_path: Path) -> None:
    done = estimated("someone/else", HF_HUB_CACHE=str(tmp_path), HF_ENDPOINT="http://hub.invalid")
    assert done.returncode == 2
    words = " ".join(done.stderr.replace("│", " ").split())
    assert "no network reaches hub.invalid: give the path of a copy of its config.json" in words
    assert "Retry" not in done.stderr


class Hub(BaseHTTPRequestHandler):
    """Has one config.json, and no weights."""

    asked: list[str] = []
    text = json.dumps({**SIZES, "model_type": "llama"}).encode()

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        is_there = self.path == "/someone/new-llama/resolve/main/config.json"
        self.send_response(200 if is_there else 404)
        if is_there:
            self.send_header("ETag", '"1"')
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", str(len(self.text)))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(self.text)

    def log_message(self, *_: object) -> None:
        pass


def test_of_a_model_on_the_hub_the_config_alone_is_downloaded(tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    there = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_CACHE": str(tmp_path)}
    there |= {"HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    try:
        done = estimated("someone/new-llama", **there)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["0"]["parameters"] > 0
        assert {path for path in Hub.asked if "resolve" in path} == {"/someone/new-llama/resolve/main/config.json"}
        done = estimated("someone/nothing", **there)
        assert done.returncode == 2
        assert "'someone/nothing' has no config.json for us on the Hub" in done.stderr
        assert "Traceback" not in done.stderr
    finally:
        server.shutdown()
        server.server_close()
