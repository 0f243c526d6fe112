"""A script that ends right after a collective ends well, while gloo's thread still has to let go of its tensors.

Whether it does by then is a race that a test cannot arrange. So a thread of its own stands in for gloo's: it has the
name that torch gives to those, works outside of Python's lock for a moment, and then needs the lock once more.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from gemini.ranks.exit_report import wait_until_gloo_is_idle

SCRIPT = """
import hashlib, sys, threading, time
from pathlib import Path
import torch
from gemini import ShardedModel

started = threading.Event()

def collective() -> None:
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
    much = bytes(2**26)
    started.set()
    for _ in range(8):
        hashlib.sha256(much)
    print("let go of its tensors", flush=True)

model = ShardedModel(torch.nn.Linear(8, 8))
model(torch.ones(1, 8))
threading.Thread(target=collective, daemon=True).start()
started.wait()
print("all is done", flush=True)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say what a thread does")


def test_a_script_ends_when_the_threads_of_collectives_have_let_go() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["all is done", "let go of its tensors"]


def test_threads_that_are_idle_are_not_waited_for() -> None:
    started = time.monotonic()
    wait_until_gloo_is_idle(60.0)
    assert time.monotonic() - started < 20.0


# As Hugging Face models do by caches of their library, the model outlives the modules of gemini, which the interpreter
# empties first: torch was imported before them.
OUTLIVES = """
import sys, torch
from gemini import ZeroInitContext

with ZeroInitContext({arguments}):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
torch.kept = model, [each for name, each in sys.modules.items() if name.startswith("gemini")]
"""


@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_model_that_was_built_and_never_wrapped_lets_its_script_end_in_silence(place: str, tmp_path: Path) -> None:
    arguments = f"home='disk', disk_path={str(tmp_path)!r}" if place == "disk" else ""
    script = OUTLIVES.replace("{arguments}", arguments)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
