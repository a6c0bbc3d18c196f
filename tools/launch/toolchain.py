"""Whether the installed torch and compilers can do what a run on GPUs of this machine needs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sysconfig
from pathlib import Path

from tools.records.run import Entry

OLDEST_TORCH = (2, 9)
CUDA_FOLDER = Path("/usr/local/cuda")
"""Where torch looks for the toolkit last."""


def torch_problem() -> str | None:
    """Why the installed torch cannot be used by the GPU bench, a sentence; None if it can."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "torch is not installed; the bench uses the machine's own, 2.9 or newer, with CUDA."
    major, minor = (int(number) for number in re.findall(r"\d+", version)[:2])
    if (major, minor) < OLDEST_TORCH:
        return f"torch {version} is too old; the bench needs 2.9 or newer."
    return None


def compiler_problem() -> str | None:
    """What torch.compile lacks on this machine, a sentence; None if nothing.

    Triton builds the launchers of its kernels with a C compiler.
    """
    if importlib.util.find_spec("triton") is None:
        return "torch.compile needs the package triton, which CUDA builds of torch bring along."
    named = os.environ.get("CC")
    if not any(shutil.which(name) for name in ([named] if named else ["gcc", "clang", "cc"])):
        return "torch.compile needs a C compiler and none is on PATH; install gcc, or set CC=."
    header = Path(sysconfig.get_paths(_scheme())["include"]) / "Python.h"
    if not header.is_file():
        return (
            f"torch.compile needs Python's headers and there is no {header}; install python3-dev."
        )
    return None


def nvcc_problem(entry: Entry) -> str | None:
    """Why a checkout whose fused kernels ask nvcc cannot start, a sentence; None if it can."""
    kernels = Path(entry.path).parent / "megatron/legacy/fused_kernels/__init__.py"
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if (
        not kernels.is_file()
        or named
        or shutil.which("nvcc")
        or (CUDA_FOLDER / "bin/nvcc").exists()
    ):
        return None
    return (
        f"Megatron {entry.megatron_version} asks nvcc for its version at start-up, and there is none; "
        "install the CUDA toolkit and set CUDA_HOME, or unset MEGATRON_LM for the wheel."
    )


def _scheme() -> str:
    """Where Triton looks: Debian's own Python names a folder for what is installed locally, too."""
    scheme = sysconfig.get_default_scheme()
    return "posix_prefix" if scheme == "posix_local" else scheme
