"""Where Megatron is about to run: its version, the device, with or without Transformer Engine."""

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

OLDEST_KNOWN = Version("0.15.0rc0")
NEWEST_KNOWN = Version("0.19")
"""Every minor release between them trained with the losses of the others; each patch says which of them
have its targets (`registry.Replacement`)."""
TRIED_COMMIT = "d98e8a64"
"""Of main, whose version is the next release's through all its commits: the one that trained so."""
WHAT_IS_KNOWN = f"{OLDEST_KNOWN.base_version} to {NEWEST_KNOWN}, and main at {TRIED_COMMIT}"


@dataclass(frozen=True)
class RuntimeContext:
    """What decides whether a patch is needed."""

    device: str
    """`cpu` or `gpu`."""
    megatron: Version
    commit: str | None = field(default=None, kw_only=True)
    """Of a checkout (`commit_of`)."""
    has_transformer_engine: bool
    """It imports; on CPU ranks never, because its layers are CUDA kernels."""
    fused: tuple[str, ...] = ()
    """Patches of `fused/` that `FUSED=` names."""
    shares_device: bool = False
    """All ranks are on one GPU."""
    allow_unknown_megatron: bool = False
    """The user lets a Megatron train that the patches were not tried with
    (`ALLOW_UNKNOWN_MEGATRON=1`)."""

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks are CPU processes over gloo."""
        return self.device == "cpu"

    @property
    def knows_megatron(self) -> bool:
        """Whether the patches were tried with this Megatron."""
        return is_known(self.megatron, self.commit)


def find_context(entry: Path, device: str) -> RuntimeContext:
    """Inspect the entry's folder and the installed packages, without importing Megatron.

    Raises:
        LookupError: Neither a checkout nor the `megatron-core` wheel is there.
        ValueError: `KIT_FUSED` names a patch that does not exist.
    """
    checkout = entry.resolve().parent
    is_checkout = (checkout / "megatron" / "core" / "package_info.py").is_file()
    return RuntimeContext(
        device=device,
        megatron=checkout_version(checkout) if is_checkout else wheel_version(),
        commit=commit_of(checkout) if is_checkout else None,
        has_transformer_engine=device == "gpu" and _imports("transformer_engine.pytorch"),
        fused=parse_fusions(os.environ.get(variables.FUSED, "")),
        shares_device=device == "gpu" and os.environ.get(variables.SHARE_GPU) == "1",
        allow_unknown_megatron=os.environ.get(variables.ALLOW_UNKNOWN_MEGATRON) == "1",
    )


def is_known(megatron: Version, commit: str | None) -> bool:
    """Whether the patches were tried with this commit, or a release of this minor version."""
    is_released = megatron >= OLDEST_KNOWN and megatron.release[:2] <= NEWEST_KNOWN.release[:2]
    return is_released or (commit or "").startswith(TRIED_COMMIT)


def unknown_version_problems(
    version: str, commit: str | None, checkout: Path | None
) -> Iterator[str]:
    """Yield a sentence if the patches were not tried with a Megatron.

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


def commit_of(folder: Path) -> str | None:
    """The commit of a folder, with `-dirty` where it was changed; None outside a repository."""
    describe = ("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    # In a container the owner of a mounted checkout is another user.
    command = ("git", "-c", "safe.directory=*", "-C", str(folder), *describe)
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return answer.stdout.strip() or None


def checkout_version(checkout: Path) -> Version:
    """The version of a Megatron-LM checkout (`megatron/core/package_info.py`).

    Raises:
        LookupError: The file does not state a version.
    """
    text = (checkout / "megatron" / "core" / "package_info.py").read_text()
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", text, re.MULTILINE))
    if len(parts) != 3:
        raise LookupError(f"{checkout} has no version in megatron/core/package_info.py.")
    pre = re.search(r"^PRE_RELEASE\s*=\s*['\"](\w*)['\"]", text, re.MULTILINE)
    return Version(f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}{pre[1] if pre else ''}")


def wheel_version() -> Version:
    """The version of the installed `megatron-core`.

    Raises:
        LookupError: It is not installed.
    """
    try:
        return Version(importlib.metadata.version("megatron-core"))
    except importlib.metadata.PackageNotFoundError:
        raise LookupError(
            "megatron-core is not installed and MEGATRON_LM names no checkout; run 'make setup'."
        ) from None


def _imports(name: str) -> bool:
    """Whether it imports: a Transformer Engine built for another torch is found but fails to load."""
    try:
        importlib.import_module(name)
    except (ImportError, OSError):
        return False
    return True
