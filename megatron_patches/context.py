"""Find out what decides which patches are needed: Megatron's version, the device, the packages.

`find_context` is the entry point; `is_known` says whether the patches were tested with a Megatron.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from megatron_patches.fusions import parse_fusions
from parakit.config import variables

OLDEST_KNOWN = Version("0.14.0")
NEWEST_KNOWN = Version("0.19")
"""Newest minor release that was tested. All minor releases from `OLDEST_KNOWN` to this one trained with
equal losses; each patch says which of them have its targets (`registry.Replacement`)."""
TESTED_COMMIT = "d98e8a64"
"""Commit of Megatron's main branch that was tested. All commits of main have the version of the next
release, so the version alone does not identify it."""
WHAT_IS_KNOWN = f"{OLDEST_KNOWN.base_version} to {NEWEST_KNOWN}, and main at {TESTED_COMMIT}"


@dataclass(frozen=True)
class RuntimeContext:
    """The facts that decide whether a patch is needed."""

    device: str
    """Device of the ranks, `cpu` or `gpu`."""
    megatron: Version
    commit: str | None = field(default=None, kw_only=True)
    """Commit of a Megatron checkout (`read_commit`); None for the wheel."""
    has_transformer_engine: bool
    """True if Transformer Engine can be imported. Always False on CPU ranks, because its layers are CUDA
    kernels."""
    fused: tuple[str, ...] = ()
    """Names in `FUSED=`, which switch on patches of `fused/`."""
    shares_device: bool = False
    """True if all ranks are on one GPU (`SHARE_GPU=1`)."""
    allow_unknown_megatron: bool = False
    """True if the user allows a Megatron that the patches were not tested with
    (`ALLOW_UNKNOWN_MEGATRON=1`)."""

    @property
    def on_cpu(self) -> bool:
        """True if the ranks are CPU processes that communicate over gloo."""
        return self.device == "cpu"

    @property
    def knows_megatron(self) -> bool:
        """True if the patches were tested with this Megatron."""
        return is_known(self.megatron, self.commit)


def find_context(entry: Path, device: str) -> RuntimeContext:
    """Return the context of an entry on a device (`cpu` or `gpu`), without importing Megatron.

    An entry in a checkout of Megatron-LM runs that checkout, any other entry runs the installed wheel.
    The environment variables of `FUSED=`, `SHARE_GPU=` and `ALLOW_UNKNOWN_MEGATRON=` are read.

    Raises:
        LookupError: Neither a checkout nor the `megatron-core` wheel is there.
        ValueError: `KIT_FUSED` names a patch that does not exist.
    """
    folder = entry.resolve().parent
    if (folder / "megatron" / "core" / "package_info.py").is_file():
        megatron, commit = checkout_version(folder), read_commit(folder)
    else:
        megatron, commit = wheel_version(), None
    is_gpu = device == "gpu"
    return RuntimeContext(
        device=device,
        megatron=megatron,
        commit=commit,
        has_transformer_engine=is_gpu and _can_import("transformer_engine.pytorch"),
        fused=parse_fusions(os.environ.get(variables.FUSED, "")),
        shares_device=is_gpu and os.environ.get(variables.SHARE_GPU) == "1",
        allow_unknown_megatron=os.environ.get(variables.ALLOW_UNKNOWN_MEGATRON) == "1",
    )


def is_known(megatron: Version, commit: str | None) -> bool:
    """Return True if the patches were tested with this commit, or with a release of this minor version."""
    is_released = megatron >= OLDEST_KNOWN and megatron.release[:2] <= NEWEST_KNOWN.release[:2]
    return is_released or (commit or "").startswith(TESTED_COMMIT)


def unknown_version_problems(
    version: str, commit: str | None, checkout: Path | None
) -> Iterator[str]:
    """Yield a sentence if the patches were not tested with a Megatron version.

    Args:
        version: Its version.
        commit: Its commit; None for a release.
        checkout: The folder that `MEGATRON_LM=` names; None for the wheel.
    """
    if not is_known(Version(version), commit):
        of = f" of MEGATRON_LM={checkout}" if checkout else ""
        at = f" at {commit}" if commit else ""
        yield (
            f"Megatron {version}{at}{of} has not been tried with this kit, which knows "
            f"{WHAT_IS_KNOWN}; name a checkout of one of those with MEGATRON_LM=, or set "
            "ALLOW_UNKNOWN_MEGATRON=1 to train with it."
        )


def read_commit(folder: Path) -> str | None:
    """Return the commit of a folder, 12 digits, with `-dirty` if tracked files are changed.

    The result is None outside a repository, and where git is not installed.
    """
    description = run_git(folder, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    return description.strip() or None


def run_git(folder: Path, *arguments: str) -> str:
    """Return what git prints in a folder; empty if git fails or is not installed, or the folder is no repository."""
    # In a container another user owns a mounted checkout, which git refuses without this setting.
    command = ("git", "-c", "safe.directory=*", "-C", str(folder), *arguments)
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
    except FileNotFoundError:
        return ""
    return "" if process.returncode else process.stdout


def checkout_version(checkout: Path) -> Version:
    """Return the version of a Megatron-LM checkout (`megatron/core/package_info.py`).

    Raises:
        LookupError: The file does not state a version.
    """
    text = (checkout / "megatron" / "core" / "package_info.py").read_text()
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", text, re.MULTILINE))
    if len(parts) != 3:
        raise LookupError(f"{checkout} has no version in megatron/core/package_info.py.")
    match = re.search(r"^PRE_RELEASE\s*=\s*['\"](\w*)['\"]", text, re.MULTILINE)
    pre_release = match[1] if match else ""
    return Version(f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}{pre_release}")


def wheel_version() -> Version:
    """Return the version of the installed `megatron-core`.

    Raises:
        LookupError: `megatron-core` is not installed.
    """
    try:
        return Version(importlib.metadata.version("megatron-core"))
    except importlib.metadata.PackageNotFoundError:
        raise LookupError(
            "megatron-core is not installed and MEGATRON_LM names no checkout; run 'make setup'."
        ) from None


def _can_import(name: str) -> bool:
    """Import a module and return True if that succeeds.

    Finding the module is not enough: a Transformer Engine that was built for another torch is found, but
    fails to load.
    """
    try:
        importlib.import_module(name)
    except (ImportError, OSError):
        return False
    return True
