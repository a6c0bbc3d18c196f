"""Whether torch.compile can make GPU kernels here: Triton builds its launchers with a C compiler."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path


def compiler_problem() -> str | None:
    """What torch.compile lacks on this machine, a sentence; None if nothing."""
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


def _scheme() -> str:
    """Where Triton looks: Debian's own Python names a folder for what is installed locally, too."""
    scheme = sysconfig.get_default_scheme()
    return "posix_prefix" if scheme == "posix_local" else scheme
