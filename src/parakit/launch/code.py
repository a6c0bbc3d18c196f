"""What code trains: the Megatron, a checkout's or the wheel's, and hashes of the files in use.

A commit does not say which edit its `-dirty` stands for, and a copy without a repository has none. All
files are read each time: 870 of them, 10 MB, take 0.04 s from the page cache. A wheel's own RECORD, or
sizes and times, would be a little faster and miss an edit.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

from megatron_patches.context import checkout_version, read_commit
from parakit.artifacts.run import CodeHashes, MegatronEntry
from parakit.cluster import MEGATRON_IN_IMAGE, ImagePair
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT

KIT_ENTRY = "examples/gpt3/pretrain_gpt.py"
KIT_FOLDERS = ("megatron_patches", "src", "examples")
SOURCES = (".py", ".sh", ".args", ".cpp", ".cu", ".h")
"""What is run or compiled; not what that gives: a checkout compiles its helpers in its first run."""


def find_entry(megatron_lm: Path | None, pair: ImagePair | None = None) -> MegatronEntry:
    """The entry, and the version and commit of the Megatron it runs: a pair's is in its image.

    Raises:
        LaunchError: No checkout was named and the wheel is not installed.
    """
    if pair is not None:
        entry = f"{MEGATRON_IN_IMAGE}/pretrain_gpt.py"
        return MegatronEntry(entry, pair.megatron_version, pair.megatron_commit[:12])
    if megatron_lm is None:
        try:
            return MegatronEntry(KIT_ENTRY, importlib.metadata.version("megatron-core"))
        except importlib.metadata.PackageNotFoundError:
            raise LaunchError(
                "megatron-core is not installed; run 'make setup', or set MEGATRON_LM to a checkout."
            ) from None
    try:
        version = str(checkout_version(megatron_lm))
    except (OSError, LookupError):
        raise LaunchError(
            f"MEGATRON_LM={megatron_lm} does not state its version in megatron/core/package_info.py; "
            "point it at a Megatron-LM checkout."
        ) from None
    return MegatronEntry(str(megatron_lm / "pretrain_gpt.py"), version, read_commit(megatron_lm))


def read_kit_commit() -> str | None:
    """The commit of this kit."""
    return read_commit(ROOT)


def identify_code(entry: MegatronEntry | None) -> CodeHashes:
    """The kit, and the Megatron of an entry; None for one in an image, which its digest identifies, or
    where none trains. What `PATCH_FILE=` adds to them is part of a run's specification."""
    kit = hash_sources(ROOT, KIT_FOLDERS)
    if entry is None:
        return CodeHashes(kit)
    beside = (ROOT / entry.path).parent
    if (beside / "megatron").is_dir():
        # A checkout: also its entry, and what that imports from beside it.
        own = ("megatron", *(path.name for path in beside.glob("*.py")))
        return CodeHashes(kit, hash_sources(beside, own))
    found = importlib.util.find_spec("megatron")  # A namespace: nothing is imported.
    folders = found.submodule_search_locations if found else None
    hashes = [hash_sources(Path(folder), (".",)) for folder in sorted(folders or ())]
    return CodeHashes(kit, "+".join(hashes) or None)


def hash_sources(root: Path, names: Iterable[str]) -> str:
    """One hash of the sources in files and folders of a folder: their names and what is in them.

    Hidden folders, caches and what cannot be read are left out.
    """
    digest = hashlib.sha256()
    files: list[Path] = []
    for place in (root / name for name in names):
        files += [place] if place.is_file() else []
        for folder, folders, found in os.walk(place):
            folders[:] = [name for name in folders if name[0] != "." and name != "__pycache__"]
            files += [Path(folder, name) for name in found if name.endswith(SOURCES)]
    for path in sorted(files):
        try:
            content = path.read_bytes()
        except OSError:  # An editor's broken link, or one that was removed meanwhile.
            continue
        digest.update(f"{path.relative_to(root)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]
