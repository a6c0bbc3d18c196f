"""Use Megatron's C++ data helpers where they can be imported, else build them for this interpreter.

Target: `megatron.core.datasets.utils.compile_helpers`, which runs `make` in Megatron's data-set folder at every
start. Without the patch, the installed wheel would exit, because it brings the built helpers but no Makefile. In a
checkout, the Makefile names the built file after the `python3-config` that is first on PATH. An interpreter of
another version would then not find the file.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from megatron_patches.registry import Patch, Replacement, wrap_original


@wrap_original
def _compile_if_missing(original: Callable[[], None]) -> None:
    """Compile Megatron's data set helpers if they cannot be imported, with this interpreter first on PATH."""
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        return
    # The Makefile calls `python3 -m pybind11`, which the environment has, and `python3-config`, which
    # lies beside the base interpreter.
    first_folders = (str(Path(sys.executable).parent), str(sysconfig.get_config_var("BINDIR")))
    os.environ["PATH"] = os.pathsep.join((*first_folders, os.environ.get("PATH", "")))
    original()
    importlib.invalidate_caches()


PATCH = Patch(
    name="dataset_helpers",
    reason="Megatron compiles its data helpers at start-up, for the wrong interpreter or not at all",
    needed=lambda context: True,
    replacements=(
        Replacement("megatron.core.datasets.utils:compile_helpers", _compile_if_missing),
    ),
)
