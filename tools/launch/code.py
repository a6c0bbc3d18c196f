"""What code trains: hashes of the files in use, whatever a repository says of them.

A commit does not say which edit its `-dirty` stands for, and a copy without a repository has none. All
files are read each time: 870 of them, 10 MB, take 0.04 s from the page cache. A wheel's own RECORD, or
sizes and times, would be a little faster and miss an edit.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.launch.compose import Launch
from tools.records.run import Code
from tools.spec.files import ROOT
from tools.spec.run import Backend

KIT_FOLDERS = ("megatron_patches", "tools", "examples")
SOURCES = (".py", ".sh", ".args", ".cpp", ".cu", ".h")
"""What is run or compiled; not what that gives: a checkout compiles its helpers in its first run."""


def code_of(launch: Launch) -> Code:
    """The kit and the Megatron of a launch. What `PLANT=` adds to them is part of its specification."""
    return Code(kit=tree_hash(ROOT, KIT_FOLDERS), megatron=_megatron_of(launch))


def tree_hash(root: Path, names: Iterable[str]) -> str:
    """One hash of the sources in files and folders of a folder: their names and what is in them.

    Hidden folders, caches and what cannot be read are left out.
    """
    digest = hashlib.sha256()
    for path in sorted(path for name in names for path in _sources(root / name)):
        try:
            content = path.read_bytes()
        except OSError:  # An editor's broken link, or one that was removed meanwhile.
            continue
        digest.update(f"{path.relative_to(root)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _megatron_of(launch: Launch) -> str | None:
    """None where an image's Megatron trains, which its digest identifies, or none does."""
    if launch.runtime.container is not None or launch.spec.backend is not Backend.MEGATRON:
        return None
    beside = (ROOT / launch.entry.path).parent
    if (
        beside / "megatron"
    ).is_dir():  # A checkout: also its entry, and what that imports from beside it.
        return tree_hash(beside, ("megatron", *(path.name for path in beside.glob("*.py"))))
    found = importlib.util.find_spec("megatron")  # A namespace: nothing is imported.
    folders = found.submodule_search_locations if found else None
    hashes = [tree_hash(Path(folder), (".",)) for folder in sorted(folders or ())]
    return "+".join(hashes) or None


def _sources(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for folder, folders, files in os.walk(path):
        folders[:] = [name for name in folders if name[0] != "." and name != "__pycache__"]
        yield from (Path(folder, name) for name in files if name.endswith(SOURCES))
