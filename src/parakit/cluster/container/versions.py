"""Versions of torch, CUDA, NCCL, cuDNN, Transformer Engine and others, of the host or of an image.

Standard library alone at import, so that it runs in any image: `python -m
parakit.cluster.container.versions` prints them as JSON, asking torch itself. On the host the packages'
metadata say the same in milliseconds.
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
"""As PyPI packages, whose names end in CUDA's major version."""


def installed_versions() -> dict[str, str]:
    """What this interpreter has installed; what it lacks is left out."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "platform": sys.platform,
        "cuda": _cuda_of_torch(),
    }
    found |= {name: _version(name) for name in PACKAGES}
    cuda_major = (found["cuda"] or "").partition(".")[0]
    for name, package in LIBRARIES.items():
        # NVIDIA's images have the libraries outside pip, and their versions in the environment.
        found[name] = _version(package + cuda_major) or (
            os.environ.get(f"{name.upper()}_VERSION") if image_tag() else None
        )
    return {name: version for name, version in found.items() if version}


def versions_from_torch() -> dict[str, str]:
    """The same, with CUDA, NCCL and cuDNN as torch was built with and finds them."""
    import torch

    found = installed_versions() | {"torch": torch.__version__}
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()  # type: ignore[no-untyped-call]
    answers = {
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)),
        "cudnn": _dotted(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
    }
    return found | {name: answer for name, answer in answers.items() if answer}


def _dotted(number: int | None) -> str:
    """cuDNN's 91002 is 9.10.2; before 9 a digit less stood for the minor version (8907 is 8.9.7)."""
    if number is None:
        return ""
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


@functools.cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _cuda_of_torch() -> str | None:
    """`torch.version.cuda`, read from its file: importing torch takes seconds."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    file = Path(torch.origin).with_name("version.py")
    match = re.search(r"^cuda\b[^=]*= '([^']+)'", file.read_text(), re.MULTILINE)
    return match[1] if match else None


if __name__ == "__main__":
    print(json.dumps(versions_from_torch()))
