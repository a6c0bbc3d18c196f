"""Megatron's C++ data helpers: used where they import, else built for this interpreter.

At start-up Megatron runs `make` in its data-set folder. The wheel brings the helpers built but no
Makefile, and Megatron exits; a checkout's Makefile takes the suffix of whichever
`python3-config` is first on PATH, and an interpreter of another version then does not find the result.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from megatron_patches.registry import Patch, Replacement, around


@around
def _compile_where_missing(original: Callable[[], None]) -> None:
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        return
    # python3 -m pybind11 needs the environment, python3-config lies beside the base interpreter.
    first = (str(Path(sys.executable).parent), str(sysconfig.get_config_var("BINDIR")))
    os.environ["PATH"] = os.pathsep.join((*first, os.environ.get("PATH", "")))
    original()
    importlib.invalidate_caches()


PATCH = Patch(
    name="dataset_helpers",
    reason="Megatron compiles its data helpers at start-up, for the wrong interpreter or not at all",
    needed=lambda context: True,
    replacements=(
        Replacement("megatron.core.datasets.utils:compile_helpers", _compile_where_missing),
    ),
)
