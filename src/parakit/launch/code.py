"""Identify the code that trains: the Megatron in use, and hashes of the kit's and Megatron's files.

A commit does not say which edit its `-dirty` stands for, and a copy without a repository has no commit, so
files are hashed. All 870 files (10 MB) are read each time, which takes 0.04 s from the page cache. Reading
only sizes and times, or a wheel's RECORD, would be a little faster and would miss an edit.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_patches.context import checkout_version, read_commit
from parakit.artifacts.run import CodeHashes, MegatronEntry
from parakit.cluster import MEGATRON_IN_IMAGE, ImagePair
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT

KIT_ENTRY = "examples/gpt3/pretrain_gpt.py"
KIT_FOLDERS = ("megatron_patches", "src", "examples")
SOURCES = (".py", ".sh", ".args", ".cpp", ".cu", ".h")
"""File name endings of code that is run or compiled. Compiled files are left out: a checkout compiles its
helpers in its first run, which would change the hash.
"""


def find_entry(megatron_lm: Path | None, pair: ImagePair | None = None) -> MegatronEntry:
    """Return the entry script, the version and the commit of the Megatron that trains.

    An image pair has its own Megatron; without `megatron_lm` the installed wheel is used.

    Raises:
        LaunchError: The checkout does not state its version, or the wheel is not installed.
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
    """Return the git commit of this kit; None if the kit is no repository."""
    return read_commit(ROOT)


def identify_code(entry: MegatronEntry | None) -> CodeHashes:
    """Return hashes of the kit's files and of the files of the entry's Megatron.

    Without an `entry` the result has no Megatron hash: the digest of an image identifies the Megatron in it, and
    some backends do not run Megatron. `PATCH_FILE=` is part of a run's specification and not of this hash.
    """
    kit = hash_sources(ROOT, KIT_FOLDERS)
    if entry is None:
        return CodeHashes(kit)
    folder = (ROOT / entry.path).parent
    is_checkout = (folder / "megatron").is_dir()
    return CodeHashes(kit, _hash_checkout(folder) if is_checkout else _hash_installed_megatron())


def _hash_checkout(checkout: Path) -> str:
    """Return a hash of Megatron's files in a checkout, with the modules beside the entry script, which imports them."""
    modules = (path.name for path in checkout.glob("*.py"))
    return hash_sources(checkout, ("megatron", *modules))


def _hash_installed_megatron() -> str | None:
    """Return the hashes of the installed Megatron's folders, joined by `+`; None if none is installed."""
    package = importlib.util.find_spec("megatron")  # A namespace package, so nothing is imported.
    if package is None:
        return None
    folders = sorted(package.submodule_search_locations or ())
    return "+".join(hash_sources(Path(folder), (".",)) for folder in folders) or None


def hash_sources(root: Path, names: Iterable[str]) -> str:
    """Return one hash over the source files among `names`, which are files and folders in `root`.

    The hash covers the files' names and contents. Hidden folders, caches and unreadable files are left out.
    """
    files: list[Path] = []
    for name in names:
        path = root / name
        if path.is_file():
            files.append(path)
        else:
            files += _list_sources(path)
    digest = hashlib.sha256()
    parts_of_root = len(root.parts)
    for path in sorted(files):
        try:
            content = path.read_bytes()
        except OSError:  # An editor's broken link, or a file that was removed meanwhile.
            continue
        # Path.relative_to would take as long as everything else in this function.
        name = "/".join(path.parts[parts_of_root:])
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _list_sources(root: Path) -> Iterator[Path]:
    """Yield the source files in a folder and below; none if there is no such folder."""
    for folder, subfolders, file_names in os.walk(root):
        # os.walk descends into the folders that are in this list after the loop's body.
        subfolders[:] = [name for name in subfolders if name[0] != "." and name != "__pycache__"]
        for name in file_names:
            if name.endswith(SOURCES):
                yield Path(folder, name)
