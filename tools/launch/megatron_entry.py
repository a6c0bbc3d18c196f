"""Which Megatron trains: a checkout's own `pretrain_gpt.py`, or the kit's entry on the wheel."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

from megatron_patches.context import checkout_version
from tools.records.run import MegatronEntry
from tools.spec.errors import LaunchError
from tools.spec.files import ROOT

KIT_ENTRY = "examples/gpt3/pretrain_gpt.py"


def find_entry(megatron_lm: Path | None) -> MegatronEntry:
    """The entry, and the version and commit of the Megatron it runs.

    Raises:
        LaunchError: No checkout was named and the wheel is not installed.
    """
    if megatron_lm is None:
        try:
            return MegatronEntry(KIT_ENTRY, importlib.metadata.version("megatron-core"))
        except importlib.metadata.PackageNotFoundError:
            raise LaunchError(
                "megatron-core is not installed; run 'make setup', or set MEGATRON_LM to a checkout."
            ) from None
    return MegatronEntry(
        path=str(megatron_lm / "pretrain_gpt.py"),
        megatron_version=_version_of(megatron_lm),
        megatron_commit=commit_of(megatron_lm),
    )


def commit_of(folder: Path) -> str | None:
    """The commit of a folder, with `-dirty` where it was changed; None outside a repository."""
    describe = ("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    command = ("git", "-C", str(folder), *describe)
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return answer.stdout.strip() or None


def kit_commit() -> str | None:
    """The commit of this kit."""
    return commit_of(ROOT)


def _version_of(checkout: Path) -> str:
    try:
        return str(checkout_version(checkout))
    except (OSError, LookupError):
        raise LaunchError(
            f"MEGATRON_LM={checkout} does not state its version in megatron/core/package_info.py; "
            "point it at a Megatron-LM checkout."
        ) from None
