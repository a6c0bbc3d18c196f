"""Configs of models in the local cache of the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_id(text: str) -> bool:
    """Return True if a text has the form of a model's id on the hub, such as `Qwen/Qwen3-8B`, and is no path."""
    has_form = _HUB_ID.fullmatch(text) is not None
    is_path = (
        text.startswith((".", "~")) or text.endswith((".args", ".json")) or Path(text).exists()
    )
    return has_form and not is_path


def find_cached_config(hub_id: str) -> Path | None:
    """Return the newest `config.json` of a model in the hub's cache, or None if the cache has none.

    The cache is the folder in HF_HUB_CACHE, `hub` in the folder of HF_HOME, or `~/.cache/huggingface/hub`.
    """
    folder = _cache_folder() / f"models--{hub_id.replace('/', '--')}" / "snapshots"
    configs = sorted(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    return configs[-1] if configs else None


def _cache_folder() -> Path:
    """Return the folder of the hub's cache, which need not exist."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = os.environ.get("HF_HOME")
    return (Path(home).expanduser() if home else caches / "huggingface") / "hub"
