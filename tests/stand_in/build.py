"""Compiles the stand-in, once for each version of its sources and of torch."""

import hashlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
BUILDS = Path(__file__).parents[2] / "build" / "stand_in"


def library() -> Path:
    """The compiled library, in the build folder. The first call takes a minute."""
    sources = sorted(SOURCES.iterdir())
    key = hashlib.sha256(b"".join(each.read_bytes() for each in sources) + torch.__version__.encode()).hexdigest()
    folder = BUILDS / key[:16]
    built = folder / "stand_in.so"
    if built.exists():
        return built
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda each: _compiled(each, folder), SOURCES.glob("*.cpp")))
    libraries = Path(torch.__file__).parent / "lib"
    # A build that is interrupted, or another one at the same time, leaves no half of a library behind.
    part = folder / f"{os.getpid()}.so"
    _run("g++", "-shared", "-o", part, *objects, f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10")
    part.replace(built)
    return built


def _compiled(source: Path, folder: Path) -> Path:
    headers = Path(torch.__file__).parent / "include"
    to = folder / f"{source.stem}-{os.getpid()}.o"
    _run("g++", "-std=c++20", "-O1", "-fPIC", "-c", f"-I{headers}", source, "-o", to)
    return to


def _run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True)
