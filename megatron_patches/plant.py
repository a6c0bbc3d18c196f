"""A Python file that every rank executes before it trains (`PLANT=`): a change of Megatron to try.

The file runs after Megatron is imported and the kit's patches are applied, so what it replaces is what
trains. It is compared with the hash that the run's record holds: what ran is what is recorded.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

FILE, SHA256 = "KIT_PLANT", "KIT_PLANT_SHA256"
"""Variables that name the file and what it must hold; unset where nothing is planted."""

_MODULE = "kit_plant"


class PlantError(RuntimeError):
    """The file is not the one of the run's record, or failed; one sentence that names it."""


def execute_plant(environment: Mapping[str, str]) -> str | None:
    """Execute the file that the environment names, as a module; returns its path, None without one.

    Raises:
        PlantError: It is missing, has changed, or an exception came out of it.
    """
    name = environment.get(FILE)
    if not name:
        return None
    path = Path(name)
    code = _read(path, environment.get(SHA256))
    importlib.import_module("megatron.training")
    module = ModuleType(_MODULE, None)
    module.__file__ = str(path)
    sys.modules[_MODULE] = module  # Where dataclasses and pickle look for what it defines.
    try:
        exec(compile(code, str(path), "exec"), module.__dict__)  # noqa: S102 - as asked
    except Exception as error:
        # Without its cause, which would be the first error of the log, without file and line.
        raise PlantError(f"{_place(error, path)}: {type(error).__name__}: {error}") from None
    return name


def _read(path: Path, sha256: str | None) -> bytes:
    try:
        code = path.read_bytes()
    except OSError as error:
        raise PlantError(f"PLANT={path} cannot be read here ({error.strerror}).") from None
    if sha256 and hashlib.sha256(code).hexdigest() != sha256:
        raise PlantError(
            f"PLANT={path} is not the file whose hash the run recorded, {sha256[:12]}; it was changed "
            "after the run was composed."
        )
    return code


def _place(error: Exception, path: Path) -> str:
    """`PLANT=file.py, line 3`: the file's own line that was reached."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"PLANT={path}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f"PLANT={path}, line {lines[-1]}" if lines else f"PLANT={path}"
