"""The config.json of a model on the Hugging Face Hub: from the local cache, else downloaded, without its weights."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

_NAME = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?"
_ID = re.compile(rf"{_NAME}/{_NAME}")


class NotOnHub(Exception):
    """There is no config to be had. The message says why."""


def is_hub_id(name: str) -> bool:
    """Whether `name` is written as an id of the Hub: owner/model."""
    return _ID.fullmatch(name) is not None


def config_of(name: str) -> Path:
    """The file config.json of the model `name`. Reads the cache; asks the Hub unless HF_HUB_OFFLINE=1. Local.

    Raises NotOnHub.
    """
    found = _cached(name)
    if found is not None:
        return found
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise NotOnHub(f"{name!r} is not in the cache ({_cache()}), and HF_HUB_OFFLINE forbids to ask the Hub")
    try:
        # Imported here: a config in the cache is read without it, in no time.
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise NotOnHub(
            f"{name!r} is not in the cache ({_cache()}), and to ask the Hub needs: pip install huggingface_hub"
        ) from None
    host = _host_unknown_here()
    if host is not None:
        raise NotOnHub(
            f"{name!r} is not in the cache ({_cache()}), and no network reaches {host}: give the path of a copy of its "
            "config.json"
        )
    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # whatever the network, the Hub and the disk have to say
        # The library's messages are paragraphs, of which the first sentence says what is wrong.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise NotOnHub(f"{name!r} has no config.json for us on the Hub: {lines[0] if lines else error!r}") from None


def _host_unknown_here() -> str | None:
    """The Hub's host, where its name has no address. The library tries that again for half a minute."""
    host = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname
    if host is None or getproxies().keys() & {"http", "https", "all"}:  # a proxy resolves names itself
        return None
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return host
    return None


def _cache() -> Path:
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()


def _cached(name: str) -> Path | None:
    """The newest revision that is there: that of "main", where it is known."""
    folder = _cache() / f"models--{name.replace('/', '--')}"
    try:
        file = folder / "snapshots" / (folder / "refs" / "main").read_text().strip() / "config.json"
        if file.is_file():
            return file
    except OSError:
        pass
    files = [file for file in folder.glob("snapshots/*/config.json") if file.is_file()]
    return max(files, key=lambda file: file.stat().st_mtime, default=None)
