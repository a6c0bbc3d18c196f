"""Read the versions of torch, CUDA, NCCL, cuDNN, Transformer Engine and others, on the host or in an image.

The module imports the standard library alone, so that it runs in any image: `python -m
parakit.cluster.container.versions` asks torch and prints the versions as JSON. On the host, the metadata of
packages give the same versions within milliseconds.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from pathlib import Path

from parakit.cluster.checks.result import image_tag

PACKAGES = (
    "torch",
    "megatron-core",
    "numpy",
    "transformer-engine",
    "datasets",
    "wandb",
    "deepspeed",
)
LIBRARIES = {"nccl": "nvidia-nccl-cu", "cudnn": "nvidia-cudnn-cu"}
"""Prefixes of package names by library. The names end in CUDA's major version."""


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages and libraries of this interpreter, by name, without importing them.

    Packages that are not installed are left out.
    """
    cuda = _cuda_of_torch()
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "platform": sys.platform,
        "cuda": cuda,
    }
    for name in PACKAGES:
        versions[name] = _package_version(name)
    cuda_major = (cuda or "").partition(".")[0]
    for name, package_prefix in LIBRARIES.items():
        version = _package_version(package_prefix + cuda_major)
        if version is None and image_tag():
            # NVIDIA's images install the libraries without pip, and have their versions in the environment.
            version = os.environ.get(f"{name.upper()}_VERSION")
        versions[name] = version
    return {name: version for name, version in versions.items() if version}


def versions_from_torch() -> dict[str, str]:
    """Return the versions of `installed_versions`, with those of CUDA, NCCL and cuDNN as torch reports them."""
    import torch

    versions = installed_versions() | {"torch": torch.__version__}
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()  # type: ignore[no-untyped-call]
    reported = {
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)),
        "cudnn": _format_cudnn_version(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
    }
    return versions | {name: version for name, version in reported.items() if version}


def _format_cudnn_version(number: int | None) -> str:
    """Return cuDNN's version number with dots; empty for None.

    91002 is 9.10.2. Numbers before version 9 are shorter: 8907 is 8.9.7.
    """
    if number is None:
        return ""
    major, minor_and_patch = divmod(number, 10_000 if number >= 90_000 else 1_000)
    return f"{major}.{minor_and_patch // 100}.{minor_and_patch % 100}"


@functools.cache
def _package_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _cuda_of_torch() -> str | None:
    """Return `torch.version.cuda`, read from its file because importing torch takes seconds; None without CUDA."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    file = Path(torch.origin).with_name("version.py")
    match = re.search(r"^cuda\b[^=]*= '([^']+)'", file.read_text(), re.MULTILINE)
    return match[1] if match else None


if __name__ == "__main__":
    print(json.dumps(versions_from_torch()))
